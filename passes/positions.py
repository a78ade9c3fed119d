"""Tables over positions are gathered at the position of every token of the row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.errors import LengthDependentError
from tree_compile.guards import LengthLimit
from tree_compile.passes.plan_inputs import OUTSIDE, RowTables, plan_input
from tree_compile.passes.report import Finding, PassReport
from tree_compile.passes.shapes import call, shape_of, size_expression, token_factor, token_symbol
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import (
    FIRST_REACH,
    GREATEST_PAIR,
    Drifting,
    Fill,
    Kind,
    LengthDependent,
    Pair,
    StaticValues,
    Table,
    evaluate_if_possible,
)

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

    def __call__(self, graph_module: fx.GraphModule) -> PassReport:
        findings = []
        for node, kind in self.statics.kinds.items():
            users = [user for user in node.users if user not in self.statics.nodes and not _is_row_number(node, user)]
            if not users:
                continue
            if isinstance(kind, (LengthDependent, Drifting)):
                raise _length_dependent(node, kind)
            if isinstance(kind, Table):
                findings.append(self._gather(node, kind, users))
            elif isinstance(kind, Fill) and _comes_from_a_buffer(node):
                self._gather_fill(node, users)
        symbol = token_symbol(graph_module.graph)
        first_rows = [
            node
            for node in graph_module.graph.nodes
            if node not in self.statics.nodes and OUTSIDE not in node.meta and _takes_first_rows(node, symbol)
        ]
        findings += [_rows_at_positions(graph_module.graph, node) for node in first_rows]
        return PassReport(self.name, tuple(findings))

    def _gather(self, node: fx.Node, kind: Table, users: list[fx.Node]) -> Finding:
        if kind.first is not None:
            gathered, became = self.tables.positions(node, kind.dim, kind.first), "the position of every token"
        else:
            gathered, became = self.tables.at_positions(node, kind.dim), "gathered at the position of every token"
        for user in users:
            user.replace_input_with(node, gathered)
        return Finding(node.name, "position table", became, source_line(node), module_path(node))

    def _gather_fill(self, node: fx.Node, users: list[fx.Node]) -> None:
        """A buffer that says the same for all tokens may be shorter than a row; it is long enough for a sequence."""
        dims = [dim for dim, size in enumerate(shape_of(node)) if not isinstance(size, int)]
        if len(dims) == 1:
            gathered = self.tables.at_positions(node, dims[0])
            for user in users:
                user.replace_input_with(node, gathered)


def _takes_first_rows(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether `node` takes the first T of more rows, such as learned embeddings of positions."""
    source: Any
    dim: Any
    source, dim, start, _, step = (*node.args, *(None, 0, 0, None, 1)[len(node.args) :])[:5]
    if node.target not in (aten.slice.Tensor, aten.narrow.default) or start not in (0, None) or step != 1:
        return False
    rows, taken = shape_of(source)[dim], shape_of(node)[dim]
    return isinstance(rows, int) and size_expression(taken) == symbol


def _rows_at_positions(graph: fx.Graph, node: fx.Node) -> Finding:
    source, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    with graph.inserting_before(node):
        taken = call(graph, aten.index_select.default, (source, dim, plan_input(graph, "plan_position")), node.meta)
    node.replace_all_uses_with(taken)
    became = "the row of every token's position"
    return Finding(node.name, "position table", became, source_line(node), module_path(node))


def _comes_from_a_buffer(node: fx.Node) -> bool:
    return any(source.op == "get_attr" or _comes_from_a_buffer(source) for source in node.all_input_nodes)


def _is_row_number(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` takes `node` as the number of a row of something that has a token axis."""
    if user.target not in _USES_AS_ROW_NUMBER:
        return False
    return user.args[0] is not node and any(not isinstance(size, int) for size in shape_of(user.args[0]))  # type: ignore[arg-type]


def position_limit(statics: StaticValues) -> LengthLimit:
    """The longest sequence whose positions all have a row in the model's embeddings of positions."""
    limit = LengthLimit()
    for node, kind in statics.kinds.items():
        for user, index in _readers(node, statics):
            if (there_are := _rows_indexed(user, index)) is not None:
                rows = _tokens_with_rows(node, kind, there_are, statics)
                if rows is not None and (limit.tokens is None or rows < limit.tokens):
                    limit = LengthLimit(rows, source_line(user))
    return limit


def _readers(node: fx.Node, statics: StaticValues) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads `node`, and as which argument: itself, or a view of it that every layer makes for itself."""
    for user in node.users:
        yield user, node
        if user.target in (aten.unsqueeze.default, aten.slice.Tensor) and user not in statics.nodes:
            yield from _readers(user, statics)


def _tokens_with_rows(node: fx.Node, kind: Kind, rows: int, statics: StaticValues) -> int | None:
    """The greatest T at which all row numbers in `node` are below `rows`; None where none was seen that is not."""
    if isinstance(kind, Table) and kind.first is not None:
        return rows - kind.first
    if not isinstance(kind, Table | Pair):
        return None
    tokens = statics.proved_length or FIRST_REACH
    if isinstance(kind, Pair):
        tokens = min(tokens, GREATEST_PAIR)
    module = node.graph.owning_module
    if module is None or (value := evaluate_if_possible(module, set(statics.nodes), {node}, tokens)) is None:
        return None
    symbol = token_symbol(node.graph)
    dims = [dim for dim, size in enumerate(shape_of(node)) if token_factor(size, symbol) == 1]
    beyond = ((value[node] >= rows) | (value[node] < -rows)).nonzero()
    return int(beyond[:, dims].amax(1).min()) if len(beyond) else None


def _rows_indexed(user: fx.Node, index: fx.Node) -> int | None:
    """How many rows there are for `user` to take by the numbers `index`; None where it does not take any."""
    args: Any = user.args
    if user.target is aten.embedding.default and args[1] is index:
        return int(shape_of(args[0])[0])
    if user.target is aten.index.Tensor and index in args[1]:
        rows = shape_of(args[0])[args[1].index(index)]
        return rows if isinstance(rows, int) else None
    return None


def _length_dependent(node: fx.Node, kind: LengthDependent | Drifting) -> LengthDependentError:
    why = kind.why if isinstance(kind, LengthDependent) else "all its values move with the number of tokens"
    return LengthDependentError(
        "A value that the model computes from the number of tokens is not the same for a prefix alone.",
        where=source_line(node),
        why=f"{why}, so sequences of different lengths cannot share a prefix.",
        hint="for a rotary embedding that switches on the sequence's length (longrope, dynamic), choose a fixed one.",
    )
