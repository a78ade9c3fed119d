"""What a model can take: how long a sequence, and how many token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tree_compile.errors import SourceLine
from tree_compile.passes.operators import SAME_NUMBERS, VIEWS
from tree_compile.passes.probing import evaluate_if_possible
from tree_compile.passes.shapes import Extent, extent, keeps_numbers, shape_of, token_symbol
from tree_compile.passes.source import source_line
from tree_compile.passes.static_values import FIRST_REACH, GREATEST_PAIR, Kind, Pair, StaticValues, Table

aten = torch.ops.aten


@dataclass(frozen=True)
class LengthLimit:
    """The longest sequence for which the captured graph is the model's.

    Attributes:
        tokens: the greatest length that is allowed.
        where: the user's line that sets it.
        has_floor_division: whether its condition divides: there tokens may fill a first window, or a second.
    """

    tokens: int
    where: SourceLine | None = None
    has_floor_division: bool = False


def position_limit(statics: StaticValues) -> LengthLimit | None:
    """The longest sequence whose positions all have a row in the model's embeddings of positions; None for no limit."""
    limit = None
    for node, kind in statics.kinds.items():
        for user, index in _readers(node, statics):
            if (there_are := _rows_indexed(user, index)) is not None:
                rows = _tokens_with_rows(node, kind, there_are, statics)
                if rows is not None and (limit is None or rows < limit.tokens):
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
    dims = [dim for dim, size in enumerate(shape_of(node)) if extent(size, symbol) == Extent(1)]
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


def vocabulary_size(graph: fx.Graph) -> int | None:
    """Rows of the embedding that the first input indexes; None where there is none."""
    return rows_of_inputs(graph)[0]


def rows_of_inputs(graph: fx.Graph) -> list[int | None]:
    """For every input, the rows of the embedding that it indexes; None where there is none."""
    return [_rows_of(node) for node in graph.nodes if node.op == "placeholder"]


def _rows_of(node: fx.Node) -> int | None:
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target is aten.embedding.default:
                return int(shape_of(user.args[0])[0])  # type: ignore[arg-type]
            if user.target in (*SAME_NUMBERS, *VIEWS) and keeps_numbers(user):
                stack.append(user)
    return None
