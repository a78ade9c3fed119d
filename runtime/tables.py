"""Static tables in the layout of a row."""

from __future__ import annotations

import torch
from torch import Tensor

DENSE_ROW_TOKENS = 16_384
"""Longest row for which a mask without a closed form is written out: T x T numbers."""


def pair_at_positions(table: Tensor, position: Tensor, hides: bool) -> Tensor:
    """A table over (query position, key position) for all pairs of a row's tokens, as a bias.

    Args:
        table: `[…, L, L]`, floating (added to the scores) or boolean.
        position: int64 `[T]`, each below L.
        hides: whether a boolean table is True where the key is hidden, rather than visible.

    Returns:
        `[heads, T, T]`, floating, where `heads` is the product of the leading sizes; -inf where a key is hidden.
    """
    rows = table.index_select(-2, position).index_select(-1, position).reshape(-1, len(position), len(position))
    if rows.dtype != torch.bool:
        return rows
    visible = ~rows if hides else rows
    hidden = torch.full((), -float("inf"), device=rows.device)
    return torch.where(visible, torch.zeros((), device=rows.device), hidden)
