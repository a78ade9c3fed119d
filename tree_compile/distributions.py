"""Distributions of next tokens along every sequence: each is computed once, however many sequences go through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tree_compile.errors import PayloadError, TokenRangeError
from tree_compile.per_sequence import PartsOfRows, PerSequence
from tree_compile.row_result import RowResult
from tree_compile.runtime.next_tokens import Asked, NextTokens, best_tokens, next_tokens
from tree_compile.runtime.options import check_above_0, check_within
from tree_compile.runtime.sequences import IntArray, as_array

if TYPE_CHECKING:
    from tree_compile.output import TreeOutput


class TopTokens(NamedTuple):
    """The likeliest tokens in some places, the likeliest first.

    Attributes:
        tokens: token ids, int64 [len - 1, k].
        logprobs: [len - 1, k].
    """

    tokens: Tensor
    logprobs: Tensor


class Distributions:
    """What the model says of every token but the first of each sequence, before it has seen the token.

    `logprobs`, `trained_logprobs`, `entropy`, `topk` and `logprobs_of` are those of `TreeOutput`, of
    softmax(logits / temperature).

    Attributes:
        output: the output that was asked for another temperature; None for an output's own, which holds it.
    """

    def __init__(
        self,
        results: Sequence[RowResult],
        sequence_ids: Sequence[int],
        temperature: float = 1.0,
        output: TreeOutput | None = None,
    ) -> None:
        number = _positive(temperature)
        self.output = output
        self._ids = sequence_ids
        self._results = results
        self._rows = [_RowDistributions(result, number) for result in results]

    @cached_property
    def logprobs(self) -> PerSequence[Tensor]:
        """The log-probability of every token but the first: `[len_i - 1]`."""
        for row in self._rows:
            row.require_logits_of(row.following)
        return self._by_sequence(_RowDistributions.logprobs, "out.logprobs")

    @cached_property
    def trained_logprobs(self) -> PerSequence[Tensor]:
        """The log-probabilities of the tokens of every sample that are trained on: `[trained_i]`."""
        for row in self._rows:
            row.require_logits_of(np.concatenate(row.trained))
        return self._by_sequence(_RowDistributions.trained_logprobs, "out.trained_logprobs")

    @cached_property
    def entropy(self) -> PerSequence[Tensor]:
        """The entropy of the distribution that every token but the first was drawn from, in nats: `[len_i - 1]`."""
        # An output without logits is refused by the call, not by `[i]`.
        self._results[0].vocabulary  # noqa: B018
        return self._by_sequence(_RowDistributions.entropy, "out.entropy")

    def topk(self, k: int) -> PerSequence[TopTokens]:
        """The `k` likeliest tokens in the place of every token but the first, and their log-probabilities."""
        vocabulary = self._results[0].vocabulary
        count = check_within("k", k, vocabulary, "logits")
        return self._by_sequence(lambda row: row.topk(count), f"out.topk({count})")

    def logprobs_of(self, labels: Sequence[Any] | Mapping[int, Any]) -> PerSequence[Tensor]:
        """The log-probabilities of other tokens in the place of every token but the first."""
        vocabulary = self._results[0].vocabulary
        given = {
            sequence: _labels_of(labels, sequence, int(length), vocabulary)
            for result in self._results
            for sequence, length in zip(result.row.sequence_ids, result.row.sequence_length, strict=True)
        }
        return self._by_sequence(lambda row: row.logprobs_of(given), "out.logprobs_of(labels)")

    def _by_sequence(self, parts: Callable[[_RowDistributions], Sequence[Any]], name: str) -> PerSequence[Any]:
        def of_row(row: _RowDistributions) -> Sequence[Any]:
            row.result.require_unchanged()
            return parts(row)

        return PerSequence(self._ids, PartsOfRows(self._results, [partial(of_row, row) for row in self._rows]), name)


@dataclass(frozen=True, eq=False)
class _RowDistributions:
    """Those of one row; lists have an entry for every sequence of the row, in the order of its ids."""

    result: RowResult
    temperature: float

    @cached_property
    def following(self) -> IntArray:
        """Row indices of all tokens that follow another one, in the order of that one."""
        parent = self.result.row.parent
        tokens = np.flatnonzero(parent >= 0)
        return tokens[np.argsort(parent[tokens], kind="stable")]

    @cached_property
    def trained(self) -> list[IntArray]:
        """Row indices of the tokens of every sample that are trained on; never those of first tokens.

        Raises:
            PlanError: the sequences of the row are no samples.
        """
        row = self.result.row
        return [row.path(sequence)[sample.is_trained] for sequence, sample in row.samples.items()]

    def require_logits_of(self, tokens: IntArray) -> None:
        """Refuses tokens of the row that the model has no logit for, as ids that are embedded alone.

        Raises:
            TokenRangeError: names the first of them.
        """
        row, vocabulary = self.result.row, self.result.vocabulary
        without = tokens[row.tokens[tokens] >= vocabulary]
        if len(without):
            sequence = next(number for number in row.sequence_ids if without[0] in row.path(number))
            raise TokenRangeError(
                f"Sequence {sequence} holds the token id {row.tokens[without[0]]}, which has no log-probability.",
                why=f"the model has logits for the token ids 0 to {vocabulary - 1}.",
                hint="where no loss counts it, pass samples, with `trainable` 0 there, to losses or "
                "out.trained_logprobs.",
            )

    @cached_property
    def _asked(self) -> Asked:
        tokens, row = self.following, self.result.row
        return self._asked_of(row.parent[tokens], row.tokens[tokens])

    def _asked_of(self, before: IntArray, labels: IntArray) -> Asked:
        states, owner = np.unique(before, return_inverse=True)
        device = self.result.states.hidden.device
        return Asked(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (states, owner, labels)))

    @cached_property
    def _both(self) -> NextTokens:
        asked = self._asked
        if bool((asked.labels >= self.result.vocabulary).any()):
            asked = Asked(asked.rows, asked.owner[:0], asked.labels[:0])
        return next_tokens(self.result.states, asked, self.temperature, entropy=True)

    def _logprobs_for(self, asked: Asked) -> Tensor:
        return next_tokens(self.result.states, asked, self.temperature).logprobs

    def logprobs(self) -> list[Tensor]:
        # Where both are wanted, the head is computed once if entropy is asked for first.
        own = self._both.logprobs if "_both" in vars(self) else self._logprobs_for(self._asked)
        found = self._at(torch.from_numpy(self.following), own)
        return [part[1:] for part in self.result.unpacked(found)]

    def trained_logprobs(self) -> list[Tensor]:
        row, wanted = self.result.row, np.concatenate(self.trained)
        tokens = np.unique(wanted)
        tokens = tokens[np.argsort(row.parent[tokens], kind="stable")]
        logprobs = self._logprobs_for(self._asked_of(row.parent[tokens], row.tokens[tokens]))
        found = self._at(torch.from_numpy(tokens), logprobs)
        return list(found[torch.from_numpy(wanted).to(found.device)].split([len(own) for own in self.trained]))

    def entropy(self) -> list[Tensor]:
        return self._before_last(self._at(self._asked.rows, self._both.entropy))

    def topk(self, k: int) -> list[TopTokens]:
        rows = self._asked.rows
        best = best_tokens(self.result.states, rows, k)
        owner = torch.arange(len(rows), device=rows.device).repeat_interleave(k)
        logprobs = self._logprobs_for(Asked(rows, owner, best.flatten())).view(-1, k)
        parts = (self._before_last(self._at(rows, values)) for values in (best, logprobs))
        return [TopTokens(*both) for both in zip(*parts, strict=True)]

    def logprobs_of(self, labels: Mapping[int, IntArray]) -> list[Tensor]:
        row = self.result.row
        given = [labels[sequence] for sequence in row.sequence_ids]
        before = [
            np.repeat(row.path(sequence)[:-1], math.prod(own.shape[1:]))
            for sequence, own in zip(row.sequence_ids, given, strict=True)
        ]
        all_before, all_labels = np.concatenate(before), np.concatenate([own.flatten() for own in given])
        order = np.argsort(all_before, kind="stable")
        found = self._logprobs_for(self._asked_of(all_before[order], all_labels[order]))
        in_place = found[torch.from_numpy(np.argsort(order)).to(found.device)]
        parts = in_place.split([own.size for own in given])
        return [part.view(own.shape) for part, own in zip(parts, given, strict=True)]

    def _at(self, rows: Tensor, values: Tensor) -> Tensor:
        """`values` at `rows`, 0 elsewhere: [T, …]."""
        count = len(self.result.states.hidden)
        return values.new_zeros(count, *values.shape[1:]).index_copy(0, rows.to(values.device), values)

    def _before_last(self, values: Tensor) -> list[Tensor]:
        return [part[:-1] for part in self.result.unpacked(values)]


def _positive(temperature: Any) -> float:
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        raise ValueError(
            "temperature requires a gradient, and none is computed of it; pass a number, as temperature.item() is, or "
            "divide out.logits by it"
        )
    return check_above_0("temperature", temperature)


_LABELS_WHY = "they are token ids, one or several for every place."
_LABELS_HINT = "the entry t of a list, array or tensor is for the place of token t + 1."


def _labels_of(labels: Sequence[Any] | Mapping[int, Any], sequence: int, tokens: int, vocabulary: int) -> IntArray:
    """Those of one sequence, int64 [tokens - 1, …]."""
    try:
        given = labels[sequence]
    except (KeyError, IndexError, TypeError):
        raise PayloadError(
            f"There are no labels for sequence {sequence}.",
            why="every sequence of the output needs its own.",
            hint="pass a list with an entry for every sequence of the batch, or a dict by their numbers.",
        ) from None
    own = as_array(given, f"labels of sequence {sequence}", "token ids", _LABELS_WHY, _LABELS_HINT)
    if own.shape[:1] != (tokens - 1,) or (own.size and own.dtype.kind not in "iu"):
        raise PayloadError(
            f"The labels of sequence {sequence} have shape {own.shape} and type {own.dtype}.",
            why=f"a sequence of {tokens} tokens has {tokens - 1} places to predict, and labels are token ids.",
            hint=_LABELS_HINT,
        )
    if own.size and not (int(own.min()) >= 0 and int(own.max()) < vocabulary):
        raise TokenRangeError(
            f"The labels of sequence {sequence} reach from {own.min()} to {own.max()}.",
            why=f"the model has logits for the token ids 0 to {vocabulary - 1}.",
            hint="give places without a label any token id, and a weight of 0 in the loss.",
        )
    return own.astype(np.int64)
