"""Tree attention on the CPU: two custom ops, exact, without a [T, T] tensor.

Plain causal attention takes one stock kernel call per segment, merged by log-sum-exp. Everything else goes block by
block over the queries. Heads are grouped as [Hk, group, T, width], so that shared key heads are never copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_compile.runtime.attention_schedule import Block, Segment, query_blocks, read_segments, row_tables

__all__ = ["tree_attention_cpu"]

_BLOCK = 128

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _Score(NamedTuple):
    """How scores are made from q.k; the biases are [Hk or 1, group or 1, ...]."""

    scale: float
    window: int
    chunk: int
    softcap: float
    key_bias: Tensor | None
    pair_bias: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether the stock kernel computes it."""
        return not (self.window or self.chunk or self.softcap or self.key_bias is not None or self.pair_bias is not None)


def tree_attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    key_bias: Tensor | None,
    pair_bias: Tensor | None,
) -> Tensor:
    """`tree_attention` for CPU tensors; arguments and result as there."""
    out, _ = _attention(query, key, value, segments, sinks, key_bias, pair_bias, scale, window, chunk, softcap)
    return out


@torch.library.custom_op("tree_compile::tree_attention", mutates_args=(), device_types="cpu")
def _attention(
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
    """The output [1, Hq, T, Dv] and the log-sum-exp of the scores [1, Hq, T], 0 where there are none."""
    heads = key.shape[1]
    score = _Score(scale, window, chunk, softcap, _group_bias(key_bias, heads), _group_bias(pair_bias, heads))
    out, lse = _empty_outputs(query, value)
    out_groups, lse_groups = _group(out, heads), _group(lse, heads)
    accumulated = out_groups if out.dtype == lse.dtype else torch.empty_like(out_groups, dtype=lse.dtype)
    accumulated.zero_()
    lse.fill_(float("-inf"))
    inputs = (_group(query, heads), _group(key, heads), _group(value, heads))
    table = read_segments(segments.tolist())
    if score.plain:
        _forward_by_segment(*inputs, table, scale, accumulated, lse_groups)
    else:
        _forward_by_block(*inputs, table, score, accumulated, lse_groups)
    if sinks is not None:
        sink = sinks.to(lse.dtype)[None, :, None]
        accumulated.mul_(_group(torch.sigmoid(lse - sink), heads).unsqueeze(-1))
        torch.logaddexp(lse, sink, out=lse)
    # Rows that nothing covers: any finite value serves the backward, whose other factors are 0 there.
    lse.masked_fill_(lse == float("-inf"), 0.0)
    if accumulated is not out_groups:
        out_groups.copy_(accumulated)
    return out, lse


@_attention.register_fake
def _(
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
    return _empty_outputs(query, value)


def _empty_outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    # Heads inside of tokens, as the stock kernels return them: models transpose and flatten next.
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, tokens, dtype=_accumulate_dtype(query.dtype))


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _group(tensor: Tensor, heads: int) -> Tensor:
    """[1, Hq, ...] as [Hk, group, ...]."""
    return tensor[0].unflatten(0, (heads, tensor.shape[1] // heads))


def _group_bias(bias: Tensor | None, heads: int) -> Tensor | None:
    if bias is None:
        return None
    return bias.unflatten(0, (heads, bias.shape[0] // heads)) if bias.shape[0] > 1 else bias[None]


@torch.library.custom_op("tree_compile::tree_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
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
    score = _Score(scale, window, chunk, softcap, _group_bias(key_bias, heads), _group_bias(pair_bias, heads))
    saved = tuple(_group(tensor, heads) for tensor in (grad, query, key, value, out, lse))
    sums = tuple(torch.zeros_like(tensor, dtype=lse.dtype) for tensor in (saved[1], key[0], value[0]))
    table = read_segments(segments.tolist())
    if score.plain:
        _backward_by_segment(*saved, table, scale, *sums)
    else:
        _backward_by_block(*saved, table, score, *sums)
    results = _empty_gradients(query, key, value, sinks)
    for result, total in zip(results, sums, strict=False):
        result.view(total.shape).copy_(total)
    if sinks is not None:
        weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse[0])
        results[3].copy_(-(weight * (grad[0] * out[0]).sum(-1, dtype=lse.dtype)).sum(-1))
    return results


@_attention_backward.register_fake
def _(
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
    return _empty_gradients(query, key, value, sinks)


def _empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = [tensor.new_empty(tensor.shape) for tensor in (query, key, value)]
    sink = query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return empty[0], empty[1], empty[2], sink


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments, sinks, key_bias, pair_bias, *constants = inputs
    ctx.save_for_backward(query, key, value, *output, segments, sinks, key_bias, pair_bias)  # type: ignore[arg-type]
    ctx.constants = constants  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, segments, sinks, key_bias, pair_bias = ctx.saved_tensors  # type: ignore[attr-defined]
    constants = ctx.constants  # type: ignore[attr-defined]
    gradients = _attention_backward(
        grad, query, key, value, out, lse, segments, sinks, key_bias, pair_bias, *constants
    )
    sink = gradients[3] if sinks is not None else None
    return *gradients[:3], None, sink, None, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


def _forward_by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], scale: float, out: Tensor, lse: Tensor
) -> None:
    """One causal call per segment: its own queries see its keys causally, its descendants see all of them."""
    query, key, value = _same_width(query, key, value)
    for start, end, last, _, _ in segments:
        if start == end:
            continue
        part, part_lse = _flash_forward(
            query[:, :, start:last],
            _repeat(key[:, :, start:end], query),
            _repeat(value[:, :, start:end], query),
            0.0,
            True,
            scale=scale,
        )
        _merge_in(out[:, :, start:last], lse[:, :, start:last], part[..., : out.shape[3]], part_lse)


def _backward_by_segment(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: list[Segment],
    scale: float,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> None:
    """The kernel's backward per segment; with the whole row's output and log-sum-exp the parts add up."""
    width, value_width = query.shape[3], value.shape[3]
    query, key, value = _same_width(query, key, value)
    grad, out, _ = _same_width(grad, out, query)
    for start, end, last, _, _ in segments:
        if start == end:
            continue
        part_query, part_key, part_value = _flash_backward(
            grad[:, :, start:last],
            query[:, :, start:last],
            _repeat(key[:, :, start:end], query),
            _repeat(value[:, :, start:end], query),
            out[:, :, start:last],
            lse[:, :, start:last],
            0.0,
            True,
            scale=scale,
        )
        grad_query[:, :, start:last] += part_query[..., :width]
        grad_key[:, start:end] += part_key[..., :width].sum(1)
        grad_value[:, start:end] += part_value[..., :value_width].sum(1)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad the last dimension with zeros to the widest; the stock kernel takes one width, contiguous."""
    width = max(tensor.shape[-1] for tensor in tensors)
    padded = [torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])) for tensor in tensors]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in padded]


def _repeat(shared: Tensor, query: Tensor) -> Tensor:
    """A view of [Hk, 1, ...] for every query head of the group."""
    return shared.expand(-1, query.shape[1], -1, -1)


def _merge_in(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add more keys to a softmax that is already normalised over others."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _forward_by_block(
    query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], score: _Score, out: Tensor, lse: Tensor
) -> None:
    tables = _tables(segments, query.shape[2])
    for block in query_blocks(segments, score.window, score.chunk, _BLOCK):
        rows = slice(block.start, block.end)
        scores, _ = _block_scores(query[:, :, rows], _gather(key[:, 0], block), block, tables, score, lse.dtype)
        block_lse = torch.logsumexp(scores, -1)
        finite = block_lse.masked_fill(block_lse == float("-inf"), 0.0)
        weights = torch.exp(scores - finite.unsqueeze(-1))
        out[:, :, rows] = _split(_join(weights) @ _gather(value[:, 0], block).to(lse.dtype), weights)
        lse[:, :, rows] = block_lse


def _backward_by_block(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: list[Segment],
    score: _Score,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> None:
    tables = _tables(segments, query.shape[2])
    for block in query_blocks(segments, score.window, score.chunk, _BLOCK):
        rows = slice(block.start, block.end)
        keys, values = _gather(key[:, 0], block).to(lse.dtype), _gather(value[:, 0], block).to(lse.dtype)
        queries, upper = _join(query[:, :, rows]).to(lse.dtype), _join(grad[:, :, rows]).to(lse.dtype)
        scores, slope = _block_scores(query[:, :, rows], keys, block, tables, score, lse.dtype)
        weights = torch.exp(scores - lse[:, :, rows].unsqueeze(-1))
        delta = (upper * _join(out[:, :, rows])).sum(-1, keepdim=True)
        inner = _join(weights) * (upper @ values.transpose(1, 2) - delta)
        if slope is not None:
            inner *= _join(slope)
        inner *= score.scale
        grad_query[:, :, rows] = _split(inner @ keys, weights)
        _scatter_add(grad_key, block, inner.transpose(1, 2) @ queries)
        _scatter_add(grad_value, block, _join(weights).transpose(1, 2) @ upper)


def _tables(segments: list[Segment], tokens: int) -> tuple[Tensor, Tensor]:
    position, subtree_end = row_tables(segments, tokens)
    return torch.tensor(position), torch.tensor(subtree_end)


def _block_scores(
    query: Tensor, key: Tensor, block: Block, tables: tuple[Tensor, Tensor], score: _Score, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Scores [Hk, group, queries, keys], -inf where invisible, and the derivative of the soft cap."""
    scores = _split(_join(query).to(dtype) @ key.to(dtype).transpose(1, 2), query) * score.scale
    slope = None
    if score.softcap:
        bounded = torch.tanh(scores / score.softcap)
        scores, slope = score.softcap * bounded, 1 - bounded * bounded
    if score.key_bias is not None:
        scores = scores + _gather_last(score.key_bias, block).to(dtype).unsqueeze(-2)
    if score.pair_bias is not None:
        scores = scores + _gather_last(score.pair_bias[:, :, block.start : block.end], block).to(dtype)
    return scores.masked_fill(~_visible(block, *tables, score.window, score.chunk), float("-inf")), slope


def _visible(block: Block, position: Tensor, subtree_end: Tensor, window: int, chunk: int) -> Tensor:
    """bool [queries, keys]."""
    rows = torch.arange(block.start, block.end)[:, None]
    keys = torch.cat([torch.arange(*keys) for keys in block.keys])
    visible = (keys <= rows) & (rows < subtree_end[keys])
    above, below = position[keys], position[block.start : block.end, None]
    if window:
        visible &= below - above < window
    if chunk:
        visible &= below // chunk == above // chunk
    return visible


def _join(tensor: Tensor) -> Tensor:
    """[Hk, group, n, m] as [Hk, group * n, m]."""
    return tensor.flatten(1, 2)


def _split(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.unflatten(1, like.shape[1:3])


def _gather(tensor: Tensor, block: Block) -> Tensor:
    """The block's key rows of [Hk, T, width]."""
    return torch.cat([tensor[:, start:end] for start, end in block.keys], 1)


def _gather_last(tensor: Tensor, block: Block) -> Tensor:
    return torch.cat([tensor[..., start:end] for start, end in block.keys], -1)


def _scatter_add(total: Tensor, block: Block, part: Tensor) -> None:
    """Add the gradient of the block's key rows to [Hk, T, width]."""
    offset = 0
    for start, end in block.keys:
        total[:, start:end] += part[:, offset : offset + end - start]
        offset += end - start
