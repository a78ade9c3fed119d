"""The head of a program for one row: logits when they are asked for, or what is computed from them part by part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tree_compile.blocks import Block
from tree_compile.errors import StaleOutputError
from tree_compile.runtime.next_tokens import States


@dataclass(frozen=True)
class CallSettings:
    """The settings of torch that a call was made under: what it computes later is computed under them, too.

    Attributes:
        gradients: whether they were on.
        inference: whether inference mode was on.
        device: type of the device.
        autocast: dtype of autocast on the device; None where it was off.
    """

    gradients: bool
    inference: bool
    device: str
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> CallSettings:
        """Those that are in force."""
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device, autocast)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All of them."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients), self.autocast_restored():
            yield

    @contextmanager
    def autocast_restored(self) -> Iterator[None]:
        """Autocast alone."""
        # Weights that were cast elsewhere may have been cast without gradients.
        with torch.autocast(self.device, self.autocast, self.autocast is not None, cache_enabled=False):
            yield


@dataclass(frozen=True)
class HeadPlan:
    """Where a program's head begins and ends.

    Attributes:
        block: the head, compiled.
        plain: the head as it is, for any number of tokens.
        hidden: place of the states among its arguments.
        is_batched: whether states and logits have a batch dimension.
        vocabulary: number of logits.
    """

    block: Block
    plain: Block
    hidden: int
    is_batched: tuple[bool, bool]
    vocabulary: int


# A dataclass, because DistributedDataParallel looks for tensors in the fields of those.
@dataclass(eq=False)
class RowHead:
    """The head, and what it takes for one row.

    Attributes:
        plan: of the program.
        arguments: of the head.
        settings: those of the call.
        depends_on: of every parameter of the head no entry, with a gradient to it: DistributedDataParallel asks which
            parameters the output depends on before any logits are computed.
    """

    plan: HeadPlan
    arguments: tuple[Tensor, ...]
    settings: CallSettings
    depends_on: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._parameters = list(self.plan.plain.parameters())
        self._versions = [parameter._version for parameter in self._parameters]
        with self.settings.restored():
            self.depends_on = [parameter.flatten()[:0] for parameter in self._parameters]

    @cached_property
    def logits(self) -> Tensor:
        """[T, vocabulary] of the whole row.

        Raises:
            StaleOutputError: a parameter of the head was changed since the call.
        """
        self._require_same_parameters()
        with self.settings.restored():
            (logits,) = self.plan.block(*self.arguments)
        return logits[0] if self.plan.is_batched[1] else logits

    @cached_property
    def hidden(self) -> Tensor:
        """The states, [T, width]."""
        states = self.arguments[self.plan.hidden]
        return states[0] if self.plan.is_batched[0] else states

    def states(self) -> States:
        """The states with the head for any part of them.

        Raises:
            StaleOutputError: a parameter of the head was changed since the call.
        """
        self._require_same_parameters()
        hidden = self.plan.hidden
        others = [*self.arguments[:hidden], *self.arguments[hidden + 1 :]]
        return States(self.hidden, others, self._parameters, self._logits_of, self.plan.vocabulary)

    def _logits_of(self, hidden: Tensor, others: Sequence[Tensor]) -> Tensor:
        at = self.plan.hidden
        states = hidden[None] if self.plan.is_batched[0] else hidden
        with self.settings.autocast_restored():
            (logits,) = self.plan.plain(*others[:at], states, *others[at:])
        return logits[0] if self.plan.is_batched[1] else logits

    def _require_same_parameters(self) -> None:
        if [parameter._version for parameter in self._parameters] != self._versions:
            raise StaleOutputError(
                "The parameters of the model's head were changed since this output was computed.",
                why="logits are computed from it when they are first asked for, and would be those of other weights.",
                hint="take out.logits, out.logprobs and the like before optimizer.step().",
            )
