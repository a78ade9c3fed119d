"""Runs passes over a graph: after each it is cleaned and checked, and its text and what was found are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from tree_compile.passes.finding import Finding
from tree_compile.passes.functional import writes


class Pass(Protocol):
    """Changes a graph in place, or refuses it."""

    @property
    def name(self) -> str:
        """Name of the stage that the graph is in after it."""
        ...

    def __call__(self, graph_module: fx.GraphModule, /) -> tuple[Finding, ...]:
        """Returns what it rewrote, in the order of the graph."""
        ...


@dataclass
class Trail:
    """What happened to a graph.

    Attributes:
        stages: the graph's code after each pass, by the pass's name, and as captured.
        findings: what the passes found, in order.
    """

    stages: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    _last: tuple[str, str] = ("", "")

    def note(self, stage: str, graph_module: fx.GraphModule) -> None:
        """Brings the code up to date, and keeps its text, which is slow to write: most passes change nothing."""
        code = graph_module.recompile()
        if code.src != self._last[0]:
            self._last = code.src, _readable(graph_module, code.globals)
        self.stages[stage] = self._last[1]


def run_pass(graph_module: fx.GraphModule, graph_pass: Pass, trail: Trail) -> None:
    """Runs one pass, removes what nothing uses any more, and checks the graph."""
    trail.findings += graph_pass(graph_module)
    remove_unused(graph_module.graph)
    graph_module.graph.lint()
    trail.note(graph_pass.name, graph_module)


def remove_unused(graph: fx.Graph) -> None:
    """Erases nodes without users. fx keeps random ones, such as the dropout of an attention that was replaced."""
    for node in reversed(graph.nodes):
        if node.op not in ("placeholder", "output") and not node.users and not writes(node):
            graph.erase_node(node)


def _readable(graph_module: fx.GraphModule, names: Mapping[str, Any]) -> str:
    """The graph as runnable Python, with the shapes of its values and the lines that they come from.

    `forward` of the class can be called with the model itself as `self`.
    """
    code = graph_module.print_readable(print_output=False)
    used = {name: value for name, value in names.items() if re.search(rf"\b{name}\b", code)}
    return "\n".join([*_imports(used), "", "", code.strip(), ""])


def _imports(used: Mapping[str, Any]) -> list[str]:
    """Import statements for the global names of generated code."""
    lines = ["import torch"]
    for name, value in used.items():
        if name != "torch" and hasattr(value, "__module__"):
            lines.append(f"from {value.__module__} import {value.__name__} as {name}")
        elif isinstance(value, float):
            lines.append(f"from math import {name}")
    return sorted(set(lines), key=lambda line: (line != "import torch", line))
