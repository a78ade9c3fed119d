"""Tables over positions are gathered at the position of every token of the row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from tree_compile.errors import LengthDependentError
from tree_compile.guards import LengthLimit
from tree_compile.passes.plan_inputs import RowTables
from tree_compile.passes.report import Finding, PassReport
from tree_compile.passes.shapes import shape_of
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import Drifting, Fill, LengthDependent, StaticValues, Table

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
    """Replaces every static table f(t) by f(position).

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


def _comes_from_a_buffer(node: fx.Node) -> bool:
    return any(source.op == "get_attr" or _comes_from_a_buffer(source) for source in node.all_input_nodes)


def _is_row_number(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` takes `node` as the number of a row of something that has a token axis."""
    if user.target not in _USES_AS_ROW_NUMBER:
        return False
    return user.args[0] is not node and any(not isinstance(size, int) for size in shape_of(user.args[0]))  # type: ignore[arg-type]


def position_limit(graph_module: fx.GraphModule, statics: StaticValues) -> LengthLimit:
    """The longest sequence whose positions all have a row in the model's embeddings of positions."""
    limit = LengthLimit()
    for node, kind in statics.kinds.items():
        if not isinstance(kind, Table) or kind.first is None:
            continue
        for user in node.users:
            if user.target is aten.embedding.default and user.args[1] is node:
                rows = int(shape_of(user.args[0])[0]) - kind.first  # type: ignore[arg-type]
                if limit.tokens is None or rows < limit.tokens:
                    limit = LengthLimit(rows, source_line(user))
    return limit


def _length_dependent(node: fx.Node, kind: LengthDependent | Drifting) -> LengthDependentError:
    why = kind.why if isinstance(kind, LengthDependent) else "all its values move with the number of tokens"
    return LengthDependentError(
        "A value that the model computes from the number of tokens is not the same for a prefix alone.",
        where=source_line(node),
        why=f"{why}, so sequences of different lengths cannot share a prefix.",
        hint="for a rotary embedding that switches on the sequence's length (longrope, dynamic), choose a fixed one.",
    )
