"""Causal convolutions and token shifts as models write them: every token takes its ancestors, not its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.finding import Finding
from tree_compile.passes.mixers import insert_mixer
from tree_compile.passes.nodes import arguments
from tree_compile.passes.shapes import call, shape_of, size_expression, token_symbol
from tree_compile.runtime.causal_convolution import causal_convolution, token_shift

aten = torch.ops.aten
_PADS = (aten.pad.default, aten.constant_pad_nd.default)


@dataclass(frozen=True)
class RewriteConvolutions:
    """Replaces depthwise causal convolutions along the tokens, and shifts by one token that pad with zeros.

    A convolution is causal where K - 1 zeros stand before the first token: `F.conv1d(F.pad(x, (K - 1, 0)), …)`, or
    `F.conv1d(x, …, padding=K - 1)[..., :T]`. A shift is `F.pad(x, (0, 0, 1, -1))`. The token-axis proof refuses others.
    """

    name: str = field(default="convolutions", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        graph, symbol = graph_module.graph, token_symbol(graph_module.graph)
        findings = []
        for node in list(graph.nodes):
            if node.target is aten.conv1d.default:
                findings += _replace_convolution(graph, node, symbol)
            elif node.target in _PADS and _is_shift(node, symbol):
                findings.append(_replace_shift(graph, node))
        return tuple(findings)


def _replace_convolution(graph: fx.Graph, node: fx.Node, symbol: sympy.Symbol) -> list[Finding]:
    given = arguments(node)
    if not _is_depthwise(given):
        return []
    values, results = _padded_before(node, given, symbol)
    if values is None:
        return []
    # Under autocast a convolution computes in another dtype than its inputs have.
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        rows = call(graph, aten.permute.default, (_in_dtype(graph, values, dtype), [0, 2, 1]), node.meta)
        weight = call(graph, aten.squeeze.dim, (_in_dtype(graph, given["weight"], dtype), 1), node.meta)
        bias = None if given["bias"] is None else _in_dtype(graph, given["bias"], dtype)
        tensors = {"values": rows, "weight": weight} | ({} if bias is None else {"bias": bias})
        convolved, finding = insert_mixer(graph, node, causal_convolution, tensors)
        back = call(graph, aten.permute.default, (convolved, [0, 2, 1]), node.meta)
    for result in results:
        result.replace_all_uses_with(back)
    return [finding]


def _in_dtype(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else call(graph, aten.to.dtype, (node, dtype), node.meta)


def _is_depthwise(given: dict[str, Any]) -> bool:
    channels, inputs, _ = shape_of(given["weight"])
    plain = [list(given[name]) for name in ("stride", "dilation")] == [[1], [1]]
    is_one_batch = len(shape_of(given["input"])) == 3 and shape_of(given["input"])[0] == 1
    return plain and inputs == 1 and given["groups"] == channels and is_one_batch


def _padded_before(node: fx.Node, given: dict[str, Any], symbol: sympy.Symbol) -> tuple[fx.Node | None, list[fx.Node]]:
    """What is convolved, without its padding, and the nodes that hold one result for every token."""
    before, padding = shape_of(given["weight"])[2] - 1, list(given["padding"])
    source = given["input"]
    if padding == [before] and _is_tokens(source, symbol):
        cuts = [user for user in node.users if _keeps_first(user, symbol)]
        return (source, cuts) if len(cuts) == len(node.users) else (None, [])
    if padding == [0] and source.target in _PADS and _pads(source) == [before, 0]:
        values = source.args[0]
        return (values, [node]) if _is_tokens(values, symbol) else (None, [])
    return None, []


def _keeps_first(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether the node keeps the first T entries of the last dimension."""
    if node.target is not aten.slice.Tensor:
        return False
    given = arguments(node)
    is_last = given["dim"] % len(shape_of(node)) == len(shape_of(node)) - 1
    return is_last and given["start"] in (None, 0) and given["step"] == 1 and _is_tokens(node, symbol)


def _is_tokens(node: fx.Node, symbol: sympy.Symbol) -> bool:
    return bool(size_expression(shape_of(node)[-1]) == symbol)


def _pads(node: fx.Node) -> list[int] | None:
    """The padding with zeros, from the last dimension on; None for any other padding."""
    given = arguments(node)
    is_zeros = given.get("mode", "constant") == "constant" and given["value"] in (None, 0)
    return list(given["pad"]) if is_zeros else None


def _is_shift(node: fx.Node, symbol: sympy.Symbol) -> bool:
    values: Any = node.args[0]
    shape = shape_of(values)
    is_row = len(shape) == 3 and shape[0] == 1 and size_expression(shape[1]) == symbol
    return is_row and _pads(node) == [0, 0, 1, -1]


def _replace_shift(graph: fx.Graph, node: fx.Node) -> Finding:
    with graph.inserting_before(node):
        shifted, finding = insert_mixer(graph, node, token_shift, {"values": node.args[0]})
    node.replace_all_uses_with(shifted)
    return finding
