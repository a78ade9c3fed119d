"""One kernel call of tree attention on the CPU, forward and backward, and the masks it needs.

Shapes: queries [Hk, group, n, width], keys and values [Hk, 1, m, width], so that the query heads of a group share one
key head without a copy; a score's biases are [Hk or 1, group or 1, 1 or T, T].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tree_compile.runtime.attention_schedule import Call, Keys, Schedule
from tree_compile.runtime.attention_score import Score

__all__ = ["add_at", "backward_call", "call_mask", "forward_call", "gather"]

# Scores of a soft-capped call that are made at once: a few megabytes with their derivatives.
_CACHED_SCORES = 1 << 18

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def gather(tensor: Tensor, keys: Keys, dim: int) -> Tensor:
    """The key rows of a tensor; a view where they are contiguous."""
    if keys.index is not None:
        return tensor.index_select(dim, keys.index)
    parts = [tensor.narrow(dim, start, end - start) for start, end in keys.ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def add_at(total: Tensor, keys: Keys, part: Tensor) -> None:
    """Add [Hk, m, width] to the key rows of [Hk, T, width]."""
    if keys.index is not None:
        total.index_add_(1, keys.index, part)
        return
    offset = 0
    for start, end in keys.ranges:
        total[:, start:end] += part[:, offset : offset + end - start]
        offset += end - start


def call_mask(call: Call, plan: Schedule, score: Score, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of a call: biases, and -inf where a key is invisible."""
    if call.causal:
        return None
    mask = _visibility(call, plan, score.window, score.chunk, dtype)
    if score.key_bias is not None:
        mask = mask + gather(score.key_bias, call.keys, 3).to(dtype)
    if score.pair_bias is not None:
        mask = mask + gather(score.pair_bias[:, :, call.start : call.end], call.keys, 3).to(dtype)
    return mask


def _visibility(call: Call, plan: Schedule, window: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """0 where a key is visible and -inf elsewhere, [queries, keys]."""
    queries = torch.arange(call.start, call.end, dtype=torch.int32)[:, None]
    below = plan.position[call.start : call.end, None]
    keys = _key_rows(call.keys)
    above, subtree_end = gather(plan.position, call.keys, 0), gather(plan.subtree_end, call.keys, 0)
    some = (keys >= call.start) | (subtree_end < call.end)
    if window:
        some |= above <= below.max() - window
    if chunk:
        some |= above // chunk != below.max() // chunk
    columns = some.nonzero().squeeze(1)  # every other key is visible to all queries
    keys, above, subtree_end = keys[columns], above[columns], subtree_end[columns]
    hidden = (keys > queries) | (queries >= subtree_end)
    if window:
        hidden |= below - above >= window
    if chunk:
        hidden |= below // chunk != above // chunk
    mask = torch.zeros(call.end - call.start, call.keys.count, dtype=dtype)
    mask[:, columns] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask


def _key_rows(keys: Keys) -> Tensor:
    if keys.index is not None:
        return keys.index.to(torch.int32)
    return torch.cat([torch.arange(start, end, dtype=torch.int32) for start, end in keys.ranges])


def forward_call(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score: Score) -> tuple[Tensor, Tensor]:
    """Output [Hk, group, n, Dv] and log-sum-exp [Hk, group, n]; causal where there is no mask.

    A query that sees nothing has output 0 and log-sum-exp 0.
    """
    if score.softcap:
        out, lse = _by_heads(_capped_forward, (query, key, value), mask, score)
        return out, lse
    key, value = (shared.expand(-1, query.shape[1], -1, -1) for shared in (key, value))
    result: tuple[Tensor, Tensor] = _flash_forward(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=score.scale
    )
    return result


def backward_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """A call's part of the gradients, [Hk, group, n, D], [Hk, m, D], [Hk, m, Dv].

    `out` and `lse` are those of the whole softmax, over all calls and the sink: then the parts add up.
    """
    if score.softcap:
        inputs = (query, key, value, grad, out, lse)
        to_query, to_key, to_value = _by_heads(_capped_backward, inputs, mask, score)
        return to_query, to_key, to_value
    key, value = (shared.expand(-1, query.shape[1], -1, -1) for shared in (key, value))
    to_query, to_key, to_value = _flash_backward(
        grad, query, key, value, out, lse, 0.0, mask is None, attn_mask=mask, scale=score.scale
    )
    return to_query, _sum_group(to_key), _sum_group(to_value)


def _sum_group(tensor: Tensor) -> Tensor:
    return tensor[:, 0] if tensor.shape[1] == 1 else tensor.sum(1)


def _by_heads(
    function: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], mask: Tensor | None, score: Score
) -> list[Tensor]:
    """`function(*tensors, mask, score)` over a few key heads at a time; `tensors` are the query, the key and others."""
    query, key = tensors[:2]
    step = max(1, _CACHED_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    if step >= query.shape[0]:
        return list(function(*tensors, mask, score))
    parts = []
    for first in range(0, query.shape[0], step):
        heads = slice(first, first + step)
        own_mask = mask if mask is None or mask.dim() == 2 or mask.shape[0] == 1 else mask[heads]
        parts.append(function(*(tensor[heads] for tensor in tensors), own_mask, score))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _capped_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score: Score
) -> tuple[Tensor, Tensor]:
    scores, _ = _capped_scores(query, key, mask, score)
    lse = torch.logsumexp(scores, -1)
    lse.masked_fill_(lse == float("-inf"), 0.0)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return (weights.flatten(1, 2) @ value[:, 0].to(weights.dtype)).unflatten(1, query.shape[1:3]), lse


def _capped_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, slope = _capped_scores(query, key, mask, score)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().flatten(1, 2)
    queries, upper = (tensor.flatten(1, 2).to(lse.dtype) for tensor in (query, grad))
    keys, values = (tensor[:, 0].to(lse.dtype) for tensor in (key, value))
    delta = (upper * out.flatten(1, 2)).sum(-1, keepdim=True)
    inner = (upper @ values.transpose(1, 2)).sub_(delta).mul_(weights).mul_(slope.flatten(1, 2)).mul_(score.scale)
    to_query = (inner @ keys).unflatten(1, query.shape[1:3])
    return to_query, inner.transpose(1, 2) @ queries, weights.transpose(1, 2) @ upper


def _capped_scores(query: Tensor, key: Tensor, mask: Tensor | None, score: Score) -> tuple[Tensor, Tensor]:
    """Scores under the soft cap [Hk, group, n, m], and the derivative of the cap."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    product = query.flatten(1, 2).to(dtype) @ key[:, 0].to(dtype).transpose(1, 2)
    bounded = product.mul_(score.scale / score.softcap).tanh_().unflatten(1, query.shape[1:3])
    slope = 1 - bounded * bounded
    scores = bounded.mul_(score.softcap)
    return (scores if mask is None else scores.add_(mask)), slope
