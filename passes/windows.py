"""Windows of m tokens that a model pools into one entry each: on a tree, an entry for every token that closes one.

A model cuts its tokens to whole windows, `x[:, : T // m * m].view(1, T // m, m, …)`, and computes window by window. In
a row there are as many entries as tokens that close a window, and their tokens are gathered, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from tree_compile.passes.axes import BLANK, TOKENS, Axis, Mixes, Value, broadcast
from tree_compile.passes.finding import Finding
from tree_compile.passes.nodes import arguments
from tree_compile.passes.operators import PADS, SLICES
from tree_compile.passes.plan_inputs import OUTSIDE, window_input
from tree_compile.passes.shapes import Extent, extent, inherited, is_size, shape_of, size_expression, token_symbol
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import StaticValues
from tree_compile.passes.token_rules import RULES, Step
from tree_compile.runtime.window_attention import entries_before, first_entries, later_entries, tokens_of_windows

aten = torch.ops.aten


@dataclass(frozen=True)
class RewriteWindows:
    """Gathers the tokens of every window, and what an entry takes from the entry before it.

    The first of T // m entries has none before it. What a model computes for the others, from `entries[:, 1:]` and
    `entries[:, :-1]`, is computed for all, and thrown away where it puts something else in front.
    """

    statics: StaticValues
    name: str = field(default="windows", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        graph, symbol = graph_module.graph, token_symbol(graph_module.graph)
        findings = []
        for node in list(graph.nodes):
            if node.op != "call_function" or node in self.statics.nodes:
                continue
            if window := _cut_to_windows(node, symbol):
                _replace(
                    graph, node, tokens_of_windows, (node.args[0], _dim(node), window_input(graph, window, "tokens"))
                )
                became = f"the {window} tokens up to every token that closes a window, gathered"
                findings.append(Finding("windows", became, source_line(node), module_path(node)))
            else:
                _replace_shift(graph, node, symbol)
        return tuple(findings)


def _dim(node: fx.Node) -> int:
    return int(arguments(node)["dim"]) % len(shape_of(node))


def _replace(graph: fx.Graph, node: fx.Node, op: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(op, args)
    new.meta = inherited(node.meta) | {"val": node.meta["val"]}
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _extents(node: Any, symbol: Any, dim: int) -> Extent | None:
    return extent(shape_of(node)[dim], symbol)


def _cut_to_windows(node: fx.Node, symbol: Any) -> int:
    """m where `node` cuts T tokens to whole windows of m, from the first on; 0 for anything else."""
    if node.target not in SLICES or arguments(node)["start"] not in (0, None) or arguments(node).get("step", 1) != 1:
        return 0
    before, after = (_extents(value, symbol, _dim(node)) for value in (node.args[0], node))
    if before != Extent(1) or after is None or after.fewer or after.factor != after.window:
        return 0
    return after.window


# The entry before


def _replace_shift(graph: fx.Graph, node: fx.Node, symbol: Any) -> None:
    if node.target in SLICES:
        _replace_slice(graph, node, symbol)
    elif node.target is aten.slice_scatter.default:
        given = arguments(node)
        window = _later(given["src"], symbol, dim := _dim(node))
        is_whole = bool(window) and _extents(node, symbol, dim) == Extent(1, window)
        if is_whole and given["start"] == 1 and given["step"] == 1:
            _put_first(graph, node, given["self"], given["src"], dim, window)
    elif node.target is aten.cat.default and len(arguments(node)["tensors"]) == 2:
        first, later = arguments(node)["tensors"]
        if (window := _later(later, symbol, dim := _dim(node))) and shape_of(first)[dim] == 1:
            _put_first(graph, node, first, later, dim, window)
    elif node.target in PADS:
        _replace_pad(graph, node, symbol)


def _later(node: fx.Node, symbol: Any, dim: int) -> int:
    """m where `node` has T // m - 1 entries along `dim`, else 0."""
    found = _extents(node, symbol, dim)
    return found.window if found is not None and found.fewer else 0


def _replace_slice(graph: fx.Graph, node: fx.Node, symbol: Any) -> None:
    """All entries but the first, or but the last: the entries that have one before them, or those before."""
    given, dim = arguments(node), _dim(node)
    source: Any = node.args[0]
    if source.target in PADS and given["start"] in (0, None) and given.get("step", 1) == 1:
        _replace_pad(graph, node, symbol)
        return
    before, window = _extents(source, symbol, dim), _later(node, symbol, dim)
    if not window or before != Extent(1, window) or given.get("step", 1) != 1:
        return
    if given["start"] == 1:
        _replace(graph, node, later_entries, (source, dim))
    elif given["start"] in (0, None):
        _replace(graph, node, entries_before, (source, dim, window_input(graph, window, "previous")))


def _put_first(graph: fx.Graph, node: fx.Node, first: Any, later: fx.Node, dim: int, window: int) -> None:
    _replace(graph, node, first_entries, (first, later, dim, window_input(graph, window, "previous")))


def _replace_pad(graph: fx.Graph, node: fx.Node, symbol: Any) -> None:
    """One value in front of all entries but the last.

    It is `F.pad(x[:, :-1], (0, 0, 1, 0))`, or `F.pad(x, (0, 0, 1, -1))`, or `F.pad(x, (0, 0, 1, 0))[:, :T // m]`.
    """
    padded: Any = node if node.target in PADS else node.args[0]
    given = arguments(padded)
    pad, source = list(given["pad"]), given["self"]
    dim = len(shape_of(node)) - len(pad) // 2
    found, left = (_extents(value, symbol, dim) for value in (source, node))
    is_constant = given.get("mode", "constant") == "constant" and not any(pad[:-2]) and pad[-2] == 1
    if not is_constant or found is None or not found.window or found.factor != 1 or left != Extent(1, found.window):
        return
    previous = window_input(graph, found.window, "previous")
    later = source if found.fewer else _insert_before(graph, node, source, dim, previous)
    _put_first(graph, node, given["value"] or 0, later, dim, found.window)


def _insert_before(graph: fx.Graph, node: fx.Node, source: fx.Node, dim: int, previous: fx.Node) -> fx.Node:
    """The entries before, ahead of `node`."""
    shape = list(shape_of(source))
    shape[dim] = shape[dim] - 1
    with graph.inserting_before(node):
        before = graph.call_function(entries_before, (source, dim, previous))
    before.meta = inherited(node.meta) | {"val": source.meta["val"].new_empty(shape)}
    return before


# Sizes


@dataclass(frozen=True)
class RewriteWindowSizes:
    """Where the model takes T // m, or T // m - 1, as a size, the row has as many as there are entries."""

    name: str = field(default="window sizes", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        graph, symbol = graph_module.graph, token_symbol(graph_module.graph)
        for node in list(graph.nodes):
            if node.op == "call_function" and OUTSIDE not in node.meta and not is_size(node):
                _give_own_sizes(graph, node, symbol)
        return ()


def _give_own_sizes(graph: fx.Graph, node: fx.Node, symbol: Any) -> None:
    """A node's sizes are computed right before it: no number crosses from one block of the model to another."""
    copies: dict[fx.Node, fx.Node] = {}
    for size in [source for source in node.all_input_nodes if is_size(source)]:
        node.replace_input_with(size, _size_in_row(graph, node, size, symbol, copies))


def _size_in_row(graph: fx.Graph, user: fx.Node, size: fx.Node, symbol: Any, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    if size_expression(size.meta["val"]) == symbol or not mentions_windows(size):
        return size
    if size not in copies:
        found = extent(size.meta["val"], symbol)
        if found is not None and found.window and found.factor == 1:
            target, args = aten.sym_size.int, (window_input(graph, found.window, "number"), 0)
        else:
            sources = {source: _size_in_row(graph, user, source, symbol, copies) for source in size.all_input_nodes}
            target, args = size.target, fx.map_arg(size.args, lambda source: sources[source])  # type: ignore[assignment]
        with graph.inserting_before(user):
            copies[size] = graph.call_function(target, args)
        copies[size].meta = inherited(user.meta) | {"val": size.meta["val"]}
    return copies[size]


def mentions_windows(size: fx.Node) -> bool:
    """Whether a size is made of the number of windows in T tokens."""
    return bool(size_expression(size.meta["val"]).atoms(FloorDiv))


# The proof


def _rule_of_cut(step: Step) -> Value:
    args: Any = step.node.args
    values, dim, tokens = args
    known = step.plain(values)
    axis, window = known.axes[dim], shape_of(tokens)[1]
    if axis not in (TOKENS, BLANK):
        raise Mixes("it takes windows of something that is not one for every token")
    return _with_axis(known, dim, Axis(window=window, right=window))


def _rule_of_later(step: Step) -> Value:
    args: Any = step.node.args
    values, dim = args[:2]
    known = step.plain(values)
    window = step.extent(shape_of(values)[dim]).window
    if known.axes[dim] not in (Axis(window=window), BLANK):
        raise Mixes("it takes the window before of something that is not one for every window")
    return _with_axis(known, dim, Axis(window=window, later=True))


def _rule_of_first(step: Step) -> Value:
    args: Any = step.node.args
    first, later, dim, _ = args
    known, before = step.plain(later), step.plain(first)
    axis = known.axes[dim]
    if axis == BLANK:
        axis = Axis(window=step.extent(shape_of(later)[dim]).window, later=True)
    if axis is None or not axis.later:
        raise Mixes("it puts something in front of what is not one for every window but the first")
    whole = _with_axis(known, dim, Axis(window=axis.window))
    return Value(broadcast([whole, before]))


def _with_axis(known: Value, dim: Any, axis: Axis) -> Value:
    return Value((*known.axes[:dim], axis, *known.axes[dim + 1 :]))


RULES[tokens_of_windows] = _rule_of_cut
RULES[later_entries] = _rule_of_later
RULES[entries_before] = _rule_of_later
RULES[first_entries] = _rule_of_first
