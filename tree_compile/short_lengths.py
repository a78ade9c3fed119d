"""Short sequences, for which a model's code may take another way than the one that was captured: all are compared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tree_compile.comparison import relative_difference, tensors_of, tolerance
from tree_compile.errors import RefusedModelError
from tree_compile.failures import of_the_model_alone
from tree_compile.foreign import plain_checkpoints
from tree_compile.inputs import graph_inputs
from tree_compile.runtime.planning import plan_rows
from tree_compile.ties import ties_of
from tree_compile.unpacked import Unpacked, own_autocast_cache

if TYPE_CHECKING:
    from tree_compile.pipeline import Rewritten

GRADIENT_ROUNDING = 10
"""A gradient is a sum of more terms than an output."""
_MOST_GRADIENTS = 1 << 26


def same_when_short(unpacked: Unpacked, rewritten: Rewritten) -> bool:
    """Whether rewritten graph and model compute the same for sequences of every length below `rewritten.short.least`.

    Outputs are compared at every length, gradients at those where a condition on the length changes.
    """
    short = rewritten.short
    assert short is not None
    tokens = np.random.default_rng(0).integers(0, rewritten.vocabulary or 2, short.least - 1)
    turns = {length for turn in (1, 2, short.least, *short.turns) for length in (turn - 1, turn)}
    allowed = tolerance(rewritten.dtypes)
    with torch.inference_mode(False), own_autocast_cache(), plain_checkpoints(unpacked.model):
        sides = _Sides(unpacked, rewritten, tokens)
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

    def __init__(self, unpacked: Unpacked, rewritten: Rewritten, tokens: np.ndarray) -> None:
        self._unpacked, self._rewritten, self._tokens = unpacked, rewritten, tokens

    def outputs_differ(self) -> float:
        lengths = range(1, len(self._tokens) + 1)
        with torch.no_grad():
            row = self._in_row(len(self._tokens))
            alone = [self._alone(length) for length in lengths]
        return relative_difference([[part[:length] for part in row] for length in lengths], alone)

    def gradients_differ(self, length: int) -> float:
        trained = {name: p for name, p in self._unpacked.model.named_parameters() if p.requires_grad}
        parameters = list(smallest_parameters(trained).values())
        with torch.enable_grad():
            found, expected = (_gradients(side(length), parameters) for side in (self._in_row, self._alone))
        return relative_difference([found], [expected])

    def _inputs(self, length: int) -> dict[str, list[list[int]]]:
        """The tokens, and zeros for every other input."""
        own = self._tokens[:length].tolist()
        return {name: [own if place == 0 else [0] * length] for place, name in enumerate(self._unpacked.input_names)}

    def _in_row(self, length: int) -> list[Tensor]:
        (row,) = plan_rows(self._inputs(length), min_shared_tokens=1).rows
        rewritten = self._rewritten
        inputs = graph_inputs(
            row, self._unpacked.device, carries_state=rewritten.carries_state, windows=rewritten.windows
        )
        return [part[:length] for part in self._without_batch(rewritten.graph_module(*inputs))]

    def _alone(self, length: int) -> list[Tensor]:
        device = self._unpacked.device
        values = tuple(torch.tensor(sequences, device=device) for sequences in self._inputs(length).values())
        with ties_of(self._rewritten, length), of_the_model_alone():
            return self._without_batch(tensors_of(self._unpacked(values)))

    def _without_batch(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [part[0] if batch else part for part, batch in zip(parts, self._rewritten.batched, strict=True)]


def smallest_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """As many as fit into memory beside a large model, the smallest first; the gradients of all pass through theirs."""
    by_size = sorted(parameters.items(), key=lambda item: item[1].numel())
    totals = itertools.accumulate(parameter.numel() for _, parameter in by_size)
    return {name: p for (name, p), total in zip(by_size, totals, strict=True) if total <= _MOST_GRADIENTS}


def _gradients(parts: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Of the sum of all outputs, each with a random weight of its own."""
    generator = torch.Generator().manual_seed(0)
    terms = [
        (part * torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.device, part.dtype)).sum()
        for part in parts
        if part.requires_grad
    ]
    if not terms or not parameters:
        return []
    with torch.autocast(terms[0].device.type, enabled=False):
        total = torch.stack(terms).sum()
        return list(torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True))
