"""The words of the token-axis proof: what the dimensions and the numbers of a value have to do with tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx


@dataclass(frozen=True)
class Chosen:
    """In place of an order: the entries are those that a mask chose, as many as it happens to choose."""

    mask: fx.Node

    @property
    def name(self) -> str:
        """Name of the mask."""
        return self.mask.name


@dataclass(frozen=True)
class Axis:
    """A dimension of size `left * T * right`: entry `(l * T + t) * right + r` belongs to token t.

    With a `window` of m tokens there are T // m windows in the place of T tokens, and everything that belongs to a
    window depends on the window's tokens and their ancestors alone.

    Attributes:
        left, right: number of entries around each token; both 0 for a blank axis, whose entries are all the same.
        order: the sort that took the entries out of their order, or the mask that chose some of them; None while all
            are there in order.
        window: tokens of a window; 0 for an axis of tokens.
        later: whether the first window of every path is missing.
    """

    left: int = 1
    right: int = 1
    order: fx.Node | Chosen | None = None
    window: int = 0
    later: bool = False

    def __str__(self) -> str:
        what = f"windows of {self.window} tokens" if self.window else "tokens"
        names = [str(self.left)] * (self.left > 1) + [what] + [str(self.right)] * (self.right > 1)
        return " x ".join(names) + (f" in the order of {self.order.name}" if self.order else "")


TOKENS = Axis()
BLANK = Axis(0, 0)


@dataclass(frozen=True)
class RowNumber:
    """Integers: at an entry, the number of the row `axis` that belongs to the same entry."""

    axis: Axis


@dataclass(frozen=True)
class Slot:
    """Integers: at an entry, the place where the sort `order` put it."""

    order: fx.Node


@dataclass(frozen=True)
class Keys:
    """The sorted values of the sort `order`: at an entry, its own key."""

    order: fx.Node


@dataclass(frozen=True)
class Counts:
    """How many entries have each key, over the sort `order`."""

    order: fx.Node


@dataclass(frozen=True)
class Offsets:
    """Where the entries of each key end, in the sort `order`."""

    order: fx.Node


@dataclass(frozen=True)
class Ancestors:
    """Integers: at an entry, rows of the entry's token itself and of its ancestors; -1 for none."""


Content = RowNumber | Slot | Keys | Counts | Offsets | Ancestors


@dataclass(frozen=True)
class Value:
    """What is known of a tensor: an axis (or None) for every dimension, and what its numbers mean.

    Every number of a value without `content` depends on its own token and that token's ancestors alone.
    """

    axes: tuple[Axis | None, ...]
    content: Content | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether it differs from row to row, or was counted over rows."""
        return any(axis is not None for axis in self.axes) or self.content is not None

    def without_content(self) -> Value:
        """The same axes with numbers that mean nothing special."""
        return replace(self, content=None)


class Mixes(Exception):
    """The rule of an operation does not cover it; the text says why."""


def unify(axes: Iterable[Axis | None]) -> Axis | None:
    """The axis of a dimension on which several operands meet, entry by entry.

    Raises:
        Mixes: their entries belong to different tokens.
    """
    found: Axis | None = None
    for axis in axes:
        if axis is None or axis == found:
            continue
        if found is None or found == BLANK:
            found = axis
        elif axis != BLANK:
            raise Mixes(f"it combines rows in the order '{found}' with rows in the order '{axis}'")
    return found


def broadcast(values: Iterable[Value]) -> tuple[Axis | None, ...]:
    """Axes of an elementwise result; dimensions are aligned from the right."""
    columns = [list(reversed(value.axes)) for value in values]
    rank = max((len(column) for column in columns), default=0)
    merged = [unify(column[dim] for column in columns if dim < len(column)) for dim in range(rank)]
    return tuple(reversed(merged))
