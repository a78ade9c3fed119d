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
    def options(self) -> frozenset[str]:
        """Names of the options that it has, the scale left out."""
        biases = {"key_bias": self.key_bias, "pair_bias": self.pair_bias}
        numbers = {"window": self.window, "chunk": self.chunk, "softcap": self.softcap}
        given = [name for name, bias in biases.items() if bias is not None]
        return frozenset([*given, *(name for name, number in numbers.items() if number)])

    @property
    def plain(self) -> bool:
        """Whether every ancestor is visible and nothing is done to the scaled products."""
        return not self.options
