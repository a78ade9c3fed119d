"""Whether tensors were changed since they were looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_STEPS = WeakTensorKeyDictionary()
"""Steps of optimizers over each tensor that is watched: fused ones change tensors without a new version."""


class Marks:
    """What tensors were when they were looked at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._marks = [_mark(tensor) for tensor in tensors]
        self._sums = [_sum_of_bits(tensor) for tensor in tensors]

    def are_unchanged(self) -> bool:
        """Whether they are so still: not changed in place, given another storage, or stepped by an optimizer."""
        return self._marks == [_mark(tensor) for tensor in self._tensors] and all(
            bool(before == _sum_of_bits(tensor)) for before, tensor in zip(self._sums, self._tensors, strict=True)
        )


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """One number that is another one after most changes: those through `.data` leave no other trace.

    Of the bits, in whole numbers: neither the order of the sum nor NaN makes a difference. It reads a tensor once,
    where a head reads it for many tokens.
    """
    numbers = tensor.detach().contiguous().flatten()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers).flatten()
    size, offset = numbers.element_size(), numbers.storage_offset()
    in_words = numbers.numel() * size % 8 == 0 and offset * size % 8 == 0
    return numbers.view(torch.int64 if in_words else torch.uint8).sum(dtype=torch.int64)


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
