"""What the operators of tree attention return: empty results by shape, and what sinks add to them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_sinks", "empty_gradients", "empty_outputs", "sink_gradient"]


def empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output [1, Hq, T, Dv], and the log-sum-exp [1, Hq, T] in float32 or float64."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    return _empty_heads(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


def empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks; the last has no entries where there are no sinks."""
    to_query, to_key, to_value = (_empty_heads(tensor, tensor.shape[3]) for tensor in (query, key, value))
    to_sinks = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return to_query, to_key, to_value, to_sinks


def _empty_heads(like: Tensor, width: int) -> Tensor:
    """[1, heads, T, width], with a token's heads side by side: models flatten them next, or come from there."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)


def add_sinks(total: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds a logit with the value 0 per head to the softmax of outputs [Hq, T, Dv] and log-sum-exps [Hq, T]."""
    sink = sinks.to(lse.dtype)[:, None]
    total.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
    torch.logaddexp(lse, sink, out=lse)


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient [Hq] of logits that take part in the softmax with a value of 0."""
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(weight * (grad * out).sum(-1, dtype=lse.dtype)).sum(-1)
