"""Trains one small model twice on the same rollouts, as a tree and unpacked, and compares."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from tree_compile.api import TreeModel, treecompile
from tree_compile.comparison import Gap, gap, held_gradients, relative
from tree_compile.errors import InputError
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.rollouts import Rollout
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.options import DEMO_ROW_TOKENS
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.row import Row
from tree_compile.selfcheck import worst_gradient

__all__ = ["DemoReport", "run_demo"]

_LEARNING_RATE = 3e-3
_TOLERANCE = 1e-4
"""What float32 rounding explains, relative to the greatest value."""


@dataclass(frozen=True)
class DemoReport:
    """What the demo measured. Steps are timed from the second on: the first compiles, and is compared.

    The two sides take turns, row by row, so that other load on the machine is in the times of both. The times are those
    of the step that took least: an early one may compile once more.

    Attributes:
        sequences: number of rollouts.
        parameters: of the model.
        input_tokens: tokens of all rollouts.
        packed_tokens: tokens of all rows.
        rows: number of rows, each one forward and backward pass.
        row_bound: a number of rows that no packing goes below.
        logit_difference: greatest difference of logits at the first step, relative to the greatest logit.
        gradient_difference: greatest difference of gradients at the first step, each parameter's relative to its
            greatest gradient.
        tolerance: what is allowed for both.
        packed_losses: loss at every step on the rows.
        unpacked_losses: the same, sequence by sequence.
        packed_seconds: time of the quickest step on the rows.
        unpacked_seconds: time of the same step sequence by sequence.
        compile_seconds: time of the first step on the rows beyond that.
    """

    sequences: int
    parameters: int
    input_tokens: int
    packed_tokens: int
    rows: int
    row_bound: int
    logit_difference: float
    gradient_difference: float
    tolerance: float
    packed_losses: list[float]
    unpacked_losses: list[float]
    packed_seconds: float
    unpacked_seconds: float
    compile_seconds: float

    @property
    def speed_up(self) -> float:
        """How many times faster a step is on the rows."""
        return self.unpacked_seconds / self.packed_seconds

    @property
    def ideal_speed_up(self) -> float:
        """Tokens in per token computed."""
        return self.input_tokens / self.packed_tokens

    @property
    def is_above_ideal(self) -> bool:
        """Whether the speed-up is more than fewer tokens explain."""
        return self.speed_up > 1.05 * self.ideal_speed_up

    @property
    def ok(self) -> bool:
        """Whether both differences are within the tolerance."""
        return max(self.logit_difference, self.gradient_difference) <= self.tolerance


def run_demo(
    rollouts: Sequence[Rollout], vocabulary: int, steps: int, row_tokens: int | None, progress: Progress
) -> DemoReport:
    """Takes the same training steps from the same weights on rows of shared prefixes, and sequence by sequence.

    Args:
        rollouts: what to train on, all of it at every step.
        vocabulary: number of token ids.
        steps: number of training steps, at least 2.
        row_tokens: greatest number of tokens in a row; if None, 16,384 or the longest rollout.
        progress: where bars are added.

    Raises:
        InputError: the rollouts are not usable, or one does not fit into a row.
    """
    torch.manual_seed(0)
    model = Dense(DenseConfig(vocab_size=vocabulary, width=128, layers=2, heads=2, kv_heads=1, hidden=352))
    longest = max(len(rollout.tokens) for rollout in rollouts)
    tree_model = treecompile(model, row_tokens=row_tokens or max(DEMO_ROW_TOKENS, longest))
    plan = tree_model.plan([rollout.tokens for rollout in rollouts])
    loss = _Loss(rollouts)
    packed, unpacked = _Packed(tree_model, plan, loss), _Unpacked(copy.deepcopy(model), rollouts, loss)
    logit_difference, *firsts = _first_step(packed, unpacked, progress)
    _, gradient_difference = worst_gradient(held_gradients(model), held_gradients(unpacked.model))
    steps_packed, steps_unpacked = _more_steps(packed, unpacked, steps - 1, progress)
    quickest = min(zip(steps_packed, steps_unpacked, strict=True), key=lambda step: step[0].seconds + step[1].seconds)
    packed_seconds, unpacked_seconds = (side.seconds for side in quickest)
    return DemoReport(
        sequences=len(rollouts),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        input_tokens=plan.input_tokens,
        packed_tokens=plan.packed_tokens,
        rows=len(plan.rows),
        row_bound=plan.row_bound,
        logit_difference=logit_difference,
        gradient_difference=gradient_difference,
        tolerance=_TOLERANCE,
        packed_losses=[step.loss for step in (firsts[0], *steps_packed)],
        unpacked_losses=[step.loss for step in (firsts[1], *steps_unpacked)],
        packed_seconds=packed_seconds,
        unpacked_seconds=unpacked_seconds,
        compile_seconds=max(0.0, firsts[0].seconds - packed_seconds),
    )


class _Loss:
    """Next-token loss on the trainable tokens, as a mean over those of all rollouts.

    The normaliser is that of the whole batch, so the losses of rows, or of sequences, add up to it.
    """

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._places = [torch.from_numpy(rollout.trainable[1:]).nonzero()[:, 0] for rollout in rollouts]
        self._targets = [
            torch.from_numpy(rollout.tokens[1:])[places] for rollout, places in zip(rollouts, self._places, strict=True)
        ]
        self._tokens = sum(map(len, self._places))
        if not self._tokens:
            raise InputError(
                "No token of the rollouts is trained on.",
                why="the demo trains on what the assistant says, and on all of a rollout that is given as tokens.",
                hint='give some messages the role "assistant".',
            )

    def __call__(self, logits: Tensor, sequence: int) -> Tensor:
        chosen = logits[self._places[sequence]]
        return F.cross_entropy(chosen, self._targets[sequence], reduction="sum") / self._tokens


class _Packed:
    """Training on rows."""

    def __init__(self, model: TreeModel, plan: Plan, loss: _Loss) -> None:
        self.model = model
        self.plan = plan
        self.optimizer = _optimizer(model)
        self._loss = loss

    def row(self, row: Row) -> tuple[float, Sequence[Tensor]]:
        """Adds the gradients of a row; returns its loss and the logits of its sequences."""
        logits = self.model(row).logits
        loss = torch.stack([self._loss(logits[sequence], sequence) for sequence in row.sequence_ids]).sum()
        loss.backward()
        return loss.item(), [logits[sequence].detach() for sequence in row.sequence_ids]


class _Unpacked:
    """Training sequence by sequence."""

    def __init__(self, model: nn.Module, rollouts: Sequence[Rollout], loss: _Loss) -> None:
        self.model = model
        self.tokens = [torch.from_numpy(rollout.tokens) for rollout in rollouts]
        self.optimizer = _optimizer(model)
        self._loss = loss

    def sequence(self, sequence: int) -> tuple[float, Tensor]:
        """Adds the gradients of a sequence; returns its loss and its logits."""
        logits = self.model(self.tokens[sequence][None])[0]
        loss = self._loss(logits, sequence)
        loss.backward()
        return loss.item(), logits.detach()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)


@dataclass
class _Step:
    """Loss and time of one side's step; `with` adds the time that is spent inside."""

    loss: float = 0.0
    seconds: float = 0.0
    _began: float = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _first_step(packed: _Packed, unpacked: _Unpacked, progress: Progress) -> tuple[float, _Step, _Step]:
    """Computes the gradients of the first step both ways; returns the difference of the logits, too."""
    bar = progress.add_task("compile, compare", total=_tokens_of_a_step(packed.plan))
    found_gap = Gap()
    one, other = _Step(), _Step()
    for found, expected in _both_ways(packed, unpacked, one, other, bar, progress):
        found_gap |= gap(found, expected)
    return relative([found_gap])[0], one, other


def _more_steps(
    packed: _Packed, unpacked: _Unpacked, count: int, progress: Progress
) -> tuple[list[_Step], list[_Step]]:
    """Ends the first step and takes `count` others, both ways."""
    bar = progress.add_task(f"{count_of(count, 'more step')}", total=count * _tokens_of_a_step(packed.plan))
    steps = [(_Step(), _Step()) for _ in range(count)]
    for one, other in steps:
        for side, step in ((packed, one), (unpacked, other)):
            with step:
                side.optimizer.step()
                side.optimizer.zero_grad()
        for _ in _both_ways(packed, unpacked, one, other, bar, progress):
            pass
    return [one for one, _ in steps], [other for _, other in steps]


def _tokens_of_a_step(plan: Plan) -> int:
    return plan.packed_tokens + plan.input_tokens


def _both_ways(
    packed: _Packed, unpacked: _Unpacked, one: _Step, other: _Step, bar: TaskID, progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Adds the gradients of all sequences on both sides; yields the logits of each.

    Row by row, so that few logits are held at once, and so that whatever else the machine does slows down both sides.
    """
    for row in packed.plan.rows:
        with one:
            loss, found = packed.row(row)
        one.loss += loss
        progress.advance(bar, row.length)
        for sequence, logits in zip(row.sequence_ids, found, strict=True):
            with other:
                loss, expected = unpacked.sequence(sequence)
            other.loss += loss
            progress.advance(bar, len(expected))
            yield logits, expected
