"""Attention over chosen keys on Hopper GPUs, by kernels that TileLang compiles.

Memory grows with the number of chosen keys only through their indices: no key is copied for a query, no score is
stored. The backward computes the scores again, and adds the gradients of keys and values atomically, so that their last
bits differ from run to run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tree_compile.runtime.hopper import is_hopper
from tree_compile.runtime.sparse_shapes import (
    SMALLEST_GROUP,
    SparseShape,
    backward_shape,
    fits,
    forward_shape,
)

__all__ = ["backward", "forward", "kernels_can"]

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
TARGET = {"kind": "cuda", "arch": "sm_90a"}


def kernels_can(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether TileLang is installed and the kernels take tensors of `forward`'s shapes.

    They want half precision on a Hopper GPU, widths in whole steps of 32, and enough query heads for one key-value head
    that a multiplication of 16 rows is not mostly padding: multi-query attention, latent attention in its latent form.
    """
    shapes_fit = query.shape[1] // key.shape[1] >= SMALLEST_GROUP and fits(key.shape[3], value.shape[3])
    dtypes_fit = query.dtype in _DTYPES and query.dtype == key.dtype == value.dtype
    return shapes_fit and dtypes_fit and query.device.type == "cuda" and _work_here(query.device)


@cache
def _work_here(device: torch.device) -> bool:
    return is_hopper(device) and importlib.util.find_spec("tilelang") is not None


def forward(query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of every query over the keys that its indices name.

    No copy is made of a query that lies in memory as [T, Hq, D], of contiguous keys and values, and of indices whose K
    is a multiple of 64.

    Args:
        query: [1, Hq, T, D], float16 or bfloat16 on CUDA; `kernels_can` says which shapes.
        key: [1, Hk, N, D].
        value: [1, Hk, N, E].
        indices: int32 [1, T, K], rows of key and value, the same for all heads. -1 names nothing: it is not read.
        scale: Factor of the scores.

    Returns:
        out [1, Hq, T, E], which lies in memory as [T, Hq, E] if Hk is 1, and the natural logarithm of the sum of the
        exponentials of the scores, float32 [1, Hq, T]. A query that names nothing has output 0 and logarithm -inf.
    """
    key_heads, tokens, group = key.shape[1], query.shape[2], query.shape[1] // key.shape[1]
    shape = forward_shape(group, key.shape[3], value.shape[3], _DTYPES[query.dtype])
    kernel, blocks = _forward_kernel(shape), _in_blocks(indices, shape.block)
    out = query.new_empty(key_heads, tokens, shape.heads, shape.value_width)
    lse = query.new_empty(key_heads, tokens, shape.heads, dtype=torch.float32)
    queries = _by_key_head(query, key_heads, shape.heads)
    for head in range(key_heads):
        kernel(queries[head], _rows(key, head), _rows(value, head), blocks, scale, out[head], lse[head])
    return _by_query_head(out, group), _by_query_head(lse[..., None], group)[..., 0]


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; a key that no query names has gradient 0.

    Args:
        grad: [1, Hq, T, E], the gradient of `out`.
        query: As in `forward`, like the other arguments.
        key: As in `forward`.
        value: As in `forward`.
        indices: As in `forward`.
        scale: As in `forward`.
        out: What `forward` returned, or that of a softmax with more terms, such as a sink.
        lse: What `forward` returned, or that of the softmax with more terms.

    Returns:
        Those of the query in its dtype, those of key and value in float32, shaped like them.
    """
    key_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    shape = backward_shape(group, key.shape[3], value.shape[3], _DTYPES[query.dtype])
    kernel, blocks = _backward_kernel(shape), _in_blocks(indices, shape.block)
    grads, queries, outs = (_by_key_head(tensor, key_heads, shape.heads) for tensor in (grad, query, out))
    sums = _by_key_head(lse[..., None], key_heads, shape.heads)[..., 0]
    query_grad = torch.empty_like(queries)
    # Their own strides would be those of a transposed key; a kernel takes compact rows.
    key_grad, value_grad = (
        torch.zeros(tensor.shape[1:], dtype=torch.float32, device=tensor.device) for tensor in (key, value)
    )
    for head in range(key_heads):
        kernel(
            grads[head], queries[head], _rows(key, head), _rows(value, head), blocks, scale, outs[head], sums[head],
            query_grad[head], key_grad[head], value_grad[head],
        )  # fmt: skip
    return _by_query_head(query_grad, group), key_grad[None], value_grad[None]


@cache
def _forward_kernel(shape: SparseShape) -> Callable[..., None]:
    from tree_compile.runtime.sparse_programs import forward_program

    return _compiled(forward_program(shape))


@cache
def _backward_kernel(shape: SparseShape) -> Callable[..., None]:
    from tree_compile.runtime.sparse_programs import backward_program

    return _compiled(backward_program(shape))


def _compiled(program: Any) -> Callable[..., None]:
    import tilelang

    kernel: Callable[..., None] = tilelang.compile(program, target=TARGET, execution_backend="tvm_ffi")
    return kernel


def _rows(tensor: Tensor, head: int) -> Tensor:
    return tensor[0, head].contiguous()


def _in_blocks(indices: Tensor, block: int) -> Tensor:
    """[T, S, block] of [1, T, K], filled up with -1, which names nothing; kernels begin with one block at least."""
    steps = max(-(-indices.shape[2] // block), 1)
    missing = steps * block - indices.shape[2]
    whole = torch.nn.functional.pad(indices[0], (0, missing), value=-1) if missing else indices[0].contiguous()
    return whole.unflatten(1, (steps, block))


def _by_key_head(tensor: Tensor, key_heads: int, heads: int) -> Tensor:
    """Contiguous [Hk, T, heads, D] of [1, Hq, T, D], with zeros for heads that pad.

    Padding is harmless: its outputs are left out, and with a query and a gradient of 0 it adds 0 to every gradient.
    """
    grouped = tensor[0].unflatten(0, (key_heads, -1)).transpose(1, 2)
    missing = heads - grouped.shape[2]
    return torch.nn.functional.pad(grouped, (0, 0, 0, missing)) if missing else grouped.contiguous()


def _by_query_head(tensor: Tensor, group: int) -> Tensor:
    """[1, Hq, T, D] of [Hk, T, heads, D]."""
    return tensor[:, :, :group].transpose(1, 2).flatten(0, 1)[None]
