"""A rewritten model, split and compiled, and how a row becomes its inputs and its results a row."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tree_compile.blocks import Blocks, as_it_is, compiled
from tree_compile.call_settings import CallSettings
from tree_compile.failures import of_tables
from tree_compile.heads import RowHead
from tree_compile.passes.flash import FlashGraph, flash_graph
from tree_compile.passes.head import find_head
from tree_compile.pipeline import Rewritten, rewrite_model
from tree_compile.row_result import RowResult
from tree_compile.runtime.row import Row
from tree_compile.unpacked import PlainModel

BACKENDS = {"inductor": compiled, "eager": as_it_is}

_LARGE = 1 << 26
"""Bytes of a model beside which the half second is small that Python takes to look for what was dropped."""


@dataclass(frozen=True)
class Program:
    """A rewritten model, ready to run.

    Attributes:
        rewritten: the model's rewritten graph.
        blocks: the same, split and compiled.
        device: where its inputs have to be.
        attention: one of ATTENTION.
        flash: where rows may take either, the same with kernels of flash attention, compiled when a row first takes it:
            a choice inside of the compiled code would be made anew, and compiled, for every tree.
        checked: whether it was compared with the unpacked model.
    """

    rewritten: Rewritten
    blocks: Blocks
    device: torch.device
    attention: str = "auto"
    flash: FlashProgram | None = None
    checked: bool = False

    def run(self, row: Row) -> RowResult:
        """Computes one row.

        Raises:
            TokenRangeError: one of the model's tables has no entry for a number of the row.
        """
        if self.flash is not None and self.flash.graph.is_faster(row):
            return self.flash.program.run(row)
        with of_tables(row):
            tensors = self.blocks(*self.rewritten.inputs(row, self.device))
        settings = CallSettings.now(self.device.type)
        if self.blocks.head is None:
            return self._result(row, tensors, settings)
        outputs = len(self.rewritten.batched) - 1
        return self._result(row, tensors[:outputs], settings, RowHead(self.blocks.head, tensors[outputs:], settings))

    def run_uncompiled(self, row: Row) -> RowResult:
        """Computes one row with the rewritten graph as it is."""
        tensors = self.rewritten.graph_module(*self.rewritten.inputs(row, self.device))
        return self._result(row, tensors, CallSettings.now(self.device.type))

    def _result(
        self, row: Row, tensors: tuple[Tensor, ...], settings: CallSettings, head: RowHead | None = None
    ) -> RowResult:
        place = self.rewritten.logits_place
        parts = self.rewritten.without_batch(tensors, None if head is None else place)
        return RowResult(row, tuple(parts), settings, place, self.rewritten.router_places, head)


@dataclass(frozen=True)
class FlashProgram:
    """A program with kernels of flash attention.

    Attributes:
        program: the program.
        graph: its graph, which says for which rows it is the faster one.
    """

    program: Program
    graph: FlashGraph


def make_program(plain: PlainModel, backend: str, attention: str) -> Program:
    """Captures, rewrites, splits and compiles a model in the mode that it is in.

    Args:
        plain: the model.
        backend: one of BACKENDS.
        attention: one of ATTENTION.

    Raises:
        RefusedModelError: the model cannot be proved exact on a prefix tree, or flash attention cannot compute it.
    """
    if sum(parameter.nbytes for parameter in plain.model.parameters()) >= _LARGE:
        # A graph of torch.fx refers to itself: what was dropped before holds its memory until Python looks for such.
        gc.collect()
    return _program_of(rewrite_model(plain), backend, plain.device, attention)


def _program_of(rewritten: Rewritten, backend: str, device: torch.device, attention: str) -> Program:
    found = None if attention == "flex" else flash_graph(rewritten.graph_module, require_all=attention == "flash")
    if found is None:
        return Program(rewritten, _blocks_of(rewritten, backend), device, attention)
    by_flash = replace(rewritten, graph_module=found.graph_module)
    flash = Program(by_flash, _blocks_of(by_flash, backend), device, attention)
    if attention == "flash":
        return flash
    return Program(rewritten, _blocks_of(rewritten, backend), device, attention, FlashProgram(flash, found))


def _blocks_of(rewritten: Rewritten, backend: str) -> Blocks:
    """The compiled blocks; the last one is the head, where there is one that can be cut off."""
    graph_module, place = rewritten.graph_module, rewritten.logits_place
    outputs: Any = graph_module.graph.output_node().args[0]
    stands_alone = place is not None and outputs.count(outputs[place]) == 1
    head = find_head(graph_module.graph, outputs[place]) if stands_alone else None
    return Blocks(graph_module, BACKENDS[backend], head)


def prove_further(program: Program, plain: PlainModel, backend: str, tokens: int) -> Program:
    """The program for sequences of up to `tokens` tokens, as far as that can be proved.

    Static values are evaluated at longer lengths. Where they say the same, the compiled blocks stay in use; where not,
    the program has not been checked yet.

    Raises:
        RefusedModelError: as `make_program`, at longer lengths.
    """
    rewritten = rewrite_model(plain, 1 << (tokens - 1).bit_length(), program.rewritten.example_tokens)
    if rewritten.trail.stages["rewritten"] == program.rewritten.trail.stages["rewritten"]:
        # The graph says the same; that of the program may have kernels of flash attention.
        return replace(program, rewritten=replace(rewritten, graph_module=program.rewritten.graph_module))
    return _program_of(rewritten, backend, program.device, program.attention)
