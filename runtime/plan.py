"""All rows of a batch: saved, sent, and given back their sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from tree_compile.errors import PlanError
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.layout import END, PARENT, POSITION, START, SUBTREE_END, Layout, lay_out
from tree_compile.runtime.page import plan_page
from tree_compile.runtime.plan_file import Numbers, not_a_plan, read_plan, write_plan
from tree_compile.runtime.render import render_plan
from tree_compile.runtime.row import Row
from tree_compile.runtime.samples import batch_of
from tree_compile.runtime.sequences import Batch, IntArray, Sequences
from tree_compile.runtime.tree import PrefixTree
from tree_compile.runtime.trie import first_other_sequence

__all__ = ["Plan"]


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
        return tuple(map(self._row, range(len(self.layout.segment_offsets) - 1)))

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
        return int(self.layout.segments[self.layout.segment_offsets[1:] - 1, END].sum())

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
        offsets = self.layout.sequence_offsets
        rows[self.layout.sequence_ids] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        return rows

    def _row(self, index: int) -> Row:
        layout = self.layout
        of_segments = slice(*layout.segment_offsets[index : index + 2].tolist())
        of_sequences = slice(*layout.sequence_offsets[index : index + 2].tolist())
        segments, sequence_ids = layout.segments[of_segments], layout.sequence_ids[of_sequences]
        return Row(
            self.batch,
            segments,
            layout.source[of_segments],
            tuple(sequence_ids.tolist()),
            layout.sequence_segment[of_sequences],
            self.tree.sequence_length[sequence_ids],
            self.row_tokens - int(segments[-1, END]) if self.padded and self.row_tokens else 0,
        )

    def of_row(self, index: int) -> Plan:
        """A plan of one row alone. Its sequences are those of the row, counted from 0 in the order of their ids.

        The row stays as it is: a tree of its sequences alone might keep other branches, and so need more tokens. What
        is counted over the samples of the batch stays so too; samples that are given to it by `with_sequences` are
        counted as a batch of their own.
        """
        row = self.rows[index]
        batch = self.batch and self.batch.of(row.sequence_ids)
        tree, count = _tree_of(row), len(row.sequence_ids)
        layout = Layout(
            segments=row.segments,
            source=tree.source,
            segment_offsets=np.array([0, len(row.segments)]),
            sequence_ids=np.arange(count),
            sequence_offsets=np.array([0, count]),
            sequence_segment=row.sequence_segment,
        )
        plan = Plan(batch, tree, layout, self.row_tokens, self.padded, 1, row.length)
        # The rows of a planned batch that was sent have what the plan has no more.
        vars(plan)["rows"] = (row.renumbered(batch, tree.source),)
        return plan

    def with_sequences(self, sequences: Sequences) -> Plan:
        """The plan with its sequences, which have to be those that it was made for.

        Compared are the lengths, and the tokens that are shared.

        Raises:
            InputError: the sequences are not usable.
            PlanError: they are others.
        """
        batch, tree = batch_of(sequences), self.tree
        if len(batch) != self.sequences:
            given = "was" if len(batch) == 1 else "were"
            what = f"{count_of(len(batch), 'sequence')} {given} given, and the plan is for {self.sequences:,}."
            raise _other_sequences(what)
        if not np.array_equal(batch.lengths, tree.sequence_length):
            raise _other_sequences(f"The plan is for {count_of(self.sequences, 'sequence')} of other lengths.")
        other = first_other_sequence(batch, tree.sequence_segment, tree.start, tree.parent, tree.source)
        if other >= 0:
            raise _other_sequences(f"Sequence {other} does not share the tokens that the plan shares.")
        return replace(self, batch=batch)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan as an npz file of integers, without its sequences."""
        leaf_row = self._sequence_row[self.tree.source[self.tree.leaves]]
        numbers = Numbers(self.row_tokens or 0, self.padded, self.row_bound, self.token_bound)
        write_plan(path, self.tree, leaf_row, numbers)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote. Nothing in the file is run.

        Raises:
            PlanError: the file is not a plan, one of another version, or no plan could have its numbers.
        """
        tree, leaf_row, numbers = read_plan(path)
        row_tokens, padded, *bounds = numbers
        plan = cls(None, tree, lay_out(tree, leaf_row), row_tokens or None, bool(padded), *bounds)
        plan._check_limits(path)
        return plan

    def _check_limits(self, path: str | PathLike[str]) -> None:
        fits = self.row_tokens is None or max(row.length for row in self.rows) <= self.row_tokens
        if not (fits and 1 <= self.row_bound <= len(self.rows) and 1 <= self.token_bound <= self.packed_tokens):
            raise not_a_plan(path, "its rows are longer than row_tokens, or fewer than the bound.")

    def __repr__(self) -> str:
        return (
            f"Plan({count_of(self.sequences, 'sequence')}, {count_of(self.input_tokens, 'token')} in, "
            f"{self.packed_tokens:,} computed, {count_of(len(self.rows), 'row')}, bound {self.row_bound:,})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"batch": None}

    def render(self, width: int = 100) -> str:
        """A picture of the tree and of the rows, as plain text of at most `width` columns (60 or more)."""
        return render_plan(self, width)

    def to_html(self) -> str:
        """A page without scripts or links: rows as bars, segments as blocks in proportion to their tokens."""
        return plan_page(self)


def _other_sequences(what: str) -> PlanError:
    return PlanError(
        what,
        why="a plan says where the tokens of its own sequences lie.",
        hint="pass the sequences that it was made for, or plan these.",
    )


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
        subtree_end=np.searchsorted(segments[:, START], segments[:, SUBTREE_END]),
        source=source,
        sequence_segment=row.sequence_segment,
        sequence_length=row.sequence_length,
    )
