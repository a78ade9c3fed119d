"""Attention over the rows that an index list names, never T x T.

On Hopper GPUs kernels read the rows where they lie (`sparse_kernels`); elsewhere chunks of queries gather them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tree_compile.runtime import sparse_kernels
from tree_compile.runtime.attention import in_autocast_dtype

__all__ = ["sparse_attention"]

_BUDGET = 1 << 20
"""Gathered numbers of keys or values that exist at a time, on the CPU: they should stay in its cache."""
_DEVICE_BUDGET = 1 << 26
"""The same on other devices, which want large kernels."""


class _Inputs(NamedTuple):
    """Query [Hk, T, group, D], key [Hk, N, D] and value [Hk, N, Dv], or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of every query over the rows that `indices` gives it.

    Under autocast, query, key and value are cast to its dtype, as `scaled_dot_product_attention` does.

    Args:
        query: [1, Hq, T, D], floating point.
        key: [1, Hk, N, D]; Hq is a multiple of Hk, query head h reads key head h // (Hq // Hk).
        value: [1, Hk, N, Dv].
        indices: int32 or int64 [1, T, K], rows of `key` and `value`, each at most once per query; -1 is nothing.
            Nothing is read or written there.
        scale: factor on q.k.
        sinks: [Hq], one more logit per head in the softmax's denominator; receives a gradient.

    Returns:
        [1, Hq, T, Dv] in the dtype of `query`; 0 where a query has no rows, and with gradient 0. Softmax and sums are
        computed in float32 at least.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    _check(query, key, value, indices, sinks)
    return sparse_attention_op(query, key, value, indices, sinks, scale)[0]


def _check(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, sinks: Tensor | None) -> None:
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}, {tuple(indices.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4 or not query.shape[0] == key.shape[0] == 1:
        raise ValueError(f"query, key and value must be [1, heads, tokens, width]: {shapes}")
    if not key.shape[1] or query.shape[1] % key.shape[1] or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"query, key and value do not fit: {shapes}")
    if query.shape[3] != key.shape[3] or indices.dim() != 3 or indices.shape[:2] != (1, query.shape[2]):
        raise ValueError(f"query, key and indices do not fit: {shapes}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"query, key and value must be of one floating dtype: {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"indices must be int32 or int64, not {indices.dtype}")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ValueError(f"sinks must be one for each of {query.shape[1]} heads, not {tuple(sinks.shape)}")


@torch.library.custom_op("tree_compile::sparse_attention", mutates_args=())
def sparse_attention_op(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [1, Hq, T, Dv] and the log-sum-exp [1, Hq, T] of the scores and the sink."""
    out, lse = _empty_outputs(query, value)
    if sparse_kernels.kernels_can(query, key, value):
        return _by_kernels(query, key, value, indices, sinks, scale, out, lse)
    inputs, sink = _grouped(query, key, value), _grouped_sinks(sinks, key.shape[1], lse.dtype)
    grouped_out, grouped_lse = _per_key_head(out, key.shape[1]), _per_key_head(lse[..., None], key.shape[1])
    grouped_out.zero_()
    grouped_lse.copy_(inputs.query.new_full((), -torch.inf) if sink is None else sink)
    with torch.autocast(query.device.type, enabled=False):
        for queries, index in _chunks(indices[0], inputs):
            scores = _scores(inputs, queries, index, scale)
            total = scores.logsumexp(-1, keepdim=True)
            total = total if sink is None else torch.logaddexp(total, sink)
            grouped_out[:, queries] = ((scores - total).exp() @ _take(inputs.value, index)).to(out.dtype)
            grouped_lse[:, queries] = total
    return out, lse


def _by_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indices: Tensor,
    sinks: Tensor | None,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fills `out` and `lse`; a sink is one more logit, which the kernels know nothing of."""
    found, total = sparse_kernels.forward(query, key, value, indices.int(), scale)
    if sinks is not None:
        sink = sinks.to(lse.dtype)[None, :, None]
        found = found * torch.sigmoid(total - sink).unsqueeze(-1)
        total = torch.logaddexp(total, sink)
    return out.copy_(found), lse.copy_(total)


@sparse_attention_op.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _empty_outputs(query, value)


@torch.library.custom_op("tree_compile::sparse_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks; the last has no entries where there are no sinks."""
    to_sinks = _sink_gradient(grad, out, lse, sinks)
    if sparse_kernels.kernels_can(query, key, value):
        found = sparse_kernels.backward(grad, query, key, value, indices.int(), scale, out, lse)
        return *_like(found, query, key, value), to_sinks
    heads = key.shape[1]
    inputs = _grouped(query, key, value)
    totals = _Inputs(*(torch.zeros_like(tensor) for tensor in inputs))
    grads, outs, lses = (_per_key_head(x, heads).to(lse.dtype) for x in (grad, out, lse[..., None]))
    with torch.autocast(query.device.type, enabled=False):
        for queries, index in _chunks(indices[0], inputs):
            weights = (_scores(inputs, queries, index, scale) - lses[:, queries]).exp()
            part, own = grads[:, queries], (grads[:, queries] * outs[:, queries]).sum(-1, keepdim=True)
            _add(totals.value, index, weights.mT @ part)
            slope = weights * (part @ _take(inputs.value, index).mT - own) * scale
            totals.query[:, queries] = slope @ _take(inputs.key, index)
            _add(totals.key, index, slope.mT @ inputs.query[:, queries])
    found = totals.query.transpose(1, 2).flatten(0, 1)[None], totals.key[None], totals.value[None]
    return *_like(found, query, key, value), to_sinks


@_backward_op.register_fake
def _(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, _out: Tensor, _lse: Tensor, _i: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = rest[0]
    to_sinks = torch.empty_like(sinks) if isinstance(sinks, Tensor) else query.new_empty(0)
    to_query, to_key, to_value = (_empty_heads(tensor, tensor.shape[3]) for tensor in (query, key, value))
    return to_query, to_key, to_value, to_sinks


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, indices, sinks, scale = inputs
    ctx.save_for_backward(query, key, value, *output, indices, sinks)  # type: ignore[arg-type]
    ctx.scale = scale  # type: ignore[attr-defined]


def _differentiate(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    *grads, to_sinks = _backward_op(grad, *saved, ctx.scale)  # type: ignore[attr-defined]
    return *grads, None, to_sinks if saved[6] is not None else None, None


sparse_attention_op.register_autograd(_differentiate, setup_context=_save_for_backward)


class _Index(NamedTuple):
    """Rows to take, int64 [n, K], and whether they stand for nothing, bool [n, K]."""

    rows: Tensor
    empty: Tensor


def _chunks(indices: Tensor, inputs: _Inputs) -> Iterator[tuple[Tensor, _Index]]:
    """The queries that read something, int64 [n], in chunks, with their rows.

    What stands for nothing is read as another row of the same query, whose weight is then 0 at that place.
    """
    heads, _, width = inputs.key.shape
    on_cpu = indices.device.type == "cpu"
    numbers = heads * indices.shape[1] * max(width, inputs.value.shape[2])
    readers = (indices >= 0).any(1).nonzero().squeeze(1)
    if not len(readers):  # torch splits nothing into one part
        return
    for queries in readers.split(max(1, (_BUDGET if on_cpu else _DEVICE_BUDGET) // max(1, numbers))):
        some = indices[queries].long()
        if on_cpu:
            some = some[:, (some >= 0).any(0)]
        empty = some < 0
        yield queries, _Index(torch.where(empty, some.max(1, keepdim=True).values, some), empty)


def _scores(inputs: _Inputs, queries: Tensor, index: _Index, scale: float) -> Tensor:
    """[Hk, n, group, K], -inf where there is nothing."""
    scores = scale * (inputs.query[:, queries] @ _take(inputs.key, index).mT)
    return scores.masked_fill_(index.empty[:, None], -torch.inf)


def _take(tensor: Tensor, index: _Index) -> Tensor:
    """Rows of [Hk, N, width] for every query: [Hk, n, K, width]."""
    flat = _of_every_head(tensor, index)
    return tensor.flatten(0, 1).index_select(0, flat).view(len(tensor), *index.rows.shape, -1)


def _add(total: Tensor, index: _Index, part: Tensor) -> None:
    """Adds [Hk, n, K, width] to the rows of [Hk, N, width]."""
    total.view(-1, total.shape[2]).index_add_(0, _of_every_head(total, index), part.flatten(0, 2))


def _of_every_head(tensor: Tensor, index: _Index) -> Tensor:
    """Row numbers in [Hk * N], int64 [Hk * n * K]."""
    first = torch.arange(len(tensor), device=tensor.device) * tensor.shape[1]
    return (first[:, None, None] + index.rows).flatten()


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> _Inputs:
    dtype = _computed_in(query)
    return _Inputs(
        _per_key_head(query, key.shape[1]).to(dtype).contiguous(),
        key[0].to(dtype).contiguous(),
        value[0].to(dtype).contiguous(),
    )


def _per_key_head(tensor: Tensor, heads: int) -> Tensor:
    """[1, Hq, T, width] as [Hk, T, group, width]."""
    return tensor[0].unflatten(0, (heads, tensor.shape[1] // heads)).transpose(1, 2)


def _grouped_sinks(sinks: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    return None if sinks is None else sinks.to(dtype).view(heads, 1, -1, 1)


def _like(found: tuple[Tensor, Tensor, Tensor], *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the dtype of the inputs, and in the layout that is promised for them."""
    to_query, to_key, to_value = (
        _empty_heads(tensor, tensor.shape[3]).copy_(gradient) for gradient, tensor in zip(found, inputs, strict=True)
    )
    return to_query, to_key, to_value


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Gradient [Hq] of logits that take part in the softmax with a value of 0."""
    if sinks is None:
        return grad.new_empty(0)
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse[0])
    return -(weight * (grad[0] * out[0]).sum(-1, dtype=lse.dtype)).sum(-1).to(sinks.dtype)


def _computed_in(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=_computed_in(query))
    return _empty_heads(query, value.shape[3]), lse


def _empty_heads(like: Tensor, width: int) -> Tensor:
    """[1, heads, T, width], with a token's heads side by side: models flatten them next, or come from there."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, width).transpose(1, 2)
