"""A number and what it counts, in words."""

from __future__ import annotations

__all__ = ["count_of"]


def count_of(number: int, noun: str, plural: str = "") -> str:
    """`1 leaf`, `1,200 leaves`: `plural` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
