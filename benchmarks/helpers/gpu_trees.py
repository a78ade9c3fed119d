"""The batches that benchmarks/gpu.py computes: lists of random token ids with prefixes in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Sequences, and what is asked of a step over their tree.

    Attributes:
        name: as printed.
        sequences: token ids, int64 [len] each.
        row_tokens: the length of a row.
        goal: what eta, or the speed-up where `goal_is_speed`, should be at least; None where nothing is stated.
        goal_is_speed: which of the two the goal is of.
    """

    name: str
    sequences: list[Tokens]
    row_tokens: int
    goal: float | None = None
    goal_is_speed: bool = False


class _Lengths:
    """Random runs of tokens, all lengths divided by `shrink`."""

    def __init__(self, vocabulary: int, shrink: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocabulary, self.shrink = vocabulary, shrink

    def after(self, above: Tokens | None, tokens: int) -> Tokens:
        run = self._random.integers(0, self._vocabulary, max(1, tokens // self.shrink))
        return run if above is None else np.concatenate([above, run])


def batches(vocabulary: int, shrink: int = 1) -> list[Batch]:
    """The four batches.

    Args:
        vocabulary: number of token ids.
        shrink: lengths are divided by it.
    """
    made: list[Callable[[_Lengths], Batch]] = [_rollouts, _agents, _half_shared, _pairs]
    return [make(_Lengths(vocabulary, shrink)) for make in made]


def _rollouts(lengths: _Lengths) -> Batch:
    """32 rollouts: four tasks under one system prompt, eight long completions of each."""
    system, sequences = lengths.after(None, 4_096), []
    for completion in (2_000, 2_000, 12_000, 7_000):
        prompt = lengths.after(system, 12_000)
        sequences += [lengths.after(prompt, completion) for _ in range(8)]
    return Batch("32 rollouts", sequences, 131_072 // lengths.shrink)


def _agents(lengths: _Lengths) -> Batch:
    """Two agents of 18 turns, whose reasoning is dropped after each: 16k tokens on a path, 9 times fewer to compute."""
    sequences = []
    for _ in range(2):
        history = lengths.after(None, 4_800)
        for _ in range(18):
            history = lengths.after(history, 620)
            sequences.append(lengths.after(history, 330))
    return Batch("agent histories", sequences, 131_072 // lengths.shrink, 0.75)


def _half_shared(lengths: _Lengths) -> Batch:
    """One prompt and 16 answers, of which a tree has half of the tokens."""
    prompt = lengths.after(None, 4_096)
    answers = [lengths.after(prompt, 3_584) for _ in range(16)]
    return Batch("half shared, depth 2", answers, 65_536 // lengths.shrink, 1.7, goal_is_speed=True)


def _pairs(lengths: _Lengths) -> Batch:
    """32 preferences: two answers each to a prompt four times as long."""
    prompts = [lengths.after(None, 1_024) for _ in range(32)]
    pairs = [lengths.after(prompt, 256) for prompt in prompts for _ in range(2)]
    return Batch("preference pairs", pairs, 32_768 // lengths.shrink)
