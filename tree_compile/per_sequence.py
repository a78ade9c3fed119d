"""One value for every sequence of a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tree_compile.row_result import RowResult

Part = TypeVar("Part")


class PerSequence(Sequence[Part], Generic[Part]):
    """One value for every sequence, found by the sequence's number in the batch; -1 is the last one that is here.

    It is no tensor: `out.logits[i].shape`, not `out.logits.shape`.
    """

    def __init__(self, sequence_ids: Sequence[int], values: Mapping[int, Any]) -> None:
        self._ids = sequence_ids
        self._values = values

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(values of {len(self)} sequences: [i], slices, or a loop)"

    def __iter__(self) -> Iterator[Part]:
        return (self[sequence] for sequence in self._ids)

    def __getitem__(self, sequence: Any) -> Any:
        if isinstance(sequence, slice):
            return [self._values[number] for number in self._ids[sequence]]
        sequence = number_of(sequence, "out.logits[i][:, -1]")
        number = self._ids[sequence] if -len(self._ids) <= sequence < 0 else sequence
        if number not in self._values:
            raise IndexError(f"there is no sequence {sequence} here, only {_numbers(self._ids)}")
        return self._values[number]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_NO_TENSOR}, and has no {name!r}: take that of one sequence, out.logits[i].{name}")

    @classmethod
    def __torch_function__(cls, function: Any, *_arguments: Any) -> Any:
        name = getattr(function, "__name__", "a function of torch")
        raise TypeError(f"{_NO_TENSOR}: call {name} for one sequence at a time, with out.logits[i]")


_NO_TENSOR = "this holds one value for every sequence"


def number_of(sequence: Any, instead: str) -> int:
    """A sequence's number; `instead` is what might be meant by something else."""
    try:
        return operator.index(sequence)
    except TypeError:
        what = f"{_NO_TENSOR}, by its number, and not by {sequence!r}: {instead} for sequence i"
        raise TypeError(what) from None


def _numbers(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:8]))
    return shown + (", …" if len(ids) > 8 else "")


class PartsOfRows(Mapping[int, Any]):
    """A value of every sequence, by its number; those of a row are made when the first of them is asked for.

    Args:
        results: of all rows.
        parts: the values of a row, in the order of its sequences.
    """

    def __init__(self, results: Sequence[RowResult], parts: Callable[[RowResult], Sequence[Any]]) -> None:
        self._parts = parts
        self._made: dict[int, Sequence[Any]] = {}
        self._where = {
            sequence: (number, result, at)
            for number, result in enumerate(results)
            for at, sequence in enumerate(result.row.sequence_ids)
        }

    def __getitem__(self, sequence: int) -> Any:
        number, result, at = self._where[sequence]
        if number not in self._made:
            self._made[number] = self._parts(result)
        return self._made[number][at]

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._where

    def __iter__(self) -> Iterator[int]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
