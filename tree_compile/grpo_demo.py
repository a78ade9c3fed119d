"""GRPO from end to end, small enough for a CPU: `python examples/grpo.py`, or `treecompile demo --grpo`.

A model learns to sort digits from its own samples.

A prompt is 12 solved examples, the same for all, and a question: `…7302>0237;` and `4916>`. A decoder that reads and
writes characters learns the form from a few supervised steps, and from then on from rewards alone: at every step it
answers each of 32 questions 8 times, and the reward is the share of digits that are in their place.

All of it goes through the tree. Answers are drawn digit by digit from the last logits of all sequences, and trained on
in one row, in which the examples are computed once, a question once for its 8 answers, and digits that answers have in
common once, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor, nn

from tree_compile import losses
from tree_compile.api import TreeModel, treecompile
from tree_compile.comparison import held_gradients
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.runtime.samples import Sample
from tree_compile.selfcheck import worst_gradient

__all__ = ["STEPS", "GrpoReport", "plot", "run_grpo_demo"]

STEPS = 300
TARGET_REWARD = 0.8
"""What the mean reward of the last steps is above after `STEPS` of them."""
_EXAMPLES, _DIGITS, _QUESTIONS, _ANSWERS = 12, 4, 32, 8
_WARM_UP_STEPS, _WARM_UP_RATE, _RATE, _GREATEST_NORM = 100, 3e-3, 1e-3, 1.0
_CLIP = 0.2
_LAST = 20
"""Steps at the end whose mean is the reward that was reached."""
_TOLERANCE = 1e-4
"""What float32 rounding explains, relative to a parameter's greatest gradient."""
_CHARACTERS = "0123456789>;"

Digits = NDArray[np.int64]
"""[questions, digits], or those of one question, [digits]."""


@dataclass(frozen=True)
class GrpoReport:
    """What happened at each step.

    Attributes:
        rewards: mean reward of the samples.
        unpacked_tokens: tokens of the samples.
        packed_tokens: tokens that were computed for them, forward and backward.
        gradient_difference: greatest difference of the gradients of the first step from those of the unpacked model,
            sample by sample; each parameter's relative to its greatest one.
    """

    rewards: list[float]
    unpacked_tokens: list[int]
    packed_tokens: list[int]
    gradient_difference: float

    @property
    def first_reward(self) -> float:
        """Before any step on rewards."""
        return self.rewards[0]

    @property
    def last_reward(self) -> float:
        """The mean of the last steps."""
        return float(np.mean(self.rewards[-_LAST:]))

    @property
    def tokens_saved(self) -> float:
        """Tokens of the samples per token computed."""
        return sum(self.unpacked_tokens) / sum(self.packed_tokens)

    @property
    def is_equal(self) -> bool:
        """Whether the gradients of the first step are those of the unpacked model."""
        return self.gradient_difference <= _TOLERANCE

    @property
    def is_reached(self) -> bool:
        """Whether the reward is as high as it should be after so many steps."""
        return len(self.rewards) < STEPS or self.last_reward >= TARGET_REWARD

    @property
    def ok(self) -> bool:
        """Whether both are so."""
        return self.is_equal and self.is_reached

    @property
    def verdict(self) -> str:
        """Both, in words."""
        equal = f"gradients are {'equal' if self.is_equal else 'NOT EQUAL'} within {_TOLERANCE:.0e}"
        if len(self.rewards) < STEPS:
            return equal
        return f"{equal}\nthe reward is {'' if self.is_reached else 'NOT '}above {TARGET_REWARD}, as it should be"


def run_grpo_demo(steps: int, progress: Progress) -> GrpoReport:
    """Warms a model up with right answers, then takes `steps` steps on its own.

    Args:
        steps: on samples, at least 1.
        progress: where bars are added.
    """
    torch.manual_seed(0)
    model = Dense(DenseConfig(vocab_size=len(_CHARACTERS), width=64, layers=2, heads=4, kv_heads=2, hidden=128))
    tree_model, task = treecompile(model, min_shared_tokens=1, backend="eager"), _Sorting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_WARM_UP_RATE)
    bar = progress.add_task("supervised steps", total=_WARM_UP_STEPS)
    for _ in range(_WARM_UP_STEPS):
        losses.sft(tree_model(task.right_answers()), normaliser="per_token").backward()
        _step(optimizer, model)
        progress.advance(bar)
    return _reinforce(tree_model, task, torch.optim.AdamW(model.parameters(), lr=_RATE), steps, progress)


def _reinforce(
    tree_model: TreeModel, task: _Sorting, optimizer: torch.optim.Optimizer, steps: int, progress: Progress
) -> GrpoReport:
    all_rewards, plans, difference = [], [], 0.0
    bar = progress.add_task("steps on rewards", total=steps)
    for step in range(steps):
        samples, rewards = _samples(tree_model, task, task.questions())
        plan = tree_model.plan(samples)
        for out in tree_model.rows(plan):
            losses.grpo(out, normaliser="per_token", clip_low=_CLIP, clip_high=_CLIP).backward()
        if step == 0:
            difference = _difference_from_unpacked(tree_model.unpacked, samples)
        _step(optimizer, tree_model)
        all_rewards.append(float(rewards.mean()))
        plans.append((plan.input_tokens, plan.packed_tokens))
        progress.advance(bar)
    unpacked_tokens, packed_tokens = zip(*plans, strict=True)
    return GrpoReport(all_rewards, list(unpacked_tokens), list(packed_tokens), difference)


def _step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), _GREATEST_NORM)
    optimizer.step()
    optimizer.zero_grad()


class _Sorting:
    """Questions, and their right answers."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)
        examples = self._generator.integers(10, size=(_EXAMPLES, _DIGITS))
        self._examples = [token for digits in examples for token in (*digits, *_ids(">"), *np.sort(digits), *_ids(";"))]

    def questions(self) -> Digits:
        """New ones, [questions, digits]."""
        return self._generator.integers(10, size=(_QUESTIONS, _DIGITS))

    def prompt(self, digits: Digits) -> list[int]:
        """Examples, then one question."""
        return [int(token) for token in (*self._examples, *digits, *_ids(">"))]

    def right_answers(self) -> list[Sample]:
        """New questions, each with its answer, which alone is trained on."""
        return [
            Sample(prompt + np.sort(digits).tolist(), trainable=[0] * len(prompt) + [1] * _DIGITS)
            for digits in self.questions()
            for prompt in [self.prompt(digits)]
        ]


def _ids(text: str) -> list[int]:
    return [_CHARACTERS.index(character) for character in text]


def _samples(tree_model: TreeModel, task: _Sorting, questions: Digits) -> tuple[list[Sample], NDArray[np.float64]]:
    """Answers of the model to each question, and their rewards [questions, answers]."""
    prompts = [task.prompt(digits) for digits in questions for _ in range(_ANSWERS)]
    answers, logprobs = _draw(tree_model, prompts)
    right = np.repeat(np.sort(questions), _ANSWERS, axis=0)
    rewards = (answers.numpy() == right).mean(1).reshape(-1, _ANSWERS)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    samples = [
        Sample(
            prompt + answer,
            trainable=[0] * len(prompt) + [1] * _DIGITS,
            advantage=float(advantage),
            old_logprobs=[0.0] * len(prompt) + old,
        )
        for prompt, answer, old, advantage in zip(
            prompts, answers.tolist(), logprobs.tolist(), advantages.ravel(), strict=True
        )
    ]
    return samples, rewards


@torch.no_grad()
def _draw(tree_model: TreeModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Tokens drawn after each prompt, and their log-probabilities, [prompts, digits]."""
    sequences, tokens, logprobs = [list(prompt) for prompt in prompts], [], []
    for _ in range(_DIGITS):
        logits = tree_model(sequences).logits
        likely = torch.stack([logits[i][-1] for i in range(len(sequences))]).log_softmax(-1)
        drawn = torch.multinomial(likely.exp(), 1)
        tokens.append(drawn)
        logprobs.append(likely.gather(1, drawn))
        for sequence, token in zip(sequences, drawn[:, 0].tolist(), strict=True):
            sequence.append(token)
    return torch.cat(tokens, 1), torch.cat(logprobs, 1)


def _difference_from_unpacked(model: nn.Module, samples: Sequence[Sample]) -> float:
    """Of the model's gradients, and those of the same loss, written out, of each sample alone."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for sample in samples:
        tokens, old = torch.tensor(sample.tokens), torch.tensor(sample.payloads["old_logprobs"])[-_DIGITS:]
        likely = alone(tokens[None])[0, -_DIGITS - 1 : -1].log_softmax(-1)
        ratio = (likely.gather(1, tokens[-_DIGITS:, None])[:, 0] - old).exp()
        advantage = sample.payloads["advantage"]
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantage)
        (-objective.sum() / (len(samples) * _DIGITS)).backward()
    return worst_gradient(held_gradients(model), held_gradients(alone))[1]


def plot(report: GrpoReport, path: Path) -> None:
    """Writes rewards, and tokens computed up to each step, as a PNG.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(report.rewards, linewidth=0.8, alpha=0.4, color="tab:blue")
    left.plot(_smooth(report.rewards), color="tab:blue")
    left.set(title=f"mean reward of {_QUESTIONS * _ANSWERS} samples", xlabel="step", ylim=(0, 1))
    right.plot(np.cumsum(report.unpacked_tokens), color="tab:gray", label="sample by sample")
    right.plot(np.cumsum(report.packed_tokens), color="tab:orange", label="on the tree")
    right.set(title="tokens computed, forward and backward", xlabel="step", yscale="log")
    right.legend()
    figure.savefig(path, dpi=150, format="png")


def _smooth(values: Sequence[float]) -> NDArray[np.float64]:
    """The mean of each value and up to `_LAST` - 1 before it."""
    sums = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - _LAST, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


if __name__ == "__main__":
    from tree_compile.cli import main

    sys.exit(main(["demo", "--grpo", *sys.argv[1:]]))
