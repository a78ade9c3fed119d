"""What a tree model returns: one part for every sequence, as the unpacked model would return it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node

from tree_compile.arguments import LOSS_HINT
from tree_compile.capture import OutputForm
from tree_compile.distributions import Distributions, TopTokens
from tree_compile.per_sequence import PartsOfRows, PerSequence, number_of
from tree_compile.row_result import RowResult, no_logits
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.samples import Counts, Sample, payload_of

_INSTEAD = {
    "loss": f"; {LOSS_HINT}",
    "aux_loss": "; that of all sequences is losses.load_balancing(out, top_k=…)",
}


# A dataclass, because DistributedDataParallel looks for tensors in the fields of those.
@dataclass(eq=False, repr=False)
class TreeOutput(Sequence[Any]):
    """The outputs of all sequences of a call.

    `out[i]` is what the unpacked model returns for sequence i, without its batch dimension; `out.logits[i]` is its
    tensor of logits `[len_i, vocabulary]`, whichever form the model returns.
    """

    _results: list[RowResult]
    _form: OutputForm

    def __post_init__(self) -> None:
        self.sequence_ids = sorted(sequence for result in self._results for sequence in result.row.sequence_ids)
        places = range(len(self._results[0]))
        self._tensors = [self._by_sequence(partial(RowResult.parts, place=place), "out.logits") for place in places]

    def _by_sequence(self, parts: Callable[[RowResult], Sequence[Any]], name: str) -> PerSequence[Any]:
        of_rows = PartsOfRows(self._results, [partial(parts, result) for result in self._results])
        return PerSequence(self.sequence_ids, of_rows, name)

    def __repr__(self) -> str:
        return f"TreeOutput({count_of(len(self), 'sequence')}, {count_of(len(self._tensors), 'tensor')} each)"

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def __getitem__(self, sequence: Any) -> Any:
        if isinstance(sequence, slice):
            return [self[number] for number in self.sequence_ids[sequence]]
        sequence = number_of(sequence, "out[i] or out.logits[i]")
        return self._form.build([tensor[sequence] for tensor in self._tensors])

    def __iter__(self) -> Iterator[Any]:
        return (self[sequence] for sequence in self.sequence_ids)

    def __reversed__(self) -> Iterator[Any]:
        return (self[sequence] for sequence in reversed(self.sequence_ids))

    def __getattr__(self, name: str) -> Any:
        if name in vars(TreeOutput):
            # Python comes here too where a property raises an AttributeError, as OutputError is, and forgets that one.
            return vars(TreeOutput)[name].__get__(self)
        raise AttributeError(
            f"a TreeOutput has no {name!r}: out[i] is the model's output for sequence i{_INSTEAD.get(name, '')}"
        )

    @cached_property
    def hidden(self) -> PerSequence[Tensor]:
        """The states that the logits are made from: `[len_i, width]` for every sequence.

        Raises:
            OutputError: the model does not end in a product of states and parameters.
            StaleOutputError: from `[i]`, as in `logprobs`.
        """
        self._results[0].require_head()
        return self._by_sequence(RowResult.hidden, "out.hidden")

    @property
    def logprobs(self) -> PerSequence[Tensor]:
        """The log-probability of every token given those before it: `[len_i - 1]`, float32 at least.

        Logits are computed in parts, and again in the backward pass, so that they are never held for a whole row. A
        token that sequences share is computed once. The first token of a sequence has no probability.

        Raises:
            OutputError: the model's output has no logits [T, vocabulary].
            StaleOutputError: from `[i]`: the head, or the states before it, were changed since the call.
            TokenRangeError: the model has no logit for a token.
        """
        return self._distributions.logprobs

    @property
    def trained_logprobs(self) -> PerSequence[Tensor]:
        """The log-probabilities of the tokens of every sample that are trained on: `[trained_i]`, as `logprobs`.

        The head is computed for what predicts them, and once for all losses over this output.

        Raises:
            PlanError: the call was made with sequences that are no samples.
            OutputError, StaleOutputError, TokenRangeError: as `logprobs`.
        """
        return self._distributions.trained_logprobs

    @property
    def entropy(self) -> PerSequence[Tensor]:
        """The entropy of the distribution that every token but the first was drawn from, in nats: `[len_i - 1]`.

        Raises:
            OutputError, StaleOutputError: as `logprobs`.
        """
        return self._distributions.entropy

    def topk(self, k: int) -> PerSequence[TopTokens]:
        """The `k` likeliest tokens in the place of every token but the first, and their log-probabilities.

        Raises:
            ValueError: `k` is not between 1 and the number of logits.
            OutputError, StaleOutputError: as `logprobs`.
        """
        return self._distributions.topk(k)

    def logprobs_of(self, labels: Sequence[Any] | Mapping[int, Any]) -> PerSequence[Tensor]:
        """The log-probabilities of other tokens in the place of every token but the first.

        Args:
            labels: by the number of the sequence, token ids `[len_i - 1]` or, several for each place,
                `[len_i - 1, …]`. They are copied.

        Returns:
            For every sequence a tensor of the shape of its labels.

        Raises:
            PayloadError: labels are missing, or not one or several for every place.
            TokenTypeError: they are no list, array or tensor.
            TokenRangeError: a label is no token id of the model.
            OutputError, StaleOutputError: as `logprobs`.
        """
        return self._distributions.logprobs_of(labels)

    def at_temperature(self, temperature: float) -> Distributions:
        """`logprobs`, `trained_logprobs`, `entropy`, `topk` and `logprobs_of` of softmax(logits / temperature).

        Losses take it in place of the output.

        Args:
            temperature: a number, which no gradient is computed of.

        Raises:
            ValueError: `temperature` is not a finite number above 0, or requires a gradient.
        """
        return Distributions(self._results, self.sequence_ids, temperature, self)

    @cached_property
    def _distributions(self) -> Distributions:
        return Distributions(self._results, self.sequence_ids)

    @cached_property
    def samples(self) -> dict[int, Sample]:
        """The samples of the call, by their numbers, in ascending order.

        Raises:
            PlanError: the call was made with sequences that are no samples.
        """
        found = {number: sample for result in self._results for number, sample in result.row.samples.items()}
        return {number: found[number] for number in self.sequence_ids}

    @property
    def counts(self) -> Counts:
        """What is counted over all samples of the batch, those of other rows among them.

        Raises:
            PlanError: the call was made with sequences that are no samples, or with a row that a `Planner` gave out,
                before all samples of the batch were known.
        """
        return self._results[0].row.counts

    def payload(self, name: str) -> PerSequence[Any]:
        """A payload of every sample, as it was given.

        Raises:
            PayloadError: there is none of this name.
            PlanError: the call was made with sequences that are no samples.
        """
        found = {number: payload_of(sample, number, name) for number, sample in self.samples.items()}
        return PerSequence(self.sequence_ids, found, f"out.payload({name!r})")

    @property
    def router_logits(self) -> PerSequence[tuple[Tensor, ...]]:
        """The logits of every router over its experts: `[len_i, experts]` for each layer that has one.

        Raises:
            OutputError: the model does not return them.
        """
        self._results[0].require_router_logits()
        return self._by_sequence(_router_logits_of_sequences, "out.router_logits")

    @property
    def row_results(self) -> Sequence[RowResult]:
        """What was computed for each row, in the layout of the row."""
        return self._results

    @property
    def logits(self) -> PerSequence[Tensor]:
        """The logits of every sequence: `[len_i, vocabulary]`.

        They are the output itself where it is a tensor, its first tensor where it is a tuple or a list, else its entry
        or attribute `logits`.

        Raises:
            OutputError: it has no such tensor.
            StaleOutputError: from `[i]`, as in `logprobs`.
        """
        place = self._form.logits_place(len(self._tensors))
        if place is None:
            raise no_logits()
        return self._tensors[place]


def _flatten(out: TreeOutput) -> tuple[list[Tensor], TreeOutput]:
    return [tensor for result in out.row_results for tensor in result.results], out


def _unflatten(tensors: Iterable[Any], out: TreeOutput) -> TreeOutput:
    left = iter(tensors)
    results = [result.with_results([next(left) for _ in result.results]) for result in out.row_results]
    return TreeOutput(results, out._form)


# DistributedDataParallel with a static graph, and FSDP, look for tensors in the leaves of an output.
register_pytree_node(TreeOutput, _flatten, _unflatten)


def _router_logits_of_sequences(result: RowResult) -> list[tuple[Tensor, ...]]:
    return list(zip(*map(result.unpacked, result.router_logits), strict=True))
