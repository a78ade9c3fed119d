"""What a model can take: how long a sequence, and how many token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tree_compile.errors import SourceLine
from tree_compile.passes.shapes import shape_of
from tree_compile.passes.source import source_line
from tree_compile.passes.static_values import StaticValues, Table

aten = torch.ops.aten
_SAME_IDS = (aten.view.default, aten.to.dtype_layout, aten.to.dtype)


@dataclass(frozen=True)
class LengthLimit:
    """The longest sequence for which the captured graph is the model's.

    Attributes:
        tokens: the greatest length that is allowed, or None where there is no limit.
        where: the user's line that sets it.
    """

    tokens: int | None = None
    where: SourceLine | None = None


def position_limit(statics: StaticValues) -> LengthLimit:
    """The longest sequence whose positions all have a row in the model's embeddings of positions."""
    limit = LengthLimit()
    for node, kind in statics.kinds.items():
        if not isinstance(kind, Table) or kind.first is None:
            continue
        for user in node.users:
            if (found := _rows_indexed(user, node)) is not None:
                rows = found - kind.first
                if limit.tokens is None or rows < limit.tokens:
                    limit = LengthLimit(rows, source_line(user))
    return limit


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
    ids = next(node for node in graph.nodes if node.op == "placeholder")
    stack = [ids]
    while stack:
        for user in stack.pop().users:
            if user.target is aten.embedding.default:
                return int(shape_of(user.args[0])[0])
            if user.target in _SAME_IDS:
                stack.append(user)
    return None
