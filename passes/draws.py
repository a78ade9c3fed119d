"""Which nodes draw random numbers."""

from __future__ import annotations

import torch
from torch import fx

from tree_compile.passes.nodes import arguments, operator_of

_DROPOUTS = (torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default)


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers; a dropout that is switched off or has probability 0 does not."""
    operator = operator_of(node)
    if operator in _DROPOUTS:
        given = arguments(node)
        return bool(given["train"] and given["p"] != 0)
    # Tags are equal without being the same object.
    return bool(torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()))
