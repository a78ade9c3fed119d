"""Computes recurrent layers over a tree by the kernels of fla in the Triton interpreter, and by the ops for the CPU.

Prints one JSON object: for every case the greatest relative difference of outputs, final states and gradients, what a
second derivative of outputs, and one of final states, is told, and how often each function of fla was called inside of
`delta_rule_fla`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
import triton.runtime.autotuner
from interpreter_loops import counted
from torch import Tensor

from tree_compile import plan_rows
from tree_compile.runtime import delta_rule_fla, recurrence_fla
from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.recurrence_chunks import by_chunks
from tree_compile.runtime.recurrence_fla import by_kernels
from tree_compile.runtime.row_tree import RowTree, tree_of_segments


class Case(NamedTuple):
    """What is computed; by one public call for each depth where `by_depth` is true, also if fla has the parts of it."""

    decay_per_channel: bool
    delta_rule: bool
    heads: int
    key_heads: int
    width: int
    initial_states: bool = True
    normalize: bool = True
    scale: float | None = None
    by_depth: bool = False


CASES = {
    "gated_delta_rule": Case(False, True, 4, 2, 64),
    "gated_delta_rule from zeros": Case(False, True, 2, 1, 32, initial_states=False, normalize=False, scale=0.5),
    "gated_delta_rule by depth": Case(False, True, 2, 1, 32, by_depth=True),
    "kda": Case(True, True, 2, 1, 32),
    "gla": Case(True, False, 4, 2, 32),
    "simple_gla": Case(False, False, 2, 1, 64),
}
"""Every head takes its time in the interpreter; of each kind of kernels that share keys one has two of these."""
PACKAGES = ("gated_delta_rule", "kda", "gla", "simple_gla")
CALLED = Counter[str]()
"""Functions of fla that `delta_rule_fla` called."""


def prepare_interpreter() -> None:
    """Takes the first configuration of every kernel, and loops over numbers that the interpreter holds."""
    triton.runtime.autotuner.Autotuner._bench = lambda *_args, **_kwargs: [0.0, 0.0, 0.0]
    for package in PACKAGES:
        importlib.import_module(f"fla.ops.{package}")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.range = counted


def count_calls() -> None:
    """Counts in `CALLED` what `delta_rule_fla` calls."""
    for name, function in list(vars(delta_rule_fla).items()):
        if getattr(function, "__module__", "").startswith("fla.") and callable(function):
            setattr(delta_rule_fla, name, noted(name, function))


def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls count under a name."""

    def call(*args: Any, **options: Any) -> Any:
        CALLED[name] += 1
        return function(*args, **options)

    return call


def forked_row() -> tuple[RowTree, int]:
    """Two roots, forks off the chunks of the kernels, segments of 1 token, of 64 and of 65, and padding."""
    trunk = [1] * 37
    sequences = [trunk + [2] * 64, trunk + [3], trunk + [4] * 30 + [5] * 5, trunk + [4] * 30 + [6] * 65, [9] * 5]
    (row,) = plan_rows(sequences, row_tokens=210, min_shared_tokens=1, pad_rows=True).rows
    return tree_of_segments(row.segments, row.parent), len(row.tokens)


def inputs_of(case: Case, tokens: int) -> LinearInputs:
    """Random inputs; longer keys would make states grow where they are not normalised."""
    width, heads = case.width, case.heads
    key, query = (torch.randn(1, tokens, case.key_heads, width) for _ in range(2))
    value, beta = torch.randn(1, tokens, heads, width), torch.rand(1, tokens, heads)
    decay = -F.softplus(torch.randn(1, tokens, heads, width if case.decay_per_channel else 1))
    inputs = LinearInputs(query, key / width**0.5, value, decay, beta if case.delta_rule else None)
    return inputs.of_each(Tensor.requires_grad_)


def compared_with_op(case: Case) -> tuple[float, list[str], dict[str, int]]:
    """The greatest relative difference of kernel and op, what second derivatives are told, and `CALLED`."""
    CALLED.clear()
    recurrence_fla._parts_are_known = lambda: not case.by_depth
    tree, tokens = forked_row()
    inputs = inputs_of(case, tokens)
    initial = torch.randn(2, case.heads, case.width, case.width, requires_grad=True) if case.initial_states else None
    options = LinearOptions(case.scale, case.delta_rule and case.normalize, initial, True)
    results = [compute(inputs, tree, options) for compute in (by_kernels, by_chunks)]
    told = [refusal(part, inputs.value) for part in results[0]]
    weights = [torch.randn_like(part) for part in results[0]]
    leaves = [leaf for leaf in (initial, *inputs) if leaf is not None]
    losses = [sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)) for parts in results]
    compared = [(*parts, *torch.autograd.grad(loss, leaves)) for parts, loss in zip(results, losses, strict=True)]
    pairs = zip(*compared, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs), told, dict(CALLED)


def refusal(part: Tensor, leaf: Tensor) -> str:
    """The error of a gradient that is to have one itself; empty where there is none."""
    try:
        torch.autograd.grad(part.square().sum(), leaf, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Compares every case."""
    torch.manual_seed(0)
    prepare_interpreter()
    count_calls()
    print(json.dumps({name: compared_with_op(case) for name, case in CASES.items()}))


if __name__ == "__main__":
    main()
