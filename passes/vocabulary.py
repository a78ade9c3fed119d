"""How many token ids a model knows."""

from __future__ import annotations

import torch
from torch import fx

from tree_compile.passes.shapes import shape_of

_SAME_IDS = (torch.ops.aten.view.default, torch.ops.aten.to.dtype_layout, torch.ops.aten.to.dtype)


def vocabulary_size(graph: fx.Graph) -> int | None:
    """Rows of the embedding that the first input indexes; None where there is none."""
    ids = next(node for node in graph.nodes if node.op == "placeholder")
    stack = [ids]
    while stack:
        for user in stack.pop().users:
            if user.target is torch.ops.aten.embedding.default:
                return int(shape_of(user.args[0])[0])
            if user.target in _SAME_IDS:
                stack.append(user)
    return None
