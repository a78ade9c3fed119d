"""Whether tensors were changed since they were looked at."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_STEPS = WeakTensorKeyDictionary()
"""Steps of optimizers over each tensor that is watched: fused ones change tensors without a new version."""


_BETWEEN = 6364136223846793005
"""What the hash of earlier words is multiplied by."""


class Marks:
    """What tensors were when they were looked at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._marks = [_mark(tensor) for tensor in tensors]
        self._hashes = [_hash_of_bits(tensor) for tensor in tensors]

    def are_unchanged(self) -> bool:
        """Whether they are so still: not changed in place, moved, stepped by an optimizer, or frozen."""
        return self._marks == [_mark(tensor) for tensor in self._tensors] and all(
            bool(before == _hash_of_bits(tensor)) for before, tensor in zip(self._hashes, self._tensors, strict=True)
        )


def _hash_of_bits(tensor: Tensor) -> Tensor:
    """One number that is another one after any change but by chance: those through `.data` leave no other trace.

    A sum of words, each with a factor of its own, since in a plain sum changes that are alike cancel out: signs that
    flip, doublings, rows that change places. Words are of 32 bits, since the highest of 64 are lost in products. In
    whole numbers neither the order of the sum nor NaN makes a difference. It reads a tensor once, where a head reads
    it for many tokens.
    """
    words = _words(tensor)
    factors = _factors(words.device)
    found = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in words.split(len(factors)):
        found = found * _BETWEEN + (part * factors[: len(part)]).sum()
    return found


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in its order, as int32, or uint8 where they do not fill or lie in such words."""
    numbers = tensor.detach().contiguous().flatten()
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers).flatten()
    size, offset = numbers.element_size(), numbers.storage_offset()
    in_words = numbers.numel() * size % 4 == 0 and offset * size % 4 == 0
    return numbers.view(torch.int32 if in_words else torch.uint8)


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """The factors of words that are hashed at once."""
    # On a CPU few, so that products stay in its cache; elsewhere many, since each call takes time.
    count = 2**14 if device.type == "cpu" else 2**22
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu")
    # Odd ones have an inverse, so that no change of one word alone is lost.
    return (factors | 1).to(device)


def _mark(tensor: Tensor) -> tuple[int | bool, ...]:
    # A tensor of inference mode has no version.
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.is_leaf and tensor.requires_grad:
        _STEPS.setdefault(tensor, 0)
    return version, tensor.data_ptr(), _STEPS.get(tensor, 0), tensor.requires_grad


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _STEPS:
                _STEPS[parameter] += 1


register_optimizer_step_post_hook(_count_step)
