"""The definition of tree attention, written with one dense [T, T] score matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_pairs(segments: Tensor, tokens: int, window: int = 0, chunk: int = 0) -> Tensor:
    """Which key rows each query row sees.

    Args:
        segments: int64 [S, 5], as `tree_attention` takes them.
        tokens: T, the length of the row with its padding.
        window: as in `tree_attention`.
        chunk: as in `tree_attention`.

    Returns:
        bool [T, T], queries first. A padding row sees nothing.
    """
    position = torch.zeros(tokens, dtype=torch.int64)
    subtree_end = torch.zeros(tokens, dtype=torch.int64)
    for start, end, last, _, first in segments.tolist():
        position[start:end] = torch.arange(first, first + end - start)
        subtree_end[start:end] = last
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    visible = (key <= query) & (query < subtree_end)
    if window:
        visible &= position[:, None] - position < window
    if chunk:
        visible &= position[:, None] // chunk == position // chunk
    return visible


def tree_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
) -> Tensor:
    """What `tree_attention` must return, by its definition; arguments and result as there."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = scale * query @ key.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if key_bias is not None:
        scores = scores + key_bias[:, None, :]
    if pair_bias is not None:
        scores = scores + pair_bias
    visible = visible_pairs(segments, query.shape[2], window, chunk).to(query.device)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    # A query that sees nothing has output 0; softmax alone would make it nan.
    nothing = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return weights[..., : query.shape[2]] @ value
