"""Plan -> a page for the browser: rows and tree, drawn in proportion to their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from tree_compile.runtime.counts import count_of

if TYPE_CHECKING:
    from tree_compile.runtime.plan import Plan
    from tree_compile.runtime.sequences import IntArray
    from tree_compile.runtime.tree import PrefixTree

__all__ = ["plan_page"]

# All lengths are in pixels of a page that is not scaled.
_LEFT, _FULL, _RIGHT = 54, 930, 216
_LINE, _BAR, _AXIS = 20, 16, 22
_LEAF, _LEAST_LEAF, _TREE = 18, 2, 1600
_LEAST_WIDTH = 0.5
_DIGIT, _MARGIN, _LABEL_HEIGHT = 6.5, 8, 12
_TICK_GAP = 60
# Where the words beside a bar end, counted from the start of the bar.
_COLUMN_NAMES, _COLUMNS = ("row", "tokens", "filled", "sequences"), (-14, _FULL + 88, _FULL + 140, _FULL + 206)

_MAX_ROWS, _MAX_BLOCKS, _MAX_SEGMENTS, _MAX_IDS = 2_000, 12_000, 2_000, 6
# Neighbours are five steps of the circle apart, so that they are told from each other.
_HUES = [(250 + 150 * branch) % 360 for branch in range(12)]
_LEVELS = 4

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --soft: #656d76; --line: #d8dee4; --room: #f3f5f7;
  --l0: .55; --l1: .7; --l2: .8; --l3: .87; --c0: .14; --c1: .12; --c2: .09; --c3: .06;
  --on0: #fff; --on1: #111; --small: #b6bcc3; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --text: #e6edf3; --soft: #8b949e; --line: #2d343c;
  --room: #191f26; --l0: .76; --l1: .6; --l2: .48; --l3: .39; --on0: #111; --on1: #fff; --small: #59616b; } }
body { margin: 0 auto; padding: 24px; max-width: 1200px; background: var(--page); color: var(--text);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 12px; } h2 { font-size: 17px; margin: 36px 0 2px; }
p { margin: 0 0 8px; color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: 10px 36px; margin: 0 0 8px; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
svg { display: block; max-width: 100%; height: auto; }
svg.axis { position: sticky; top: 0; background: var(--page); }
ul { display: flex; flex-wrap: wrap; gap: 4px 20px; list-style: none; margin: 4px 0 8px; padding: 0; font-size: 12px; }
li svg { display: inline-block; vertical-align: -2px; margin-right: 5px; }
text { font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; fill: var(--text); }
text.soft { fill: var(--soft); } text.end { text-anchor: end; } text.mid { text-anchor: middle; }
.in { pointer-events: none; fill: var(--on1); } .in.d0 { fill: var(--on0); }
line { stroke: var(--line); }
rect { fill: oklch(var(--l) var(--c) var(--h)); }
rect.b { stroke: var(--page); } rect:hover { opacity: .75; }
.d0 { --l: var(--l0); --c: var(--c0); } .d1 { --l: var(--l1); --c: var(--c1); }
.d2 { --l: var(--l2); --c: var(--c2); } .d3 { --l: var(--l3); --c: var(--c3); }
.t { --h: 255; --c: .025; } rect.small { fill: var(--small); }
rect.room { fill: var(--room); stroke: var(--line); } rect.padding { fill: url(#hatch); stroke: var(--line); }
pattern path { stroke: var(--soft); fill: none; }
"""
_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M-1 1 1 -1M0 6 6 0M5 7 7 5"/>'
    "</pattern>"
)


def plan_page(plan: Plan) -> str:
    """Draws a plan as one page of HTML, which is well-formed XML too and needs nothing else.

    First the numbers. Then a bar for every row, in which the segments of the tree are blocks in proportion to their
    tokens; a block tells more when the pointer is on it. Then the tree, where x is the position and y the leaves.
    A prefix has the same colour everywhere. Where there are too many, small neighbours are one grey block, and the
    first rows and the segments with the most tokens below them are shown.
    """
    shades = _shades(plan.tree)
    parts = [*_heading(plan), *_legend(plan, shades), *_rows(plan, shades), *_tree(plan.tree, shades)]
    style = _STYLE + "".join(f".h{hue} {{ --h: {degrees}; }}\n" for hue, degrees in enumerate(_HUES))
    head = f'<meta charset="utf-8"/><title>Plan</title>\n<style>{style}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'


@dataclass(frozen=True)
class _Shade:
    """How a segment is drawn: its CSS classes; and its depth in the tree."""

    classes: str
    depth: int


def _shades(tree: PrefixTree) -> list[_Shade]:
    """What most sequences go through is grey. Each branch off it has a hue, fainter with every level."""
    is_common = (2 * tree.sequences_through > len(tree.sequence_length)).tolist()
    shades: list[_Shade] = []
    hues: list[int] = []
    levels: list[int] = []
    branches = 0
    for segment, above in enumerate(tree.parent.tolist()):
        starts = above < 0 or is_common[above] != is_common[segment]
        levels.append(0 if starts else levels[above] + 1)
        hues.append(branches % len(_HUES) if starts else hues[above])
        branches += starts and not is_common[segment]
        hue = "t" if is_common[segment] else f"h{hues[-1]}"
        depth = shades[above].depth + 1 if above >= 0 else 0
        shades.append(_Shade(f"{hue} d{min(levels[-1], _LEVELS - 1)}", depth))
    return shades


@dataclass(frozen=True, eq=False)
class _Paths:
    """The segments on the paths of some sequences in pre-order.

    The sequences through the k-th of them are those from `first[k]` up to `past[k]`.
    """

    segments: IntArray
    sequences: IntArray
    first: IntArray
    past: IntArray

    def through(self, index: int) -> IntArray:
        return self.sequences[self.first[index] : self.past[index]]


def _paths(tree: PrefixTree, parent: list[int], sequences: IntArray) -> _Paths:
    ends = tree.sequence_segment[sequences]
    order = np.argsort(ends, kind="stable")
    ends = ends[order]
    held = np.array(_with_parents(parent, ends.tolist()))
    first, past = np.searchsorted(ends, held), np.searchsorted(ends, tree.subtree_end[held])
    return _Paths(held, sequences[order], first, past)


def _with_parents(parent: list[int], segments: list[int]) -> list[int]:
    held: set[int] = set()
    for start in segments:
        segment = start
        while segment >= 0 and segment not in held:
            held.add(segment)
            segment = parent[segment]
    return sorted(held)


def _heading(plan: Plan) -> Iterator[str]:
    yield "<h1>Plan</h1>"
    numbers = [
        ("sequences", f"{plan.sequences:,}"),
        ("tokens in", f"{plan.input_tokens:,}"),
        ("tokens computed", f"{plan.packed_tokens:,}"),
        ("fewer tokens", f"{plan.input_tokens / plan.packed_tokens:.2f}x"),
        ("rows", f"{len(plan.rows):,}"),
    ]
    if plan.row_tokens is not None:
        numbers += [
            ("tokens in a row, at most", f"{plan.row_tokens:,}"),
            ("rows filled", _percent(plan.packed_tokens, len(plan.rows) * plan.row_tokens)),
            ("row bound", f"{plan.row_bound:,}"),
            ("token bound", f"{plan.token_bound:,}"),
        ]
    yield f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{number}</dd></div>' for name, number in numbers)}</dl>"
    if plan.row_tokens is not None:
        yield "<p>No packing of this tree has fewer rows, or fewer tokens, than the bounds say.</p>"


def _legend(plan: Plan, shades: list[_Shade]) -> Iterator[str]:
    used = {shade.classes.split()[-1] for shade in shades if not shade.classes.startswith("t")}
    entries = [("t d0", "on the way of most sequences")] if any(shade.classes == "t d0" for shade in shades) else []
    levels = [(f"d{level}", text) for level, text in enumerate(("a branch", "below it", "deeper", "deeper still"))]
    entries += [(f"h0 {level}", text) for level, text in levels if level in used]
    entries += [("small", "small segments together"), ("padding", "padding") if plan.padded else ("room", "free")]
    items = "".join(f"<li>{_SWATCH.format(classes)}{text}</li>" for classes, text in entries)
    # The pattern has to stand in a picture that is shown.
    yield f'<svg width="0" height="0"><defs>{_HATCH}</defs></svg>'
    yield f"<h2>Rows</h2>\n<p>One bar is one forward pass. {_COLOURS}</p>\n<ul>{items}</ul>"


_SWATCH = '<svg width="14" height="12"><rect x="1" y="1" width="12" height="10" class="{}"/></svg>'
_COLOURS = "The same prefix has the same colour in all rows and in the tree. Point at a block to see more."


def _rows(plan: Plan, shades: list[_Shade]) -> Iterator[str]:
    shown = plan.rows[:_MAX_ROWS]
    full = plan.row_tokens or max(row.length for row in shown)
    parent = plan.tree.parent.tolist()
    paths = [_paths(plan.tree, parent, np.array(row.sequence_ids)) for row in shown]
    least = _least_tokens([plan.tree.length[held.segments] for held in paths], full)
    yield _axis(full, [(_LEFT + x, word) for x, word in zip(_COLUMNS, _COLUMN_NAMES, strict=True)])
    lines = []
    for index, (row, held) in enumerate(zip(shown, paths, strict=True)):
        blocks = _row_blocks(plan.tree, shades, held, full, least)
        rest = _rest(row.length, full, plan.padded)
        words = _row_words(index, row.length, full, len(row.sequence_ids))
        lines.append(f'<g transform="translate({_LEFT} {index * _LINE + 2})">{words}{rest}{"".join(blocks)}</g>')
    yield _svg(len(shown) * _LINE + 4, lines)
    if len(shown) < len(plan.rows):
        yield f"<p>… {count_of(len(plan.rows) - len(shown), 'more row')}</p>"


def _least_tokens(lengths: list[IntArray], full: int) -> float:
    """What a segment needs for a block of its own: half a pixel, or more where there would be too many blocks."""
    half_pixel = _LEAST_WIDTH * full / _FULL
    every = np.concatenate(lengths)
    if len(every) <= _MAX_BLOCKS:
        return half_pixel
    return max(half_pixel, float(np.partition(every, -_MAX_BLOCKS)[-_MAX_BLOCKS]) + 1)


def _row_blocks(tree: PrefixTree, shades: list[_Shade], held: _Paths, full: int, least: float) -> Iterator[str]:
    tokens = tree.length[held.segments]
    edges = np.append(0, np.cumsum(tokens)).tolist()
    segments, scale = held.segments.tolist(), _FULL / full
    for first, past in _runs(tokens.tolist(), least):
        x, width = edges[first] * scale, (edges[past] - edges[first]) * scale
        if past - first > 1:
            text = f"{past - first:,} small segments, {count_of(edges[past] - edges[first], 'token')}"
            yield _rect(x, 0, width, _BAR, "small", text)
            continue
        shade = shades[segments[first]]
        text = _about(tree, segments[first], shade, held.through(first))
        yield _rect(x, 0, width, _BAR, shade.classes, text)
        yield _inside(x, 0, width, _BAR, shade.classes, f"{edges[past] - edges[first]:,}")


def _runs(tokens: list[int], least: float) -> Iterator[tuple[int, int]]:
    """Neighbours to draw as one block, as ranges: each segment alone that is large enough, the others together."""
    first = 0
    for index, length in enumerate(tokens):
        if length >= least:
            if first < index:
                yield first, index
            yield index, index + 1
            first = index + 1
    if first < len(tokens):
        yield first, len(tokens)


def _rest(length: int, full: int, padded: bool) -> str:
    if length == full:
        return ""
    classes, word = ("padding", "padding") if padded else ("room", "free")
    x = length * _FULL / full
    return _rect(x, 0, _FULL - x, _BAR, classes, f"{count_of(full - length, 'token')} {word}")


def _row_words(index: int, length: int, full: int, sequences: int) -> str:
    filled = _percent(length, full)
    about = f"row {index}: {length:,} of {count_of(full, 'token')} ({filled}) in {count_of(sequences, 'sequence')}"
    words = (f"{index}", f"{length:,}", filled, f"{sequences:,}")
    place = f'class="end" y="{_BAR - 4}"'
    texts = "".join(f'<text {place} x="{x}">{word}</text>' for x, word in zip(_COLUMNS, words, strict=True))
    return f"<g><title>{escape(about)}</title>{texts}</g>"


def _tree(tree: PrefixTree, shades: list[_Shade]) -> Iterator[str]:
    shown, longest = tree.largest(_MAX_SEGMENTS), int(tree.end.max())
    yield "<h2>Tree</h2>"
    yield (
        f"<p>{count_of(len(tree), 'segment')} and {count_of(len(tree.leaves), 'leaf', 'leaves')}. From left to right "
        "the position in a sequence; the height of a segment is that of all leaves shown below it.</p>"
    )
    if len(shown) < len(tree):
        hidden = int(tree.length.sum() - tree.length[shown].sum())
        yield (
            f"<p>The {len(shown):,} segments with the most tokens below them are shown; "
            f"{count_of(len(tree) - len(shown), 'smaller one')} with {count_of(hidden, 'token')} left out.</p>"
        )
    yield _axis(longest, [])
    past = np.searchsorted(shown, tree.subtree_end[shown])
    is_leaf = past == np.arange(1, len(shown) + 1)
    leaf_height = min(_LEAF, max(_LEAST_LEAF, _TREE / is_leaf.sum()))
    edges = np.append(0, np.cumsum(is_leaf)) * leaf_height
    blocks = _tree_blocks(tree, shades, shown, _FULL / longest, zip(edges.tolist(), edges[past].tolist(), strict=False))
    yield _svg(edges[-1] + 4, [f'<g transform="translate({_LEFT} 2)">', *blocks, "</g>"])


def _tree_blocks(
    tree: PrefixTree, shades: list[_Shade], shown: IntArray, scale: float, edges: Iterable[tuple[float, float]]
) -> Iterator[str]:
    held = _paths(tree, tree.parent.tolist(), np.arange(len(tree.sequence_length)))
    for segment, (top, bottom) in zip(shown.tolist(), edges, strict=False):
        tokens, shade, through = int(tree.length[segment]), shades[segment], held.through(segment)
        # What is narrower than a pixel would be pale.
        x, width, height = int(tree.start[segment]) * scale, max(1, tokens * scale), bottom - top
        yield _rect(x, top, width, height, shade.classes, _about(tree, segment, shade, through))
        word = f"{tokens:,}" if len(through) == 1 else f"{tokens:,} x {len(through):,}"
        yield _inside(x, top, width, height, shade.classes, word)


def _about(tree: PrefixTree, segment: int, shade: _Shade, through: IntArray) -> str:
    tokens, start = int(tree.length[segment]), int(tree.start[segment])
    few = np.sort(through if len(through) <= _MAX_IDS else np.partition(through, _MAX_IDS)[:_MAX_IDS])
    ids = ", ".join(map(str, few.tolist())) + (", …" if len(through) > _MAX_IDS else "")
    return (
        f"{count_of(tokens, 'token')}, positions {start:,} to {start + tokens - 1:,}, depth {shade.depth}\n"
        f"{count_of(len(through), 'sequence')}: {ids}"
    )


def _rect(x: float, y: float, width: float, height: float, classes: str, about: str) -> str:
    # A block that is narrower than its border would not be seen.
    border = " b" if min(width, height) >= 3 else ""
    down = f' y="{_short(y)}"' if y else ""
    place = f'x="{_short(x)}"{down} width="{_short(width)}" height="{_short(height)}"'
    return f'<rect {place} class="{classes}{border}"><title>{escape(about)}</title></rect>'


def _inside(x: float, y: float, width: float, height: float, classes: str, word: str) -> str:
    """A word in the middle of a block, where it fits."""
    if width < len(word) * _DIGIT + _MARGIN or height < _LABEL_HEIGHT:
        return ""
    place = f'x="{_short(x + width / 2)}" y="{_short(y + height / 2 + 4)}"'
    return f'<text class="in mid {classes}" {place}>{escape(word)}</text>'


def _axis(full: int, columns: Iterable[tuple[int, str]]) -> str:
    """Counts of tokens along a bar, and the names of what stands beside it. Stays in sight while the page scrolls."""
    parts = [f'<text class="soft end" x="{x}" y="12">{word}</text>' for x, word in columns]
    for tokens in _ticks(full):
        x = _short(_LEFT + tokens * _FULL / full)
        parts.append(f'<line x1="{x}" x2="{x}" y1="16" y2="{_AXIS}"/>')
        parts.append(f'<text class="soft mid" x="{x}" y="12">{tokens:,}</text>')
    return _svg(_AXIS, parts, "axis")


def _ticks(full: int) -> list[int]:
    """Round numbers from 0 on, and `full`; the last round one is left out where it is too near."""
    step = next(base * 10**zeros for zeros in range(20) for base in (1, 2, 5) if base * 10**zeros * 10 >= full)
    return [*range(0, full - int(full * _TICK_GAP / _FULL), step), full]


def _svg(height: float, parts: list[str], classes: str = "") -> str:
    width = _LEFT + _FULL + _RIGHT
    named = f' class="{classes}"' if classes else ""
    box = f'width="{width}" height="{_short(height)}" viewBox="0 0 {width} {_short(height)}"'
    return f"<svg{named} {box}>\n" + "\n".join(parts) + "\n</svg>"


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _percent(part: int, whole: int) -> str:
    """Rounded down: a row with a hole is not full."""
    return f"{1000 * part // whole / 10}%"
