"""Distributions of next tokens, from the states before a model's head: never more than a chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Asked", "NextTokens", "States", "best_tokens", "next_tokens"]

_BUDGET = 1 << 26
"""Bytes of logits of a chunk on the CPU; the backward pass holds a few tensors of that size."""
_DEVICE_BUDGET = 1 << 28
"""The same on other devices, which want large kernels."""


@dataclass(frozen=True, eq=False)
class States:
    """The states of some tokens, and the head that makes logits of them.

    Attributes:
        hidden: [T, width].
        values: other tensors that the model computed for its head, such as a weight.
        parameters: the parameters that the head computes with.
        head: takes states [n, width] and `values`; returns logits [n, vocabulary].
        vocabulary: number of logits.
    """

    hidden: Tensor
    values: Sequence[Tensor]
    parameters: Sequence[Tensor]
    head: Callable[[Tensor, Sequence[Tensor]], Tensor]
    vocabulary: int

    def parts(self, count: int) -> Iterator[slice]:
        """`count` states in chunks."""
        budget = _BUDGET if self.hidden.device.type == "cpu" else _DEVICE_BUDGET
        size = max(1, budget // (self.vocabulary * max(4, self.hidden.element_size())))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))


@dataclass(frozen=True, eq=False)
class Asked:
    """Whose distributions are asked for, and the log-probabilities of which labels.

    Attributes:
        states: row indices of the states, int64 [R], each once.
        owner: the place in `states` that every label belongs to, int64 [E], ascending.
        labels: token ids, int64 [E].
    """

    states: Tensor
    owner: Tensor
    labels: Tensor


class NextTokens(NamedTuple):
    """What some distributions say.

    Attributes:
        logprobs: of the labels, [E].
        entropy: of every distribution, in nats, [R].
    """

    logprobs: Tensor
    entropy: Tensor


def next_tokens(states: States, asked: Asked, temperature: float = 1.0) -> NextTokens:
    """Log-probabilities and entropies of softmax(logits / temperature), float32 at least, with gradients.

    The forward pass keeps the logarithm of a sum for every state; the backward pass computes the logits again (Chen et
    al., arXiv 1604.06174). With z the logits and p = softmax(z), the gradient of log p[label] in z is
    onehot(label) - p, and that of the entropy H is -p (log p + H).
    """
    tensors = (states.hidden, *states.values, *states.parameters)
    return NextTokens(*_NextTokens.apply(states, asked, temperature, *tensors))


def best_tokens(states: States, rows: Tensor, k: int) -> Tensor:
    """The `k` likeliest next tokens after the states in some rows, the likeliest first: int64 [R, k]."""
    found = [rows.new_zeros(0, k)]
    with torch.no_grad():
        found += [
            states.head(states.hidden[rows[part]], states.values).topk(k).indices for part in states.parts(len(rows))
        ]
    return torch.cat(found)


class _NextTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: States, asked: Asked, temperature: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        none = states.hidden.new_zeros(0, dtype=_wide(states.hidden.dtype))
        logprobs, entropies, totals = [none], [none], [none]
        for part, edges in _chunks(states, asked):
            scores = _scores(states.head(states.hidden[asked.states[part]], states.values), temperature)
            total = scores.logsumexp(1)
            owner = asked.owner[edges] - part.start
            logprobs.append(scores[owner, asked.labels[edges]] - total[owner])
            entropies.append(torch.special.entr((scores - total[:, None]).exp_()).sum(1))
            totals.append(total)
        entropy = torch.cat(entropies)
        ctx.states, ctx.asked, ctx.temperature = states, asked, temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(torch.cat(totals), entropy, *tensors)
        return torch.cat(logprobs), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        states, asked = ctx.states, ctx.asked
        totals, entropy, hidden, *others = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        sums = [torch.zeros_like(x) if need else None for x, need in zip((hidden, *others), needed, strict=True)]
        for part, edges in _chunks(states, asked):
            rows = asked.states[part]
            logits, inputs = _again(states, hidden[rows], others, needed)
            logprobs = _scores(logits.detach(), ctx.temperature).sub_(totals[part, None])
            slope = torch.zeros_like(logprobs)
            if to_logprobs is not None:
                owner = asked.owner[edges] - part.start
                _add_to_logprobs(slope, logprobs, owner, asked.labels[edges], to_logprobs[edges])
            if to_entropy is not None:
                _add_to_entropy(slope, logprobs, entropy[part], to_entropy[part])
            slope = slope.div_(ctx.temperature).to(logits.dtype)
            found = iter(torch.autograd.grad(logits, inputs, slope, allow_unused=True))
            if sums[0] is not None:
                sums[0].index_copy_(0, rows, next(found))
            for total, gradient in zip((total for total in sums[1:] if total is not None), found, strict=True):
                if gradient is not None:
                    total.add_(gradient)
        return None, None, None, *sums


def _chunks(states: States, asked: Asked) -> Iterator[tuple[slice, slice]]:
    """The states in chunks, and the labels of each."""
    parts = list(states.parts(len(asked.states)))
    ends = torch.searchsorted(asked.owner, torch.tensor([part.stop for part in parts], device=asked.owner.device))
    starts = [0, *ends.tolist()]
    return ((part, slice(start, end)) for part, start, end in zip(parts, starts, starts[1:], strict=False))


def _scores(logits: Tensor, temperature: float) -> Tensor:
    """A new tensor of logits / temperature, in float32 at least."""
    return logits.to(_wide(logits.dtype)) / temperature


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _again(
    states: States, hidden: Tensor, others: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor]]:
    """The logits of `hidden`, computed again, and the tensors that need a gradient, in their order."""
    count = len(states.values)
    hidden, *values = (
        tensor.detach().requires_grad_(need)
        for tensor, need in zip((hidden, *others[:count]), needed[: count + 1], strict=True)
    )
    with torch.enable_grad():
        logits = states.head(hidden, values)
    tensors = (hidden, *values, *states.parameters)
    return logits, [tensor for tensor, need in zip(tensors, needed, strict=True) if need]


def _add_to_logprobs(slope: Tensor, logprobs: Tensor, owner: Tensor, labels: Tensor, gradient: Tensor) -> None:
    """Adds gradient * (onehot(label) - p) of every label to the slope in the logits of its state."""
    totals = gradient.new_zeros(len(slope)).index_add_(0, owner, gradient)
    slope.addcmul_(logprobs.exp(), totals[:, None], value=-1)
    slope.index_put_((owner, labels), gradient, accumulate=True)


def _add_to_entropy(slope: Tensor, logprobs: Tensor, entropy: Tensor, gradient: Tensor) -> None:
    """Adds gradient * -p (log p + H) to the slope in the logits; 0 where p is 0."""
    found = torch.special.entr(logprobs.exp()).addcmul_(logprobs.exp(), entropy[:, None], value=-1)
    slope.addcmul_(found, gradient[:, None])
