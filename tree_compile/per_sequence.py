"""One value for every sequence of a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.utils import _pytree as pytree

from tree_compile.row_result import RowResult

Part = TypeVar("Part")


class PerSequence(Sequence[Part], Generic[Part]):
    """One value for every sequence, found by the sequence's number in the batch.

    A loop, a slice and a negative number go over the sequences that are here, which in the output of one row are some
    of the batch: -1 is the last of them. It is no tensor: `out.logits[i].shape`, not `out.logits.shape`.

    Args:
        sequence_ids: numbers of the sequences that are here, ascending.
        values: theirs.
        name: what errors call this: "out.logits".
    """

    def __init__(self, sequence_ids: Sequence[int], values: Mapping[int, Any], name: str) -> None:
        self._ids = sequence_ids
        self._values = values
        self._name = name

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(values of {len(self)} sequences: [i], slices, or a loop)"

    def __iter__(self) -> Iterator[Part]:
        return (self[sequence] for sequence in self._ids)

    def __reversed__(self) -> Iterator[Part]:
        return (self[sequence] for sequence in reversed(self._ids))

    def __getitem__(self, sequence: Any) -> Any:
        if isinstance(sequence, slice):
            return [self._values[number] for number in self._ids[sequence]]
        sequence = number_of(sequence, f"{self._name}[i][:, -1]")
        number = self._ids[sequence] if -len(self._ids) <= sequence < 0 else sequence
        if number not in self._values:
            raise IndexError(f"there is no sequence {sequence} here, only {numbers_of(self._ids)} (row.sequence_ids)")
        return self._values[number]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copies and pickles, before there are attributes
            raise AttributeError(name)
        raise AttributeError(f"{_NO_TENSOR}, and has no {name!r}: take that of one sequence, {self._name}[i].{name}")

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = getattr(function, "__name__", "a function of torch")
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, cls)]
        name = given[0]._name if given else "it"
        raise TypeError(f"{_NO_TENSOR}: call {called} for one sequence at a time, with {name}[i]")


_NO_TENSOR = "this holds one value for every sequence"


def number_of(sequence: Any, instead: str) -> int:
    """A sequence's number; `instead` is what might be meant by something else."""
    try:
        return operator.index(sequence)
    except TypeError:
        what = f"{_NO_TENSOR}, by its number, and not by {sequence!r}: {instead} for sequence i"
        raise TypeError(what) from None


def numbers_of(ids: Sequence[int]) -> str:
    """The first few numbers of sequences, in words."""
    shown = ", ".join(map(str, ids[:8]))
    return shown + (", …" if len(ids) > 8 else "")


class PartsOfRows(Mapping[int, Any]):
    """A value of every sequence, by its number; those of a row are made when the first of them is asked for.

    Args:
        results: of all rows.
        parts: for each of them what makes the values of its sequences, in their order.
    """

    def __init__(self, results: Sequence[RowResult], parts: Sequence[Callable[[], Sequence[Any]]]) -> None:
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
            # Values that are first asked for under no_grad, to be printed, are asked for again by a loss.
            with result.settings.restored():
                self._made[number] = self._parts[number]()
        return self._made[number][at]

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._where

    def __iter__(self) -> Iterator[int]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)
