"""Rows -> plan: where every token of every sequence lies."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from tree_compile.errors import PayloadError, PlanError
from tree_compile.runtime.layout import END, PARENT, POSITION, START, SUBTREE_END, Layout, lay_out
from tree_compile.runtime.page import plan_page
from tree_compile.runtime.plan_file import read_plan, write_plan
from tree_compile.runtime.render import render_plan
from tree_compile.runtime.rows import OBJECTIVES, Budget, pack_rows
from tree_compile.runtime.sequences import Batch, IntArray, Sequences, TokenArray, TokenSequence, as_batch
from tree_compile.runtime.tree import PrefixTree, build_prefix_tree
from tree_compile.runtime.trie import first_difference

__all__ = ["Plan", "Row", "check_options", "plan_rows", "warm_up"]

_SHARES = ("all", "context")


@dataclass(frozen=True, eq=False)
class Row:
    """One forward pass: some sequences, laid out as a tree in depth-first pre-order.

    T is the number of tokens with padding. Token k is token q or an ancestor of it exactly when
    `k <= q < subtree_end[k]`.

    Attributes:
        batch: the sequences of the plan, or None where the plan is without them.
        segments: int64 [S, 5], the segments of this row in pre-order, columns start, end, subtree_end, parent and
            position. The first three are row indices; parent is an index into this table, -1 at a root; position is
            that of the first token. Padding is in no segment.
        sources: for each segment a sequence that holds its tokens, int64 [S].
        members: which sequences of the batch the row holds, ascending, int64 [N].
        sequence_segment: for each of them the segment in which it ends, int64 [N].
        sequence_length: for each of them its tokens, int64 [N].
        padding: tokens at the end of the row that nobody reads.
    """

    batch: Batch | None
    segments: IntArray
    sources: IntArray
    members: IntArray
    sequence_segment: IntArray
    sequence_length: IntArray
    padding: int = 0

    @cached_property
    def inputs(self) -> dict[str, IntArray]:
        """One int64 array [T] per input; the tokens come first, then the payloads. Made when first asked for.

        Raises:
            PlanError: the plan is without its sequences.
        """
        if self.batch is None:
            raise PlanError(
                "The plan is without its sequences.",
                why="a plan is saved and sent as integers only.",
                hint="give them back: plan.with_sequences(sequences).",
            )
        return {name: self._gather(values) for name, values in self.batch.inputs.items()}

    @property
    def tokens(self) -> IntArray:
        """Token ids, int64 [T]; 0 on padding.

        Raises:
            PlanError: the plan is without its sequences.
        """
        return next(iter(self.inputs.values()))

    @property
    def length(self) -> int:
        """Tokens without padding."""
        return int(self.segments[-1, END])

    @cached_property
    def sequence_ids(self) -> tuple[int, ...]:
        """Which sequences of the batch the row holds, ascending."""
        return tuple(self.members.tolist())

    @cached_property
    def position(self) -> IntArray:
        """Index of each token in its own sequence, int64 [T]; 0 on padding."""
        offset = self._per_token(self.segments[:, POSITION] - self.segments[:, START])
        return self._padded(offset + np.arange(self.length), 0)

    @cached_property
    def parent(self) -> IntArray:
        """Row index of the token before each token in its sequence, int64 [T]; -1 at roots and on padding."""
        before = np.arange(-1, self.length - 1)
        above = self.segments[:, PARENT]
        before[self.segments[:, START]] = np.where(above < 0, -1, self.segments[above, END] - 1)
        return self._padded(before, -1)

    @cached_property
    def subtree_end(self) -> IntArray:
        """One past the last row index below each token's segment, int64 [T]; padding is below nothing."""
        end = self._per_token(self.segments[:, SUBTREE_END])
        return self._padded(end, np.arange(self.length, self.length + self.padding) + 1)

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
            segment, end = above, int(self.segments[above, END])
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
        follows = self.segments[:, PARENT] == index - 1
        return np.maximum.accumulate(np.where(follows, 0, index))

    def _index(self, sequence: int) -> int:
        at = bisect_left(self.sequence_ids, sequence)
        if at == len(self.sequence_ids) or self.sequence_ids[at] != sequence:
            raise KeyError(f"sequence {sequence} is not in this row, which holds {len(self.sequence_ids)} sequences")
        return at

    def _per_token(self, values: IntArray) -> IntArray:
        return np.repeat(values, self.segments[:, END] - self.segments[:, START])

    def _padded(self, values: IntArray, padding: int | IntArray) -> IntArray:
        if not self.padding:
            return values
        padded = np.empty(self.length + self.padding, np.int64)
        padded[: self.length] = values
        padded[self.length :] = padding
        return padded

    def _gather(self, values: list[TokenArray]) -> IntArray:
        parts = [
            values[source][position : position + end - start]
            for source, (start, end, _, _, position) in zip(self.sources.tolist(), self.segments.tolist(), strict=True)
        ]
        return self._padded(np.concatenate(parts, dtype=np.int64), 0)

    def __repr__(self) -> str:
        return f"Row({self.length:,} tokens, {len(self.members):,} sequences, {len(self.segments):,} segments)"

    def __getstate__(self) -> dict[str, Any]:
        """A row is sent with its own tokens and without the other sequences of the batch."""
        inputs = {} if self.batch is None else {"inputs": self.inputs}
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"batch": None} | inputs


@dataclass(frozen=True, eq=False)
class Plan:
    """All rows of a batch, as integers. Every sequence is in exactly one row.

    A plan that was pickled or loaded is without its sequences: `with_sequences` gives them back.

    Attributes:
        batch: the sequences; not pickled and not saved.
        tree: the prefix tree of the batch.
        layout: the segments of every row.
        row_tokens: the greatest number of tokens in a row, None for one row without a limit.
        padded: whether every row is filled up to `row_tokens` with tokens that nobody reads.
        row_bound: a number of rows that no packing of this tree goes below.
        token_bound: a number of tokens, over all rows, that no packing of this tree goes below.
    """

    batch: Batch | None
    tree: PrefixTree
    layout: Layout
    row_tokens: int | None
    padded: bool
    row_bound: int
    token_bound: int

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The rows."""
        return tuple(map(self._row, range(len(self.layout.segment_bounds) - 1)))

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.tree.sequence_length)

    @property
    def input_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.tree.sequence_length.sum())

    @property
    def packed_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.layout.segments[self.layout.segment_bounds[1:] - 1, END].sum())

    def row_of(self, sequence: int) -> int:
        """The index of the row that holds a sequence.

        Raises:
            IndexError: the batch has no such sequence.
        """
        if not 0 <= sequence < self.sequences:
            raise IndexError(f"there is no sequence {sequence}; the batch has {self.sequences}")
        return int(self._sequence_row[sequence])

    @cached_property
    def _sequence_row(self) -> IntArray:
        rows = np.empty(self.sequences, np.int64)
        bounds = self.layout.sequence_bounds
        rows[self.layout.sequences] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        return rows

    def _row(self, index: int) -> Row:
        layout = self.layout
        held = slice(*layout.segment_bounds[index : index + 2].tolist())
        members = slice(*layout.sequence_bounds[index : index + 2].tolist())
        ids = layout.sequences[members]
        segments = layout.segments[held]
        padding = self.row_tokens - int(segments[-1, END]) if self.padded and self.row_tokens else 0
        return Row(
            self.batch, segments, layout.sources[held], ids, layout.sequence_segment[members],
            self.tree.sequence_length[ids], padding,
        )  # fmt: skip

    def of_row(self, index: int) -> Plan:
        """A plan of one row alone. Its sequences are those of the row, counted from 0 in the order of their ids.

        The row stays as it is: a tree of its sequences alone might keep other branches, and so need more tokens.
        """
        row = self.rows[index]
        batch = self.batch and Batch(
            {name: [values[i] for i in row.sequence_ids] for name, values in self.batch.inputs.items()}
        )
        tree, bounds = _tree_of(row), np.array([0, len(row.segments)])
        ids = np.arange(len(row.members))
        layout = Layout(row.segments, tree.source, bounds, ids, np.array([0, len(ids)]), row.sequence_segment)
        return Plan(batch, tree, layout, self.row_tokens, self.padded, 1, row.length)

    def with_sequences(self, sequences: Sequences) -> Plan:
        """The plan with its sequences, which have to be those that it was made for.

        Compared are the lengths, and the tokens that are shared.

        Raises:
            InputError: the sequences are not usable.
            PlanError: they are others.
        """
        batch, tree = as_batch(sequences), self.tree
        if not np.array_equal(batch.lengths, tree.sequence_length):
            raise PlanError(
                f"The plan is for {self.sequences} sequences of other lengths.",
                why="a plan says where the tokens of its own sequences lie.",
                hint="pass the sequences that it was made for, or plan these.",
            )
        other = first_difference(batch, tree.sequence_segment, tree.start, tree.parent, tree.source)
        if other >= 0:
            raise PlanError(
                f"Sequence {other} does not share the tokens that the plan shares.",
                why="a plan says where the tokens of its own sequences lie.",
                hint="pass the sequences that it was made for, or plan these.",
            )
        return replace(self, batch=batch)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as an npz file of integers, without its sequences."""
        leaf_row = self._sequence_row[self.tree.source[self.tree.leaves]]
        write_plan(path, self.tree, leaf_row, [self.row_tokens or 0, self.padded, self.row_bound, self.token_bound])

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Nothing in the file is run.

        Raises:
            PlanError: the file is not a plan, one of another version, or no plan could have its numbers.
        """
        tree, leaf_row, numbers = read_plan(path)
        row_tokens, padded, row_bound, token_bound = numbers
        order = np.argsort(leaf_row, kind="stable")
        packed = np.split(tree.leaves[order], np.cumsum(np.bincount(leaf_row))[:-1])
        plan = cls(None, tree, lay_out(tree, packed), row_tokens or None, bool(padded), row_bound, token_bound)
        _check_limits(plan, path)
        return plan

    def __repr__(self) -> str:
        return (
            f"Plan({self.sequences:,} sequences, {self.input_tokens:,} tokens in, {self.packed_tokens:,} computed, "
            f"{len(self.rows):,} rows, bound {self.row_bound:,})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"batch": None}

    def render(self, width: int = 100) -> str:
        """A picture of the tree and of the rows, as plain text of at most `width` columns (60 or more)."""
        return render_plan(self, width)

    def to_html(self) -> str:
        """A page without scripts or links: rows as bars, segments as blocks in proportion to their tokens."""
        return plan_page(self)


def plan_rows(
    sequences: Sequences,
    row_tokens: int | None = None,
    min_shared_tokens: int = 64,
    objective: str = "rows",
    pad_rows: bool = False,
    *,
    share: str = "all",
    trainable: Sequence[TokenSequence] | None = None,
    plan_seconds: float = 0.15,
    plan_attempts: int | None = None,
) -> Plan:
    """Plans the rows in which a batch of sequences is computed.

    Args:
        sequences: a list of sequences, or a dict of such lists for tokens with payloads: see `as_batch`.
        row_tokens: the greatest number of tokens in a row; None puts the whole batch in one row.
        min_shared_tokens: shared segments with fewer tokens are copied to their children instead.
        objective: "rows" for the fewest rows, then the fewest tokens; "tokens" for the fewest tokens, then even rows.
        pad_rows: fill every row up to `row_tokens` with tokens that nobody reads.
        share: "all" shares every common prefix; "context" shares it up to, and without, the token before the first
            trainable one, so that each sequence has its own copy of all that a loss reads.
        trainable: for `share="context"`, per sequence one value per token, not 0 where it is trained on.
        plan_seconds: how long rows are improved; 0 takes the best construction.
        plan_attempts: improve for so many attempts instead, which gives the same rows on every machine.

    Raises:
        InputError: the sequences are not usable; `as_batch` and `pack_rows` list the cases.
        ValueError: an option has no meaning.
    """
    check_options(row_tokens, min_shared_tokens, objective, pad_rows)
    _check_budget(plan_seconds, plan_attempts)
    if trainable is not None and share != "context":
        raise ValueError('trainable is for share="context"')
    if share not in _SHARES:
        raise ValueError(f"share is {share!r}; it must be one of {', '.join(map(repr, _SHARES))}")
    batch = as_batch(sequences)
    tree = build_prefix_tree(batch, min_shared_tokens, _limits(batch, trainable) if share == "context" else None)
    packed, bounds = pack_rows(tree, row_tokens, objective, Budget(plan_seconds, plan_attempts))
    return Plan(batch, tree, lay_out(tree, packed), row_tokens, pad_rows, *bounds)


def check_options(row_tokens: int | None, min_shared_tokens: int, objective: str, pad_rows: bool) -> None:
    """Refuses options of `plan_rows` that have no meaning.

    Raises:
        ValueError: names the option.
    """
    if row_tokens is not None:
        _check_count("row_tokens", row_tokens, 1)
    _check_count("min_shared_tokens", min_shared_tokens, 1)
    if objective not in OBJECTIVES:
        raise ValueError(f"the objective is {objective!r}; it must be one of {', '.join(map(repr, OBJECTIVES))}")
    if pad_rows and row_tokens is None:
        raise ValueError("pad_rows=True needs row_tokens: the length to pad to")


def _check_limits(plan: Plan, path: str | PathLike[str]) -> None:
    fullest = max(row.length for row in plan.rows)
    fits = plan.row_tokens is None or fullest <= plan.row_tokens
    if not (fits and 1 <= plan.row_bound <= len(plan.rows) and 1 <= plan.token_bound <= plan.packed_tokens):
        raise PlanError(
            f"{path} is not a plan.",
            why="its rows are longer than row_tokens, or fewer than the bound.",
            hint="write it with plan.save(path).",
        )


def _check_count(name: str, value: Any, least: int) -> None:
    try:
        is_right = operator.index(value) >= least
    except TypeError:
        is_right = False
    if not is_right:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _check_budget(seconds: float, attempts: int | None) -> None:
    if not seconds >= 0:
        raise ValueError(f"plan_seconds is {seconds!r}; it must be 0 or more")
    if attempts is not None:
        _check_count("plan_attempts", attempts, 0)


def _tree_of(row: Row) -> PrefixTree:
    """The segments of a row as a tree of their own."""
    segments, source = row.segments, np.empty(len(row.segments), np.int64)
    by_length = np.argsort(row.sequence_length, kind="stable")
    source[row.sequence_segment[by_length]] = by_length
    for segment in range(len(segments) - 1, 0, -1):
        if segments[segment, PARENT] >= 0:
            source[segments[segment, PARENT]] = source[segment]
    return PrefixTree(
        start=segments[:, POSITION],
        length=segments[:, END] - segments[:, START],
        parent=segments[:, PARENT],
        subtree=np.searchsorted(segments[:, START], segments[:, SUBTREE_END]),
        source=source,
        sequence_segment=row.sequence_segment,
        sequence_length=row.sequence_length,
    )


def _limits(batch: Batch, trainable: Sequence[TokenSequence] | None) -> IntArray:
    """Tokens that others may share: those before the one that predicts the first trainable token."""
    if trainable is None:
        raise ValueError('share="context" needs trainable: per sequence one value per token')
    masks = [np.asarray(mask) != 0 for mask in trainable]
    shapes = [(length,) for length in batch.lengths.tolist()]
    if [mask.shape for mask in masks] != shapes:
        wrong = next((i for i, (m, s) in enumerate(zip(masks, shapes, strict=False)) if m.shape != s), None)
        raise PayloadError(
            f"trainable does not fit to {'the number of sequences' if wrong is None else f'sequence {wrong}'}.",
            why="it has one value for every token of every sequence.",
        )
    first = [int(mask.argmax()) if mask.any() else len(mask) + 1 for mask in masks]
    return np.maximum(np.array(first) - 1, 0)


def warm_up() -> None:
    """Loads what numba has compiled, or compiles it when it is first used on a machine, so that no step waits."""
    for dtype in (np.int64, np.int32):
        # The best construction is above the bound, so that rows are reopened.
        sequences = [np.array([first] * 3 + [last] * 2, dtype) for first in range(3) for last in (7, 8, 9)]
        plan_rows(sequences, 8, 1, plan_attempts=1).with_sequences(sequences)
