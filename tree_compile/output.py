"""What a tree model returns: one part for every sequence, as the unpacked model would return it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor

from tree_compile.capture import OutputForm
from tree_compile.runtime.row import Row
from tree_compile.runtime.unpack import unpack_row

Part = TypeVar("Part")


@dataclass(frozen=True, eq=False)
class RowResult:
    """The graph's results for one row.

    Attributes:
        row: the row.
        tensors: `[T, …]` each, in the layout of the row (padding may follow).
    """

    row: Row
    tensors: tuple[Tensor, ...]

    @cached_property
    def _parts(self) -> dict[int, list[Tensor]]:
        return {}

    def parts(self, place: int) -> list[Tensor]:
        """The tensor at `place`, one part `[len_i, …]` for every sequence of the row, in the order of its ids."""
        if place not in self._parts:
            ranges = [self.row.path_ranges(sequence) for sequence in self.row.sequence_ids]
            self._parts[place] = unpack_row(self.tensors[place], ranges)
        return self._parts[place]


class PerSequence(Sequence[Part], Generic[Part]):
    """One value for every sequence, found by the sequence's number in the batch; -1 is the last one that is here."""

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
        number = self._ids[sequence] if -len(self._ids) <= sequence < 0 else sequence
        if number not in self._values:
            raise IndexError(f"there is no sequence {sequence} here, only {_numbers(self._ids)}")
        return self._values[number]


def _numbers(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:8]))
    return shown + (", …" if len(ids) > 8 else "")


class _Parts(Mapping[int, Tensor]):
    """One tensor of the output, by sequence; taken out of its row when first asked for."""

    def __init__(self, results: Sequence[RowResult], place: int) -> None:
        self._place = place
        self._where = {
            sequence: (result, at) for result in results for at, sequence in enumerate(result.row.sequence_ids)
        }

    def __getitem__(self, sequence: int) -> Tensor:
        result, at = self._where[sequence]
        return result.parts(self._place)[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


# A dataclass, because DistributedDataParallel looks for tensors in the fields of those.
@dataclass(eq=False, repr=False)
class TreeOutput(Sequence[Any]):
    """The outputs of all sequences of a call.

    `out[i]` is what the unpacked model returns for sequence i, without its batch dimension; `out.logits[i]` is its
    tensor of logits `[len_i, vocabulary]`, whichever form the model returns.
    """

    _results: list[RowResult]
    _form: OutputForm

    def __post_init__(self) -> None:
        self.sequence_ids = sorted(sequence for result in self._results for sequence in result.row.sequence_ids)
        places = range(len(self._results[0].tensors))
        self._tensors = [PerSequence[Tensor](self.sequence_ids, _Parts(self._results, place)) for place in places]

    def __repr__(self) -> str:
        return f"TreeOutput({len(self):,} sequences, {len(self._tensors)} tensors each)"

    def __len__(self) -> int:
        return len(self.sequence_ids)

    def __getitem__(self, sequence: Any) -> Any:
        if isinstance(sequence, slice):
            return [self[number] for number in self.sequence_ids[sequence]]
        return self._form.build([tensor[sequence] for tensor in self._tensors])

    def __iter__(self) -> Iterator[Any]:
        return (self[sequence] for sequence in self.sequence_ids)

    def __getattr__(self, name: str) -> Any:
        loss = "; a loss is computed from out.logits[i] and the labels of sequence i" if name == "loss" else ""
        raise AttributeError(f"a TreeOutput has no {name!r}: out[i] is the model's output for sequence i{loss}")

    @property
    def logits(self) -> PerSequence[Tensor]:
        """The logits of every sequence: `[len_i, vocabulary]`.

        They are the output itself where it is a tensor, its entry or attribute `logits` where it has one, else its
        first tensor.
        """
        return self._tensors[self._logits_place]

    @cached_property
    def _logits_place(self) -> int:
        places = self._form.build(range(len(self._tensors)))
        found = places.get("logits") if isinstance(places, Mapping) else getattr(places, "logits", None)
        return found if isinstance(found, int) else 0
