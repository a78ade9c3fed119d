"""Closed forms of masks and biases: what a table over (query position, key position) says, in q and k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

HIDDEN_BELOW = -1.0e4
"""A score this low is taken for hidden: the model's own scores are above half of it."""

q, k = sympy.symbols("q k", integer=True, nonnegative=True)


class NotCausal(ValueError):
    """A token sees a token after it."""


class SeesNothing(ValueError):
    """A token sees no token at all, not even itself."""


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees on its path: all before it, a window, or the tokens of its chunk.

    Attributes:
        window: number of last tokens that are seen, the query itself among them; 0 for all.
        chunk: only tokens of the same chunk of this many are seen; 0 for all.
    """

    window: int = 0
    chunk: int = 0

    @property
    def expression(self) -> sympy.Basic:
        """The condition in q and k, for a key at or before the query."""
        parts = [k <= q]
        if self.window:
            parts.append(q - k < self.window)
        if self.chunk:
            parts.append(sympy.Eq(sympy.floor(q / self.chunk), sympy.floor(k / self.chunk)))
        return sympy.And(*parts)

    def table(self, tokens: int, device: torch.device) -> Tensor:
        """Boolean `[tokens, tokens]`, query by key."""
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril_()
        if self.window:
            seen.triu_(1 - self.window)
        if self.chunk:
            chunk = torch.arange(tokens, device=device) // self.chunk
            seen &= chunk[:, None] == chunk
        return seen


@dataclass(frozen=True)
class PairForm:
    """What a pair table says.

    Attributes:
        visibility: the closed form of its mask; None where mask or bias have none, and the table itself has to be
            gathered.
        slopes: `[heads]` float64: the bias is `slope * k`, up to a constant per query, which softmax does not see;
            None where there is no bias.
    """

    visibility: Visibility | None
    slopes: Tensor | None = None


def pair_form(samples: Sequence[Tensor]) -> PairForm:
    """The closed form of a table that is known at growing numbers of tokens, and that is the same at all of them.

    Args:
        samples: boolean (True is visible) or floating (added to the scores) `[..., T, T]`, query by key.

    Raises:
        NotCausal: a key after its query is visible.
        SeesNothing: some query sees no key.
    """
    visible, bias = split_mask(samples[-1])
    _require_causal(visible)
    visibility = _visibility([split_mask(sample)[0] for sample in samples])
    if visibility is None or bias is None or not bool((bias != 0).any()):
        return PairForm(visibility)
    slopes = _slopes(bias, visible)
    return PairForm(visibility if slopes is not None else None, slopes)


def as_visibility(table: Tensor, hides: bool) -> Tensor:
    """A mask that is True where something is visible, of one that is True where it is hidden; biases as they are."""
    return ~table if hides else table


def sum_of_masks(tables: Sequence[Tensor]) -> Tensor:
    """Several masks at once: hidden by one is hidden; biases add up."""
    if len(tables) == 1:
        return tables[0]
    if all(table.dtype == torch.bool for table in tables):
        return torch.stack(torch.broadcast_tensors(*tables)).all(0)
    total = torch.zeros(())
    for table in tables:
        hidden = torch.full((), -float("inf"))
        total = total + (torch.where(table, 0.0, hidden) if table.dtype == torch.bool else table)
    return total


def greatest_hidden(tables: Sequence[Tensor], fills: Sequence[float], floor: float, visible: Tensor) -> float:
    """No score that masks hide is greater than this and the model's own score; NaN where that cannot be said.

    A mask of truths puts its fill in the place of a score, and biases may come before or after it.

    Args:
        tables: what hides or biases, boolean (True is visible) or floating.
        fills: the score that each boolean table gives to what it hides.
        floor: what scores are raised to where they are below it, before or after any of those.
        visible: what is visible of all of them at once.
    """
    if all(table.dtype == torch.bool for table in tables):
        return max(*fills, floor)
    filled, total, risen = torch.full((), -math.inf), torch.zeros(()), torch.zeros(())
    is_filled = torch.zeros((), dtype=torch.bool)
    for table, fill in zip(tables, fills, strict=True):
        if table.dtype == torch.bool:
            filled, is_filled = torch.where(table, filled, filled.clamp_min(fill)), is_filled | ~table
        else:
            total, risen = total + table, risen + table.clamp_min(0)
    hidden = torch.where(is_filled, filled.clamp_min(floor) + risen, torch.maximum(total, floor + risen))
    return float(torch.where(visible, -math.inf, hidden).max())


def split_mask(table: Tensor) -> tuple[Tensor, Tensor | None]:
    """A mask as visibility (boolean) and as a bias that is 0 where nothing is visible (None for a boolean mask)."""
    if table.dtype == torch.bool:
        return table, None
    visible = table > HIDDEN_BELOW
    return visible, torch.where(visible, table, torch.zeros_like(table))


def _require_causal(visible: Tensor) -> None:
    if bool(visible.triu(1).any()):
        raise NotCausal
    if not bool(visible.any(-1).all()):
        raise SeesNothing


def _visibility(samples: Sequence[Tensor]) -> Visibility | None:
    last = samples[-1]
    flat = last.reshape(-1, *last.shape[-2:])
    if not bool((flat == flat[:1]).all()):
        return None
    hidden = ~flat[0, :, 0]
    reach = int(hidden.nonzero()[0]) if bool(hidden.any()) else 0
    for candidate in (Visibility(), Visibility(window=reach), Visibility(chunk=reach)):
        if all(bool((candidate.table(sample.shape[-1], sample.device) == sample).all()) for sample in samples):
            return candidate
    return None


def _slopes(bias: Tensor, visible: Tensor) -> Tensor | None:
    """s where the bias, less its value at key 0, is s * k for all visible pairs and every head."""
    heads = bias.reshape(-1, *bias.shape[-2:]).double()
    if heads.shape[-1] < 3 or not bool(visible[..., 0].all()):
        return None
    relative = heads - heads[..., :1]
    slopes = relative[:, -1, 1]
    keys = torch.arange(heads.shape[-1], device=bias.device, dtype=torch.float64)
    matches = (relative == slopes[:, None, None] * keys) | ~visible.reshape(-1, *visible.shape[-2:])
    return slopes if bool(matches.all()) else None
