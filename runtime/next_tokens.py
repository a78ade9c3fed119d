"""Distributions of next tokens, from the states before a model's head: never more than a chunk of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Asked", "NextTokens", "States", "best_tokens", "next_tokens"]

_BUDGET = 1 << 24
"""Bytes of logits of a chunk on the CPU, where its memory is used again; the backward pass holds a few such tensors."""
_DEVICE_BUDGET = 1 << 28
"""The same on other devices, which want large kernels."""


@dataclass(frozen=True, eq=False)
class States:
    """The states of some tokens, and the head that makes logits of them.

    Attributes:
        hidden: [T, width].
        values: what the head computes with besides: parameters, buffers, and what the model computed for it.
        head: takes states [n, width] and `values`; returns logits [n, vocabulary].
        vocabulary: number of logits.
        dtype: of the logits.
    """

    hidden: Tensor
    values: Sequence[Tensor]
    head: Callable[[Tensor, Sequence[Tensor]], Tensor]
    vocabulary: int
    dtype: torch.dtype

    def chunks(self, count: int) -> Iterator[slice]:
        """`count` states in chunks."""
        budget = _BUDGET if self.hidden.device.type == "cpu" else _DEVICE_BUDGET
        size = max(1, budget // (self.vocabulary * _wide(self.dtype).itemsize))
        return (slice(start, min(start + size, count)) for start in range(0, count, size))


@dataclass(frozen=True, eq=False)
class Asked:
    """Whose distributions are asked for, and the log-probabilities of which labels.

    Attributes:
        rows: row indices of the states, int64 [R], each once.
        owner: the place in `rows` that every label belongs to, int64 [E], ascending.
        labels: token ids, int64 [E].
    """

    rows: Tensor
    owner: Tensor
    labels: Tensor


class NextTokens(NamedTuple):
    """What some distributions say.

    Attributes:
        logprobs: of the labels, [E].
        entropy: of every distribution, in nats, [R]; [0] where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor


def next_tokens(states: States, asked: Asked, temperature: float = 1.0, *, entropy: bool = False) -> NextTokens:
    """Log-probabilities and entropies of softmax(logits / temperature), float32 at least, with gradients.

    The backward pass computes the logits again (Chen et al., arXiv 1604.06174). With z the logits and p = softmax(z),
    the gradient of log p[label] in z is onehot(label) - p, and that of the entropy H is -p (log p + H).

    Args:
        states: the states and their head.
        asked: of which states and labels.
        temperature: divides the logits.
        entropy: whether entropies are computed; else there are none.
    """
    return NextTokens(*_NextTokens.apply(states, asked, temperature, entropy, states.hidden, *states.values))


def best_tokens(states: States, rows: Tensor, k: int) -> Tensor:
    """The `k` likeliest next tokens after the states in some rows, the likeliest first: int64 [R, k]."""
    found = [rows.new_zeros(0, k)]
    with torch.no_grad():
        found += [
            states.head(states.hidden[rows[part]], states.values).topk(k).indices for part in states.chunks(len(rows))
        ]
    return torch.cat(found)


class _NextTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: States, asked: Asked, temperature: float, entropy: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(states.dtype)
        # Memory that is kept between those of two chunks would keep each of them from being used again.
        found = states.hidden.new_empty(len(asked.labels), dtype=wide)
        entropies = states.hidden.new_empty(len(asked.rows) if entropy else 0, dtype=wide)
        for part, edges in _chunks(states, asked):
            logits = states.head(states.hidden[asked.rows[part]], states.values)
            logprobs = _scaled(logits, temperature).log_softmax(1)
            found[edges] = logprobs[asked.owner[edges] - part.start, asked.labels[edges]]
            if entropy:
                entropies[part] = torch.special.entr(logprobs.exp_()).sum(1)
        ctx.states, ctx.asked, ctx.temperature = states, asked, temperature
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return found, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_logprobs: Tensor | None, to_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        states, asked = ctx.states, ctx.asked
        hidden, *values = ctx.saved_tensors
        sums = _Sums((hidden, *values), ctx.needs_input_grad[4:])
        for part, edges in _chunks(states, asked):
            rows = asked.rows[part]
            inputs = sums.detached((hidden[rows], *values))
            with torch.enable_grad():
                logits = states.head(inputs[0], inputs[1:])
            owner, labels = asked.owner[edges] - part.start, asked.labels[edges]
            to_scores = _to_scores(
                _scaled(logits.detach(), ctx.temperature),
                None if to_logprobs is None else (owner, labels, to_logprobs[edges]),
                None if to_entropy is None else to_entropy[part],
            )
            sums.add(logits, to_scores.div_(ctx.temperature).to(logits.dtype), inputs, rows)
        return None, None, None, None, *sums.gradients()


class _Sums:
    """Gradients of states and values, added up over chunks in float32 at least; None where no chunk has one."""

    def __init__(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._tensors, self._needed = tensors, needed
        self._sums: list[Tensor | None] = [None] * len(tensors)
        self._has_chunks = False

    def detached(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors without what comes before them, hooks of their own among it, and with gradients as needed."""
        pairs = zip(tensors, self._needed, strict=True)
        return [tensor.detach().requires_grad_(needed) for tensor, needed in pairs]

    def add(self, logits: Tensor, gradient: Tensor, inputs: Sequence[Tensor], rows: Tensor) -> None:
        """The gradients that come through the logits of some rows."""
        self._has_chunks = True
        wanted = [place for place, needed in enumerate(self._needed) if needed]
        if not logits.requires_grad:
            return
        found = torch.autograd.grad(logits, [inputs[place] for place in wanted], gradient, allow_unused=True)
        for place, part in zip(wanted, found, strict=True):
            if part is not None:
                total = self._sum(place)
                total.index_copy_(0, rows, part.to(total.dtype)) if place == 0 else total.add_(part)

    def _sum(self, place: int) -> Tensor:
        total, tensor = self._sums[place], self._tensors[place]
        if total is None:
            total = self._sums[place] = torch.zeros_like(tensor, dtype=_wide(tensor.dtype))
        return total

    def gradients(self) -> list[Tensor | None]:
        """In the dtypes of the tensors."""
        if not self._has_chunks:
            # Where nothing is asked of a row, a gradient of 0 says so to the other ranks, which wait for one.
            return [
                torch.zeros_like(x) if needed else None for x, needed in zip(self._tensors, self._needed, strict=True)
            ]
        pairs = zip(self._sums, self._tensors, strict=True)
        return [None if total is None else total.to(tensor.dtype) for total, tensor in pairs]


def _chunks(states: States, asked: Asked) -> Iterator[tuple[slice, slice]]:
    """The states in chunks, and the labels of each."""
    parts = list(states.chunks(len(asked.rows)))
    last = torch.tensor([part.stop for part in parts], dtype=torch.int64, device=asked.owner.device)
    ends = torch.searchsorted(asked.owner, last)
    starts = [0, *ends.tolist()]
    return ((part, slice(start, end)) for part, start, end in zip(parts, starts, starts[1:], strict=False))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, in float32 at least."""
    wide = logits.to(_wide(logits.dtype))
    return wide if temperature == 1.0 else wide / temperature


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _to_scores(scores: Tensor, to_logprobs: tuple[Tensor, Tensor, Tensor] | None, to_entropy: Tensor | None) -> Tensor:
    """The gradient in the scores [n, vocabulary].

    Args:
        scores: logits / temperature.
        to_logprobs: of some labels: place of their state, label and gradient, [E] each.
        to_entropy: of every entropy, [n].
    """
    total = scores.new_zeros(len(scores))
    if to_logprobs is not None:
        owner, labels, gradient = to_logprobs
        total.index_add_(0, owner, gradient)
    if to_entropy is None:
        found = scores.softmax(1).mul_(-total[:, None])
    else:
        chance = scores.softmax(1)
        minus_log = torch.special.entr(chance)
        entropy = minus_log.sum(1)
        found = minus_log.mul_(to_entropy[:, None]).addcmul_(chance, (to_entropy * entropy + total)[:, None], value=-1)
    if to_logprobs is not None:
        found.index_put_((owner, labels), gradient, accumulate=True)
    return found
