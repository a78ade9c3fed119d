"""Compiles an ordinary causal language model into one that computes every shared token prefix once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_compile.api import TreeModel, treecompile
    from tree_compile.collate import treecompile_collate
    from tree_compile.errors import TreeCompileError
    from tree_compile.runtime.estimate import estimate
    from tree_compile.runtime.plan import Plan
    from tree_compile.runtime.planner import Planner
    from tree_compile.runtime.planning import plan_rows
    from tree_compile.runtime.row import Row
    from tree_compile.runtime.samples import Sample

__all__ = [
    "Plan", "Planner", "Row", "Sample", "TreeCompileError", "TreeModel", "__version__", "estimate", "plan_rows",
    "treecompile", "treecompile_collate",
]  # fmt: skip

__version__ = "0.1.0"

# Loaded on first use: importing torch takes seconds, which `treecompile --help` should not.
_HOME = {
    "Plan": "tree_compile.runtime.plan",
    "Planner": "tree_compile.runtime.planner",
    "Row": "tree_compile.runtime.row",
    "Sample": "tree_compile.runtime.samples",
    "TreeCompileError": "tree_compile.errors",
    "TreeModel": "tree_compile.api",
    "estimate": "tree_compile.runtime.estimate",
    "plan_rows": "tree_compile.runtime.planning",
    "treecompile": "tree_compile.api",
    "treecompile_collate": "tree_compile.collate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
