"""What one forward pass computes: where every token of its sequences lies."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import PayloadError, PlanError
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.layout import END, PARENT, POSITION, START, SUBTREE_END
from tree_compile.runtime.samples import Counts, Sample, per_token
from tree_compile.runtime.sequences import Batch, IntArray, TokenArray, as_it_lies

__all__ = ["Row"]


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
        source: for each segment a sequence that holds its tokens, int64 [S].
        sequence_ids: which N sequences of the batch the row holds, ascending.
        sequence_segment: for each of them the segment in which it ends, int64 [N].
        sequence_length: for each of them its tokens, int64 [N].
        padding: tokens at the end of the row that nobody reads.
    """

    batch: Batch | None
    segments: IntArray
    source: IntArray
    sequence_ids: tuple[int, ...]
    sequence_segment: IntArray
    sequence_length: IntArray
    padding: int = 0

    @cached_property
    def inputs(self) -> dict[str, IntArray]:
        """One int64 array [T] per input; the tokens come first, then the payloads. Made when first asked for.

        Recorded experts are [T, layers, experts per token].

        Raises:
            PlanError: the plan is without its sequences.
        """
        if self.batch is None:
            raise _without_sequences()
        found = {name: self._gather(values) for name, values in self.batch.inputs.items()}
        return found | {name: table[found[name]] for name, table in self.batch.tables.items()}

    @property
    def tokens(self) -> IntArray:
        """Token ids, int64 [T]; 0 on padding.

        Raises:
            PlanError: the plan is without its sequences.
        """
        return next(iter(self.inputs.values()))

    @cached_property
    def samples(self) -> dict[int, Sample]:
        """The samples of the row's sequences, by their numbers.

        Raises:
            PlanError: the plan was made for sequences without payloads, or is without them.
        """
        self.require_samples()
        assert self.batch is not None
        assert self.batch.samples is not None
        return {number: self.batch.samples.all[number] for number in self.sequence_ids}

    @property
    def has_samples(self) -> bool:
        """Whether its sequences are of samples, which a row that was sent has of its own."""
        return "samples" in vars(self) or (self.batch is not None and self.batch.samples is not None)

    def require_samples(self) -> None:
        """Refuses sequences that are no samples.

        Raises:
            PlanError: as `samples`.
        """
        if self.has_samples:
            return
        if self.batch is None and "inputs" not in vars(self):
            raise _without_sequences()
        raise PlanError(
            "The sequences of this row are no samples.",
            why="they were passed as tokens alone, or in a dict of inputs of the model.",
            hint="pass samples: model([Sample(tokens), …]), with the payloads that the loss reads.",
        )

    @property
    def payload_names(self) -> tuple[str, ...]:
        """Names of the payloads of its samples; none where its sequences are no samples."""
        return tuple(next(iter(self.samples.values())).payloads) if self.has_samples else ()

    @cached_property
    def counts(self) -> Counts:
        """What is counted over all samples of the batch, those of other rows among them.

        Raises:
            PlanError: there are no samples, or the row was given out before all samples of the batch were known.
        """
        self.require_samples()
        known = self._known_counts
        if known is None:
            raise PlanError(
                "What is to be counted over the whole batch is not known.",
                why="a Planner gives rows out before it has seen all samples.",
                hint="pass it to the loss: counts=losses.counts_of(all_samples), "
                'or counts=losses.Counts(sequences=…) for "per_sequence".',
            )
        return known

    @property
    def _known_counts(self) -> Counts | None:
        """Those of the batch; None where they, or the samples, are not known."""
        if "counts" in vars(self):
            return self.counts
        return self.batch.samples.counts if self.batch is not None and self.batch.samples is not None else None

    @cached_property
    def batch_sequences(self) -> int | None:
        """How many sequences the batch has, those of other rows among them; None where that is not known."""
        return None if self.batch is None else self.batch.whole

    @cached_property
    def sequences_through(self) -> IntArray:
        """How many sequences of the row go through each token, int64 [T]; 0 on padding."""
        change = np.zeros(self.length + self.padding + 1, np.int64)
        for sequence in self.sequence_ids:
            starts, ends = np.array(self.path_ranges(sequence)).T
            change[starts] += 1
            change[ends] -= 1
        return change.cumsum()[:-1]

    def payload(self, name: str) -> NDArray[Any]:
        """A payload with one entry per token in the layout of the row, [T, …]; 0 on padding.

        Raises:
            InputError: it is missing, does not fit the tokens, is of another shape than that of another sample, or
                is not the same in all sequences through a token.
        """
        given = {number: per_token(sample, number, name) for number, sample in self.samples.items()}
        seen = np.zeros(self.length + self.padding, np.bool_)
        shape, dtype = _form_of_all(given, name)
        found = np.zeros((len(seen), *shape), dtype)
        for number, values in given.items():
            path = self.path(number)
            if not np.array_equal(found[path[seen[path]]], values[seen[path]], equal_nan=dtype.kind == "f"):
                raise PayloadError(
                    f"{name!r} of sample {number} differs from that of another sample where they share tokens.",
                    why="a token of the row is computed once for all of them.",
                    hint="read it by sequence: out.payload(name)[i].",
                )
            found[path], seen[path] = values, True
        return found

    @property
    def length(self) -> int:
        """Tokens without padding."""
        return int(self.segments[-1, END])

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
            as_it_lies(values[source])[position : position + end - start]
            for source, (start, end, _, _, position) in zip(self.source.tolist(), self.segments.tolist(), strict=True)
        ]
        return self._padded(np.concatenate(parts, dtype=np.int64), 0)

    def renumbered(self, batch: Batch | None, source: IntArray) -> Row:
        """The same row with its sequences counted from 0, as in a plan of this row alone.

        Args:
            batch: its sequences; None where there are none, or the row was sent with its own.
            source: for each segment a sequence that holds its tokens, int64 [S].
        """
        row = replace(self, batch=batch, source=source, sequence_ids=tuple(range(len(self.sequence_ids))))
        sent = {name: vars(self)[name] for name in ("inputs", "batch_sequences", "counts") if name in vars(self)}
        samples = {"samples": dict(enumerate(self.samples.values()))} if self.has_samples else {}
        vars(row).update(sent | samples)
        return row

    def __repr__(self) -> str:
        counts = ((self.length, "token"), (len(self.sequence_ids), "sequence"), (len(self.segments), "segment"))
        return f"Row({', '.join(count_of(*count) for count in counts)})"

    def __getstate__(self) -> dict[str, Any]:
        """A row is sent with its own tokens and without the other sequences of the batch."""
        has_tokens = self.batch is not None or "inputs" in vars(self)
        inputs = {"inputs": self.inputs, "batch_sequences": self.batch_sequences} if has_tokens else {}
        samples = {"samples": self.samples} if self.has_samples else {}
        counts = {} if self._known_counts is None else {"counts": self._known_counts}
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {"batch": None} | inputs | samples | counts


def _without_sequences() -> PlanError:
    return PlanError(
        "The plan is without its sequences.",
        why="a plan is saved and sent as integers only.",
        hint="give them back: plan.with_sequences(sequences).",
    )


def _form_of_all(given: Mapping[int, NDArray[Any]], name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape of an entry, and the dtype that holds the entries of all samples."""
    first = next(iter(given))
    shape = given[first].shape[1:]
    for number, values in given.items():
        if values.shape[1:] != shape or (values.dtype.kind in "biuf") is not (given[first].dtype.kind in "biuf"):
            raise PayloadError(
                f"An entry of {name!r} is {_form(values)} in sample {number}, and {_form(given[first])} in "
                f"sample {first}.",
                why="the entries of a row stand in one array.",
                hint="give every sample entries of one shape and kind.",
            )
    dtype = functools.reduce(np.promote_types, {values.dtype for values in given.values()})
    for number, values in given.items():
        if values.dtype.kind in "iu" and not np.array_equal(values.astype(dtype).astype(values.dtype), values):
            raise PayloadError(
                f"{name!r} of sample {number} has numbers that {dtype} cannot hold.",
                why="the entries of a row stand in one array, and those of other samples are of another type.",
                hint="give every sample entries of one type.",
            )
    return shape, dtype


def _form(values: NDArray[Any]) -> str:
    return f"of shape {values.shape[1:]} and type {values.dtype}"
