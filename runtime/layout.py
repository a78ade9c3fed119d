"""Rows -> the segments of every row in pre-order, and where each sequence ends in them. Compiled by numba."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["END", "PARENT", "POSITION", "START", "SUBTREE_END", "Layout", "lay_out"]

START, END, SUBTREE_END, PARENT, POSITION = range(5)


@dataclass(frozen=True, eq=False)
class Layout:
    """All rows of a plan, one after the other, as integers: R rows with S segments, and N sequences.

    Attributes:
        segments: int64 [S, 5], columns start, end, subtree_end, parent and position. The first three are indices of
            tokens in the row; parent is an index among the row's own segments, -1 at a root; position is that of the
            first token.
        source: for each segment a sequence that holds its tokens, int64 [S].
        segment_offsets: the segments of row r are those from `segment_offsets[r]` up to `segment_offsets[r + 1]`,
            int64 [R + 1].
        sequence_ids: the sequences by row, ascending in each, int64 [N].
        sequence_offsets: as `segment_offsets`, int64 [R + 1].
        sequence_segment: for each of `sequence_ids` the segment of its row in which it ends, int64 [N].
    """

    segments: IntArray
    source: IntArray
    segment_offsets: IntArray
    sequence_ids: IntArray
    sequence_offsets: IntArray
    sequence_segment: IntArray


def lay_out(tree: PrefixTree, leaf_row: IntArray) -> Layout:
    """Lays the rows out.

    A segment that has one child only in its row is one segment with that child.

    Args:
        tree: the prefix tree.
        leaf_row: for each leaf of the tree its row, int64 [leaves]; every row from 0 on has one.
    """
    rows = int(leaf_row.max()) + 1
    leaves, leaf_offsets = _grouped(leaf_row, rows)
    sequence_ids, sequence_offsets = _grouped(leaf_row[tree.sequence_leaf], rows)
    segments, source, segment_offsets, sequence_segment = _lay_out(
        tree.start, tree.end, tree.parent, tree.source, tree.leaves[leaves], leaf_offsets,
        tree.sequence_segment[sequence_ids], sequence_offsets,
    )  # fmt: skip
    return Layout(segments, source, segment_offsets, sequence_ids, sequence_offsets, sequence_segment)


def _grouped(row: IntArray, rows: int) -> tuple[IntArray, IntArray]:
    """What is in every row, ascending, row after row; and where each row begins, int64 [rows + 1]."""
    order = np.argsort(row, kind="stable")
    return order, np.searchsorted(row[order], np.arange(rows + 1))


@numba.njit(cache=True)
def _lay_out(starts, ends, parents, sources, leaves, leaf_offsets, ends_in, sequence_offsets):
    """Segments [S, 5], sources [S] and segment offsets [R + 1] of all rows, and the segment of each sequence [N]."""
    count, rows = len(starts), len(leaf_offsets) - 1
    held_in, children = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    place, held = np.zeros(count, np.int64), np.empty(count, np.int64)
    offsets, sequence_segment = np.zeros(rows + 1, np.int64), np.empty(len(ends_in), np.int64)
    for row in range(rows):
        found = _hold(row, leaves[leaf_offsets[row] : leaf_offsets[row + 1]], parents, held_in, children, held)
        offsets[row + 1] = offsets[row] + _branches(held[:found], parents, children)
    held_in[:] = -1
    table, source = np.empty((offsets[-1], 5), np.int64), np.empty(offsets[-1], np.int64)
    for row in range(rows):
        found = _hold(row, leaves[leaf_offsets[row] : leaf_offsets[row + 1]], parents, held_in, children, held)
        at, token = offsets[row] - 1, 0
        for segment in held[:found]:
            if _is_branch(segment, parents, children):
                at, above = at + 1, parents[segment]
                table[at, START], table[at, POSITION] = token, starts[segment]
                table[at, PARENT] = place[above] if above >= 0 else -1
            token += ends[segment] - starts[segment]
            place[segment] = at - offsets[row]
            table[at, END], source[at] = token, sources[segment]
        _close(table[offsets[row] : offsets[row + 1]])
        for sequence in range(sequence_offsets[row], sequence_offsets[row + 1]):
            sequence_segment[sequence] = place[ends_in[sequence]]
    return table, source, offsets, sequence_segment


@numba.njit(cache=True)
def _is_branch(segment, parents, children):
    """Whether a segment is a root or has siblings in its row; else it is one segment with the one above it."""
    return parents[segment] < 0 or children[parents[segment]] > 1


@numba.njit(cache=True)
def _branches(held, parents, children):
    count = 0
    for segment in held:
        count += _is_branch(segment, parents, children)
    return count


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
