"""Loops in kernels that the Triton interpreter runs; with numpy 2.4, its own do not count up to a computed number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["counted"]


class Number(int):
    """A loop variable as kernels use it: a number with a dtype."""

    def to(self, *_args: Any, **_kwargs: Any) -> Number:
        """Itself in any dtype."""
        return self


def counted(*bounds: Any) -> Iterator[Number]:
    """`range` for bounds that the interpreter holds in arrays of one number."""
    numbers = [int(bound.handle.data.item()) if hasattr(bound, "handle") else int(bound) for bound in bounds]
    return map(Number, range(*numbers))
