"""Computes recurrent layers over a tree by the kernels of fla in the Triton interpreter, and by the ops for the CPU.

Prints one JSON object: for every kernel the greatest relative difference of outputs, final states and gradients, and
what a second derivative of outputs, and one of final states, is told.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
import triton.runtime.autotuner
from interpreter_loops import counted
from torch import Tensor

from tree_compile import plan_rows
from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.recurrence_chunks import by_chunks
from tree_compile.runtime.recurrence_fla import by_kernels
from tree_compile.runtime.row_tree import RowTree, tree_of_segments

KERNELS = {
    # package: decay per channel, delta rule, heads, heads of the keys, width
    "gated_delta_rule": (False, True, 4, 2, 64),
    "kda": (True, True, 2, 1, 32),
    "gla": (True, False, 4, 2, 32),
    "simple_gla": (False, False, 2, 1, 64),
}
"""Every head takes its time in the interpreter; of each kind of kernels that share keys one has two of these."""


def prepare_interpreter() -> None:
    """Takes the first configuration of every kernel, and loops over numbers that the interpreter holds."""
    triton.runtime.autotuner.Autotuner._bench = lambda *_args, **_kwargs: [0.0, 0.0, 0.0]
    for package in KERNELS:
        importlib.import_module(f"fla.ops.{package}")
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.range = counted


def forked_row() -> tuple[RowTree, int]:
    """Two roots, forks off the chunks of the kernels, segments of 1 token, of 64 and of 65."""
    trunk = [1] * 37
    sequences = [trunk + [2] * 64, trunk + [3], trunk + [4] * 30 + [5] * 5, trunk + [4] * 30 + [6] * 65, [9] * 5]
    (row,) = plan_rows(sequences, min_shared_tokens=1).rows
    return tree_of_segments(row.segments, row.parent), len(row.tokens)


def inputs_of(name: str, tokens: int) -> LinearInputs:
    """Random inputs."""
    has_channels, has_delta, heads, key_heads, width = KERNELS[name]
    key, query = (torch.randn(1, tokens, key_heads, width) for _ in range(2))
    value, beta = torch.randn(1, tokens, heads, width), torch.rand(1, tokens, heads)
    decay = -F.softplus(torch.randn(1, tokens, heads, width if has_channels else 1))
    inputs = LinearInputs(query, key, value, decay, beta if has_delta else None)
    return inputs.of_each(Tensor.requires_grad_)


def compared_with_op(name: str) -> tuple[float, list[str]]:
    """The greatest relative difference of kernel and op, and what second derivatives are told."""
    tree, tokens = forked_row()
    _, has_delta, heads, _, width = KERNELS[name]
    inputs, initial = inputs_of(name, tokens), torch.randn(2, heads, width, width, requires_grad=True)
    options = LinearOptions(None, has_delta, initial, True)
    results = [compute(inputs, tree, options) for compute in (by_kernels, by_chunks)]
    told = [refusal(part, inputs.value) for part in results[0]]
    weights = [torch.randn_like(part) for part in results[0]]
    leaves = [initial, *(leaf for leaf in inputs if leaf is not None)]
    losses = [sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)) for parts in results]
    compared = [(*parts, *torch.autograd.grad(loss, leaves)) for parts, loss in zip(results, losses, strict=True)]
    pairs = zip(*compared, strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs), told


def refusal(part: Tensor, leaf: Tensor) -> str:
    """The error of a gradient that is to have one itself; empty where there is none."""
    try:
        torch.autograd.grad(part.square().sum(), leaf, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    """Compares every kernel."""
    torch.manual_seed(0)
    prepare_interpreter()
    print(json.dumps({name: compared_with_op(name) for name in KERNELS}))


if __name__ == "__main__":
    main()
