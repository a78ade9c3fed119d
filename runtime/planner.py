"""Rollouts that finish one by one -> rows that are given out as soon as enough others wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tree_compile.errors import PayloadError
from tree_compile.runtime.options import MIN_SHARED_TOKENS, check_count, check_options
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.samples import batch_of
from tree_compile.runtime.sequences import Batch, TokenArray, TokenSequence, check_fits

__all__ = ["Planner", "ReadyRow"]


@dataclass(frozen=True, eq=False)
class ReadyRow:
    """A row that is given out.

    Attributes:
        plan: a plan of this one row, over the sequences in it.
        sequence_ids: of each sequence of the plan, counted from 0 in the order in which they were added.
    """

    plan: Plan
    sequence_ids: tuple[int, ...]


class Planner:
    """Packs sequences that arrive one by one.

    Sequences wait until `rows_waiting` rows' worth of tokens is there. Then all that wait are planned together, the
    fullest rows are given out until one row's worth less waits, and the rest waits on, with what comes next. The more
    may wait, the nearer the rows come to those of a plan of all at once.

    Args:
        row_tokens: the greatest number of tokens in a row.
        min_shared_tokens: as in `plan_rows`.
        rows_waiting: rows' worth of computed tokens that may wait, 2 or more.
        longest_wait: a sequence is given out at the latest when so many have been added after it; None for no limit.
        plan_seconds: as in `plan_rows`, for each time that the waiting ones are planned.

    Raises:
        ValueError: an option has no meaning.
    """

    def __init__(
        self,
        row_tokens: int,
        min_shared_tokens: int = MIN_SHARED_TOKENS,
        *,
        rows_waiting: int = 4,
        longest_wait: int | None = None,
        plan_seconds: float = 0.02,
    ) -> None:
        self._row_tokens = check_count("row_tokens", row_tokens, 1)
        options = check_options(row_tokens, min_shared_tokens, plan_seconds=plan_seconds)
        self._min_shared_tokens, self._plan_seconds = options.min_shared_tokens, options.budget.seconds
        self._most_waiting = check_count("rows_waiting", rows_waiting, 2) * self._row_tokens
        self._longest_wait = None if longest_wait is None else check_count("longest_wait", longest_wait, 0)
        self._waiting: dict[int, dict[str, TokenArray]] = {}
        self._names: tuple[str, ...] = ()
        self._added = 0
        self._room = self._most_waiting
        """Tokens that may be added before it is worth to plan again: so many could at most be computed."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the sequences that were added and not given out."""
        return tuple(self._waiting)

    def add(self, sequence: TokenSequence | Mapping[str, TokenSequence]) -> list[ReadyRow]:
        """Adds a finished sequence; the rows that are given out now, none most of the time.

        Args:
            sequence: its tokens, or a dict of tokens and payloads.

        Raises:
            InputError: the sequence is not usable, or longer than a row. It is not added then.
        """
        batch = batch_of(_of_one(sequence), first=self._added)
        self._check_names(tuple(batch.inputs))
        self._check_kind(batch)
        check_fits(batch.lengths, self._row_tokens, first=self._added)
        # Copies: a caller may fill the same array with the next rollout.
        self._waiting[self._added] = {name: values[0].copy() for name, values in batch.inputs.items()}
        self._names = tuple(batch.inputs)
        self._added += 1
        self._room -= len(batch.tokens[0])
        return self._give_out(self._most_waiting - self._row_tokens) if self._room <= 0 or self._is_overdue() else []

    def flush(self) -> list[ReadyRow]:
        """The rows of all that wait."""
        return self._give_out(0) if self._waiting else []

    def _check_names(self, names: tuple[str, ...]) -> None:
        if self._names and names != self._names:
            raise PayloadError(
                f"Sequence {self._added} has the inputs {', '.join(names)}, and those before it had "
                f"{', '.join(self._names)}.",
                why="sequences of a row are computed together.",
                hint="give every sequence the same inputs, in one order.",
            )

    def _check_kind(self, batch: Batch) -> None:
        if batch.tables:
            raise PayloadError(
                f"Sample {self._added} has recorded experts.",
                why="a planner plans tokens alone, and gives rows out without samples.",
                hint="plan the samples of a batch with plan_rows.",
            )

    def _is_overdue(self) -> bool:
        """Whether the oldest that waits has waited for as long as it may."""
        return self._longest_wait is not None and self._added - 1 - next(iter(self._waiting)) >= self._longest_wait

    def _give_out(self, most_left: int) -> list[ReadyRow]:
        """Gives rows out until at most `most_left` computed tokens wait."""
        ids = self.waiting
        plan = plan_rows(self._batch(), self._row_tokens, self._min_shared_tokens, plan_seconds=self._plan_seconds)
        going = self._going(plan, most_left)
        for i in range(plan.sequences):
            if plan.row_of(i) in going:
                del self._waiting[ids[i]]
        self._room = self._most_waiting - plan.packed_tokens + sum(plan.rows[index].length for index in going)
        return [ReadyRow(plan.of_row(index), tuple(ids[i] for i in plan.rows[index].sequence_ids)) for index in going]

    def _going(self, plan: Plan, most_left: int) -> list[int]:
        """The fullest rows, so that at most `most_left` tokens wait on, and that of a sequence that is overdue."""
        due = plan.row_of(0) if self._is_overdue() else None
        left, going = plan.packed_tokens, []
        for index in sorted(range(len(plan.rows)), key=lambda index: -plan.rows[index].length):
            if left > most_left or index == due:
                left -= plan.rows[index].length
                going.append(index)
        return sorted(going)

    def _batch(self) -> Batch:
        waiting = self._waiting.values()
        return Batch({name: [inputs[name] for inputs in waiting] for name in self._names})


def _of_one(
    sequence: TokenSequence | Mapping[str, TokenSequence],
) -> list[TokenSequence] | dict[str, list[TokenSequence]]:
    """What `as_batch` takes, with one sequence."""
    return {name: [values] for name, values in sequence.items()} if isinstance(sequence, Mapping) else [sequence]
