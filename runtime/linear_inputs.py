"""What every layer of `linear_recurrence` comes down to, however it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

__all__ = ["LinearInputs", "LinearOptions"]


class LinearInputs(NamedTuple):
    """Of one row: query and key [1, T, Hk, D], value [1, T, H, E], decay [1, T, H, D or 1], beta [1, T, H] or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor | None

    def of_each(self, change: Callable[[Tensor], Tensor]) -> LinearInputs:
        """The same with every tensor changed."""
        query, key, value, decay = map(change, self[:4])
        return LinearInputs(query, key, value, decay, None if self.beta is None else change(self.beta))


class LinearOptions(NamedTuple):
    """As in `delta_rule`."""

    scale: float | None
    normalize: bool
    initial_state: Tensor | None
    output_final_state: bool
