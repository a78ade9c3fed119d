"""What a capture assumed about the number of tokens T: a range of lengths, or control flow that is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.errors import ControlFlowError, SourceLine
from tree_compile.passes.limits import LengthLimit

_LARGEST = 1 << 24
_SMALL = 4_096
_LONGEST_TRIED = 4_096


@dataclass(frozen=True)
class ShortLengths:
    """Lengths at which the model's code may take another way than the one that was captured.

    Attributes:
        least: from this length on it takes the captured one.
        turns: lengths below it at which a condition changes.
        error: what to raise where graph and model differ at a shorter length.
    """

    least: int
    turns: frozenset[int]
    error: ControlFlowError


class _AnyInput:
    """Stands for ``L['name']`` in a guard: every input has size (1, T)."""

    def __init__(self, tokens: int) -> None:
        self._size = torch.Size((1, tokens))

    def size(self) -> torch.Size:
        return self._size

    def __getitem__(self, _key: Any) -> _AnyInput:
        return self


def _holds(code: Any, tokens: int) -> bool:
    functions = {"min": min, "max": max, "int": int, "Min": min, "Max": max, "torch": torch, "math": math}
    try:
        return bool(eval(code, {"__builtins__": {}}, {"L": _AnyInput(tokens), **functions}))
    except ZeroDivisionError:
        return False


def _probe_lengths(guard: str) -> list[int]:
    """All small lengths, powers of two, and the lengths at which the guard's own numbers may matter."""
    powers = [1 << exponent for exponent in range(12, 25)]
    numbers = {int(number) for number in re.findall(r"\d+", guard)}
    own = {a // b for a in numbers for b in numbers | {1} if b and _SMALL <= a // b < _LARGEST}
    return sorted({*range(2, _SMALL), *(length + step for length in (*powers, *own) for step in (-1, 0, 1))})


def _last_true(holds: partial[bool], low: int, high: int) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class _Range:
    """The lengths for which a guard holds: from `least` up to `limit`, None for no limit; or not a range at all.

    `turns` are lengths at which it begins or ceases to hold.
    """

    least: int = 0
    limit: int | None = None
    turns: frozenset[int] = frozenset()
    is_range: bool = True


def _range(guard: str, example: int, same_at: Callable[[int], bool | None]) -> _Range:
    """For which T `guard` holds, among them `example`."""
    holds = partial(_holds, compile(guard, "<guard>", "eval"))
    lengths = _probe_lengths(guard)
    truth = [holds(tokens) for tokens in lengths]
    if all(truth):
        return _Range()
    false = [tokens for tokens, is_true in zip(lengths, truth, strict=True) if not is_true]
    # A slice up to T of a buffer with just T rows is no slice: torch notes T != rows, and nothing else changes.
    if len(false) == 1 and false[0] <= _LONGEST_TRIED and same_at(false[0]):
        return _Range()
    if false[0] > example:
        first_false = truth.index(False)
        return _Range(limit=_last_true(holds, lengths[first_false - 1], lengths[first_false]))
    if false[-1] < min(example, _LONGEST_TRIED):
        turns = {after for after in range(3, false[-1] + 2) if holds(after) != holds(after - 1)}
        return _Range(false[-1] + 1, turns=frozenset(turns))
    return _Range(is_range=False)


def length_limit(
    guards: Iterable[str], graph: fx.Graph, example: int, same_at: Callable[[int], bool | None]
) -> tuple[LengthLimit | None, ShortLengths | None, ControlFlowError | None]:
    """Reads the guards of an exported program.

    A guard that holds for every length of two tokens or more says nothing; so does one that excludes a single length at
    which the graph computes what the model does. One that holds up to some length is a limit. One that holds from some
    length on leaves it to a comparison whether the model's code takes another way below; any other means that it
    branches on T.

    Args:
        guards: `ExportedProgram._guards_code`.
        graph: the captured graph, whose shape environment knows the lines that the guards come from.
        example: the T of the capture.
        same_at: whether graph and model compute the same for sequences of one length.

    Returns:
        The tightest limit, None for no limit; the lengths below which guards do not hold, None where all do; and an
        error where one holds for no such range.
    """
    limit, short, error = None, None, None
    for guard in dict.fromkeys(guards):
        found = _range(guard, example, same_at)
        if not found.is_range:
            error = error or _control_flow(_readable(guard), _guard_line(guard, graph))
        elif found.least:
            first = short.error if short else _control_flow(_readable(guard), _guard_line(guard, graph))
            before = short or ShortLengths(0, frozenset(), first)
            short = ShortLengths(max(found.least, before.least), found.turns | before.turns, first)
        elif found.limit is not None and (limit is None or found.limit < limit.tokens):
            limit = LengthLimit(found.limit, _guard_line(guard, graph), has_floor_division="//" in guard)
    return limit, short, error


def branches_on_one_token(where: SourceLine | None) -> ControlFlowError:
    """torch.export takes two tokens or more for granted, and notes no condition for it."""
    return _control_flow("T > 1", where)


def _control_flow(condition: str, where: SourceLine | None) -> ControlFlowError:
    return ControlFlowError(
        f"The model's Python code depends on the number of tokens T: it assumed {condition}.",
        where=where,
        why="a row holds many sequences of different lengths, so there is no one T to branch on.",
        hint="write the branch as tensor operations on positions, or move it out of the model's forward.",
    )


def _readable(guard: str) -> str:
    return re.sub(r"L\[[^\]]*\](\[\d+\])?\.size\(\)\[1\]", "T", guard)


def _shape_guards(graph: fx.Graph) -> list[Any]:
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt):
                return list(size.node.shape_env.guards)
    return []


def _guard_line(guard: str, graph: fx.Graph) -> SourceLine | None:
    """The line of the shape guard that is true for the same lengths as `guard`."""
    holds = partial(_holds, compile(guard, "<guard>", "eval"))
    for shape_guard in _shape_guards(graph):
        if all(_symbolic_holds(shape_guard.expr, tokens) == holds(tokens) for tokens in range(2, 80)):
            frame = shape_guard.sloc.framework_loc
            return SourceLine(frame.filename, frame.lineno, (frame.line or "").strip()) if frame else None
    return None


def _symbolic_holds(expression: Any, tokens: int) -> bool:
    try:
        return bool(expression.xreplace({symbol: sympy.Integer(tokens) for symbol in expression.free_symbols}))
    except ZeroDivisionError:
        return False
