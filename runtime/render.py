"""Plan -> text: the tree and the rows, drawn in proportion to their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tree_compile.runtime.counts import count_of
from tree_compile.runtime.depths import depth_of_each
from tree_compile.runtime.layout import END, PARENT

if TYPE_CHECKING:
    from tree_compile.runtime.plan import Plan
    from tree_compile.runtime.row import Row
    from tree_compile.runtime.tree import PrefixTree

__all__ = ["render_plan"]

_MIN_WIDTH = 60
_MAX_LINES = 24
# One shade per depth; the last one serves all greater depths.
_SHADES = "█▓▒░"


def render_plan(plan: Plan, width: int = 100) -> str:
    """Draws a plan.

    First a summary. Then one line per segment of the tree, where a bar spans the positions of its tokens, so that
    children lie to the right of their parent. Then one line per row, where every segment is a stretch of a bar in
    the shade of its depth. Where there are too many, the segments with the most tokens below them and the first
    rows are shown.

    Args:
        plan: what to draw.
        width: columns to use, at least 60.

    Raises:
        ValueError: `width` is below 60.
    """
    if width < _MIN_WIDTH:
        raise ValueError(f"width is {width}; it must be at least {_MIN_WIDTH} columns")
    lines = [*_summary(plan), "", *_tree_lines(plan.tree, width), "", *_row_lines(plan, width)]
    return "\n".join(line.rstrip() for line in lines)


def _summary(plan: Plan) -> list[str]:
    sequences, saved = count_of(plan.sequences, "sequence"), plan.input_tokens / plan.packed_tokens
    lines = [f"{sequences}: {plan.input_tokens:,} tokens in, {plan.packed_tokens:,} computed ({saved:.2f}x fewer)"]
    if plan.row_tokens is not None:
        lines.append(f"{count_of(len(plan.rows), 'row')} of at most {plan.row_tokens:,} tokens")
        lines.append(f"bound: {count_of(plan.row_bound, 'row')}, {plan.token_bound:,} tokens; no packing needs fewer")
    return lines


def _tree_lines(tree: PrefixTree, width: int) -> list[str]:
    shown = tree.largest(_MAX_LINES)
    counts = [count_of(number, "sequence") for number in tree.sequences_through[shown].tolist()]
    labels = [f"{tokens:,}" for tokens in tree.length[shown].tolist()]
    label_width, count_width = max(map(len, labels)), max(map(len, counts))
    longest = int(tree.end.max())
    scale = (width - label_width - count_width - 4) / longest
    lines = [f"tree: {count_of(len(tree), 'segment')}, positions 0 to {longest - 1:,} from left to right"]
    for segment, label, count in zip(shown.tolist(), labels, counts, strict=True):
        bar = _span(int(tree.start[segment]), int(tree.end[segment]), scale)
        lines.append(f"{label:>{label_width}}  {bar}  {count}")
    if len(shown) < len(tree):
        lines.append(f"… {count_of(len(tree) - len(shown), 'smaller segment')}")
    return lines


def _span(start: int, end: int, scale: float) -> str:
    first = int(start * scale)
    return " " * first + "█" * max(1, int(end * scale) - first)


def _row_lines(plan: Plan, width: int) -> list[str]:
    shown = plan.rows[:_MAX_LINES]
    labels = [f"row {index}" for index in range(len(shown))]
    counts = [f"{row.length:,} in {count_of(len(row.sequence_ids), 'sequence')}" for row in shown]
    label_width, count_width = max(map(len, labels)), max(map(len, counts))
    cells = width - label_width - count_width - 6
    full = plan.row_tokens or shown[0].length
    lines = ["rows: tokens computed, shaded by depth"]
    for row, label, count in zip(shown, labels, counts, strict=True):
        lines.append(f"{label:<{label_width}}  ▕{_bar(row, cells, full)}▏  {count}")
    if len(shown) < len(plan.rows):
        lines.append(f"… {count_of(len(plan.rows) - len(shown), 'more row')}")
    return lines


def _bar(row: Row, cells: int, full: int) -> str:
    """A row in which `full` tokens take all cells; a segment of two cells or more begins with a line."""
    middle = (np.arange(cells) + 0.5) * full / cells
    segment = np.searchsorted(row.segments[:, END], middle, side="right").tolist()
    shades = [_SHADES[min(depth, len(_SHADES) - 1)] for depth in depth_of_each(row.segments[:, PARENT])] + [" "]
    drawn = [shades[index] for index in segment]
    for cell in range(1, cells - 1):
        if segment[cell - 1] != segment[cell] == segment[cell + 1] < len(row.segments):
            drawn[cell] = "│"
    return "".join(drawn)
