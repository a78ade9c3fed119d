"""Rows -> plan: the tokens of every row and where each sequence lies in it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tree_compile.runtime.render import render_plan
from tree_compile.runtime.rows import pack_rows, row_bounds
from tree_compile.runtime.sequences import Batch, IntArray, Sequences, TokenArray, as_batch
from tree_compile.runtime.tree import PrefixTree, build_prefix_tree

__all__ = ["SEGMENT_COLUMNS", "Plan", "Row", "plan_rows"]

SEGMENT_COLUMNS = ("start", "end", "subtree_end", "parent", "position")
_START, _END, _SUBTREE_END, _PARENT, _POSITION = range(5)


@dataclass(frozen=True, eq=False)
class Row:
    """One forward pass: some sequences, laid out as a tree in depth-first pre-order.

    T is the number of tokens with padding. Token k is token q or an ancestor of it exactly when
    `k <= q < subtree_end[k]`.

    Attributes:
        inputs: one int64 array of shape [T] per input; the tokens come first, then the payloads.
        segments: int64 [S, 5], the segments of this row in pre-order, columns as in `SEGMENT_COLUMNS`. start, end
            and subtree_end are row indices; parent is an index into this table, -1 at a root; position is that of
            the first token. Padding is in no segment.
        sequence_ids: which sequences of the batch the row holds, ascending.
        sequence_segment: for each of them the segment in which it ends, int64.
        sequence_length: for each of them its tokens, int64.
    """

    inputs: dict[str, IntArray]
    segments: IntArray
    sequence_ids: tuple[int, ...]
    sequence_segment: IntArray
    sequence_length: IntArray

    @property
    def tokens(self) -> IntArray:
        """Token ids, int64 [T]; 0 on padding."""
        return next(iter(self.inputs.values()))

    @property
    def length(self) -> int:
        """Tokens without padding."""
        return int(self.segments[-1, _END])

    @cached_property
    def position(self) -> IntArray:
        """Index of each token in its own sequence, int64 [T]; 0 on padding."""
        offset = self._per_token(self.segments[:, _POSITION] - self.segments[:, _START])
        return self._padded(offset + np.arange(self.length), 0)

    @cached_property
    def parent(self) -> IntArray:
        """Row index of the token before each token in its sequence, int64 [T]; -1 at roots and on padding."""
        before = np.arange(-1, self.length - 1)
        above = self.segments[:, _PARENT]
        before[self.segments[:, _START]] = np.where(above < 0, -1, self.segments[above, _END] - 1)
        return self._padded(before, -1)

    @cached_property
    def subtree_end(self) -> IntArray:
        """One past the last row index below each token's segment, int64 [T]; padding is below nothing."""
        end = self._per_token(self.segments[:, _SUBTREE_END])
        return self._padded(end, np.arange(self.length, len(self.tokens)) + 1)

    def path_ranges(self, sequence: int) -> list[tuple[int, int]]:
        """The row indices of a sequence's tokens as ranges (start, end), in order.

        Raises:
            KeyError: the sequence is not in this row.
        """
        at = self._index(sequence)
        segment, tokens = int(self.sequence_segment[at]), int(self.sequence_length[at])
        start, _, _, _, position = self.segments[segment].tolist()
        ranges = []
        end = start + tokens - position
        while segment >= 0:
            segment = int(self._run_head[segment])
            start, _, _, above, _ = self.segments[segment].tolist()
            ranges.append((start, end))
            segment, end = above, int(self.segments[above, _END])
        return ranges[::-1]

    def path(self, sequence: int) -> IntArray:
        """The row indices of a sequence's tokens, in order: int64 [len].

        Raises:
            KeyError: the sequence is not in this row.
        """
        return np.concatenate([np.arange(start, end) for start, end in self.path_ranges(sequence)])

    @cached_property
    def _run_head(self) -> IntArray:
        """For each segment the first one of the path to it from which it is reached without a gap."""
        index = np.arange(len(self.segments))
        follows = self.segments[:, _PARENT] == index - 1
        return np.maximum.accumulate(np.where(follows, 0, index))

    def _index(self, sequence: int) -> int:
        at = bisect_left(self.sequence_ids, sequence)
        if at == len(self.sequence_ids) or self.sequence_ids[at] != sequence:
            raise KeyError(f"sequence {sequence} is not in this row, which holds {len(self.sequence_ids)} sequences")
        return at

    def _per_token(self, values: IntArray) -> IntArray:
        return np.repeat(values, self.segments[:, _END] - self.segments[:, _START])

    def _padded(self, values: IntArray, padding: int | IntArray) -> IntArray:
        if len(values) == len(self.tokens):
            return values
        padded = np.empty(len(self.tokens), np.int64)
        padded[: len(values)] = values
        padded[len(values) :] = padding
        return padded


@dataclass(frozen=True, eq=False)
class Plan:
    """All rows of a batch. Every sequence is in exactly one row.

    Attributes:
        rows: the rows.
        tree: the prefix tree of the batch.
        sequence_row: the row of each sequence, int64 [number of sequences].
        row_tokens: the greatest number of tokens in a row, None for one row without a limit.
        row_bound: a number of rows that no packing of this tree goes below.
        token_bound: a number of tokens, over all rows, that no packing of this tree goes below.
    """

    rows: tuple[Row, ...]
    tree: PrefixTree
    sequence_row: IntArray
    row_tokens: int | None
    row_bound: int
    token_bound: int

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.sequence_row)

    @property
    def input_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.tree.sequence_length.sum())

    @property
    def packed_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return sum(row.length for row in self.rows)

    def row_of(self, sequence: int) -> int:
        """The index of the row that holds a sequence.

        Raises:
            IndexError: the batch has no such sequence.
        """
        if not 0 <= sequence < self.sequences:
            raise IndexError(f"there is no sequence {sequence}; the batch has {self.sequences}")
        return int(self.sequence_row[sequence])

    def render(self, width: int = 100) -> str:
        """A picture of the tree and of the rows, as plain text of at most `width` columns (60 or more)."""
        return render_plan(self, width)


def plan_rows(
    sequences: Sequences,
    row_tokens: int | None = None,
    min_shared_tokens: int = 64,
    objective: str = "rows",
    pad_rows: bool = False,
) -> Plan:
    """Plans the rows in which a batch of sequences is computed.

    Args:
        sequences: a list of sequences, or a dict of such lists for tokens with payloads: see `as_batch`.
        row_tokens: the greatest number of tokens in a row; None puts the whole batch in one row.
        min_shared_tokens: shared segments with fewer tokens are copied to their children instead.
        objective: "rows" for the fewest rows, "tokens" for the fewest tokens.
        pad_rows: fill every row up to `row_tokens` with tokens that nobody reads.

    Raises:
        InputError: the sequences are not usable; `as_batch` and `pack_rows` list the cases.
        ValueError: an option has no meaning.
    """
    if pad_rows and row_tokens is None:
        raise ValueError("pad_rows=True needs row_tokens: the length to pad to")
    batch = as_batch(sequences)
    tree = build_prefix_tree(batch, min_shared_tokens)
    packed = pack_rows(tree, row_tokens, objective)
    sequence_row = _sequence_rows(tree, packed)
    members = _members(sequence_row, len(packed))
    padded = row_tokens if pad_rows else None
    rows = tuple(_row(batch, tree, *pair, padded) for pair in zip(packed, members, strict=True))
    return Plan(rows, tree, sequence_row, row_tokens, *row_bounds(tree, row_tokens))


def _sequence_rows(tree: PrefixTree, packed: list[list[int]]) -> IntArray:
    leaf_row = np.empty(len(tree), np.int64)
    for row, leaves in enumerate(packed):
        leaf_row[leaves] = row
    return leaf_row[tree.leaves[tree.sequence_leaf]]


def _members(sequence_row: IntArray, rows: int) -> list[IntArray]:
    """The sequence ids of every row, ascending."""
    order = np.argsort(sequence_row, kind="stable")
    return np.split(order, np.searchsorted(sequence_row[order], np.arange(1, rows)))


def _row(batch: Batch, tree: PrefixTree, leaves: list[int], members: IntArray, padded: int | None) -> Row:
    held = _with_ancestors(tree, leaves)
    segments, table_index = _segment_table(tree, held)
    return Row(
        inputs={name: _gather(values, tree, held, padded) for name, values in batch.inputs.items()},
        segments=segments,
        sequence_ids=tuple(members.tolist()),
        sequence_segment=table_index[np.searchsorted(held, tree.sequence_segment[members])],
        sequence_length=tree.sequence_length[members],
    )


def _with_ancestors(tree: PrefixTree, leaves: list[int]) -> IntArray:
    """The segments on the paths to the leaves, in pre-order."""
    held: set[int] = set()
    for leaf in leaves:
        segment = leaf
        while segment >= 0 and segment not in held:
            held.add(segment)
            segment = int(tree.parent[segment])
    return np.array(sorted(held), np.int64)


def _segment_table(tree: PrefixTree, held: IntArray) -> tuple[IntArray, IntArray]:
    """The table of a row, and for each held segment its place in the table.

    A segment whose only child in this row follows it is one segment with that child.
    """
    index = np.arange(len(held))
    parent = np.searchsorted(held, tree.parent[held]) - (tree.parent[held] < 0)
    children = np.bincount(parent[parent >= 0], minlength=len(held))
    head = (parent < 0) | (children[parent] != 1)
    table_index = np.cumsum(head) - 1
    bounds = np.append(0, np.cumsum(tree.length[held]))
    subtree_end = bounds[np.searchsorted(held, tree.subtree[held])]
    start = bounds[index[head]]
    end = np.append(start[1:], bounds[-1])
    above = np.where(parent[head] < 0, -1, table_index[parent[head]])
    return np.stack([start, end, subtree_end[head], above, tree.start[held][head]], axis=1), table_index


def _gather(values: list[TokenArray], tree: PrefixTree, held: IntArray, padded: int | None) -> IntArray:
    start, end, source = tree.start[held].tolist(), tree.end[held].tolist(), tree.source[held].tolist()
    parts: list[TokenArray] = [values[i][first:past] for i, first, past in zip(source, start, end, strict=True)]
    if padded is not None:
        parts.append(np.zeros(padded - sum(map(len, parts)), np.int64))
    return np.concatenate(parts, dtype=np.int64)
