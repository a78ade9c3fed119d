"""Whether tensors were changed since they were looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_STEPS = WeakTensorKeyDictionary()
"""Steps of optimizers over each tensor that is watched: fused ones change tensors without a new version."""


def marks_of(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """What is another one once a tensor was changed, by an operation in place, another storage, or an optimizer."""
    return [_mark(tensor) for tensor in tensors]


def _mark(tensor: Tensor) -> tuple[int, ...]:
    # A tensor of inference mode has no version.
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.is_leaf and tensor.requires_grad:
        _STEPS.setdefault(tensor, 0)
    return version, tensor.data_ptr(), _STEPS.get(tensor, 0)


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _STEPS:
                _STEPS[parameter] += 1


register_optimizer_step_post_hook(_count_step)
