"""Losses over log-probabilities, divided by what is counted over the whole batch.

    for out in tree_model.rows(samples):
        losses.sft(out, normaliser="per_token").backward()

Every loss is a sum over the trained tokens of the sequences of `out`, each with a weight that is 1 over a count of
the *whole* batch: trained tokens of all samples, each of its own, however many are computed once. So the losses of
rows add up to that of the batch, and gradients to its gradient, however it is packed.

| normaliser | weight of a trained token |
|---|---|
| "per_token" | 1 / trained tokens of the batch |
| "per_sequence" | 1 / (trained tokens of its sequence * sequences) |
| "per_group" | 1 / (trained tokens of the samples with its payload `group` * groups) |
| "constant" | 1 / `constant` |

Where a batch is more than one call knows of, as with several ranks or gradient accumulation, pass what is counted over
all of it: `counts=counts_of(samples) + counts_of(others)`. DistributedDataParallel takes the mean over ranks: multiply
the loss by their number.

For rollouts that were sampled at a temperature t, and have old log-probabilities of it, pass `out.at_temperature(t)`.

`load_balancing` is of all tokens of all sequences, and has counts of its own: see there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tree_compile.distributions import Distributions
from tree_compile.errors import PayloadError
from tree_compile.output import TreeOutput
from tree_compile.routing import expert_counts, load_balancing, require_output
from tree_compile.runtime.options import as_number, check_above_0, check_at_least_0, check_choice
from tree_compile.runtime.samples import GROUP, PAIR, Counts, Sample, counts_of, payload_of, per_token
from tree_compile.runtime.sequences import IntArray

__all__ = [
    "NORMALISERS",
    "Counts",
    "cispo",
    "counts_of",
    "dpo",
    "expert_counts",
    "grpo",
    "kl_to_reference",
    "load_balancing",
    "ppo_clip",
    "sft",
]

Output: TypeAlias = TreeOutput | Distributions

NORMALISERS = ("per_token", "per_sequence", "per_group", "constant")


def sft(out: Output, *, normaliser: str, constant: float | None = None, counts: Counts | None = None) -> Tensor:
    """Cross entropy: -sum_t w_t log p_t.

    Args:
        out: of samples; or out.at_temperature(t), for log-probabilities at another temperature.
        normaliser: one of NORMALISERS, see above.
        constant: for "constant".
        counts: of the whole batch, where `out` is of a part of it that was planned apart, or given out by a `Planner`.

    Raises:
        TypeError: `out` is no output of a call, as one of its sequences is none.
        InputError: a payload is missing or does not fit, or `counts` is missing where they are not known.
        ValueError: an option has no meaning.
        OutputError, StaleOutputError, TokenRangeError: as `out.logprobs`.
    """
    divisor = _Divisor(normaliser, constant, counts)
    tokens = _Trained.of(out)
    return tokens.sum(-tokens.logprobs, divisor)


def grpo(
    out: Output,
    *,
    normaliser: str,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    constant: float | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """Clipped policy gradient with one advantage per sequence (GRPO, Shao et al., arXiv 2402.03300, eq. 3, without KL).

    With r_t = p_t / p_old_t: -sum_t w_t min(r_t A, clip(r_t, 1 - clip_low, 1 + clip_high) A). "per_sequence" is GRPO's
    own normaliser; "per_token" with a greater `clip_high` is that of DAPO (arXiv 2503.14476), "constant" that of
    Dr. GRPO (arXiv 2503.20783).

    Args:
        out: of samples with the payloads `old_logprobs` [len] and `advantage`, one number.
        normaliser: as in `sft`, like `constant` and `counts`.
        clip_low: how far the ratio counts below 1.
        clip_high: how far above.
        constant: as in `sft`.
        counts: as in `sft`.

    Raises:
        InputError: as `sft`.
        ValueError: as `sft`.
        OutputError, StaleOutputError, TokenRangeError: as `sft`.
    """
    check_at_least_0("clip_low", clip_low)
    check_at_least_0("clip_high", clip_high)
    divisor = _Divisor(normaliser, constant, counts)
    tokens = _Trained.of(out)
    objective = tokens.clipped(tokens.of_sequence("advantage"), clip_low=clip_low, clip_high=clip_high)
    return tokens.sum(-objective, divisor)


def ppo_clip(
    out: Output, *, normaliser: str, clip: float = 0.2, constant: float | None = None, counts: Counts | None = None
) -> Tensor:
    """Clipped policy gradient with an advantage per token (PPO, Schulman et al., arXiv 1707.06347, eq. 7).

    As `grpo`, with the payload `advantages` [len] in place of `advantage`, and one `clip` for both sides.

    Raises:
        InputError: as `sft`.
        ValueError: as `sft`.
        OutputError, StaleOutputError, TokenRangeError: as `sft`.
    """
    check_at_least_0("clip", clip)
    divisor = _Divisor(normaliser, constant, counts)
    tokens = _Trained.of(out)
    objective = tokens.clipped(tokens.of_token("advantages"), clip_low=clip, clip_high=clip)
    return tokens.sum(-objective, divisor)


def cispo(
    out: Output,
    *,
    normaliser: str,
    clip_high: float = 3.0,
    constant: float | None = None,
    counts: Counts | None = None,
) -> Tensor:
    """Policy gradient with clipped importance weights (CISPO, MiniMax, arXiv 2506.13585, eq. 4).

    -sum_t w_t min(r_t, 1 + clip_high) A log p_t, where no gradient goes through the ratio r_t = p_t / p_old_t.

    Args:
        out: as in `grpo`.
        normaliser: as in `sft`, like `constant` and `counts`.
        clip_high: how far above 1 the ratio counts.
        constant: as in `sft`.
        counts: as in `sft`.

    Raises:
        InputError: as `sft`.
        ValueError: as `sft`.
        OutputError, StaleOutputError, TokenRangeError: as `sft`.
    """
    check_at_least_0("clip_high", clip_high)
    divisor = _Divisor(normaliser, constant, counts)
    tokens = _Trained.of(out)
    weights = tokens.ratio().detach().clamp(max=1 + clip_high) * tokens.of_sequence("advantage")
    return tokens.sum(-weights * tokens.logprobs, divisor)


def kl_to_reference(
    out: Output, *, normaliser: str, constant: float | None = None, counts: Counts | None = None
) -> Tensor:
    """An estimate of KL(p || p_ref) from the sampled tokens, never below 0 (k3 of Schulman, "Approximating KL", 2020).

    sum_t w_t (exp(d_t) - d_t - 1) with d_t = log p_ref_t - log p_t.

    Args:
        out: of samples with the payload `reference_logprobs` [len].
        normaliser: as in `sft`, like `constant` and `counts`.
        constant: as in `sft`.
        counts: as in `sft`.

    Raises:
        InputError: as `sft`.
        ValueError: as `sft`.
        OutputError, StaleOutputError, TokenRangeError: as `sft`.
    """
    divisor = _Divisor(normaliser, constant, counts)
    tokens = _Trained.of(out)
    difference = tokens.of_token("reference_logprobs") - tokens.logprobs
    return tokens.sum(difference.expm1() - difference, divisor)


def dpo(out: Output, *, beta: float = 0.1, counts: Counts | None = None) -> Tensor:
    """Preferences (DPO, Rafailov et al., arXiv 2305.18290, eq. 7), the mean over all pairs of the batch.

    -log sigmoid(beta (d_chosen - d_rejected)) with d = sum_t log p_t - log p_ref_t over the trained tokens.

    Args:
        out: of samples with the payloads `reference_logprobs` [len], `pair`, the same for both samples of a preference,
            and `chosen`, which of the two it is.
        beta: how much the reference counts.
        counts: as in `sft`.

    Raises:
        InputError: as `sft`, or a pair has not one chosen and one rejected sample in `out`.
        ValueError: as `sft`.
        OutputError, StaleOutputError, TokenRangeError: as `out.logprobs`.
    """
    check_above_0("beta", beta)
    _check_kind(counts)
    tokens = _Trained.of(out)
    margins = tokens.of_each(tokens.logprobs - tokens.of_token("reference_logprobs"))
    chosen, rejected = _pairs(tokens.out)
    pairs = _covering((counts or tokens.out.counts).pairs, len(chosen), "pairs")
    return -F.logsigmoid(beta * (margins[chosen] - margins[rejected])).sum() / pairs


@dataclass(frozen=True)
class _Divisor:
    """What a loss is divided by, as its arguments say; checked before the head is computed."""

    normaliser: str
    constant: float | None
    counts: Counts | None

    def __post_init__(self) -> None:
        check_choice("normaliser", self.normaliser, NORMALISERS)
        if self.normaliser == "constant":
            check_above_0("constant", self.constant)
            self._leave_out("counts", self.counts)
        else:
            _check_kind(self.counts)
            self._leave_out("constant", self.constant)

    def _leave_out(self, name: str, value: object) -> None:
        if value is not None:
            raise ValueError(f"{name} is {value!r}; with the normaliser {self.normaliser!r} it must be left out")


@dataclass(frozen=True, eq=False)
class _Trained:
    """The trained tokens of all sequences of an output, one sequence after the other.

    Attributes:
        out: the output.
        logprobs: [N].
        sequence: the place of each token's sequence among those of `out`, int64 [N].
        places: for each sequence, which of its tokens are trained, int64 [trained_i].
    """

    out: TreeOutput
    logprobs: Tensor
    sequence: Tensor
    places: list[IntArray]

    @classmethod
    def of(cls, given: Output) -> _Trained:
        out = require_output(given.output if isinstance(given, Distributions) else given)
        places = [np.flatnonzero(out.samples[number].is_trained) for number in out.sequence_ids]
        logprobs = torch.cat(list(given.trained_logprobs))
        sequence = np.repeat(np.arange(len(places)), list(map(len, places)))
        return cls(out, logprobs, torch.from_numpy(sequence).to(logprobs.device), places)

    def of_token(self, name: str) -> Tensor:
        """A payload per token, [N]."""
        found = []
        for number, at in zip(self.out.sequence_ids, self.places, strict=True):
            sample = self.out.samples[number]
            _check_constant(payload_of(sample, number, name), number, name)
            values = per_token(sample, number, name)
            if values.ndim != 1 or values.dtype.kind not in "biuf":
                raise PayloadError(
                    f"{name!r} of sample {number} has shape {values.shape} and type {values.dtype}.",
                    why="a loss reads one number per token.",
                    hint="pass [len]; for tokens of the prompt any number, such as 0.",
                )
            # torch has not all types of NumPy, nor steps backwards.
            found.append(values[at].astype(np.float64))
        return torch.from_numpy(np.concatenate(found)).to(self.logprobs)

    def of_sequence(self, name: str) -> Tensor:
        """A payload per sequence, for each of its tokens, [N]."""
        numbers = [_number(payload_of(self.out.samples[i], i, name), i, name) for i in self.out.sequence_ids]
        return self.logprobs.new_tensor(numbers)[self.sequence]

    def of_each(self, values: Tensor) -> Tensor:
        """The sum over each sequence, [sequences]."""
        return values.new_zeros(len(self.places)).index_add(0, self.sequence, values)

    def ratio(self) -> Tensor:
        """p / p_old of every token, [N]."""
        return (self.logprobs - self.of_token("old_logprobs")).exp()

    def clipped(self, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
        """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) of every token, [N]."""
        ratio = self.ratio()
        return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)

    def sum(self, values: Tensor, divisor: _Divisor) -> Tensor:
        """The sum of `values` [N], each divided by what the normaliser says."""
        if divisor.constant is not None:
            return values.sum() / divisor.constant
        divisors = values.new_tensor(self._divisors(divisor.normaliser, divisor.counts or self.out.counts))
        return (values / divisors[self.sequence]).sum()

    def _divisors(self, normaliser: str, counts: Counts) -> list[int]:
        """Of every sequence's tokens; 0 where it has none."""
        lengths = [len(at) for at in self.places]
        if normaliser == "per_token":
            return [_covering(counts.tokens, sum(lengths), "trained tokens")] * len(lengths)
        if normaliser == "per_sequence":
            sequences = _covering(counts.sequences, sum(length > 0 for length in lengths), "sequences")
            return [length * sequences for length in lengths]
        groups = [self.out.samples[number].key(GROUP, number) for number in self.out.sequence_ids]
        own: Counter[Hashable] = Counter()
        for group, length in zip(groups, lengths, strict=True):
            own[group] += length
        for group, tokens in own.items():
            _covering(counts.group_tokens.get(group, 0), tokens, f"tokens of the group {group!r}")
        return [counts.group_tokens.get(group, 0) * len(counts.group_tokens) for group in groups]


def _covering(count: int, own: int, what: str) -> int:
    """The count, which is over a whole batch, and so not below that of a part of it."""
    if not own <= count < math.inf:
        raise ValueError(f"counts has {count} {what}, and this output alone has {own}; it must be of the whole batch")
    return count


def _check_kind(counts: object) -> None:
    if not isinstance(counts, Counts | None):
        raise ValueError(f"counts is {counts!r}; it must be what losses.counts_of returns, or a sum of those")


def _check_constant(value: Any, number: int, name: str) -> None:
    if isinstance(value, Tensor) and value.requires_grad:
        raise PayloadError(
            f"{name!r} of sample {number} requires a gradient.",
            why="a loss takes payloads as constants, and would leave it out.",
            hint="pass it detached: value.detach().",
        )


def _number(value: Any, number: int, name: str) -> float:
    _check_constant(value, number, name)
    found = as_number(value)
    if not math.isfinite(found):
        raise PayloadError(
            f"{name!r} of sample {number} is {value!r}.",
            why="it is one number for the whole sample.",
            hint="pass a finite number.",
        )
    return found


def _pairs(out: TreeOutput) -> tuple[list[int], list[int]]:
    """Places of the chosen samples among the sequences of `out`, and of the rejected ones, in the same order."""
    sides: tuple[dict[Any, int], dict[Any, int]] = {}, {}
    for place, number in enumerate(out.sequence_ids):
        sample = out.samples[number]
        pair, is_chosen = sample.key(PAIR, number), _is_chosen(sample, number)
        if pair in sides[is_chosen]:
            raise _not_a_pair(pair, f"two samples that are {'chosen' if is_chosen else 'rejected'}")
        sides[is_chosen][pair] = place
    for pair in sides[0].keys() ^ sides[1].keys():
        raise _not_a_pair(pair, "one sample")
    return [sides[1][pair] for pair in sides[1]], [sides[0][pair] for pair in sides[1]]


def _is_chosen(sample: Sample, number: int) -> bool:
    found = _number(payload_of(sample, number, "chosen"), number, "chosen")
    if found not in (0, 1):
        raise PayloadError(
            f"'chosen' of sample {number} is {sample.payloads['chosen']!r}.",
            why="it says which of the two samples of a preference it is.",
            hint="pass True or False.",
        )
    return bool(found)


def _not_a_pair(pair: Any, what: str) -> PayloadError:
    return PayloadError(
        f"The pair {pair!r} has {what} here.",
        why="a preference needs one chosen and one rejected sample in the same call.",
        hint="pass both to one call, model(samples), which may compute several rows.",
    )
