"""Operations that a model computes with autocast switched off, while it is on around the tree model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tree_compile.runtime.attention import tree_attention
from tree_compile.runtime.sparse_attention import sparse_attention
from tree_compile.runtime.topk_index import tree_topk_index
from tree_compile.runtime.window_attention import topk_entries, window_attention


def without_autocast(device: str, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """`function(*args, **options)` with autocast switched off for devices of the type `device`."""
    with torch.autocast(device, enabled=False):
        return function(*args, **options)


def _kept_off(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(device: str, /, *args: Any, **options: Any) -> Any:
        return without_autocast(device, function, *args, **options)

    call.__name__ = call.__qualname__ = f"{function.__name__}_without_autocast"
    return call


WITHOUT_AUTOCAST = {
    op: _kept_off(op) for op in (tree_attention, sparse_attention, tree_topk_index, window_attention, topk_entries)
}
"""For every op that a rewrite puts into graphs, the function that computes it in the dtype of its operands.

A graph holds functions as targets only, not as arguments, so `without_autocast` alone does not do.
"""
