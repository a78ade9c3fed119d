"""Recurrent layers by the kernels of flash-linear-attention: one call for all segments of one depth.

Every segment starts from the final state of its parent, which the call of the depth above returned. What does not
depend on the tree is the kernels' own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_compile.runtime.depths import depths_of
from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.row_tree import RowTree

__all__ = ["by_kernels", "kernels_can"]


def kernels_can(value: Tensor) -> bool:
    """Whether the kernels are installed and take this tensor: on CUDA, and not in float64."""
    return value.device.type == "cuda" and value.dtype != torch.float64 and _is_installed()


@cache
def _is_installed() -> bool:
    return all(importlib.util.find_spec(package) is not None for package in ("fla", "triton"))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_kernels(inputs: LinearInputs, tree: RowTree, options: LinearOptions) -> tuple[Tensor, Tensor]:
    """Outputs [1, T, H, E], with zeros for padding, and the states after every segment, [S, H, D, E]."""
    segments = tree.segments[tree.segments[:, 1] > 0].numpy()
    kernel, device = _kernel(inputs), inputs.value.device
    out, before, ends = torch.zeros_like(inputs.value), options.initial_state, torch.empty(0)
    states, depths = [], depths_of(segments)
    for depth in depths:
        rows = torch.from_numpy(depth.tokens).to(device)
        if depth.parents[0] >= 0:
            before = ends.index_select(0, torch.from_numpy(depth.parents).to(device))
        parts = inputs.of_each(partial(_rows, rows))
        offsets = torch.from_numpy(depth.offsets).to(device)
        done, ends = kernel(
            parts, scale=options.scale, normalize=options.normalize, initial_state=before, cu_seqlens=offsets
        )
        out = out.index_copy(1, rows, done.to(out.dtype))
        states.append(ends)
    places = np.argsort(np.concatenate([depth.segments for depth in depths]))
    return out, torch.cat(states).index_select(0, torch.from_numpy(places).to(device))


def _rows(rows: Tensor, values: Tensor) -> Tensor:
    return values.index_select(1, rows)


def _kernel(inputs: LinearInputs) -> Callable[..., tuple[Tensor, Tensor]]:
    has_channels = inputs.decay.shape[-1] > 1
    if inputs.beta is None:
        return _gated_linear if has_channels else _simple_linear
    return _kimi_delta if has_channels else _gated_delta


def _gated_delta(x: LinearInputs, *, normalize: bool, **options: Any) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    found: tuple[Tensor, Tensor] = chunk_gated_delta_rule(
        x.query, x.key, x.value, x.decay[..., 0], x.beta,
        use_qk_l2norm_in_kernel=normalize, output_final_state=True, **options,
    )  # fmt: skip
    return found


def _kimi_delta(x: LinearInputs, *, normalize: bool, **options: Any) -> tuple[Tensor, Tensor]:
    from fla.ops.kda import chunk_kda

    query, key = _for_value_heads(x)
    found: tuple[Tensor, Tensor] = chunk_kda(
        query, key, x.value, x.decay, x.beta, use_qk_l2norm_in_kernel=normalize, output_final_state=True, **options
    )
    return found


def _gated_linear(x: LinearInputs, *, normalize: bool, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    from fla.ops.gla import chunk_gla

    query, key = _for_value_heads(x)
    found: tuple[Tensor, Tensor] = chunk_gla(query, key, x.value, x.decay, output_final_state=True, **options)
    return found


def _simple_linear(x: LinearInputs, *, normalize: bool, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    from fla.ops.simple_gla import chunk_simple_gla

    query, key = _for_value_heads(x)
    found: tuple[Tensor, Tensor] = chunk_simple_gla(
        query, key, x.value, g=x.decay[..., 0], output_final_state=True, **options
    )
    return found


def _for_value_heads(x: LinearInputs) -> tuple[Tensor, Tensor]:
    """Query and key with as many heads as the value; each of theirs serves some neighbouring ones."""
    group = x.value.shape[2] // x.key.shape[2]
    return x.query.repeat_interleave(group, 2), x.key.repeat_interleave(group, 2)
