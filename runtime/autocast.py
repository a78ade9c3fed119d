"""Operations that a model computes with autocast switched off, while it is on around the tree model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tree_compile.runtime.attention import tree_attention
from tree_compile.runtime.sparse_attention import sparse_attention
from tree_compile.runtime.topk_index import tree_topk_index
from tree_compile.runtime.window_attention import topk_entries, window_attention


def without_autocast(device: str, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """`function(*args, **options)` with autocast switched off for devices of the type `device`."""
    with torch.autocast(device, enabled=False):
        return function(*args, **options)


def attention_without_autocast(device: str, /, *args: Any, **options: Any) -> Tensor:
    """`tree_attention(*args, **options)` in the dtype of its operands, which autocast would change."""
    return without_autocast(device, tree_attention, *args, **options)


def sparse_attention_without_autocast(device: str, /, *args: Any, **options: Any) -> Tensor:
    """`sparse_attention(*args, **options)` in the dtype of its operands."""
    return without_autocast(device, sparse_attention, *args, **options)


def topk_index_without_autocast(device: str, /, *args: Any) -> Tensor:
    """`tree_topk_index(*args)` in the dtype of its operands."""
    return without_autocast(device, tree_topk_index, *args)


def window_attention_without_autocast(device: str, /, *args: Any, **options: Any) -> Tensor:
    """`window_attention(*args, **options)` in the dtype of its operands."""
    return without_autocast(device, window_attention, *args, **options)


def topk_entries_without_autocast(device: str, /, *args: Any) -> Tensor:
    """`topk_entries(*args)` in the dtype of its operands."""
    return without_autocast(device, topk_entries, *args)
