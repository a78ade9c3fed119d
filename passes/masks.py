"""What hides tokens in an attention: static pair tables, and lists of the tokens that an indexer chose.

Masks over windows of tokens are read in `window_patterns`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import fx

from tree_compile.passes.fills import filled, number_of, rounded
from tree_compile.passes.nodes import arguments
from tree_compile.passes.operators import BOTH, EITHER, FILLS, NOT, SAME_ROWS, SCATTERS, WHERES
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.passes.shapes import is_boolean, is_tensor, keeps_numbers, shape_of, sizes
from tree_compile.passes.static_values import Fill, Fixed, Kind, LengthDependent, Pair, StaticValues

aten = torch.ops.aten


class NoMatch(Exception):
    """Nodes that are not what this package can read; the text says why."""


class ChangesWithLength(NoMatch):
    """A mask or bias at a pair of tokens changes with the number of tokens after them."""


# How masks are put together


@dataclass(frozen=True)
class View:
    """How a mask is looked at.

    Attributes:
        hides: True for a mask of truths that is True where hidden.
        fill: the score that a mask of truths gives to what it hides.
        as_bool: whether its numbers are taken as truths; else they are added to the scores.
        casts: the dtypes that its numbers go through until then, the first one first.
    """

    hides: bool = False
    fill: float = -math.inf
    as_bool: bool = False
    casts: tuple[torch.dtype, ...] = ()

    def cast(self, number: float) -> float | None:
        """What becomes of a number; None where one of the dtypes cannot hold it."""
        found: float | None = number
        for dtype in self.casts:
            found = rounded(found, dtype)
        return found

    def is_hidden(self, number: float) -> bool:
        """Whether `number` hides what it stands at."""
        found = self.cast(number)
        return found is not None and (bool(found) is self.hides if self.as_bool else found <= HIDDEN_BELOW)

    def is_visible(self, number: float) -> bool:
        """Whether `number` leaves the score that it stands at as it is."""
        found = self.cast(number)
        return found is not None and (bool(found) is not self.hides if self.as_bool else found == 0)


class _Found(Protocol):
    """What is known of a mask; a sum of two says what is known where both hide."""

    def __add__(self, other: Self) -> Self: ...


Found = TypeVar("Found", bound=_Found)


class MaskReader(ABC, Generic[Found]):
    """Takes a mask apart into what it is made of at last, which a subclass reads.

    Attributes:
        statics: the static values of the graph.
        nothing: what is known of a mask that hides nothing.
    """

    statics: StaticValues
    nothing: Found

    @abstractmethod
    def static(self, node: Any, view: View) -> Found:
        """What a static node says."""

    @abstractmethod
    def other(self, node: fx.Node, view: View) -> Found:
        """What a node says that is no mask made of others."""

    def read(self, node: Any, view: View) -> Found:
        """What the mask or bias `node` says.

        Raises:
            NoMatch: it is not known.
        """
        number = number_of(node, self.statics)
        if number is not None and view.is_visible(number):
            return self.nothing
        is_static = node in self.statics.nodes or node in self.statics.kinds or not is_tensor(node)
        if is_tensor(node) and is_boolean(node) is not view.as_bool and (is_static or not view.as_bool):
            raise NoMatch("its mask is used as a number, or numbers as its mask")
        if is_static:
            return self.static(node, view)
        above = _unmoved(node)
        if above is None:
            return self._combined(node, view)
        return self.read(above, replace(view, casts=(node.meta["val"].dtype, *view.casts)))

    def _combined(self, node: fx.Node, view: View) -> Found:
        args: Any = node.args
        if node.target in (*NOT, *BOTH, *EITHER):
            if not view.as_bool or not is_boolean(node):
                raise NoMatch("its mask is combined as numbers")
            view = replace(view, casts=())  # truths stay what they are
            if node.target in NOT:
                return self.read(args[0], replace(view, hides=not view.hides))
            if view.hides is not (node.target in EITHER):
                raise NoMatch("one of its masks shows what another hides")
            return self.read(args[0], view) + self.read(args[1], view)
        if node.target is aten.add.Tensor:
            return self._sum(node, view)
        if node.target in (*FILLS, *WHERES):
            return self._filled(node, view)
        return self.other(node, view)

    def _sum(self, node: fx.Node, view: View) -> Found:
        """Biases, or truths: their sum is true where either is."""
        given = arguments(node)
        if given["alpha"] != 1 or (view.as_bool and not (view.hides and is_boolean(node))):
            raise NoMatch("its masks are added as numbers")
        return self.read(given["self"], view) + self.read(given["other"], view)

    def _filled(self, node: fx.Node, view: View) -> Found:
        found = filled(node, self.statics, view.is_hidden)
        if found is None:
            raise NoMatch("hidden scores are filled with a value that still gets weight")
        fill = view.fill if view.as_bool else view.cast(found.fill)
        assert fill is not None  # it hides
        return self.read(found.above, view) + self.read(found.mask, View(found.hides, fill, True))


def _unmoved(node: fx.Node) -> fx.Node | None:
    """A mask in another shape, whose last two dimensions are still query and key, or in another dtype."""
    if node.target not in (*SAME_ROWS, aten.slice.Tensor):
        return None
    source: Any = node.args[0]
    if sizes(source)[-2:] != sizes(node)[-2:]:
        if node.target is aten.slice.Tensor:
            return None
        raise NoMatch("its mask is reshaped")
    if not (keeps_numbers(node) or is_boolean(source) or is_boolean(node)):
        raise NoMatch("its mask is cast to numbers that are not the same")
    return source


def index_of_visible(node: fx.Node, view: View, statics: StaticValues) -> fx.Node:
    """The numbers of the keys that a mask shows, where it has one value at those and another at all others.

    Raises:
        NoMatch: it is no such mask.
    """
    given, rank = arguments(node), len(shape_of(node))
    others = number_of(given["self"], statics)
    at_index = rounded(number_of(given.get("value", given.get("src")), statics), node.meta["val"].dtype)
    if others is None or at_index is None or given["dim"] % rank != rank - 1:
        raise NoMatch(_why_not_static(None))
    if sizes(node)[:-1] != sizes(given["index"])[:-1]:
        raise NoMatch("its mask has rows that the list of chosen keys has none for")
    if not view.is_hidden(others) or not view.is_visible(at_index):
        raise NoMatch("its mask hides the keys of a list, and shows all others")
    return given["index"]


# Masks over tokens


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
    return _TokenMasks(statics).read(node, View(hides, fill, is_boolean(node)))


@dataclass(frozen=True)
class _TokenMasks(MaskReader[Masks]):
    statics: StaticValues
    nothing: Masks = Masks()

    def static(self, node: Any, view: View) -> Masks:
        kind = self.statics.kinds.get(node)
        if isinstance(kind, Fill) and all(map(view.is_visible, kind.value.flatten().tolist())):
            return self.nothing
        if not isinstance(kind, Pair):
            raise ChangesWithLength(kind.why) if isinstance(kind, LengthDependent) else NoMatch(_why_not_static(kind))
        return Masks((Mask(node, view.hides, view.fill),))

    def other(self, node: fx.Node, view: View) -> Masks:
        if node.target not in SCATTERS:
            raise NoMatch(_why_not_static(None))
        return Masks(chosen=index_of_visible(node, view, self.statics))


def _why_not_static(kind: Kind | None) -> str:
    if kind is None:
        return "its mask or bias depends on the tokens or on parameters, not on positions alone"
    if isinstance(kind, (Fixed, Fill)):
        return "its mask is the same for all tokens"
    return "its mask has other dimensions than one of T queries and one of T keys"
