"""Rollouts that finish one by one -> rows that are given out as soon as they are full."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tree_compile.errors import PayloadError, SequenceTooLongError
from tree_compile.runtime.plan import Plan, check_options, plan_rows
from tree_compile.runtime.sequences import Batch, TokenArray, TokenSequence, as_batch

__all__ = ["Planner", "ReadyRow"]


@dataclass(frozen=True, eq=False)
class ReadyRow:
    """A row that is given out.

    Attributes:
        plan: a plan of this one row, over the sequences in it.
        numbers: of each sequence of the plan, counted from 0 in the order in which they were added.
    """

    plan: Plan
    numbers: tuple[int, ...]


class Planner:
    """Packs sequences that arrive one by one.

    Sequences wait until some rows' worth of tokens is there. Then all that wait are planned together, rows that are
    full enough are given out, and the rest waits on, with what comes next. The more may wait, the nearer the rows come
    to those of a plan of all at once.

    Args:
        row_tokens: the greatest number of tokens in a row.
        min_shared_tokens: as in `plan_rows`.
        rows_waiting: rows' worth of computed tokens that wait before rows are given out, 2 or more.
        full: share of `row_tokens` from which on a row is given out early.
        longest_wait: a sequence is given out at the latest when so many have been added after it; None for no limit.
        plan_seconds: as in `plan_rows`, for each time that the waiting ones are planned.

    Raises:
        ValueError: an option has no meaning.
    """

    def __init__(
        self,
        row_tokens: int,
        min_shared_tokens: int = 64,
        *,
        rows_waiting: int = 4,
        full: float = 0.97,
        longest_wait: int | None = None,
        plan_seconds: float = 0.02,
    ) -> None:
        check_options(row_tokens, min_shared_tokens, "rows", pad_rows=False)
        if rows_waiting < 2 or not 0 < full <= 1 or (longest_wait is not None and longest_wait < 0):
            raise ValueError("rows_waiting must be at least 2, full in (0, 1], longest_wait 0 or more")
        self._options = (row_tokens, min_shared_tokens)
        self._seconds = plan_seconds
        self._rows_waiting, self._full, self._longest_wait = rows_waiting, full, longest_wait
        self._waiting: dict[int, dict[str, TokenArray]] = {}
        self._names: tuple[str, ...] = ()
        self._added = 0
        self._room = rows_waiting * row_tokens
        """Tokens that may be added before it is worth to plan again: so many could at most be computed."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """Numbers of the sequences that were added and not given out."""
        return tuple(self._waiting)

    def add(self, sequence: TokenSequence | Mapping[str, TokenSequence]) -> list[ReadyRow]:
        """Adds a finished sequence; the rows that are given out now, none most of the time.

        Args:
            sequence: its tokens, or a dict of tokens and payloads.

        Raises:
            InputError: the sequence is not usable, or longer than a row.
        """
        one = {n: [v] for n, v in sequence.items()} if isinstance(sequence, Mapping) else [sequence]
        # Copies: a caller may fill the same array with the next rollout.
        inputs = {name: values[0].copy() for name, values in as_batch(one).inputs.items()}
        self._names = self._names or tuple(inputs)
        if tuple(inputs) != self._names:
            raise PayloadError(
                f"The sequence has the inputs {', '.join(inputs)}, and those before it had {', '.join(self._names)}.",
                why="sequences of a row are computed together.",
                hint="give every sequence the same inputs, in one order.",
            )
        tokens = len(next(iter(inputs.values())))
        if tokens > self._options[0]:
            raise SequenceTooLongError(
                f"The sequence has {tokens} tokens, more than row_tokens={self._options[0]}.",
                why="a sequence is never split over rows.",
                hint="raise row_tokens, or shorten or leave out the sequence.",
            )
        self._waiting[self._added] = inputs
        self._added += 1
        self._room -= tokens
        if self._room > 0 and not self._overdue():
            return []
        return self._give_out(all_rows=False)

    def flush(self) -> list[ReadyRow]:
        """The rows of all that wait."""
        return self._give_out(all_rows=True) if self._waiting else []

    def _overdue(self) -> bool:
        oldest = next(iter(self._waiting), self._added)
        return self._longest_wait is not None and self._added - 1 - oldest >= self._longest_wait

    def _give_out(self, all_rows: bool) -> list[ReadyRow]:
        ids = self.waiting
        plan = plan_rows(self._batch(ids), *self._options, plan_seconds=self._seconds)
        enough = plan.packed_tokens >= self._rows_waiting * self._options[0]
        ready = [index for index in range(len(plan.rows)) if all_rows or self._goes(plan, index, ids, enough)]
        if enough and not ready:
            ready.append(max(range(len(plan.rows)), key=lambda index: plan.rows[index].length))
        found = [ReadyRow(plan.of_row(index), tuple(ids[i] for i in plan.rows[index].sequence_ids)) for index in ready]
        for number in itertools.chain(*(row.numbers for row in found)):
            del self._waiting[number]
        computed = plan.packed_tokens - sum(row.plan.packed_tokens for row in found)
        self._room = max(self._rows_waiting * self._options[0] - computed, self._options[0])
        return found

    def _goes(self, plan: Plan, index: int, ids: tuple[int, ...], enough: bool) -> bool:
        """Whether a row is full, while enough others wait, or holds a sequence that has waited for too long."""
        row = plan.rows[index]
        is_due = self._overdue() and any(ids[i] == ids[0] for i in row.sequence_ids)
        return is_due or (enough and row.length >= self._full * self._options[0])

    def _batch(self, ids: tuple[int, ...]) -> Batch:
        names = list(self._waiting[ids[0]])
        return Batch({name: [self._waiting[i][name] for i in ids] for name in names})
