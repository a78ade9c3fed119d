"""Kernels of flash attention as they are defined: every sequence of a call by dense scores, in any precision.

They check their arguments as kernels do: what they are given must be packed, and of one width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tree_compile.runtime.flash_calls import VarlenCall
from tree_compile.runtime.flash_kernels import FlashKernels

__all__ = ["reference_kernels"]


def reference_kernels(softcap: float) -> FlashKernels:
    """Stands in for `flash_kernels.kernels_for`."""
    return FlashKernels(partial(forward, softcap=softcap), partial(backward, softcap=softcap))


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float, *, softcap: float
) -> tuple[Tensor, Tensor]:
    """Output [n, Hq, width] and log-sum-exp [Hq, n]."""
    check(query, key, value, call)
    out, lse = torch.full_like(query, torch.nan), query.new_full((query.shape[1], query.shape[0]), torch.nan)
    for queries, keys in sequences(call):
        scores, _ = scores_of(query[queries], key[keys], call, scale, softcap)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), for_heads(value[keys], query))
    return out, lse


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float,
    *, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, from the output and the log-sum-exp that are given."""
    check(query, key, value, call)
    assert grad.shape == query.shape == out.shape
    assert lse.shape == (query.shape[1], query.shape[0])
    assert lse.is_contiguous()
    gradients = [torch.full_like(tensor, torch.nan) for tensor in (query, key, value)]
    for queries, keys in sequences(call):
        scores, slope = scores_of(query[queries], key[keys], call, scale, softcap)
        weights = (scores - lse[:, queries, None]).exp()
        upper = grad[queries]
        delta = (upper * out[queries]).sum(-1).transpose(0, 1)[..., None]
        inner = weights * (torch.einsum("qhd,khd->hqk", upper, for_heads(value[keys], query)) - delta) * slope * scale
        gradients[0][queries] = torch.einsum("hqk,khd->qhd", inner, for_heads(key[keys], query))
        gradients[1][keys] = of_key_heads(torch.einsum("hqk,qhd->khd", inner, query[queries]), key)
        gradients[2][keys] = of_key_heads(torch.einsum("hqk,qhd->khd", weights, upper), key)
    return gradients[0], gradients[1], gradients[2]


def check(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall) -> None:
    """Refuses what a kernel would read wrongly."""
    assert query.dim() == key.dim() == value.dim() == 3
    assert query.shape[2] == key.shape[2] == value.shape[2]
    assert query.shape[2] % 8 == 0
    assert key.shape == value.shape
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    for offsets, longest, rows in (
        (call.query_offsets, call.longest_query, len(query)),
        (call.key_offsets, call.longest_key, len(key)),
    ):
        assert offsets.dtype == torch.int32
        assert offsets[0] == 0
        assert offsets[-1] == rows
        assert offsets.diff().min() > 0
        assert offsets.diff().max() == longest


def sequences(call: VarlenCall) -> list[tuple[slice, slice]]:
    """Rows of the queries and of the keys of each sequence."""
    queries, keys = (offsets.unfold(0, 2, 1).tolist() for offsets in (call.query_offsets, call.key_offsets))
    return [(slice(*query), slice(*key)) for query, key in zip(queries, keys, strict=True)]


def scores_of(query: Tensor, key: Tensor, call: VarlenCall, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Scores [Hq, n, m] of one sequence, and the derivative of the soft cap."""
    scores = torch.einsum("qhd,khd->hqk", query, for_heads(key, query)) * scale
    slope = torch.ones_like(scores)
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, slope = softcap * bounded, 1 - bounded**2
    if call.causal:
        # Bottom-right: the last query sees the last key.
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, slope


def for_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as the query."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def of_key_heads(gradient: Tensor, key: Tensor) -> Tensor:
    """The sum over the query heads that share a key head."""
    return gradient.unflatten(1, (key.shape[1], -1)).sum(2)
