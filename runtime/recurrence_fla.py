"""Recurrent layers by the kernels of flash-linear-attention, which take all segments of one depth in one call.

Every segment starts from the final state of its parent, which the call of the depth above returned. What does not
depend on the tree is the kernels' own. Of the gated delta rule only kernels that carry the state are called for each
depth, where fla has them as expected (`delta_rule_fla`).
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
    compute = _row_at_once if _shares_work(inputs, calls) else _depth_by_depth
    out, states = map(_once_differentiable, compute(_in_order(inputs, calls), calls, options))
    whole = torch.zeros_like(inputs.value).index_copy(1, calls.rows, out.to(inputs.value.dtype))
    return whole, states.index_select(0, calls.places) if options.output_final_state else None


def _in_order(inputs: LinearInputs, calls: DepthCalls) -> LinearInputs:
    """The tokens, depth by depth; the kernels want one dtype for query, key and value."""
    query, key, value, decay, beta = inputs.of_each(partial(_rows, calls.rows))
    return LinearInputs(query.to(value.dtype), key.to(value.dtype), value, decay, beta)


def _rows(rows: Tensor, values: Tensor) -> Tensor:
    return values.index_select(1, rows)


def _shares_work(inputs: LinearInputs, calls: DepthCalls) -> bool:
    """Whether the kernels that do not carry a state are called once for all depths."""
    is_gated_delta_rule = inputs.beta is not None and inputs.decay.shape[-1] == 1
    return is_gated_delta_rule and len(calls.depths) > 1 and _parts_are_known()


@cache
def _parts_are_known() -> bool:
    """Whether this version of fla has the functions that `delta_rule_fla` calls, with their arguments."""
    # They are not its entry points, so that other versions may change them without a word.
    return str(importlib.import_module("fla").__version__).startswith("0.6.")


def _row_at_once(x: LinearInputs, calls: DepthCalls, options: LinearOptions) -> tuple[Tensor, Tensor]:
    from tree_compile.runtime.delta_rule_fla import delta_rule_of_row

    return delta_rule_of_row(x, calls, options)


def _depth_by_depth(x: LinearInputs, calls: DepthCalls, options: LinearOptions) -> tuple[Tensor, Tensor]:
    """As in `delta_rule_fla.delta_rule_of_row`, for all of these layers."""
    initial = options.initial_state
    found: list[tuple[Tensor, Tensor]] = []
    before = None if initial is None else initial.float()
    for call, part in zip(calls.depths, _by_depth(x, calls), strict=True):
        if found:
            before = found[-1][1].index_select(0, call.parents)
        found.append(_run(
            part, scale=options.scale, normalize=options.normalize, initial_state=before,
            cu_seqlens=call.packed.offsets, cu_seqlens_cpu=call.offsets_on_cpu,
        ))  # fmt: skip
    out, ends = zip(*found, strict=True)
    return torch.cat(out, 1), torch.cat(ends)


def _by_depth(x: LinearInputs, calls: DepthCalls) -> list[LinearInputs]:
    """The tokens of each depth."""
    lengths = [call.tokens for call in calls.depths]
    betas = [None] * len(lengths) if x.beta is None else x.beta.split(lengths, 1)
    parts = zip(*(tensor.split(lengths, 1) for tensor in x[:4]), betas, strict=True)
    return [LinearInputs(*part) for part in parts]


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
