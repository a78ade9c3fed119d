"""What a program computes for one row, and its parts by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tree_compile.call_settings import CallSettings
from tree_compile.errors import OutputError, StaleOutputError
from tree_compile.heads import RowHead
from tree_compile.runtime.next_tokens import States
from tree_compile.runtime.row import Row
from tree_compile.runtime.unpack import unpack_row


@dataclass(eq=False)
class RowResult:
    """The graph's results for one row.

    Attributes:
        row: the row.
        tensors: `[T, …]` each, in the layout of the row (padding may follow); without the logits where there is a head.
        settings: those of torch that the call was made under.
        logits_place: place of the logits among the outputs; None where none of their names is that of logits.
        router_places: places of the logits of routers, one for each layer that has one.
        head: makes the logits; None where they are among the tensors.
    """

    row: Row
    tensors: tuple[Tensor, ...]
    settings: CallSettings
    logits_place: int | None
    router_places: tuple[int, ...] = ()
    head: RowHead | None = None

    def __post_init__(self) -> None:
        self._version = self._version_of_logits()

    def _version_of_logits(self) -> int:
        """How often the logits were changed in place, where they are among the tensors: parts may be views of them."""
        if self.head is not None or self.logits_place is None or self.tensors[self.logits_place].is_inference():
            return 0
        return self.tensors[self.logits_place]._version

    def __len__(self) -> int:
        return len(self.tensors) + (self.head is not None)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """All that the program computed: the tensors, and what the head takes."""
        return self.tensors if self.head is None else (*self.tensors, *self.head.inputs)

    def with_results(self, results: Sequence[Tensor]) -> RowResult:
        """The same of other tensors, in the order of `results`."""
        own = len(self.tensors)
        head = None if self.head is None else replace(self.head, inputs=tuple(results[own:]))
        return replace(self, tensors=tuple(results[:own]), head=head)

    def tensor(self, place: int) -> Tensor:
        """The output at `place`; logits are computed when they are first asked for.

        Raises:
            StaleOutputError: it is the logits, and what they are computed from was changed since the call.
        """
        if self.head is None or self.logits_place is None or place < self.logits_place:
            return self.tensors[place]
        if place > self.logits_place:
            return self.tensors[place - 1]
        self.head.require_unchanged()
        return self.head.logits

    def parts(self, place: int) -> list[Tensor]:
        """The output at `place`, one part `[len_i, …]` for every sequence of the row, in the order of its ids.

        Raises:
            StaleOutputError: as `tensor`.
        """
        return self.unpacked(self.tensor(place))

    @property
    def router_logits(self) -> list[Tensor]:
        """The logits of every router over its experts, `[T, experts]` each; padding may follow.

        Raises:
            OutputError: the model does not return them.
        """
        self.require_router_logits()
        return [self.tensor(place) for place in self.router_places]

    def require_router_logits(self) -> None:
        """Refuses an output without the logits of routers.

        Raises:
            OutputError: as `router_logits`.
        """
        found = [self.tensor(place) for place in self.router_places]
        if not found or any(logits.dim() != 2 or not logits.is_floating_point() for logits in found):
            raise OutputError(
                "The model's output has no logits of routers.",
                why="they are its entry or attribute `router_logits`, one tensor [T, experts] for each layer.",
                hint="for a model of transformers: treecompile(model, forward_kwargs={'output_router_logits': True}).",
            )

    @property
    def vocabulary(self) -> int:
        """Number of logits.

        Raises:
            OutputError: the logits are not one number for every token id and token.
        """
        return self.head.head.vocabulary if self.head is not None else self._logits.shape[1]

    @property
    def states(self) -> States:
        """The states before the head; without one the logits themselves, which make themselves.

        Raises:
            OutputError: the logits are not one number for every token id and token.
        """
        if self.head is not None:
            return self.head.states
        logits = self._logits
        return States(logits, (), _as_they_are, logits.shape[1], logits.dtype)

    @property
    def _logits(self) -> Tensor:
        logits = None if self.logits_place is None else self.tensor(self.logits_place)
        if logits is None:
            raise no_logits()
        if logits.dim() != 2 or not logits.is_floating_point():
            raise OutputError(
                f"The model's output has no logits: in their place is a tensor of {logits.dtype} with "
                f"{logits.dim()} dimensions.",
                why="log-probabilities are computed from logits [T, vocabulary].",
                hint="return the logits as the output, or as its entry or attribute `logits`.",
            )
        return logits

    def hidden(self) -> list[Tensor]:
        """The states before the head `[len_i, width]`, for every sequence of the row.

        Raises:
            OutputError: there is no head.
            StaleOutputError: they were changed since the call.
        """
        head = self.require_head()
        head.require_unchanged()
        return self.unpacked(head.hidden)

    def require_head(self) -> RowHead:
        """The head.

        Raises:
            OutputError: there is none.
        """
        if self.head is None:
            raise OutputError(
                "The states before the logits are not known.",
                why="the model does not end in a product of states and parameters that stands alone.",
                hint="let the model return them.",
            )
        return self.head

    def require_unchanged(self) -> None:
        """Refuses to compute from states that are not those of the call.

        Raises:
            StaleOutputError: what logits are computed from was changed since the call.
        """
        if self.head is not None:
            self.head.require_unchanged()
        if self._version != self._version_of_logits():
            raise StaleOutputError(
                "The logits of this output were changed in place.",
                why="log-probabilities and losses are computed from them.",
                hint="change a copy: out.logits[i].clone().",
            )

    def unpacked(self, values: Tensor) -> list[Tensor]:
        """Values `[T, …]` of the row, one part `[len_i, …]` for every sequence, in the order of its ids."""
        return unpack_row(values, [self.row.path_ranges(sequence) for sequence in self.row.sequence_ids])


def no_logits() -> OutputError:
    """What says that none of the output's names is that of logits."""
    return OutputError(
        "The model's output has no logits: none of its names is `logits`, with a tensor.",
        why="it may be states, and what is computed from logits would be computed from them.",
        hint="return them as the entry or attribute `logits`, as a causal language model does; out[i] has the others.",
    )


def _as_they_are(logits: Tensor, _others: Sequence[Tensor]) -> Tensor:
    return logits
