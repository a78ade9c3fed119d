"""A readable account of what became of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tree_compile.errors import SourceLine
from tree_compile.passes.finding import Finding
from tree_compile.passes.flash import KernelsOfGraph, kernels_of
from tree_compile.programs import Program
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.depths import depths_of
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import tree_of_segments
from tree_compile.runtime.state_scan import levels_of

_INSTALLED = f"{os.sep}site-packages{os.sep}"


@dataclass(frozen=True)
class RowStates:
    """What the layers that carry a state do for one row.

    Attributes:
        tokens: T.
        depth: segments on the longest path: so many calls per pass and layer where kernels take one depth at a time.
        chunks: chunks of the row, each with a state in every layer.
        levels: chunks on the longest path: so many steps per pass and layer elsewhere.
        state_bytes: of all layers together.
    """

    tokens: int
    depth: int
    chunks: int
    levels: int
    state_bytes: int

    def __str__(self) -> str:
        return (
            f"a row of {count_of(self.tokens, 'token')}: depth {self.depth}, {count_of(self.chunks, 'chunk')} in "
            f"{count_of(self.levels, 'level')}, {self.state_bytes:,} bytes of states"
        )


@dataclass(frozen=True)
class Explanation:
    """What every mixing node of the user's model became.

    Attributes:
        findings: one for each, in the order of the model.
        limits: longest sequence and its line, for each limit that the capture found.
        vocabulary: number of token ids, or None.
        blocks: number of blocks, and how many of them have code of their own.
        rows: what layers that carry a state do for the rows that were asked for.
        asked_rows: how many rows were asked for.
        kernels: what computes attention on CUDA, and for how many of the rows; empty where nothing is to be said.
    """

    findings: tuple[Finding, ...]
    limits: tuple[tuple[int, SourceLine | None], ...]
    vocabulary: int | None
    blocks: tuple[int, int]
    rows: tuple[RowStates, ...] = ()
    asked_rows: int = 0
    kernels: str = ""

    def __str__(self) -> str:
        lines = [_findings_text(alike) for alike in _alike(self.findings)]
        lines += [f"at most {tokens} tokens in a sequence{_at(where)}" for tokens, where in self.limits]
        if self.vocabulary is not None:
            lines.append(f"token ids below {self.vocabulary}")
        lines.append(f"{count_of(self.blocks[0], 'block')}, {self.blocks[1]} of them with code of their own")
        lines += [self.kernels] if self.kernels else []
        lines.append("every other operation is proved to work token by token")
        lines += map(str, self.rows)
        if self.asked_rows and not self.rows:
            lines.append(f"no layer is known to carry a state: there is none in {count_of(self.asked_rows, 'row')}")
        return "\n".join(lines)


def _alike(findings: Sequence[Finding]) -> Iterable[Sequence[Finding]]:
    """Findings that became the same at the same line, as in layer after layer, where the first of them stands."""
    groups: dict[Finding, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(replace(finding, module="", state_bytes=0), []).append(finding)
    return groups.values()


def _findings_text(alike: Sequence[Finding]) -> str:
    first, last = alike[0], alike[-1]
    place = f" in {first.module}" if first.module else ""
    if len(alike) > 1:
        place += f" … {last.module} ({len(alike)} times)" if last.module != first.module else f" ({len(alike)} times)"
    return f"{first.kind}{place}{_at(first.where)}\n    -> {first.became}"


def _at(where: SourceLine | None) -> str:
    """The line, with the path of an installed package from the package on."""
    return f"  ({str(where).rpartition(_INSTALLED)[2]})" if where is not None else ""


def explain(program: Program, rows: Sequence[Row] = ()) -> Explanation:
    """Collects what all passes found, and what it comes to for some rows."""
    findings = tuple(program.rewritten.trail.findings)
    limits = tuple((limit.tokens, limit.where) for limit in program.rewritten.limits)
    blocks = (len(program.blocks.blocks), program.blocks.distinct)
    states = sum(finding.state_bytes for finding in findings)
    costs = tuple(_row_states(row, states) for row in rows if states)
    return Explanation(
        findings, limits, program.rewritten.vocabulary, blocks, costs, len(rows), _kernels(program, rows)
    )


def _kernels(program: Program, rows: Sequence[Row]) -> str:
    """What computes attention on CUDA, and why not something else."""
    by_row = program.flash
    found = kernels_of((program if by_row is None else by_row.program).rewritten.graph_module)
    parts = []
    if found.flash:
        either = "flash attention" if by_row is None else "flex_attention or flash attention, whichever is faster"
        parts.append(f"{count_of(found.flash, 'attention')} by {either}")
    if by_row is not None and rows:
        parts.append(f"flash attention for {sum(map(by_row.graph.is_faster, rows))} of {count_of(len(rows), 'row')}")
    if found.flex:
        parts.append(f"{count_of(found.flex, 'attention')} by flex_attention{_because(program, found)}")
    if not parts and program.attention != "auto":
        parts.append(f'attention="{program.attention}" is for CUDA, and says nothing here')
    return "\n".join(parts)


def _because(program: Program, found: KernelsOfGraph) -> str:
    return f": {'; '.join(found.reasons)}" if program.attention == "auto" else ""


def _row_states(row: Row, bytes_per_chunk: int) -> RowStates:
    tree = tree_of_segments(row.segments, row.parent)
    chunks, levels = len(tree.chunk_parent), len(levels_of(tree.chunk_parent, tree.chunk_parent.device))
    return RowStates(len(row.tokens), len(depths_of(row.segments)), chunks, levels, chunks * bytes_per_chunk)
