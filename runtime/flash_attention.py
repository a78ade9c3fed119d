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
from tree_compile.runtime.flash_calls import Rows, varlen_calls
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
    total = torch.zeros_like(queries, dtype=lse.dtype)
    forward = kernels_for(softcap).forward
    for call in varlen_calls(segments, query.device):
        part = forward(queries[call.queries], keys[call.keys], values[call.keys], call, scale)
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
    upper, queries, keys, values, whole = _by_token(grad, query, key, value, out)
    totals = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (queries, keys, values)]
    backward = kernels_for(softcap).backward
    for call in varlen_calls(segments, query.device):
        parts = backward(
            upper[call.queries],
            queries[call.queries],
            keys[call.keys],
            values[call.keys],
            whole[call.queries],
            lse[0, :, call.queries].contiguous(),
            call,
            scale,
        )
        for sums, rows, part in zip(totals, (call.queries, call.keys, call.keys), parts, strict=True):
            sums[rows] += part
    for result, sums in zip(results[:3], totals, strict=True):
        _fill(result, sums)
    if sinks is not None:
        results[3].copy_(sink_gradient(grad[0], out[0], lse[0], sinks))
    return results


@flash_backward_op.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_gradients(query, key, value, rest[3])


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments, sinks, *constants = inputs
    ctx.save_for_backward(query, key, value, *output, segments, sinks)  # type: ignore[arg-type]
    ctx.constants = constants  # type: ignore[attr-defined]


def _differentiate(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    to_query, to_key, to_value, to_sinks = flash_backward_op(grad, *saved, *ctx.constants)  # type: ignore[attr-defined]
    return to_query, to_key, to_value, None, to_sinks if saved[6] is not None else None, None, None


flash_op.register_autograd(_differentiate, setup_context=_save_for_backward)


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
