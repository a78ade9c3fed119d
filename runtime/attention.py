"""Attention over a row: every token sees itself and its ancestors, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_compile.runtime.attention_cpu import attention_op
from tree_compile.runtime.attention_cuda import flex_tree_attention
from tree_compile.runtime.attention_score import Score
from tree_compile.runtime.flash_attention import flash_tree_attention
from tree_compile.runtime.flash_forms import AttentionForm, is_cuda, why_not_flash
from tree_compile.runtime.options import check_choice

__all__ = ["dtype_in_autocast", "in_autocast_dtype", "tree_attention"]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    subtree_end: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    kernels: str = "flex",
) -> Tensor:
    """Attention of every token over itself and its ancestors in the prefix tree.

    The score of query row q and key row k in head h is
    `softcap(scale * q.k) + key_bias[h, k] + pair_bias[h, q, k]` with `softcap(x) = c * tanh(x / c)`.
    Under autocast, query, key and value are cast to its dtype, as `scaled_dot_product_attention` does.

    Args:
        query: [1, Hq, T, D], floating point.
        key: [1, Hk, T, D]; Hq is a multiple of Hk, query head h reads key head h // (Hq // Hk).
        value: [1, Hk, T, Dv].
        segments: int64 on the CPU, [S >= 2, 5]: start, end, subtree_end, parent, position of each segment in
            pre-order, without gaps. Entries of zeros at the end are skipped.
        position: int64 [T], index of each token in its own sequence.
        subtree_end: int64 [T], one past the last row index of the subtree of each token's segment.
        scale: factor on q.k.
        window: a query sees only keys fewer than this many positions above it; 0 means all.
        chunk: a query sees only keys with the same position // chunk; 0 means all.
        softcap: bound c on the scaled scores; 0 means none.
        sinks: [Hq], one more logit per head in the softmax's denominator; receives a gradient.
        key_bias: [Hq or 1, T], added to the scores; receives no gradient.
        pair_bias: [Hq or 1, T, T] in row coordinates, added to the scores, may hold -inf; receives no gradient.
        kernels: on CUDA, "flex" for flex_attention or "flash" for kernels of flash attention; nothing elsewhere.

    Returns:
        [1, Hq, T, Dv] in the dtype of `query`. Rows behind the last segment are padding: 0, and with gradient 0.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, a bias would need a gradient, or kernels of flash
            attention are asked for and cannot compute this.
    """
    query, key, value = in_autocast_dtype(query, key, value)
    _check(query, key, value, segments)
    _check_biases(key_bias, pair_bias)
    check_choice("kernels", kernels, ("flex", "flash"))
    if is_cuda(query.device):
        score = Score(scale, window, chunk, softcap, key_bias, pair_bias)
        if kernels == "flash":
            if not torch.compiler.is_compiling():  # a graph says so only where it was asked before
                _check_flash(query, value, score)
            return flash_tree_attention(query, key, value, segments, sinks, scale, softcap)
        return flex_tree_attention(query, key, value, segments, position, subtree_end, sinks, score)
    out, _ = attention_op(query, key, value, segments, sinks, key_bias, pair_bias, scale, window, chunk, softcap)
    return out


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as attention takes them under autocast, which leaves float64 alone; as they are where it is off."""
    return tuple(tensor.to(dtype_in_autocast(tensor)) for tensor in tensors)


def dtype_in_autocast(tensor: Tensor) -> torch.dtype:
    """The dtype that autocast, where it is on, gives to a tensor of a matrix product: it leaves float64 alone."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def _check(query: Tensor, key: Tensor, value: Tensor, segments: Tensor) -> None:
    if query.dim() != 4 or query.shape[0] != 1:
        raise ValueError(f"query must be [1, heads, tokens, width], not {tuple(query.shape)}")
    if key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"query, key, value do not fit: {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query is {query.shape[3]} wide and key is {key.shape[3]} wide")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if segments.device.type != "cpu":
        raise ValueError(f"segments must be on the CPU, which reads them, and not on {segments.device}")


def _check_flash(query: Tensor, value: Tensor, score: Score) -> None:
    width = max(query.shape[3], value.shape[3])
    reason = why_not_flash(AttentionForm(query.device, query.dtype, width, score.options))
    if reason is not None:
        raise ValueError(f"flash attention cannot compute this: {reason.why}")


def _check_biases(*biases: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(bias is not None and bias.requires_grad for bias in biases):
        raise ValueError("key_bias and pair_bias receive no gradient: detach them, or do not train what they come from")
