"""A rewritten model, split and compiled, and how a row becomes its inputs and its results a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tree_compile.blocks import Blocks, as_it_is, compiled
from tree_compile.failures import of_tables
from tree_compile.output import RowResult
from tree_compile.pipeline import Rewritten, rewrite_model
from tree_compile.runtime.row import Row
from tree_compile.unpacked import PlainModel

BACKENDS = {"inductor": compiled, "eager": as_it_is}


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
            return self._result(row, self.blocks(*self.rewritten.inputs(row, self.device)))

    def run_uncompiled(self, row: Row) -> RowResult:
        """Computes one row with the rewritten graph as it is."""
        return self._result(row, self.rewritten.graph_module(*self.rewritten.inputs(row, self.device)))

    def _result(self, row: Row, tensors: tuple[Tensor, ...]) -> RowResult:
        return RowResult(row, tuple(self.rewritten.without_batch(tensors)))


def make_program(plain: PlainModel, backend: str) -> Program:
    """Captures, rewrites, splits and compiles a model in the mode that it is in.

    Args:
        plain: the model.
        backend: one of BACKENDS.

    Raises:
        RefusedModelError: the model cannot be proved exact on a prefix tree.
    """
    rewritten = rewrite_model(plain)
    return Program(rewritten, Blocks(rewritten.graph_module, BACKENDS[backend]), plain.device)


def prove_further(program: Program, plain: PlainModel, backend: str, tokens: int) -> Program:
    """The program for sequences of up to `tokens` tokens, as far as that can be proved.

    Static values are evaluated at longer lengths. Where they say the same, the compiled blocks stay in use; where not,
    the program has not been checked yet.

    Raises:
        RefusedModelError: at longer lengths, the model cannot be proved exact on a prefix tree.
    """
    rewritten = rewrite_model(plain, 1 << (tokens - 1).bit_length(), program.rewritten.example_tokens)
    if rewritten.trail.stages["rewritten"] == program.rewritten.trail.stages["rewritten"]:
        return replace(program, rewritten=rewritten)
    blocks = Blocks(rewritten.graph_module, BACKENDS[backend])
    return replace(program, rewritten=rewritten, blocks=blocks, checked=False)
