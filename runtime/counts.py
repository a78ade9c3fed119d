"""A number and what it counts, in words."""

from __future__ import annotations

from typing import Any

__all__ = ["a_kind", "count_of"]


def count_of(number: int, noun: str, plural: str = "") -> str:
    """`1 leaf`, `1,200 leaves`: `plural` where an s does not make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def a_kind(value: Any) -> str:
    """The type of a value with its article: `a list`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
