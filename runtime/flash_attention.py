"""Tree attention on CUDA by kernels of flash attention: several calls, merged by their log-sum-exps.

A query gets a result from its own segment, and one from each segment above it. With outputs o1, o2 and log-sum-exps l1,
l2 over disjoint sets of keys, over both sets

    l = log(exp(l1) + exp(l2))        o = o1 + sigmoid(l2 - l1) * (o2 - o1)

In the backward, each call is given the merged output and log-sum-exp: its weights are then those of the whole softmax,
and the parts of all calls add up to the exact gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tree_compile.runtime.attention_results import add_sinks, empty_gradients, empty_outputs, sink_gradient
from tree_compile.runtime.flash_calls import Rows, VarlenCall, varlen_calls
from tree_compile.runtime.flash_kernels import kernels_for
from tree_compile.runtime.transfers import READS_ON_HOST

__all__ = ["flash_tree_attention"]

# The kernels' loads are of eight numbers.
_MULTIPLE = 8


def flash_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, sinks: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """`tree_attention` of all ancestors, with a soft cap or without; arguments and result as there.

    `flash_forms.why_not_flash` says what it does not take.
    """
    out, _ = flash_op(query, key, value, segments, sinks, scale, softcap)
    return out


@torch.library.custom_op("tree_compile::flash_attention", mutates_args=(), tags=READS_ON_HOST)
def flash_op(
    query: Tensor, key: Tensor, value: Tensor, segments: Tensor, sinks: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The output [1, Hq, T, Dv] and the log-sum-exp [1, Hq, T] of the scores and the sink."""
    out, lse = empty_outputs(query, value)
    lse.fill_(float("-inf"))
    queries, keys, values = _by_token(query, key, value)
    own, *above = varlen_calls(segments, query.device)
    parts = (_forward_of(call, queries, keys, values, scale, softcap) for call in (own, *above))
    alone, lse[0, :, own.queries] = next(parts)
    total = _in_row(alone, own.queries, len(queries), lse.dtype if above or sinks is not None else alone.dtype)
    for call, part in zip(above, parts, strict=True):
        _merge(total, lse[0], call.queries, *part)
    if sinks is not None:
        add_sinks(total.transpose(0, 1), lse[0], sinks)
    _fill(out, total)
    return out, lse


@flash_op.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_outputs(query, value)


@torch.library.custom_op("tree_compile::flash_attention_backward", mutates_args=(), tags=READS_ON_HOST)
def flash_backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks; the last has no entries where there are no sinks."""
    results = empty_gradients(query, key, value, sinks)
    by_token = _by_token(grad, query, key, value, out)
    own, *above = varlen_calls(segments, query.device)
    parts = (_backward_of(call, *by_token, lse=lse[0], scale=scale, softcap=softcap) for call in (own, *above))
    dtype = lse.dtype if above else query.dtype
    totals = [_in_row(part, own.queries, query.shape[2], dtype) for part in next(parts)]
    for call, part in zip(above, parts, strict=True):
        for sums, rows, some in zip(totals, (call.queries, call.keys, call.keys), part, strict=True):
            sums[rows] += some
    for result, sums in zip(results[:3], totals, strict=True):
        _fill(result, sums)
    if sinks is not None:
        results[3].copy_(sink_gradient(grad[0], out[0], lse[0], sinks))
    return results


@flash_backward_op.register_fake
def _(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    _out: Tensor, _lse: Tensor, _segments: Tensor, sinks: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(query, key, value, sinks)


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments, sinks, *constants = inputs
    ctx.save_for_backward(query, key, value, *output, segments, sinks)  # type: ignore[arg-type]
    ctx.constants = constants  # type: ignore[attr-defined]


def _differentiate(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    to_query, to_key, to_value, to_sinks = flash_backward_op(grad, *saved, *ctx.constants)  # type: ignore[attr-defined]
    *_, sinks = saved
    return to_query, to_key, to_value, None, None if sinks is None else to_sinks, None, None


flash_op.register_autograd(_differentiate, setup_context=_save_for_backward)


def _forward_of(
    call: VarlenCall, queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The output [n, Hq, width] and the log-sum-exp [Hq, n] of the queries of a call over its keys."""
    given = queries[call.queries], keys[call.keys], values[call.keys]
    return kernels_for(softcap).forward(*given, call, scale)


def _backward_of(
    call: VarlenCall, grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor,
    *, lse: Tensor, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Its part of the gradients of its queries, keys and values."""
    given = grad[call.queries], queries[call.queries], keys[call.keys], values[call.keys], out[call.queries]
    return kernels_for(softcap).backward(*given, lse[:, call.queries].contiguous(), call, scale)


def _in_row(part: Tensor, rows: Rows, tokens: int, dtype: torch.dtype) -> Tensor:
    """What the call of every token over its own segment gives, [T, heads, width], with zeros for padding."""
    whole = part.new_zeros((tokens, *part.shape[1:]), dtype=dtype)
    whole[rows] = part
    return whole


def _by_token(*tensors: Tensor) -> list[Tensor]:
    """Tensors [1, heads, T, any width] as the kernels read them: [T, heads, width], in one width."""
    widest = max(tensor.shape[3] for tensor in tensors)
    width = -(-widest // _MULTIPLE) * _MULTIPLE
    return [_padded(tensor[0].transpose(0, 1), width).contiguous() for tensor in tensors]


def _padded(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _merge(total: Tensor, lse: Tensor, rows: Rows, part: Tensor, part_lse: Tensor) -> None:
    """Adds the keys of a call to the softmax of its queries: outputs [T, Hq, width] and log-sum-exps [Hq, T]."""
    before = lse[:, rows]
    weight = torch.sigmoid(part_lse - before).transpose(0, 1).unsqueeze(-1)
    total[rows] = total[rows].lerp(part.to(total.dtype), weight)
    lse[:, rows] = torch.logaddexp(before, part_lse)


def _fill(result: Tensor, by_token: Tensor) -> None:
    """Writes [T, heads, width] into [1, heads, T, the width without padding]."""
    result[0].copy_(by_token[..., : result.shape[3]].transpose(0, 1))
