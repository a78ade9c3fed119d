"""Numbers that stand at every place of a tensor, and what puts one number among others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tree_compile.passes.nodes import arguments
from tree_compile.passes.operators import FILLS, FULL, ONES, SAME_ROWS, WHERES, ZEROS
from tree_compile.passes.shapes import is_full_slice, is_tensor
from tree_compile.passes.static_values import Fill, Fixed, StaticValues


def number_of(value: Any, statics: StaticValues) -> float | None:
    """A number, or the one that stands at every place of a tensor; None for anything else."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    kind = statics.kinds.get(value)
    if isinstance(kind, (Fixed, Fill)):
        return _everywhere(kind.value)
    is_made = is_tensor(value) and value.op == "call_function" and not value.meta["val"].is_complex()
    return rounded(_made_of(value, statics), value.meta["val"].dtype) if is_made else None


def _everywhere(value: Tensor) -> float | None:
    if not value.numel() or value.is_complex():
        return None
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) else None


def _made_of(node: fx.Node, statics: StaticValues) -> float | None:
    """The number that an operator fills a tensor with, before its dtype rounds it."""
    if node.target in ZEROS:
        return 0.0
    if node.target in ONES:
        return 1.0
    if node.target in FULL:
        return number_of(arguments(node)["fill_value"], statics)
    return number_of(node.args[0], statics) if node.target in SAME_ROWS or is_full_slice(node) else None


def rounded(number: float | None, dtype: torch.dtype) -> float | None:
    """A number as a tensor holds it; None for none, and for one that it cannot hold."""
    if number is None or (not math.isfinite(number) and not dtype.is_floating_point and dtype != torch.bool):
        return None
    # From float64 a number that an integer dtype cannot hold becomes any; from int64 it wraps, as the model's does.
    is_whole = not dtype.is_floating_point and abs(number) < 1 << 63 and number == int(number)
    held = torch.tensor(int(number)) if is_whole else torch.tensor(number, dtype=torch.float64)
    return float(held.to(dtype))


class Filled(NamedTuple):
    """`above`, with the number `fill` where `mask` is True; where it is False, if not `hides`."""

    above: Any
    mask: Any
    fill: float
    hides: bool


def filled(node: fx.Node, statics: StaticValues, is_hidden: Callable[[float], bool]) -> Filled | None:
    """What a masked_fill or a torch.where makes of a mask and a number for which `is_hidden` is true.

    None for any other node, and where neither side is such a number.
    """
    given = arguments(node)
    if node.target in FILLS:
        tried = [(given["self"], given["mask"], given["value"], True)]
    elif node.target in WHERES:
        condition, one, other = given["condition"], given["self"], given["other"]
        tried = [(other, condition, one, True), (one, condition, other, False)]
    else:
        return None
    for above, mask, value, hides in tried:
        fill = rounded(number_of(value, statics), node.meta["val"].dtype)
        if fill is not None and is_hidden(fill):
            return Filled(above, mask, fill, hides)
    return None
