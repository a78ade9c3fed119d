"""Short sequences, for which a model's code may take another way than the one that was captured: all are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tree_compile.comparison import (
    are_close,
    gradients_of,
    relative_difference,
    smallest_parameters,
    tensors_of,
    tolerance,
    trained_parameters,
    weights_of,
)
from tree_compile.errors import CaptureError, RefusedModelError
from tree_compile.failures import of_the_model_alone
from tree_compile.foreign import plain_checkpoints
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.recordings import ROUTED
from tree_compile.runtime.samples import Sample
from tree_compile.runtime.sequences import Sequences
from tree_compile.runtime.topk_index import recorded_choices
from tree_compile.ties import choices_of, telling_of_experts, ties_of
from tree_compile.trials import numbers_at_one, trials
from tree_compile.unpacked import PlainModel, own_autocast_cache

if TYPE_CHECKING:
    from tree_compile.pipeline import Rewritten


def same_when_short(plain: PlainModel, rewritten: Rewritten) -> bool:
    """Whether rewritten graph and model compute the same for sequences of every length below `rewritten.short.least`.

    Outputs are compared at every length; those where a condition on the length changes are also tried on more tokens,
    and with gradients. What the model itself does not take is passed over.
    """
    short = rewritten.short
    assert short is not None
    turns = {length for turn in (1, 2, short.least, *short.turns) for length in (turn - 1, turn)}
    with torch.inference_mode(False), own_autocast_cache(), plain_checkpoints(plain.model):
        sides = _Sides(plain, rewritten)
        try:
            return sides.same_at_all_lengths(short.least - 1) and all(
                sides.same_with_gradients(length) for length in sorted(turns) if 0 < length < short.least
            )
        except RefusedModelError:
            return False


class _Sides:
    """A row that holds some tokens, and the model on those alone."""

    def __init__(self, plain: PlainModel, rewritten: Rewritten) -> None:
        self._plain, self._rewritten = plain, telling_of_experts(rewritten)

    def same_at_all_lengths(self, longest: int) -> bool:
        """Whether the outputs are the same for every prefix of some random tokens."""
        lengths = range(1, longest + 1)
        tokens = np.random.default_rng(0).integers(0, self._rewritten.vocabulary or 2, longest)
        values = self._beside_zeros(torch.from_numpy(tokens)[None])
        with torch.no_grad():
            row, made = self._in_row(values)
            alone = {
                length: self._alone_or_none(
                    tuple(value[:, :length] for value in values), [own[:length] for own in made]
                )
                for length in lengths
            }
        taken = {length: parts for length, parts in alone.items() if parts is not None}
        found = [[part[:length] for part in row] for length in taken]
        return relative_difference(found, taken.values()) <= tolerance(self._rewritten.dtypes)

    def same_with_gradients(self, length: int) -> bool:
        """Whether outputs and gradients are the same for several sequences of one length."""
        rewritten = self._rewritten
        longer = max(rewritten.example_tokens, length + 1)
        numbers = numbers_at_one(self._plain, length, longer)
        return all(map(self._same, trials(self._plain, rewritten.graph_module.graph, length, numbers)))

    def _beside_zeros(self, tokens: Tensor) -> tuple[Tensor, ...]:
        others = len(self._plain.input_names) - 1
        zeros = torch.zeros_like(tokens, device=self._plain.device)
        return self._plain.shaped([tokens.to(self._plain.device), *[zeros] * others])

    def _same(self, values: tuple[Tensor, ...]) -> bool:
        parameters = smallest_parameters(trained_parameters(self._plain.model))
        with torch.enable_grad():
            if self._alone_or_none(values) is None:
                return True
            row, made = self._in_row(values)
            parts = row, self._alone_or_none(values, made) or []
            found, expected = (
                (own, list(gradients_of([own], weights_of([own]), parameters).values())) for own in parts
            )
        return are_close(found, expected, self._rewritten.dtypes)

    def _in_row(self, values: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        """What the row of these tokens computes, and its choices of keys and experts."""
        (row,) = plan_rows(self._sequences(values), min_shared_tokens=1).rows
        rewritten, length = self._rewritten, values[0].shape[1]
        with recorded_choices() as made:
            results = rewritten.graph_module(*rewritten.inputs(row, self._plain.device))
        choices = [own[:length] for own in choices_of(row, made)]
        return [part[:length] for part in rewritten.without_batch(results)], choices

    def _sequences(self, values: tuple[Tensor, ...]) -> Sequences:
        named = dict(zip(self._plain.input_names, values, strict=True))
        if ROUTED in named:
            return [Sample(values[0][0], routed_experts=named[ROUTED][0])]
        return {name: value.tolist() for name, value in named.items()}

    def _alone_or_none(self, values: tuple[Tensor, ...], made: Sequence[Tensor] = ()) -> list[Tensor] | None:
        """What the model computes with choices that the row `made`; None where it does not take so many tokens."""
        try:
            with ties_of(self._rewritten, values[0].shape[1], made), of_the_model_alone():
                return self._rewritten.without_batch(tensors_of(self._plain(values)))
        except CaptureError:
            return None
