"""Distributions of next tokens along every sequence: each is computed once, however many sequences go through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tree_compile.errors import PayloadError, TokenRangeError
from tree_compile.per_sequence import PartsOfRows, PerSequence
from tree_compile.row_result import RowResult
from tree_compile.runtime.next_tokens import Asked, NextTokens, best_tokens, next_tokens
from tree_compile.runtime.sequences import IntArray, as_array


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

    `logprobs`, `entropy`, `topk` and `logprobs_of` are those of `TreeOutput`, of softmax(logits / temperature).
    """

    def __init__(self, results: Sequence[RowResult], sequence_ids: Sequence[int], temperature: float = 1.0) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature!r}; it must be a number above 0")
        self._ids = sequence_ids
        self._results = results
        self._of_row = {id(result): _RowDistributions(result, float(temperature)) for result in results}

    @cached_property
    def logprobs(self) -> PerSequence[Tensor]:
        """The log-probability of every token but the first: `[len_i - 1]`."""
        return self._by_sequence(_RowDistributions.logprobs)

    def logprobs_at(self, places: Mapping[int, IntArray]) -> PerSequence[Tensor]:
        """The log-probabilities of some tokens alone, by the number of the sequence; of none is it the first."""
        return self._by_sequence(lambda of_row: of_row.logprobs_at(places))

    @cached_property
    def entropy(self) -> PerSequence[Tensor]:
        """The entropy of the distribution that every token but the first was drawn from, in nats: `[len_i - 1]`."""
        return self._by_sequence(_RowDistributions.entropy)

    def topk(self, k: int) -> PerSequence[TopTokens]:
        """The `k` likeliest tokens in the place of every token but the first, and their log-probabilities."""
        return self._by_sequence(lambda of_row: of_row.topk(k))

    def logprobs_of(self, labels: Sequence[Any] | Mapping[int, Any]) -> PerSequence[Tensor]:
        """The log-probabilities of other tokens in the place of every token but the first."""
        return self._by_sequence(lambda of_row: of_row.logprobs_of(labels))

    def _by_sequence(self, parts: Callable[[_RowDistributions], Sequence[Any]]) -> PerSequence[Any]:
        def of_row(result: RowResult) -> Sequence[Any]:
            with result.settings.restored():
                return parts(self._of_row[id(result)])

        return PerSequence(self._ids, PartsOfRows(self._results, of_row))


@dataclass(frozen=True, eq=False)
class _RowDistributions:
    """Those of one row; lists have an entry for every sequence of the row, in the order of its ids."""

    result: RowResult
    temperature: float

    @cached_property
    def _edges(self) -> tuple[IntArray, IntArray]:
        """Row indices of all tokens that follow another one, and of the one before, which ascend."""
        parent = self.result.row.parent
        tokens = np.flatnonzero(parent >= 0)
        tokens = tokens[np.argsort(parent[tokens], kind="stable")]
        return tokens, parent[tokens]

    @cached_property
    def _asked(self) -> Asked:
        tokens, before = self._edges
        return self._asked_of(before, self.result.row.tokens[tokens])

    def _asked_of(self, before: IntArray, labels: IntArray) -> Asked:
        states, owner = np.unique(before, return_inverse=True)
        device = self.result.states.hidden.device
        return Asked(*(torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (states, owner, labels)))

    @cached_property
    def _both(self) -> NextTokens:
        return next_tokens(self.result.states, self._asked, self.temperature, entropy=True)

    @cached_property
    def _next_logprobs(self) -> Tensor:
        # Where both are wanted, the head is computed once if entropy is asked for first.
        return self._both.logprobs if "_both" in vars(self) else self._logprobs_for(self._asked)

    def _logprobs_for(self, asked: Asked) -> Tensor:
        return next_tokens(self.result.states, asked, self.temperature).logprobs

    def logprobs(self) -> list[Tensor]:
        tokens, _ = self._edges
        found = self._at(torch.from_numpy(tokens), self._next_logprobs)
        return [part[1:] for part in self.result.unpacked(found)]

    def logprobs_at(self, places: Mapping[int, IntArray]) -> list[Tensor]:
        row = self.result.row
        wanted = [row.path(sequence)[places[sequence]] for sequence in row.sequence_ids]
        # Each token once, by the row index of the one before.
        tokens = np.unique(np.concatenate(wanted))
        tokens = tokens[np.argsort(row.parent[tokens], kind="stable")]
        found = self._logprobs_for(self._asked_of(row.parent[tokens], row.tokens[tokens]))
        order = np.argsort(tokens)
        at = order[np.searchsorted(tokens, np.concatenate(wanted), sorter=order)]
        return list(found[torch.from_numpy(at).to(found.device)].split([len(own) for own in wanted]))

    def entropy(self) -> list[Tensor]:
        return self._before_last(self._at(self._asked.rows, self._both.entropy))

    def topk(self, k: int) -> list[TopTokens]:
        states = self.result.states
        if not 0 < k <= states.vocabulary:
            raise ValueError(f"k is {k!r}; it must be between 1 and the number of logits, {states.vocabulary}")
        rows = self._asked.rows
        best = best_tokens(states, rows, k)
        owner = torch.arange(len(rows), device=rows.device).repeat_interleave(k)
        logprobs = self._logprobs_for(Asked(rows, owner, best.flatten())).view(-1, k)
        parts = (self._before_last(self._at(rows, values)) for values in (best, logprobs))
        return [TopTokens(*both) for both in zip(*parts, strict=True)]

    def logprobs_of(self, labels: Sequence[Any] | Mapping[int, Any]) -> list[Tensor]:
        row, vocabulary = self.result.row, self.result.states.vocabulary
        given = [_labels_of(labels, sequence, len(row.path(sequence)), vocabulary) for sequence in row.sequence_ids]
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


_LABELS_WHY = "they are token ids, one or several for every place."
_LABELS_HINT = "the entry t of a list, array or tensor is for the place of token t + 1."


def _labels_of(labels: Sequence[Any] | Mapping[int, Any], sequence: int, tokens: int, vocabulary: int) -> IntArray:
    """Those of one sequence, int64 [tokens - 1, …]."""
    try:
        given = labels[sequence]
    except (KeyError, IndexError):
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
    own = own.astype(np.int64)
    if own.size and not (int(own.min()) >= 0 and int(own.max()) < vocabulary):
        raise TokenRangeError(
            f"The labels of sequence {sequence} reach from {own.min()} to {own.max()}.",
            why=f"the model has logits for the token ids 0 to {vocabulary - 1}.",
            hint="leave out places without a label, or give them any token id and a weight of 0.",
        )
    return own
