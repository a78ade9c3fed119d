"""A rewritten model, split and compiled, and how a row becomes its inputs and its results a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_compile.blocks import Blocks, as_it_is, compiled
from tree_compile.failures import of_tables
from tree_compile.output import RowResult
from tree_compile.passes.plan_inputs import TREE_INPUTS
from tree_compile.pipeline import Rewritten, rewrite_model
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import tree_of_segments
from tree_compile.unpacked import Unpacked

BACKENDS = {"inductor": compiled, "eager": as_it_is}
_FEWEST_TOKENS = 2
"""torch.compile makes a program of its own for sizes 0 and 1, and torch.export assumes at least 2."""


@dataclass(frozen=True)
class Program:
    """A rewritten model, ready to run.

    Attributes:
        rewritten: the model's rewritten graph.
        blocks: the same, split and compiled.
        device: where its inputs have to be.
        checked: whether it was compared with the unpacked model.
    """

    rewritten: Rewritten
    blocks: Blocks
    device: torch.device
    checked: bool = False

    def run(self, row: Row) -> RowResult:
        """Computes one row.

        Raises:
            TokenRangeError: one of the model's tables has no entry for a number of the row.
        """
        with of_tables(row):
            return self._result(row, self.blocks(*self._inputs(row)))

    def run_uncompiled(self, row: Row) -> RowResult:
        """Computes one row with the rewritten graph as it is."""
        return self._result(row, self.rewritten.graph_module(*self._inputs(row)))

    def _inputs(self, row: Row) -> tuple[Any, ...]:
        inputs = row_inputs(row, self.device)
        return (*inputs, *tree_arguments(row, self.device)) if self.rewritten.carries_state else inputs

    def _result(self, row: Row, tensors: tuple[Tensor, ...]) -> RowResult:
        batched = self.rewritten.batched
        return RowResult(row, tuple(t[0] if has_batch else t for t, has_batch in zip(tensors, batched, strict=True)))


def make_program(unpacked: Unpacked, backend: str) -> Program:
    """Captures, rewrites, splits and compiles a model in the mode that it is in.

    Args:
        unpacked: the model.
        backend: one of BACKENDS.

    Raises:
        RefusedModelError: the model cannot be proved exact on a prefix tree.
    """
    rewritten = rewrite_model(unpacked)
    return Program(rewritten, Blocks(rewritten.graph_module, BACKENDS[backend]), unpacked.device)


def prove_further(program: Program, unpacked: Unpacked, backend: str, tokens: int) -> Program:
    """The program for sequences of up to `tokens` tokens, as far as that can be proved.

    Static values are evaluated at longer lengths. Where they say the same, the compiled blocks stay in use; where not,
    the program has not been checked yet.

    Raises:
        RefusedModelError: at longer lengths, the model cannot be proved exact on a prefix tree.
    """
    rewritten = rewrite_model(unpacked, reach=1 << (tokens - 1).bit_length())
    if rewritten.trail.stages["rewritten"] == program.rewritten.trail.stages["rewritten"]:
        return replace(program, rewritten=rewritten)
    blocks = Blocks(rewritten.graph_module, BACKENDS[backend])
    return replace(program, rewritten=rewritten, blocks=blocks, checked=False)


def row_inputs(row: Row, device: torch.device) -> tuple[Any, ...]:
    """The arguments of a rewritten graph for one row, in its order."""
    inputs = [_on_device(values, device)[None] for values in row.inputs.values()]
    position = _on_device(row.position, device)
    rows = np.arange(len(row.tokens), max(len(row.tokens), _FEWEST_TOKENS)) + 1
    subtree_end = torch.from_numpy(np.concatenate([row.subtree_end, rows])).to(device, non_blocking=True)
    length = max(int(row.position.max()) + 1, _FEWEST_TOKENS)
    return (*inputs, _segments(row), position, subtree_end, length)


def tree_arguments(row: Row, device: torch.device) -> tuple[Tensor, ...]:
    """The arguments that follow where the graph has layers that carry a state, in the order of TREE_INPUTS."""
    tree = tree_of_segments(row.segments, row.parent, _FEWEST_TOKENS).to(device)
    return tuple(getattr(tree, name) for name in TREE_INPUTS.values())


def _segments(row: Row) -> Tensor:
    missing = max(0, _FEWEST_TOKENS - len(row.segments))
    return torch.from_numpy(np.pad(row.segments, ((0, missing), (0, 0))))


def _on_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    missing = max(0, _FEWEST_TOKENS - len(values))
    padded = np.pad(values.astype(np.int64, copy=False), (0, missing))
    return torch.from_numpy(padded).to(device, non_blocking=True)
