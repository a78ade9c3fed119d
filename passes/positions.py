"""Tables over positions are gathered at the position of every token of the row."""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from tree_compile.errors import LengthDependentError
from tree_compile.passes.finding import Finding
from tree_compile.passes.nodes import ancestors, arguments
from tree_compile.passes.plan_inputs import OUTSIDE, RowTables, plan_input
from tree_compile.passes.shapes import call, shape_of, size_expression, token_symbol
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import Drifting, Fill, LengthDependent, StaticValues, Table, WindowTable

aten = torch.ops.aten
_USES_AS_ROW_NUMBER = {
    aten.index_put.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.gather.default,
    aten.index_copy.default,
    aten.index_add.default,
    aten.index.Tensor,
    aten.index_select.default,
}


@dataclass(frozen=True)
class RewritePositions:
    """Replaces every static table f(t), and the first T rows of anything longer, by f(position).

    A range 0, 1, 2, … that numbers rows, as an index into or along the tokens, is not a position and is left to the
    token-axis proof.

    Raises:
        LengthDependentError: a static value at a token changes with the number of tokens after it.
    """

    statics: StaticValues
    tables: RowTables
    name: str = field(default="positions", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        findings = []
        for node, kind in self.statics.kinds.items():
            users = [user for user in node.users if user not in self.statics.nodes and not _is_row_number(node, user)]
            if not users:
                continue
            if isinstance(kind, (LengthDependent, Drifting)):
                raise _length_dependent(node, kind)
            if isinstance(kind, Table):
                findings.append(self._gather(node, kind, users))
            elif isinstance(kind, WindowTable):
                findings.append(self._gather_windows(node, kind, users))
            elif isinstance(kind, Fill) and any(map(_may_differ_further_on, ancestors([node]))):
                self._gather_fill(node, users)
        symbol = token_symbol(graph_module.graph)
        first_rows = [
            node
            for node in graph_module.graph.nodes
            if node not in self.statics.nodes and OUTSIDE not in node.meta and _takes_a_row_per_token(node, symbol)
        ]
        findings += [_rows_at_positions(graph_module.graph, node) for node in first_rows]
        return tuple(findings)

    def _gather(self, node: fx.Node, kind: Table, users: list[fx.Node]) -> Finding:
        if kind.first is not None:
            gathered, became = self.tables.positions(node, kind.dim, kind.first), "the position of every token"
        else:
            gathered, became = self.tables.at_positions(node, kind.dim), "gathered at the position of every token"
        for user in users:
            user.replace_input_with(node, gathered)
        return Finding("position table", became, source_line(node), module_path(node))

    def _gather_windows(self, node: fx.Node, kind: WindowTable, users: list[fx.Node]) -> Finding:
        gathered = self.tables.at_windows(node, kind.dim, kind.window)
        for user in users:
            user.replace_input_with(node, gathered)
        return Finding("position table", "gathered at the number of every window", source_line(node), module_path(node))

    def _gather_fill(self, node: fx.Node, users: list[fx.Node]) -> None:
        """What says the same for all tokens that were tried; a buffer may be shorter than a row."""
        symbol = token_symbol(node.graph)
        dims = [dim for dim, size in enumerate(shape_of(node)) if size_expression(size) == symbol]
        if len(dims) == 1:
            gathered = self.tables.at_positions(node, dims[0])
            for user in users:
                user.replace_input_with(node, gathered)


def _may_differ_further_on(source: fx.Node) -> bool:
    return source.op == "get_attr" or getattr(source.target, "overloadpacket", None) is aten.arange


def _takes_a_row_per_token(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether `node` takes T of more rows, from a fixed one on, such as learned embeddings of positions."""
    if node.target not in (aten.slice.Tensor, aten.narrow.default):
        return False
    given = arguments(node)
    if not isinstance(given["start"] or 0, int) or (given["start"] or 0) < 0 or given.get("step", 1) != 1:
        return False
    rows, taken = shape_of(given["self"])[given["dim"]], shape_of(node)[given["dim"]]
    return isinstance(rows, int) and size_expression(taken) == symbol


def _rows_at_positions(graph: fx.Graph, node: fx.Node) -> Finding:
    given, position = arguments(node), plan_input(graph, "plan_position")
    source, dim, start = given["self"], given["dim"], given["start"] or 0
    with graph.inserting_before(node):
        rows = call(graph, aten.add.Scalar, (position, start), node.meta) if start else position
        taken = call(graph, aten.index_select.default, (source, dim, rows), node.meta)
    node.replace_all_uses_with(taken)
    became = "the row of every token's position"
    return Finding("position table", became, source_line(node), module_path(node))


def _is_row_number(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` takes `node` as the number of a row of something that has a token axis."""
    if user.target not in _USES_AS_ROW_NUMBER:
        return False
    return user.args[0] is not node and any(not isinstance(size, int) for size in shape_of(user.args[0]))  # type: ignore[arg-type]


def _length_dependent(node: fx.Node, kind: LengthDependent | Drifting) -> LengthDependentError:
    found = (
        kind if isinstance(kind, LengthDependent) else LengthDependent("all its values move with the number of tokens")
    )
    return LengthDependentError(
        "A value that the model computes from the number of tokens is not the same for a prefix alone.",
        where=source_line(node),
        why=f"{found.why}, so sequences of different lengths cannot share a prefix.",
        hint=f"{found.hint}.",
    )
