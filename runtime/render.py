"""Plan -> text: the tree and the rows, drawn in proportion to their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_compile.runtime.plan import Plan

__all__ = ["render_plan"]


def render_plan(plan: Plan, width: int) -> str:
    """Draws the tree and the rows of a plan."""
    return f"{plan.sequences} sequences {width}"
