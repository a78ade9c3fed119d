"""How attention scores are made from q.k, and which keys of a path they are made for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Score"]


class Score(NamedTuple):
    """The options of `tree_attention`, as it describes them."""

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    key_bias: Tensor | None = None
    pair_bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether every ancestor is visible and nothing is done to the scaled products."""
        return not (self.window or self.chunk or self.softcap) and self.key_bias is None and self.pair_bias is None
