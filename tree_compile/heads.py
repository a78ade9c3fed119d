"""The head of a program for one row: logits when they are asked for, or what is computed from them part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tree_compile.call_settings import CallSettings
from tree_compile.changes import Marks
from tree_compile.errors import StaleOutputError
from tree_compile.runtime.next_tokens import States

if TYPE_CHECKING:
    from tree_compile.blocks import Block


@dataclass(frozen=True)
class ProgramHead:
    """The head of a program.

    Attributes:
        block: compiled, for a whole row.
        plain: as it is, for any number of tokens.
        hidden: place of the states among its inputs.
        is_batched: whether states and logits have a batch dimension.
        vocabulary: number of logits.
        dtype: of the logits.
    """

    block: Block
    plain: Block
    hidden: int
    is_batched: tuple[bool, bool]
    vocabulary: int
    dtype: torch.dtype


# A dataclass, because DistributedDataParallel looks for tensors in the fields of those.
@dataclass(eq=False)
class RowHead:
    """The head, and what it takes for one row.

    Attributes:
        head: of the program.
        inputs: of the head.
        settings: those of the call.
        hidden: the states, [T, width].
        depends_on: of every parameter of the head no entry, with a gradient to it: DistributedDataParallel asks which
            parameters the output depends on before any logits are computed.
    """

    head: ProgramHead
    inputs: tuple[Tensor, ...]
    settings: CallSettings
    hidden: Tensor = field(init=False)
    depends_on: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._attributes = self.head.plain.attributes()
        states = self.inputs[self.head.hidden]
        self.hidden = states[0] if self.head.is_batched[0] else states
        self.depends_on = [tensor.flatten()[:0] for tensor in self._attributes if tensor.requires_grad]
        self._marks = Marks((*self._attributes, *self.inputs))

    @cached_property
    def logits(self) -> Tensor:
        """[T, vocabulary] of the whole row."""
        (logits,) = self.head.block(*self.inputs)
        return self._without_batch(logits)

    @cached_property
    def states(self) -> States:
        """The states, with the head for any part of them."""
        at = self.head.hidden
        others = (*self.inputs[:at], *self.inputs[at + 1 :], *self._attributes)
        return States(self.hidden, others, self._logits_of, self.head.vocabulary, self.head.dtype)

    def _logits_of(self, hidden: Tensor, others: Sequence[Tensor]) -> Tensor:
        at, count = self.head.hidden, len(self.inputs) - 1
        states = hidden[None] if self.head.is_batched[0] else hidden
        with self.settings.autocast_restored():
            (logits,) = self.head.plain.function(*others[count:], *others[:at], states, *others[at:count])
        return self._without_batch(logits)

    def _without_batch(self, logits: Tensor) -> Tensor:
        return logits[0] if self.head.is_batched[1] else logits

    def require_unchanged(self) -> None:
        """Refuses to compute with other weights or states than those of the call.

        Raises:
            StaleOutputError: some were changed, or are not here any more.
        """
        if any(tensor.numel() and not tensor.untyped_storage().size() for tensor in self._attributes):
            raise StaleOutputError(
                "The parameters of the model's head were given back to other ranks since this output was computed.",
                why="logits are computed from it when they are first asked for.",
                hint="keep them until the backward pass: fully_shard(tree_model, reshard_after_forward=False).",
            )
        if not self._marks.are_unchanged():
            raise StaleOutputError(
                "The model's head, or the states before it, were changed or frozen since this output was computed.",
                why="logits are computed from them when they are first asked for, and would be others, or have other "
                "gradients.",
                hint="take out.logits, out.logprobs and the like before optimizer.step(), or call the model again.",
            )
