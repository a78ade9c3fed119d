"""Short sequences, for which a model's code may take another way than the one that was captured: all are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tree_compile.comparison import (
    GRADIENT_ROUNDING,
    gradients_of,
    relative_difference,
    smallest_parameters,
    tensors_of,
    tolerance,
    trained_parameters,
    weights_of,
)
from tree_compile.errors import RefusedModelError
from tree_compile.failures import of_the_model_alone
from tree_compile.foreign import plain_checkpoints
from tree_compile.runtime.planning import plan_rows
from tree_compile.ties import ties_of
from tree_compile.unpacked import PlainModel, own_autocast_cache

if TYPE_CHECKING:
    from tree_compile.pipeline import Rewritten


def same_when_short(plain: PlainModel, rewritten: Rewritten) -> bool:
    """Whether rewritten graph and model compute the same for sequences of every length below `rewritten.short.least`.

    Outputs are compared at every length, gradients at those where a condition on the length changes.
    """
    short = rewritten.short
    assert short is not None
    tokens = np.random.default_rng(0).integers(0, rewritten.vocabulary or 2, short.least - 1)
    turns = {length for turn in (1, 2, short.least, *short.turns) for length in (turn - 1, turn)}
    allowed = tolerance(rewritten.dtypes)
    with torch.inference_mode(False), own_autocast_cache(), plain_checkpoints(plain.model):
        sides = _Sides(plain, rewritten, tokens)
        try:
            return sides.outputs_differ() <= allowed and all(
                sides.gradients_differ(length) <= GRADIENT_ROUNDING * allowed
                for length in sorted(turns)
                if 0 < length < short.least
            )
        except RefusedModelError:
            return False


class _Sides:
    """A row that holds every prefix of some tokens, and the model on each prefix alone."""

    def __init__(self, plain: PlainModel, rewritten: Rewritten, tokens: np.ndarray) -> None:
        self._plain, self._rewritten, self._tokens = plain, rewritten, tokens

    def outputs_differ(self) -> float:
        lengths = range(1, len(self._tokens) + 1)
        with torch.no_grad():
            row = self._in_row(len(self._tokens))
            alone = [self._alone(length) for length in lengths]
        return relative_difference([[part[:length] for part in row] for length in lengths], alone)

    def gradients_differ(self, length: int) -> float:
        parameters = smallest_parameters(trained_parameters(self._plain.model))
        with torch.enable_grad():
            sides = [[side(length)] for side in (self._in_row, self._alone)]
            found, expected = (gradients_of(parts, weights_of(parts), parameters) for parts in sides)
        return relative_difference([list(found.values())], [list(expected.values())])

    def _inputs(self, length: int) -> dict[str, list[list[int]]]:
        """The tokens, and zeros for every other input."""
        own = self._tokens[:length].tolist()
        return {name: [own if place == 0 else [0] * length] for place, name in enumerate(self._plain.input_names)}

    def _in_row(self, length: int) -> list[Tensor]:
        (row,) = plan_rows(self._inputs(length), min_shared_tokens=1).rows
        rewritten = self._rewritten
        results = rewritten.graph_module(*rewritten.inputs(row, self._plain.device))
        return [part[:length] for part in rewritten.without_batch(results)]

    def _alone(self, length: int) -> list[Tensor]:
        device = self._plain.device
        values = tuple(torch.tensor(sequences, device=device) for sequences in self._inputs(length).values())
        with ties_of(self._rewritten, length), of_the_model_alone():
            return self._rewritten.without_batch(tensors_of(self._plain(values)))
