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
from tree_compile.passes.shapes import call, in_dtype, shape_of, size_expression, token_symbol
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
            if node.target in (aten.conv1d.default, aten.conv1d.padding):
                findings += _replace_convolution(graph, node, symbol)
            elif node.target in _PADS and _is_shift(node, symbol):
                findings.append(_replace_shift(graph, node))
        return tuple(findings)


def _replace_convolution(graph: fx.Graph, node: fx.Node, symbol: sympy.Symbol) -> list[Finding]:
    given = arguments(node)
    found = _padded_before(node, given, symbol) if _is_depthwise(given) else None
    if found is None:
        return []
    values, cuts = found
    # Under autocast a convolution computes in another dtype than its inputs have.
    dtype = node.meta["val"].dtype
    with graph.inserting_before(node):
        rows = call(graph, aten.permute.default, (in_dtype(graph, values, dtype), [0, 2, 1]), node.meta)
        weight = call(graph, aten.squeeze.dim, (in_dtype(graph, given["weight"], dtype), 1), node.meta)
        bias = None if given["bias"] is None else in_dtype(graph, given["bias"], dtype)
        tensors = {"values": rows, "weight": weight, "bias": bias}
        convolved, finding = insert_mixer(graph, node, causal_convolution, tensors)
        result = call(graph, aten.permute.default, (convolved, [0, 2, 1]), node.meta)
    if not cuts:
        node.replace_all_uses_with(result)
    for cut in cuts:
        _replace_cut(graph, node, cut, result)
    return [finding]


def _replace_cut(graph: fx.Graph, node: fx.Node, cut: list[fx.Node], result: fx.Node) -> None:
    """Puts what stands between a convolution and the cut to T tokens after a convolution that needs no cut."""
    *between, last = cut
    replaced = {node: result}
    for step in between:
        args, kwargs = fx.map_arg((step.args, step.kwargs), lambda given: replaced.get(given, given))
        with graph.inserting_before(step):
            replaced[step] = call(graph, step.target, args, step.meta, **kwargs)
    last.replace_all_uses_with(replaced[[node, *between][-1]])


def _is_depthwise(given: dict[str, Any]) -> bool:
    channels, inputs, _ = shape_of(given["weight"])
    plain = [list(given[name]) for name in ("stride", "dilation")] == [[1], [1]]
    is_one_batch = len(shape_of(given["input"])) == 3 and shape_of(given["input"])[0] == 1
    return plain and inputs == 1 and given["groups"] == channels and is_one_batch


def _padded_before(
    node: fx.Node, given: dict[str, Any], symbol: sympy.Symbol
) -> tuple[fx.Node, list[list[fx.Node]]] | None:
    """What is convolved, without its padding; and how it is cut to one result for every token, where it has to be.

    None where it is not causal, or not along the tokens.
    """
    before, padding = shape_of(given["weight"])[2] - 1, given["padding"]
    source = given["input"]
    if list(padding) == [before] and _is_tokens(source, symbol):
        cuts = _cuts(node, 2, symbol)
        return None if cuts is None else (source, cuts)
    is_unpadded = padding == "valid" or list(padding) == [0]
    is_causal = is_unpadded and source.target in _PADS and _pads(source) == [before, 0]
    return (source.args[0], []) if is_causal and _is_tokens(source.args[0], symbol) else None


def _cuts(node: fx.Node, dim: int, symbol: sympy.Symbol) -> list[list[fx.Node]] | None:
    """The ways from a convolution, whose tokens lie along `dim`, to the nodes that keep its first T results.

    None where one of them is used otherwise. Activations and transpositions may come in between.
    """
    ways: list[list[fx.Node]] = []
    for user in node.users:
        if _keeps_first(user, dim, symbol):
            ways.append([user])
            continue
        moved = _moved(user, dim)
        further = None if moved is None else _cuts(user, moved, symbol)
        if further is None:
            return None
        ways += [[user, *way] for way in further]
    return ways


def _moved(node: fx.Node, dim: int) -> int | None:
    """Where dimension `dim` of the only input is in the result of an activation or a transposition."""
    if len(node.all_input_nodes) != 1 or node.op != "call_function":
        return None
    given, rank = arguments(node), len(shape_of(node))
    if node.target is aten.transpose.int:
        one, other = given["dim0"] % rank, given["dim1"] % rank
        return {one: other, other: one}.get(dim, dim)
    if node.target is aten.permute.default:
        return [place % rank for place in given["dims"]].index(dim)
    if node.target is aten.mT.default:
        return {rank - 1: rank - 2, rank - 2: rank - 1}.get(dim, dim)
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return dim if is_pointwise and torch.Tag.nondeterministic_seeded not in node.target.tags else None  # type: ignore[union-attr]


def _keeps_first(node: fx.Node, dim: int, symbol: sympy.Symbol) -> bool:
    """Whether the node keeps the first T entries of `dim`."""
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        return False
    given = arguments(node)
    is_first = given["dim"] % len(shape_of(node)) == dim and given["start"] in (None, 0) and given.get("step", 1) == 1
    return is_first and bool(size_expression(shape_of(node)[dim]) == symbol)


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
