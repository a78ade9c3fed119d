"""Rollouts that finish one by one -> rows that are given out as soon as enough others wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tree_compile.errors import PayloadError
from tree_compile.runtime.options import MIN_SHARED_TOKENS, check_count, check_options
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.samples import Sample, Samples, batch_of
from tree_compile.runtime.sequences import TOKENS, Batch, TokenArray, TokenSequence, check_fits

__all__ = ["Planner", "ReadyRow"]


@dataclass(frozen=True, eq=False)
class ReadyRow:
    """A row that is given out.

    Attributes:
        plan: a plan of this one row, over the sequences in it. What is counted over the whole batch is not known, since
            more of it may come: losses over the row take `counts`.
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
        self._waiting: dict[int, _Waiting] = {}
        self._form = ""
        self._added = 0
        self._room = self._most_waiting
        """Tokens that may be added before it is worth to plan again: so many could at most be computed."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the sequences that were added and not given out."""
        return tuple(self._waiting)

    def add(self, sequence: TokenSequence | Sample | Mapping[str, TokenSequence]) -> list[ReadyRow]:
        """Adds a finished sequence; the rows that are given out now, none most of the time.

        Args:
            sequence: its tokens, a sample, or a dict of tokens and payloads. Tokens are copied, and so is `trainable`
                of a sample; its payloads have to stay as they are.

        Raises:
            InputError: the sequence is not usable, longer than a row, or unlike those before it in its inputs or
                payloads. It is not added then.
        """
        batch = batch_of(_of_one(sequence), first=self._added)
        self._refuse_recordings(batch)
        check_fits(batch.lengths, self._row_tokens, first=self._added)
        # Copies: a caller may fill the same array with the next rollout.
        inputs = {name: values[0].copy() for name, values in batch.inputs.items()}
        waiting = _Waiting(inputs, _with_tokens(batch.samples.all[0], inputs[TOKENS]) if batch.samples else None)
        self._check_form(waiting.form)
        self._waiting[self._added], self._form = waiting, waiting.form
        self._added += 1
        self._room -= len(batch.tokens[0])
        return self._give_out(self._most_waiting - self._row_tokens) if self._room <= 0 or self._is_overdue() else []

    def flush(self) -> list[ReadyRow]:
        """The rows of all that wait."""
        return self._give_out(0) if self._waiting else []

    def _check_form(self, form: str) -> None:
        if self._form and form != self._form:
            raise PayloadError(
                f"Sequence {self._added} {form}, and the one before it {self._form}.",
                why="sequences of a row are computed together.",
                hint="give every sequence the same inputs and payloads.",
            )

    def _refuse_recordings(self, batch: Batch) -> None:
        if batch.tables:
            raise PayloadError(
                f"Sample {self._added} has recorded experts.",
                why="they are numbered for each batch anew, and the numbers of samples that come later mean others.",
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
        waiting = list(self._waiting.values())
        samples = tuple(one.sample for one in waiting if one.sample is not None)
        inputs = {name: [one.inputs[name] for one in waiting] for name in waiting[0].inputs}
        return Batch(inputs, Samples(samples, is_complete=False) if samples else None, is_complete=False)


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A sequence that was added, and the sample that it is of."""

    inputs: dict[str, TokenArray]
    sample: Sample | None

    @property
    def form(self) -> str:
        """What those of a batch have in common, in words."""
        if self.sample is None:
            return f"has the inputs {', '.join(self.inputs)}"
        return f"is a sample with the payloads {', '.join(sorted(self.sample.payloads)) or '(none)'}"


def _with_tokens(kept: Sample, tokens: TokenArray) -> Sample:
    """A batch's own sample, with tokens that stay as they are."""
    kept.tokens = tokens
    return kept


def _of_one(
    sequence: TokenSequence | Sample | Mapping[str, TokenSequence],
) -> list[TokenSequence] | list[Sample] | dict[str, list[TokenSequence]]:
    """What `batch_of` takes, with one sequence."""
    if isinstance(sequence, Mapping):
        return {name: [values] for name, values in sequence.items()}
    return [sequence]  # type: ignore[return-value]
