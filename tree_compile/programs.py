"""A rewritten model, split and compiled, and how a row becomes its inputs and its results a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_compile.blocks import Blocks, as_it_is, compiled
from tree_compile.errors import RefusedModelError
from tree_compile.output import RowResult
from tree_compile.passes.plan_inputs import TREE_INPUTS
from tree_compile.pipeline import Rewritten, rewrite_model
from tree_compile.rehearsal import longer_example
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import tree_of_segments
from tree_compile.runtime.windows import windows_of_row
from tree_compile.short_lengths import same_when_short
from tree_compile.unpacked import Unpacked

BACKENDS = {"inductor": compiled, "eager": as_it_is}
_LONGEST_EXAMPLE = 4_096
_FEWEST_TOKENS = 2
"""torch.compile makes a program of its own for sizes 0 and 1, and torch.export assumes at least 2."""


@dataclass(frozen=True)
class Program:
    """A rewritten model, ready to run.

    Attributes:
        rewritten: the model's rewritten graph.
        blocks: the same, split and compiled.
        device: where its inputs have to be.
        example_tokens: tokens of the sequence that it was captured with; 0 for a few dozen.
        checked: whether it was compared with the unpacked model.
    """

    rewritten: Rewritten
    blocks: Blocks
    device: torch.device
    example_tokens: int = 0
    checked: bool = False

    def run(self, row: Row) -> RowResult:
        """Computes one row."""
        return self._result(row, self.blocks(*self._inputs(row)))

    def run_uncompiled(self, row: Row) -> RowResult:
        """Computes one row with the rewritten graph as it is."""
        return self._result(row, self.rewritten.graph_module(*self._inputs(row)))

    def _inputs(self, row: Row) -> tuple[Any, ...]:
        windows = self.rewritten.windows
        inputs = row_inputs(row, self.device, max((window for window, _ in windows), default=0))
        tree = tree_arguments(row, self.device) if self.rewritten.carries_state else ()
        return (*inputs, *tree, *window_arguments(row, self.device, windows))

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
    program = _program(unpacked, backend)
    while (limit := program.rewritten.limit_of_windows) < _LONGEST_EXAMPLE:
        # The model's code takes another way once there is a window, and that may hold for shorter sequences as well.
        try:
            longer = _program(unpacked, backend, longer_example(unpacked, limit))
        except RefusedModelError:
            break
        if longer.rewritten.limit_of_windows <= limit:
            break
        program = longer
    return program


def _program(unpacked: Unpacked, backend: str, example_tokens: int = 0) -> Program:
    rewritten = rewrite_model(unpacked, example_tokens=example_tokens)
    blocks = Blocks(rewritten.graph_module, BACKENDS[backend])
    program = Program(rewritten, blocks, unpacked.device, example_tokens)
    short = rewritten.short
    if short is not None and (rewritten.random or not same_when_short(unpacked, program.run_uncompiled, rewritten)):
        raise short.error
    return program


def prove_further(program: Program, unpacked: Unpacked, backend: str, tokens: int) -> Program:
    """The program for sequences of up to `tokens` tokens, as far as that can be proved.

    Static values are evaluated at longer lengths. Where they say the same, the compiled blocks stay in use; where not,
    the program has not been checked yet.

    Raises:
        RefusedModelError: at longer lengths, the model cannot be proved exact on a prefix tree.
    """
    rewritten = rewrite_model(unpacked, 1 << (tokens - 1).bit_length(), program.example_tokens)
    if rewritten.trail.stages["rewritten"] == program.rewritten.trail.stages["rewritten"]:
        return replace(program, rewritten=rewritten)
    blocks = Blocks(rewritten.graph_module, BACKENDS[backend])
    return replace(program, rewritten=rewritten, blocks=blocks, checked=False)


def row_inputs(row: Row, device: torch.device, least: int = 0) -> tuple[Any, ...]:
    """The arguments of a rewritten graph for one row, in its order; tables are made for `least` positions at least."""
    inputs = [_on_device(values, device)[None] for values in row.inputs.values()]
    position = _on_device(row.position, device)
    rows = np.arange(len(row.tokens), max(len(row.tokens), _FEWEST_TOKENS)) + 1
    subtree_end = torch.from_numpy(np.concatenate([row.subtree_end, rows])).to(device, non_blocking=True)
    length = max(int(row.position.max()) + 1, _FEWEST_TOKENS, least)
    return (*inputs, _segments(row), position, subtree_end, length)


def tree_arguments(row: Row, device: torch.device) -> tuple[Tensor, ...]:
    """The arguments that follow where the graph has layers that carry a state, in the order of TREE_INPUTS."""
    tree = tree_of_segments(row.segments, row.parent, _FEWEST_TOKENS).to(device)
    return tuple(getattr(tree, name) for name in TREE_INPUTS.values())


def window_arguments(row: Row, device: torch.device, fields: Sequence[tuple[int, str]]) -> tuple[Tensor, ...]:
    """The arguments that follow where the graph pools windows: fields of `WindowTables`, each with its window."""
    tables = {window: windows_of_row(row, window, _FEWEST_TOKENS) for window in dict(fields)}
    tensors = {(window, name): torch.from_numpy(getattr(tables[window], name)) for window, name in fields}
    return tuple(
        tensor if name == "ranges" else tensor.to(device, non_blocking=True) for (_, name), tensor in tensors.items()
    )


def _segments(row: Row) -> Tensor:
    missing = max(0, _FEWEST_TOKENS - len(row.segments))
    return torch.from_numpy(np.pad(row.segments, ((0, missing), (0, 0))))


def _on_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    missing = max(0, _FEWEST_TOKENS - len(values))
    padded = np.pad(values.astype(np.int64, copy=False), (0, missing))
    return torch.from_numpy(padded).to(device, non_blocking=True)
