"""Causal convolutions and token shifts as models write them: every token takes its ancestors, not its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from tree_compile.passes.draws import draws
from tree_compile.passes.finding import Finding
from tree_compile.passes.mixers import insert_mixer
from tree_compile.passes.nodes import arguments
from tree_compile.passes.padding import keeps_first, pads, transposed, without_zeros
from tree_compile.passes.shapes import call, in_dtype, is_tensor, shape_of, size_expression, token_symbol
from tree_compile.passes.static_values import StaticValues
from tree_compile.runtime.causal_convolution import causal_convolution, token_shift

aten = torch.ops.aten
_ENTRY_BY_ENTRY = (
    aten.contiguous.default, aten.clone.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device,
    aten.dropout.default,
)  # fmt: skip
"""Besides what torch tags as such."""


@dataclass(frozen=True)
class RewriteConvolutions:
    """Replaces depthwise causal convolutions along the tokens, and shifts by one token that pad with zeros.

    A convolution is causal where K - 1 zeros stand before the first token: `F.conv1d(F.pad(x, (K - 1, 0)), …)`, or
    `F.conv1d(x, …, padding=K - 1)[..., :T]`. Shifts are `F.pad(x, (0, 0, 1, -1))`, and the same with a slice before or
    after it. `torch.cat` may put the zeros there as well. The token-axis proof refuses others. Static values are
    left as they are.
    """

    statics: StaticValues
    name: str = field(default="convolutions", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        graph, symbol = graph_module.graph, token_symbol(graph_module.graph)
        findings = []
        for node in list(graph.nodes):
            if node in self.statics.nodes:
                continue
            if node.target in (aten.conv1d.default, aten.conv1d.padding):
                findings += _replace_convolution(graph, node, symbol)
            elif (values := _shifted(node, symbol)) is not None:
                findings.append(_replace_shift(graph, node, values))
        return tuple(findings)


class _Causal(NamedTuple):
    """A causal convolution.

    Attributes:
        values: what is convolved, without its padding, before `transpositions`.
        transpositions: those between the padding and the convolution.
        steps: what computes entry by entry with results for more than T tokens.
        cuts: where the first T of them are taken; none where there are no more than T results.
    """

    values: fx.Node
    transpositions: list[fx.Node]
    steps: list[fx.Node]
    cuts: list[fx.Node]


def _replace_convolution(graph: fx.Graph, node: fx.Node, symbol: sympy.Symbol) -> list[Finding]:
    given = arguments(node)
    found = _causal(node, given, symbol) if _is_depthwise(given) else None
    if found is None:
        return []
    # Under autocast a convolution computes in another dtype than its inputs have.
    dtype, values = node.meta["val"].dtype, found.values
    with graph.inserting_before(node):
        for step in found.transpositions:
            values = call(graph, step.target, (values, *step.args[1:]), step.meta, **step.kwargs)
        rows = call(graph, aten.permute.default, (in_dtype(graph, values, dtype), [0, 2, 1]), node.meta)
        weight = call(graph, aten.squeeze.dim, (in_dtype(graph, given["weight"], dtype), 1), node.meta)
        bias = None if given["bias"] is None else in_dtype(graph, given["bias"], dtype)
        tensors = {"values": rows, "weight": weight, "bias": bias}
        convolved, finding = insert_mixer(graph, node, causal_convolution, tensors)
        result = call(graph, aten.permute.default, (convolved, [0, 2, 1]), node.meta)
    if found.cuts:
        _replace_cuts(graph, node, found, result)
    else:
        node.replace_all_uses_with(result)
    return [finding]


def _replace_cuts(graph: fx.Graph, node: fx.Node, found: _Causal, result: fx.Node) -> None:
    """Puts what stands between a convolution and the cuts to T tokens after a convolution that needs no cut."""
    replaced = {node: result}
    for step in found.steps:
        args, kwargs = fx.map_arg((step.args, step.kwargs), lambda given: replaced.get(given, given))
        with graph.inserting_before(step):
            replaced[step] = call(graph, step.target, args, step.meta, **kwargs)
    for cut in found.cuts:
        cut.replace_all_uses_with(replaced[cut.all_input_nodes[0]])


def _is_depthwise(given: dict[str, Any]) -> bool:
    channels, inputs, _ = shape_of(given["weight"])
    plain = [list(given[name]) for name in ("stride", "dilation")] == [[1], [1]]
    is_one_batch = len(shape_of(given["input"])) == 3 and shape_of(given["input"])[0] == 1
    return plain and inputs == 1 and given["groups"] == channels and is_one_batch


def _causal(node: fx.Node, given: dict[str, Any], symbol: sympy.Symbol) -> _Causal | None:
    """None where the convolution is not causal, or not along the tokens."""
    before, padding, source = shape_of(given["weight"])[2] - 1, given["padding"], given["input"]
    if list(padding) == [before] and _has_tokens(source, -1, symbol):
        until = _until_cuts(node, symbol)
        return None if until is None else _Causal(source, [], *until)
    if padding != "valid" and list(padding) != [0]:
        return None
    padded, dim, transpositions = _before_transpositions(source)
    values = without_zeros(padded, dim, before)
    return None if values is None or not _has_tokens(values, dim, symbol) else _Causal(values, transpositions, [], [])


def _before_transpositions(node: fx.Node) -> tuple[fx.Node, int, list[fx.Node]]:
    """What is transposed to `node`, where its last dimension lay, and the transpositions."""
    dim = -1
    found: list[fx.Node] = []
    while transposed(node, dim) is not None:
        dim = next(place for place in range(-len(shape_of(node)), 0) if transposed(node, place) == dim)
        found.insert(0, node)
        node = node.all_input_nodes[0]
    return node, dim, found


def _until_cuts(node: fx.Node, symbol: sympy.Symbol) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """What computes with the results of a convolution, entry by entry, and the nodes that keep the first T of them.

    None where one of them is used otherwise.
    """
    dims: dict[fx.Node, int] = {node: -1}
    cuts = []
    for user in node.graph.nodes:
        used = [source for source in user.all_input_nodes if source in dims]
        if used and keeps_first(user, dims[used[0]], symbol):
            cuts.append(user)
        elif used:
            dim = _after_step(user, dims)
            if dim is None:
                return None
            dims[user] = dim
    return list(dims)[1:], cuts


def _after_step(node: fx.Node, dims: dict[fx.Node, int]) -> int | None:
    """Where a step that computes entry by entry has the dimension of its inputs that `dims` says; None for others."""
    if not is_tensor(node):
        return None
    (dim, *others) = {dims[source] for source in node.all_input_nodes if source in dims}
    if (moved := transposed(node, dim)) is not None:
        return moved
    is_plain = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _ENTRY_BY_ENTRY
    if others or not is_plain or draws(node):
        return None
    return dim if all(source in dims or _is_blank(source, dim) for source in node.all_input_nodes) else None


def _is_blank(node: fx.Node, dim: int) -> bool:
    """Whether a node is the same for all entries of a dimension."""
    return not is_tensor(node) or len(shape_of(node)) < -dim or bool(size_expression(shape_of(node)[dim]) == 1)


def _has_tokens(node: fx.Node, dim: int, symbol: sympy.Symbol) -> bool:
    return bool(size_expression(shape_of(node)[dim]) == symbol)


def _shifted(node: fx.Node, symbol: sympy.Symbol) -> fx.Node | None:
    """Values of one row [1, T, D] that the node is, shifted by one token."""
    values: fx.Node | None = None
    if pads(node) == [0, 0, 1, -1]:
        values = node.all_input_nodes[0]
    elif keeps_first(node, -2, symbol):
        values = without_zeros(node.all_input_nodes[0], -2, 1)
    elif (part := without_zeros(node, -2, 1)) is not None and keeps_first(part, -2, symbol - 1):
        values = part.all_input_nodes[0]
    is_row = values is not None and len(shape_of(values)) == 3 and shape_of(values)[0] == 1
    return values if values is not None and is_row and _has_tokens(values, -2, symbol) else None


def _replace_shift(graph: fx.Graph, node: fx.Node, values: fx.Node) -> Finding:
    with graph.inserting_before(node):
        same = in_dtype(graph, values, node.meta["val"].dtype)
        shifted, finding = insert_mixer(graph, node, token_shift, {"values": same})
    node.replace_all_uses_with(shifted)
    return finding
