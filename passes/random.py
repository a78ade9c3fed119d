"""Which nodes draw random numbers."""

from __future__ import annotations

import torch
from torch import fx

_DROPOUTS = (torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default)


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers; a dropout that is switched off or has probability 0 does not."""
    if node.target in _DROPOUTS:
        _, probability, active, *_ = (*node.args, None)
        return bool(active and probability != 0)
    # Tags are equal without being the same object.
    return bool(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()))
