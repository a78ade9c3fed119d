"""The options of a plan, and what is refused among them."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ATTENTION",
    "DEMO_ROW_TOKENS",
    "MIN_SHARED_TOKENS",
    "OBJECTIVES",
    "PLAN_SECONDS",
    "Budget",
    "Options",
    "as_number",
    "check_above_0",
    "check_at_least_0",
    "check_choice",
    "check_count",
    "check_options",
    "check_within",
]

ATTENTION = ("auto", "flex", "flash")
"""What may compute attention on CUDA: by row the faster one of the others, flex_attention, or flash attention."""
OBJECTIVES = ("rows", "tokens")
_SHARES = ("all", "context")
PLAN_SECONDS = 0.15
"""How long rows are improved where nothing else is said."""
MIN_SHARED_TOKENS = 64
"""The fewest tokens of a shared segment where nothing else is said."""
DEMO_ROW_TOKENS = 16_384
"""The most tokens in a row of `treecompile demo` where nothing else is said and no rollout has more."""
_MOST = 2**62
"""Greater counts mean the same, and sums with them would not fit in 64 bits."""


@dataclass(frozen=True)
class Budget:
    """How long rows are improved.

    Attributes:
        seconds: until then, by the clock.
        attempts: or for so many attempts, which gives the same rows on every machine; None for the clock.
    """

    seconds: float = PLAN_SECONDS
    attempts: int | None = None


@dataclass(frozen=True)
class Options:
    """What a plan is made with: plain Python numbers, since compiled code is compiled anew for any other type.

    Attributes:
        row_tokens: the greatest number of tokens in a row; None for one row.
        min_shared_tokens: the fewest tokens of a shared segment.
        objective: one of `OBJECTIVES`.
        pad_rows: whether rows are filled up to `row_tokens`.
        budget: how long rows are improved.
    """

    row_tokens: int | None
    min_shared_tokens: int
    objective: str
    pad_rows: bool
    budget: Budget


def check_options(
    row_tokens: int | None,
    min_shared_tokens: int,
    objective: str = "rows",
    pad_rows: bool = False,
    plan_seconds: float = PLAN_SECONDS,
    plan_attempts: int | None = None,
    share: str = "all",
) -> Options:
    """The options of `plan_rows`, which has the same arguments, in the types that the planner computes with.

    Raises:
        ValueError: names the option that has no meaning.
    """
    pad_rows = _truth("pad_rows", pad_rows)
    if row_tokens is not None:
        row_tokens = check_count("row_tokens", row_tokens, 1)
    elif pad_rows:
        raise ValueError("row_tokens is None; it must be the length to pad to where pad_rows is True")
    min_shared_tokens = check_count("min_shared_tokens", min_shared_tokens, 1)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("share", share, _SHARES)
    return Options(row_tokens, min_shared_tokens, objective, pad_rows, _budget(plan_seconds, plan_attempts))


def check_count(name: str, value: Any, least: int) -> int:
    """A whole number of at least `least` as a Python int that fits in 64 bits.

    Raises:
        ValueError: it is not one; names the option.
    """
    try:
        # True is no count, though Python takes it for 1.
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return min(count, _MOST)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Refuses what is not one of the choices.

    Raises:
        ValueError: names the option and the choices.
    """
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def check_within(name: str, value: Any, most: int, what: str) -> int:
    """A whole number from 1 to `most`, which is the number of `what`, as a Python int.

    Raises:
        ValueError: it is not one; names the option.
    """
    try:
        # True is no count, though Python takes it for 1.
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if not 0 < count <= most:
        raise ValueError(f"{name} is {value!r}; it must be between 1 and the number of {what}, {most}")
    return count


def check_at_least_0(name: str, value: Any) -> float:
    """A number of 0 or more as a Python float.

    Raises:
        ValueError: it is not one; names the option.
    """
    number = as_number(value)
    if not number >= 0:
        raise ValueError(f"{name} is {value!r}; it must be a number of 0 or more")
    return number


def check_above_0(name: str, value: Any) -> float:
    """A finite number above 0 as a Python float.

    Raises:
        ValueError: it is not one; names the option.
    """
    number = as_number(value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a number above 0")
    return number


def as_number(value: Any) -> float:
    """A number, or an array or tensor of one, as a Python float; NaN for anything else, texts of numbers too."""
    try:
        return math.nan if isinstance(value, str | bytes | bytearray) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _budget(seconds: Any, attempts: Any) -> Budget:
    number = check_at_least_0("plan_seconds", seconds)
    return Budget(number, None if attempts is None else check_count("plan_attempts", attempts, 0))


def _truth(name: str, value: Any) -> bool:
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} is {value!r}; it must be True or False") from None
