"""What hides tokens in an attention: static pair tables, and lists of the tokens that an indexer chose.

Masks over windows of tokens are read in `window_patterns`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tree_compile.passes.nodes import arguments
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.passes.shapes import is_tensor, shape_of, size_expression
from tree_compile.passes.static_values import Fill, Fixed, Kind, LengthDependent, Pair, StaticValues

aten = torch.ops.aten


class NoMatch(Exception):
    """Nodes that are not what this package can read; the text says why."""


class ChangesWithLength(NoMatch):
    """A mask or bias at a pair of tokens changes with the number of tokens after them."""


@dataclass(frozen=True)
class Mask:
    """A static pair table that hides or biases scores.

    Attributes:
        node: the table.
        hides: True for a boolean table that is True where hidden.
        fill: the score that a boolean table gives to what it hides.
    """

    node: fx.Node
    hides: bool = False
    fill: float = -math.inf


@dataclass(frozen=True)
class Masks:
    """All that hides keys at once.

    Attributes:
        static: the tables.
        chosen: a node with the numbers of the keys that are left, for every query; None where there is no such list.
    """

    static: tuple[Mask, ...] = ()
    chosen: fx.Node | None = None

    def __add__(self, other: Masks) -> Masks:
        if self.chosen is not None and other.chosen is not None:
            raise NoMatch("its keys are chosen twice")
        return Masks((*self.static, *other.static), self.chosen or other.chosen)


@dataclass(frozen=True)
class _View:
    """How a mask is looked at: `hides` and `fill` as in `Mask`; `as_bool` where its numbers are taken as truth."""

    hides: bool = False
    fill: float = -math.inf
    as_bool: bool = False


def read_masks(node: fx.Node, statics: StaticValues, hides: bool = False, fill: float = -math.inf) -> Masks:
    """`node`, a mask or bias, as tables and choices.

    Args:
        node: boolean, or floating and added to the scores.
        statics: the static values of its graph.
        hides: True for a boolean mask that is True where hidden.
        fill: the score that a boolean mask gives to what it hides.

    Raises:
        ChangesWithLength: a table changes with the number of tokens.
        NoMatch: it depends on the tokens in another way than by a choice of keys.
    """
    return _read(node, _View(hides, fill, node.meta["val"].dtype == torch.bool), statics)


def _read(node: Any, view: _View, statics: StaticValues) -> Masks:
    if node in statics.nodes or node in statics.kinds or not is_tensor(node):
        return Masks(_static_masks(node, statics, view))
    reader = _READERS.get(node.target)
    if reader is None or node.op != "call_function":
        raise NoMatch(_why_not_static(None))
    return reader(node, view, statics)


def _static_masks(node: fx.Node, statics: StaticValues, view: _View) -> tuple[Mask, ...]:
    """`node` as a mask; none where it hides nothing."""
    kind = statics.kinds.get(node)
    if is_tensor(node) and (node.meta["val"].dtype == torch.bool) is not view.as_bool:
        raise NoMatch("its mask is used as a number, or numbers as its mask")
    if isinstance(kind, Fill) and _hides_nothing(kind.value, view.hides):
        return ()
    if not isinstance(kind, Pair):
        raise ChangesWithLength(kind.why) if isinstance(kind, LengthDependent) else NoMatch(_why_not_static(kind))
    return (Mask(node, view.hides, view.fill),)


def _hides_nothing(value: torch.Tensor, hides: bool) -> bool:
    if value.dtype == torch.bool:
        return bool((value != hides).all())
    return bool((value == 0).all())


def _why_not_static(kind: Kind | None) -> str:
    if kind is None:
        return "its mask or bias depends on the tokens or on parameters, not on positions alone"
    return f"its mask is not a table over (query, key), but a {type(kind).__name__.lower()}"


# How masks are put together

_Reader = Callable[[fx.Node, _View, StaticValues], Masks]


def _same(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
    """A mask in another shape, whose last two dimensions are still query and key, or in another dtype."""
    source: Any = node.args[0]
    before, after = ([size_expression(size) for size in shape_of(mask)[-2:]] for mask in (source, node))
    if before != after:
        raise NoMatch("its mask is reshaped")
    is_bool = node.meta["val"].dtype == torch.bool
    return _read(source, replace(view, as_bool=view.as_bool or is_bool), statics)


def _inverted(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
    _require_truth(node, view)
    return _read(node.args[0], replace(view, hides=not view.hides), statics)


def _require_truth(node: fx.Node, view: _View) -> None:
    """Refuses operators on bits of numbers, which are another thing on truths."""
    if not view.as_bool or node.meta["val"].dtype != torch.bool:
        raise NoMatch("its mask is combined as numbers")


def _both(hidden_by_either: bool) -> _Reader:
    """An `and` of masks that show, or an `or` of masks that hide."""

    def read(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
        _require_truth(node, view)
        if view.hides is not hidden_by_either:
            raise NoMatch("one of its masks shows what another hides")
        return _read(node.args[0], view, statics) + _read(node.args[1], view, statics)

    return read


def _sum(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
    given = arguments(node)
    if view.as_bool or given["alpha"] != 1 or not is_tensor(given["other"]):
        raise NoMatch(_why_not_static(None))
    return _read(given["self"], view, statics) + _read(given["other"], view, statics)


def _filled(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
    given = arguments(node)
    return _of_fill(given["self"], given["mask"], True, _number(given["value"], statics), view, statics)


def _where(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
    given = arguments(node)
    first, second = (_number(given[name], statics) for name in ("self", "other"))
    is_filled_where_true = first is not None and first <= HIDDEN_BELOW
    base, fill = (given["other"], first) if is_filled_where_true else (given["self"], second)
    return _of_fill(base, given["condition"], is_filled_where_true, fill, view, statics)


def _of_fill(base: Any, mask: fx.Node, hides: bool, fill: float | None, view: _View, statics: StaticValues) -> Masks:
    if view.as_bool or fill is None or fill > HIDDEN_BELOW:
        raise NoMatch("hidden scores are filled with a value that still gets weight")
    hidden = _read(mask, _View(hides, fill, True), statics)
    return hidden if _number(base, statics) == 0 else _read(base, view, statics) + hidden


def _scattered(node: fx.Node, view: _View, statics: StaticValues) -> Masks:
    """One value at the keys that a list names, another at all others."""
    given = arguments(node)
    others, chosen = _number(given["self"], statics), float(given["value"])
    rank = len(shape_of(node))
    if others is None or given["dim"] % rank != rank - 1:
        raise NoMatch(_why_not_static(None))
    of_mask, of_list = ([size_expression(size) for size in shape_of(x)[:-1]] for x in (node, given["index"]))
    if of_mask != of_list:
        raise NoMatch("its mask has rows that the list of chosen keys has none for")
    if view.as_bool:
        is_choice = bool(others) is view.hides and bool(chosen) is not view.hides
    else:
        is_choice = others <= HIDDEN_BELOW and chosen == 0
    if not is_choice:
        raise NoMatch("its mask hides the keys of a list, and shows all others")
    return Masks(chosen=given["index"])


def _number(node: Any, statics: StaticValues) -> float | None:
    """The number that `node` is, at all places; None where it is anything else."""
    if isinstance(node, (bool, int, float)):
        return float(node)
    kind = statics.kinds.get(node)
    if isinstance(kind, (Fill, Fixed)) and bool((kind.value == kind.value.flatten()[0]).all()):
        return float(kind.value.flatten()[0])
    if not isinstance(node, fx.Node) or node in statics.nodes or node.op != "call_function":
        return None
    if node.target in _CONSTANTS:
        return _CONSTANTS[node.target]
    if node.target in _FULL:
        return _number(arguments(node)["fill_value"], statics)
    return _number(node.args[0], statics) if node.target in _SAME else None


_CONSTANTS = {
    aten.new_ones.default: 1.0, aten.ones_like.default: 1.0, aten.ones.default: 1.0,
    aten.new_zeros.default: 0.0, aten.zeros_like.default: 0.0, aten.zeros.default: 0.0,
}  # fmt: skip
_FULL = {aten.new_full.default, aten.full_like.default, aten.full.default}
_SAME = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.slice.Tensor,
}  # fmt: skip
_READERS: dict[Any, _Reader] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _inverted),
    **dict.fromkeys((aten.__and__.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor), _both(False)),
    **dict.fromkeys((aten.__or__.Tensor, aten.logical_or.default, aten.bitwise_or.Tensor), _both(True)),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _filled),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), _where),
    aten.add.Tensor: _sum,
    aten.scatter.value: _scattered,
}
