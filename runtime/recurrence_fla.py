"""Recurrent layers by the kernels of flash-linear-attention: one call for all segments of one depth.

Every segment starts from the final state of its parent, which the call of the depth above returned. What does not
depend on the tree is the kernels' own.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tree_compile.runtime.depth_calls import DepthCalls, depth_calls
from tree_compile.runtime.hopper import is_hopper
from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.row_tree import RowTree

__all__ = ["by_kernels", "kernels_can"]


def kernels_can(key: Tensor, value: Tensor) -> bool:
    """Whether the kernels are installed and take these tensors: on CUDA, half precision, keys at most 256 wide.

    In float32 they multiply in TF32, which is coarser than what float32 is compared in.
    """
    return (
        value.device.type == "cuda"
        and value.dtype in (torch.float16, torch.bfloat16)
        and key.shape[-1] <= _WIDEST
        and _work_here(value.device)
    )


_WIDEST = 256


# torch.compile would trace it otherwise, and cannot go through an import.
@cache
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _work_here(device: torch.device) -> bool:
    """Whether the kernels are installed; on Hopper those of some versions of triton are wrong, and need tilelang."""
    if not all(importlib.util.find_spec(package) is not None for package in ("fla", "triton")):
        return False
    # The module's own version: what it was installed as may be pytorch-triton or pytorch-triton-rocm.
    version = [int(number) for number in re.findall(r"\d+", importlib.import_module("triton").__version__)[:3]]
    is_wrong = is_hopper(device) and [3, 4, 0] <= version < [3, 7, 1]
    return not is_wrong or importlib.util.find_spec("tilelang") is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_kernels(inputs: LinearInputs, tree: RowTree, options: LinearOptions) -> tuple[Tensor, Tensor | None]:
    """Outputs [1, T, H, E], with zeros for padding, and the states after every segment, [S, H, D, E]."""
    calls = depth_calls(tree.segments, inputs.value.device)
    initial = options.initial_state
    done: list[Tensor] = []
    states: list[Tensor] = []
    before = None if initial is None else initial.float()
    for call, part in zip(calls.depths, _by_depth(inputs, calls), strict=True):
        if states:
            before = states[-1].index_select(0, call.parents)
        out, ends = _run(
            part, scale=options.scale, normalize=options.normalize, initial_state=before,
            cu_seqlens=call.packed.offsets, cu_seqlens_cpu=call.offsets_on_cpu,
        )  # fmt: skip
        done.append(_once_differentiable(out))
        states.append(_once_differentiable(ends))
    whole = torch.zeros_like(inputs.value).index_copy(1, calls.rows, torch.cat(done, 1).to(inputs.value.dtype))
    return whole, torch.cat(states).index_select(0, calls.places) if options.output_final_state else None


def _once_differentiable(result: Tensor) -> Tensor:
    """A result of a kernel, through which a second derivative is an error: the kernels' own would be silently wrong."""
    if result.requires_grad:
        result.register_hook(_refuse_second_derivatives)
    return result


def _refuse_second_derivatives(_grad: Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward pass under create_graph=True alone
        raise RuntimeError(
            "a layer that fla's kernels compute has first derivatives only; call it without create_graph"
        )


def _by_depth(inputs: LinearInputs, calls: DepthCalls) -> list[LinearInputs]:
    """The tokens of each depth, one after the other; the kernels want one dtype for query, key and value."""
    lengths = [call.tokens for call in calls.depths]
    query, key, value, decay, beta = inputs.of_each(partial(_rows, calls.rows))
    same = (query.to(value.dtype), key.to(value.dtype), value, decay)
    betas = [None] * len(lengths) if beta is None else beta.split(lengths, 1)
    parts = zip(*(tensor.split(lengths, 1) for tensor in same), betas, strict=True)
    return [LinearInputs(*part) for part in parts]


def _rows(rows: Tensor, values: Tensor) -> Tensor:
    return values.index_select(1, rows)


_KERNELS = {
    (False, True): ("gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("kda", "chunk_kda"),
    (False, False): ("simple_gla", "chunk_simple_gla"),
    (True, False): ("gla", "chunk_gla"),
}
"""Package and function, by whether the decay has channels and whether there is a delta rule."""


def _run(x: LinearInputs, *, normalize: bool, **options: Any) -> tuple[Tensor, Tensor]:
    has_channels, has_delta = x.decay.shape[-1] > 1, x.beta is not None
    package, name = _KERNELS[has_channels, has_delta]
    kernel = getattr(importlib.import_module(f"fla.ops.{package}"), name)
    # Only kernels with a delta rule let heads share keys.
    query, key = (x.query, x.key) if has_delta else _for_value_heads(x)
    decay = x.decay if has_channels else x.decay[..., 0]
    delta = {"beta": x.beta, "use_qk_l2norm_in_kernel": normalize} if has_delta else {}
    found: tuple[Tensor, Tensor] = kernel(
        q=query, k=key, v=x.value, g=decay, output_final_state=True, **delta, **options
    )
    return found


def _for_value_heads(x: LinearInputs) -> tuple[Tensor, Tensor]:
    """Query and key with as many heads as the value; each of theirs serves some neighbouring ones."""
    group = x.value.shape[2] // x.key.shape[2]
    if group == 1:
        return x.query, x.key
    return x.query.repeat_interleave(group, 2), x.key.repeat_interleave(group, 2)
