"""Masks and positions that are made in the shape and dtype of a tensor are made of the shape alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.finding import Finding
from tree_compile.passes.nodes import arguments
from tree_compile.passes.operators import FULL, ONES, ZEROS
from tree_compile.passes.shapes import Extent, extent, inherited, shape_of, token_symbol

aten = torch.ops.aten
_OF_A_TENSOR: dict[Any, Any] = {
    **dict.fromkeys(set(ONES) - {aten.ones.default}, aten.ones.default),
    **dict.fromkeys(set(ZEROS) - {aten.zeros.default}, aten.zeros.default),
    **dict.fromkeys(set(FULL) - {aten.full.default}, aten.full.default),
}


@dataclass(frozen=True)
class MakeByShape:
    """`x.new_ones(T, T)` becomes `torch.ones(T, T, dtype=x.dtype)`, which depends on no token.

    Only where it has two dimensions of T, as masks have, or one and no others, as positions: what is as wide as the
    model is no static value.
    """

    name: str = field(default="made by shape", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        graph, symbol = graph_module.graph, token_symbol(graph_module.graph)
        for node in list(graph.nodes):
            if node.target in _OF_A_TENSOR and _is_mask_or_positions(node, symbol):
                _replace(graph, node)
        return ()


def _is_mask_or_positions(node: fx.Node, symbol: sympy.Symbol) -> bool:
    shape = shape_of(node)
    extents = [extent(size, symbol) for size in shape]
    if any(found not in (Extent(), Extent(1)) for found in extents):
        return False
    others = math.prod(size for size, found in zip(shape, extents, strict=True) if found == Extent())
    return others == 1 and 0 < extents.count(Extent(1)) <= 2


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    given, value = arguments(node), node.meta["val"]
    keywords = {"dtype": value.dtype, "device": value.device, "layout": torch.strided, "pin_memory": False}
    with graph.inserting_before(node):
        sizes: list[Any] = given.get("size") or _sizes(graph, node)
        fill = (given["fill_value"],) if "fill_value" in given else ()
        made = graph.call_function(_OF_A_TENSOR[node.target], (sizes, *fill), keywords)
    made.meta = {**inherited(node.meta), "val": value}
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _sizes(graph: fx.Graph, node: fx.Node) -> list[Any]:
    """The sizes of a node, T as the number of tokens that is read off the graph's first input."""
    return [size if isinstance(size, int) else _number_of_tokens(graph) for size in shape_of(node)]


def _number_of_tokens(graph: fx.Graph) -> fx.Node:
    ids = next(node for node in graph.nodes if node.op == "placeholder")
    node = graph.call_function(aten.sym_size.int, (ids, 1))
    node.meta["val"] = ids.meta["val"].shape[1]
    return node
