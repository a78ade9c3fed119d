"""Rows -> the segments of every row in pre-order, and where each sequence ends in them. Compiled by numba."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["END", "PARENT", "POSITION", "SEGMENT_COLUMNS", "START", "SUBTREE_END", "Layout", "lay_out"]

SEGMENT_COLUMNS = ("start", "end", "subtree_end", "parent", "position")
START, END, SUBTREE_END, PARENT, POSITION = range(5)


@dataclass(frozen=True, eq=False)
class Layout:
    """All rows of a plan, one after the other, as integers: R rows with S segments, and N sequences.

    Attributes:
        segments: int64 [S, 5], columns as in `SEGMENT_COLUMNS`; start, end and subtree_end are indices of tokens in the
            row, parent is an index among the row's own segments, -1 at a root; position is that of the first token.
        sources: for each segment a sequence that holds its tokens, int64 [S].
        segment_bounds: the segments of row r are those from `segment_bounds[r]` up to `segment_bounds[r + 1]`,
            int64 [R + 1].
        sequences: the sequences by row, ascending in each, int64 [N].
        sequence_bounds: as `segment_bounds`, int64 [R + 1].
        sequence_segment: for each of `sequences` the segment of its row in which it ends, int64 [N].
    """

    segments: IntArray
    sources: IntArray
    segment_bounds: IntArray
    sequences: IntArray
    sequence_bounds: IntArray
    sequence_segment: IntArray


def lay_out(tree: PrefixTree, packed: list[IntArray]) -> Layout:
    """Lays the rows out.

    A segment whose only child in its row follows it is one segment with that child.

    Args:
        tree: the prefix tree.
        packed: the leaf segments of every row, in pre-order.
    """
    row_of = np.empty(len(tree), np.int64)
    for row, leaves in enumerate(packed):
        row_of[leaves] = row
    sequence_row = row_of[tree.leaves[tree.sequence_leaf]]
    sequences = np.argsort(sequence_row, kind="stable")
    rows = np.arange(len(packed) + 1)
    sequence_bounds = np.searchsorted(sequence_row[sequences], rows)
    leaf_bounds = np.append(0, np.cumsum([len(leaves) for leaves in packed]))
    segments, sources, segment_bounds, sequence_segment = _lay_out(
        tree.start, tree.end, tree.parent, tree.source, np.concatenate(packed), leaf_bounds,
        tree.sequence_segment[sequences], sequence_bounds,
    )  # fmt: skip
    return Layout(segments, sources, segment_bounds, sequences, sequence_bounds, sequence_segment)


@numba.njit(cache=True)
def _lay_out(starts, ends, parents, sources, leaves, leaf_bounds, ends_in, sequence_bounds):
    held_in, children = np.full(len(starts), -1, np.int64), np.zeros(len(starts), np.int64)
    place = np.zeros(len(starts), np.int64)
    held = np.empty(len(starts), np.int64)
    room = 0
    for row in range(len(leaf_bounds) - 1):
        room += _hold(row, leaves[leaf_bounds[row] : leaf_bounds[row + 1]], parents, held_in, children, held)
    held_in[:] = -1
    table, origin = np.empty((room, 5), np.int64), np.empty(room, np.int64)
    bounds, sequence_segment = np.zeros(len(leaf_bounds), np.int64), np.empty(len(ends_in), np.int64)
    found = 0
    for row in range(len(leaf_bounds) - 1):
        count = _hold(row, leaves[leaf_bounds[row] : leaf_bounds[row + 1]], parents, held_in, children, held)
        first, token = found, 0
        for segment in held[:count]:
            above = parents[segment]
            if above < 0 or children[above] > 1:
                table[found, START], table[found, POSITION] = token, starts[segment]
                table[found, PARENT] = place[above] if above >= 0 else -1
                found += 1
            token += ends[segment] - starts[segment]
            place[segment] = found - 1 - first
            table[found - 1, END], origin[found - 1] = token, sources[segment]
        _close(table[first:found])
        bounds[row + 1] = found
        for at in range(sequence_bounds[row], sequence_bounds[row + 1]):
            sequence_segment[at] = place[ends_in[at]]
    return table[:found].copy(), origin[:found].copy(), bounds, sequence_segment


@numba.njit(cache=True)
def _hold(row, leaves, parents, held_in, children, held):
    """The segments on the paths to the leaves in pre-order, and how many children of each are among them."""
    count = 0
    for leaf in leaves:
        begin, segment = count, leaf
        while segment >= 0 and held_in[segment] != row:
            held_in[segment], children[segment], held[count] = row, 0, segment
            count, segment = count + 1, parents[segment]
        held[begin:count] = held[begin:count][::-1].copy()
        if segment >= 0:
            children[segment] += 1
        for at in range(begin, count - 1):
            children[held[at]] += 1
    return count


@numba.njit(cache=True)
def _close(table):
    """Sets the end of the subtree of every segment of a row."""
    for at in range(len(table)):
        table[at, SUBTREE_END] = table[at, END]
    for at in range(len(table) - 1, -1, -1):
        above = table[at, PARENT]
        if above >= 0:
            table[above, SUBTREE_END] = max(table[above, SUBTREE_END], table[at, SUBTREE_END])
