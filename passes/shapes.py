"""Sizes in a captured graph: which dimensions mention the number of tokens T, and how often."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv

from tree_compile.passes.autocast import AUTOCAST_OFF, as_the_model
from tree_compile.passes.operators import SOFTMAXES


def token_symbol(graph: fx.Graph) -> sympy.Symbol:
    """The symbol T: size 1 of the graph's inputs."""
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            size = node.meta["val"].shape[1]
            if isinstance(size, torch.SymInt):
                return size.node.expr
    raise ValueError("the graph has no input with a free number of tokens")


def size_expression(size: Any) -> sympy.Expr:
    """A size, an int, a SymInt or an expression, as an expression in T."""
    if isinstance(size, sympy.Expr):
        return size
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else sympy.Integer(size)


@dataclass(frozen=True)
class Extent:
    """The size `factor * T`, or with a `window` of m tokens `factor * (T // m) - fewer`; factor 0 is a plain number."""

    factor: int = 0
    window: int = 0
    fewer: int = 0


def extent(size: Any, symbol: sympy.Symbol) -> Extent | None:
    """How `size` mentions T; None where it does so in any other way."""
    expression = size_expression(size)
    if not expression.free_symbols:
        return Extent()
    factor = sympy.cancel(expression / symbol)
    if factor.is_Integer and factor > 0:
        return Extent(int(factor))
    for windows in expression.atoms(FloorDiv):
        tokens, window = windows.args
        for fewer in (0, 1):
            count = sympy.cancel((expression + fewer) / windows)
            if tokens == symbol and window.is_Integer and count.is_Integer and count > 0 and not (fewer and count > 1):
                return Extent(int(count), int(window), fewer)
    return None


def window_beside_tokens(size: Any, symbol: sympy.Symbol) -> int:
    """m where `size` is T + T // m, else 0."""
    expression = size_expression(size)
    found = extent(expression - symbol, symbol) if expression.has(FloorDiv) else None
    return found.window if found is not None and found == Extent(1, found.window) else 0


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Sizes of a node's tensor value."""
    return tuple(node.meta["val"].shape)


def sizes(node: fx.Node) -> list[sympy.Expr]:
    """Sizes of a node's tensor value as expressions in T, which can be compared."""
    return [size_expression(size) for size in shape_of(node)]


def is_tensor(node: Any) -> bool:
    """Whether `node` is a node with one tensor as its value."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def is_boolean(node: Any) -> bool:
    """Whether `node` has a boolean tensor as its value."""
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def keeps_numbers(node: fx.Node) -> bool:
    """Whether the dtype of a node holds the numbers of its first input, up to rounding: no truths, none that wrap.

    Of eight bits there are few numbers: who casts to them means the rounding.
    """
    source: Any = node.args[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if after == before:
        return True
    if after.is_floating_point:
        return bool(before.is_floating_point and after.itemsize > 1)
    return after in (torch.int32, torch.int64) and before in (torch.int32, torch.int64)


def is_full_slice(node: fx.Node) -> bool:
    """Whether `node` is a slice that takes everything."""
    return node.target is torch.ops.aten.slice.Tensor and sizes(node) == sizes(node.args[0])  # type: ignore[arg-type]


def is_softmax_over_last(node: fx.Node) -> bool:
    """Whether `node` is a softmax over the last of several dimensions."""
    if node.target not in SOFTMAXES or not is_tensor(node):
        return False
    rank, dim = len(shape_of(node)), node.args[1]
    return rank > 1 and dim in (-1, rank - 1)


def is_size(node: Any) -> bool:
    """Whether `node` is a node with a number that depends on T as its value."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def inherited(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Where a node comes from, and how it is computed, for a node that takes its place."""
    return {name: meta[name] for name in ("stack_trace", "nn_module_stack", AUTOCAST_OFF) if name in meta}


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], meta: Mapping[str, Any], **keywords: Any) -> fx.Node:
    """Inserts a call with the origin `meta` and the fake value that its arguments give it."""
    node = graph.call_function(target, args, keywords)
    node.meta = inherited(meta)
    values, named = fx.map_arg((args, keywords), lambda source: source.meta["val"])
    fake = next(value for value in values if isinstance(value, Tensor))
    with fake.fake_mode, as_the_model(meta):  # type: ignore[attr-defined]
        node.meta["val"] = target(*values, **named)
    return node


def in_dtype(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`node`, cast where its dtype is another."""
    return node if node.meta["val"].dtype == dtype else call(graph, torch.ops.aten.to.dtype, (node, dtype), node.meta)


def in_one_dtype(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` in the widest of their dtypes: some models make scores in float32, and weigh values of another dtype."""
    dtype = functools.reduce(torch.promote_types, (node.meta["val"].dtype for node in nodes))
    return [in_dtype(graph, node, dtype) for node in nodes]
