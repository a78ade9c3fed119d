"""Tree attention on the CPU: two custom ops, exact, without a [T, T] tensor.

Heads are grouped as [Hk, group, T, width], so that shared key heads are never copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tree_compile.runtime.attention_kernels import add_at, backward_call, call_mask, forward_call, gather
from tree_compile.runtime.attention_results import add_sinks, empty_gradients, empty_outputs, sink_gradient
from tree_compile.runtime.attention_schedule import BLOCK, Schedule, schedule
from tree_compile.runtime.attention_score import Score

__all__ = ["attention_op"]

# About how many scores a block call has where the mask differs between heads, and so has as many numbers.
_MASK_BUDGET = 1 << 23


class _Inputs(NamedTuple):
    """Query [Hk, group, T, D], key [Hk, 1, T, D] and value [Hk, 1, T, Dv], or their gradients."""

    query: Tensor
    key: Tensor
    value: Tensor


@torch.library.custom_op("tree_compile::tree_attention", mutates_args=(), device_types="cpu")
def attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    sinks: Tensor | None,
    key_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The output [1, Hq, T, Dv] and the log-sum-exp [1, Hq, T] of the scores and the sink."""
    heads = key.shape[1]
    score = _grouped_score(scale, window, chunk, softcap, key_bias, pair_bias, heads)
    out, lse = empty_outputs(query, value)
    total = out.zero_() if out.dtype == lse.dtype else torch.zeros_like(out, dtype=lse.dtype)
    lse.fill_(float("-inf"))
    inputs = _grouped_inputs(query, key, value)
    plan = _schedule(segments, score, query.shape[1], query.shape[3])
    _forward(inputs, _group(total, heads), _group(lse, heads), plan, score)
    if sinks is not None:
        add_sinks(total[0], lse[0], sinks)
    if total is not out:
        out.copy_(total)
    return out, lse


@attention_op.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_outputs(query, value)


@torch.library.custom_op("tree_compile::tree_attention_backward", mutates_args=(), device_types="cpu")
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor,
    sinks: Tensor | None,
    key_bias: Tensor | None,
    pair_bias: Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks; the last has no entries where there are no sinks."""
    heads = key.shape[1]
    score = _grouped_score(scale, window, chunk, softcap, key_bias, pair_bias, heads)
    results = empty_gradients(query, key, value, sinks)
    exact = query.dtype == lse.dtype
    totals = [result.zero_() if exact else torch.zeros_like(result, dtype=lse.dtype) for result in results[:3]]
    inputs, sums = _grouped_inputs(query, key, value), _grouped_inputs(*totals)
    plan = _schedule(segments, score, query.shape[1], query.shape[3])
    _backward(inputs, _group(grad, heads), _group(out, heads), _group(lse, heads), sums, plan, score)
    if not exact:
        for result, total in zip(results[:3], totals, strict=True):
            result.copy_(total)
    if sinks is not None:
        results[3].copy_(sink_gradient(grad[0], out[0], lse[0], sinks))
    return results


@_backward_op.register_fake
def _(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor,
    _out: Tensor, _lse: Tensor, _segments: Tensor, sinks: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_gradients(query, key, value, sinks)


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments, sinks, key_bias, pair_bias, *constants = inputs
    ctx.save_for_backward(query, key, value, *output, segments, sinks, key_bias, pair_bias)  # type: ignore[arg-type]
    ctx.constants = constants  # type: ignore[attr-defined]


def _differentiate(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # type: ignore[attr-defined]
    to_query, to_key, to_value, to_sinks = _backward_op(grad, *saved, *ctx.constants)  # type: ignore[attr-defined]
    *_, sinks, _key_bias, _pair_bias = saved
    return to_query, to_key, to_value, None, None if sinks is None else to_sinks, *[None] * 6


attention_op.register_autograd(_differentiate, setup_context=_save_for_backward)


def _grouped_inputs(query: Tensor, key: Tensor, value: Tensor) -> _Inputs:
    return _Inputs(*(_group(tensor, key.shape[1]) for tensor in (query, key, value)))


def _group(tensor: Tensor, heads: int) -> Tensor:
    """[1, Hq, ...] as [Hk, group, ...]."""
    return tensor[0].unflatten(0, (heads, tensor.shape[1] // heads))


def _grouped_score(
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    key_bias: Tensor | None,
    pair_bias: Tensor | None,
    heads: int,
) -> Score:
    per_pair = None if key_bias is None else key_bias.unsqueeze(1)
    return Score(scale, window, chunk, softcap, _group_bias(per_pair, heads), _group_bias(pair_bias, heads))


def _group_bias(bias: Tensor | None, heads: int) -> Tensor | None:
    if bias is None:
        return None
    return _group(bias[None], heads if bias.shape[0] > 1 else 1)


def _schedule(segments: Tensor, score: Score, heads: int, width: int) -> Schedule:
    block, channels = BLOCK, heads * width if score.plain else None
    per_head = [bias for bias in (score.key_bias, score.pair_bias) if bias is not None and bias.shape[:2] != (1, 1)]
    if per_head:
        longest = int((segments[:, 4] + segments[:, 1] - segments[:, 0]).max())
        block = min(BLOCK, max(8, _MASK_BUDGET // (heads * longest)))
    return schedule(segments, score.window, score.chunk, channels, block)


def _forward(inputs: _Inputs, total: Tensor, lse: Tensor, plan: Schedule, score: Score) -> None:
    """Add every call's keys to the softmax of its query rows."""
    query, key, value = _for_kernel(score, *inputs)
    for call in plan.calls:
        rows = slice(call.start, call.end)
        part, part_lse = forward_call(
            query[:, :, rows],
            gather(key, call.keys, 2),
            gather(value, call.keys, 2),
            call_mask(call, plan, score, lse.dtype),
            score,
        )
        weight = torch.sigmoid(part_lse - lse[:, :, rows]).unsqueeze(-1)
        total[:, :, rows].lerp_(part[..., : total.shape[3]].to(total.dtype), weight)
        torch.logaddexp(lse[:, :, rows], part_lse, out=lse[:, :, rows])


def _backward(
    inputs: _Inputs, grad: Tensor, out: Tensor, lse: Tensor, totals: _Inputs, plan: Schedule, score: Score
) -> None:
    """Add every call's part to the gradients of the inputs."""
    width, value_width = inputs.query.shape[3], inputs.value.shape[3]
    query, key, value, grad, out = _for_kernel(score, *inputs, grad, out)
    for call in plan.calls:
        rows = slice(call.start, call.end)
        part_query, part_key, part_value = backward_call(
            query[:, :, rows],
            gather(key, call.keys, 2),
            gather(value, call.keys, 2),
            grad[:, :, rows],
            out[:, :, rows],
            lse[:, :, rows],
            call_mask(call, plan, score, lse.dtype),
            score,
        )
        totals.query[:, :, rows] += part_query[..., :width]
        add_at(totals.key[:, 0], call.keys, part_key[..., :width])
        add_at(totals.value[:, 0], call.keys, part_value[..., :value_width])


def _for_kernel(score: Score, *tensors: Tensor) -> list[Tensor]:
    """Tensors as the stock kernel reads them: one width, and entries of a head side by side."""
    width = max(tensor.shape[-1] for tensor in tensors)
    if not score.softcap:
        tensors = tuple(torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors)
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]
