"""The tensors of an output, their gradients, and how far those of two outputs are from each other."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_FILL = 10_000.0
"""An equal number on both sides that is as great as this says what is masked, and nothing of the others' size."""
_LEAST = 1e-3
"""Of the greatest scale of all: a tensor with a smaller one may be the rounding of 0."""

GRADIENT_ROUNDING = 10
"""A gradient is a sum of more terms than an output."""
_MOST_GRADIENTS = 1 << 26
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Relative difference that rounding explains: that of the coarsest dtype that was computed in."""
    return max((_TOLERANCE[dtype] for dtype in dtypes if dtype in _TOLERANCE), default=1e-4)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of a model's output, in order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Gap:
    """How far a tensor, or several, are from what they should be.

    Attributes:
        difference: greatest absolute difference of two numbers; infinite where one of them alone is NaN or infinite,
            and where shapes or dtypes differ.
        scale: greatest absolute number that is expected, fills that both sides have left out.
    """

    difference: float = 0.0
    scale: float = 0.0

    def __or__(self, other: Gap) -> Gap:
        return Gap(max(self.difference, other.difference), max(self.scale, other.scale))


def gap(found: Tensor, expected: Tensor) -> Gap:
    """Compares two tensors."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return Gap(math.inf, 0.0)
    if not found.numel():
        return Gap()
    a, b = _exact(found), _exact(expected)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    difference = float(torch.where(differs, (a - b).abs(), 0.0).max())
    counts = (differs | (b.abs() < _FILL)) & b.isfinite()
    scale = float(torch.where(counts, b.abs(), 0.0).max())
    return Gap(math.inf if math.isnan(difference) else difference, scale)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def rounding_of_zero(dtypes: Iterable[torch.dtype]) -> float:
    """What a number may be that is 0 in exact arithmetic, such as the gradient of a bias of all keys.

    Args:
        dtypes: what was computed in.

    Returns:
        Relative to the greatest of the numbers that it was computed from.
    """
    return max([_LEAST, *(torch.finfo(dtype).eps for dtype in dtypes if dtype in _TOLERANCE)])


def relative(gaps: Sequence[Gap], least: float = _LEAST) -> list[float]:
    """The difference of each, relative to its own scale, or to `least` of the greatest where that is more."""
    floor = least * max((one.scale for one in gaps), default=0.0)
    return [one.difference / max(one.scale, floor, 1e-30) for one in gaps]


def relative_difference(
    found: Iterable[Sequence[Tensor]], expected: Iterable[Sequence[Tensor]], least: float = _LEAST
) -> float:
    """The greatest difference of several outputs, that of every tensor relative to its greatest number in all of them.

    Args:
        found: the tensors of every output.
        expected: what they should be; another number of tensors is an infinite difference.
        least: as in `relative`.
    """
    rows = list(zip(found, expected, strict=True))
    if any(len(ours) != len(theirs) for ours, theirs in rows):
        return math.inf
    gaps = [[gap(a, b) for a, b in zip(ours, theirs, strict=True)] for ours, theirs in rows]
    return max(relative([functools.reduce(Gap.__or__, own) for own in zip(*gaps, strict=True)], least), default=0.0)


Computed = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Outputs, and gradients of their sum with weights."""


def are_close(found: Computed, expected: Computed, dtypes: Collection[torch.dtype]) -> bool:
    """Whether two results differ by no more than rounding in `dtypes`."""
    allowed, least = tolerance(dtypes), rounding_of_zero(dtypes)
    return (
        relative_difference([found[0]], [expected[0]]) <= allowed
        and relative_difference([found[1]], [expected[1]], least) <= GRADIENT_ROUNDING * allowed
    )


# Gradients


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that get gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def held_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a backward pass has left in the parameters, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def smallest_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """As many as fit into memory beside a large model, the smallest first; the gradients of all pass through theirs."""
    by_size = sorted(parameters.items(), key=lambda item: item[1].numel())
    totals = itertools.accumulate(parameter.numel() for _, parameter in by_size)
    return {name: p for (name, p), total in zip(by_size, totals, strict=True) if total <= _MOST_GRADIENTS}


def weights_of(parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """A random weight for every number of several outputs, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return [[_weight(part, generator) for part in own] for own in parts]


def _weight(part: Tensor, generator: torch.Generator) -> Tensor:
    if not part.is_floating_point():
        return torch.ones_like(part)
    return torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.device, part.dtype)


def gradients_of(
    parts: Sequence[Sequence[Tensor]], weights: Sequence[Sequence[Tensor]], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """Those of the sum of several outputs times `weights`; none where the outputs need no gradients."""
    terms = [
        (part * weight).sum()
        for own, of_own in zip(parts, weights, strict=True)
        for part, weight in zip(own, of_own, strict=True)
        if part.requires_grad
    ]
    if not parameters or not terms:
        return {}
    # Autocast around a backward pass would cast once more, which nobody trains with.
    with torch.autocast(terms[0].device.type, enabled=False):
        found = torch.autograd.grad(
            torch.stack(terms).sum(), list(parameters.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(parameters, found, strict=True))
