"""Tree attention on CUDA: flex_attention with a block mask built from segment intervals."""

from __future__ import annotations

from torch import Tensor

__all__ = ["tree_attention_cuda"]


def tree_attention_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    subtree_end: Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: Tensor | None,
    key_bias: Tensor | None,
    pair_bias: Tensor | None,
) -> Tensor:
    """`tree_attention` for CUDA tensors; arguments and result as there."""
    raise NotImplementedError
