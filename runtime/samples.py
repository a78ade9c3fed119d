"""Samples: sequences with what belongs to them, and what is counted over all samples of a batch."""

from __future__ import annotations

import copy
import difflib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import InputError, PayloadError
from tree_compile.runtime.contexts import zeros_and_ones
from tree_compile.runtime.recordings import ROUTED, number_choices
from tree_compile.runtime.sequences import Batch, Sequences, TokenSequence, as_array, as_batch

__all__ = [
    "GROUP",
    "PAIR",
    "Counts",
    "Sample",
    "Samples",
    "batch_of",
    "counts_of",
    "is_mask_name",
    "payload_of",
    "per_token",
]

GROUP = "group"
"""The payload that samples of one prompt have in common."""
PAIR = "pair"
"""The payload that the two samples of a preference have in common."""


class Sample:
    """One sequence and what belongs to it.

    Args:
        tokens: token ids, [len].
        trainable: per token, 1 where a loss counts it, else 0; all of them count if left out. The first token of a
            sequence has no log-probability, and so never counts.
        payloads: anything else: per token [len, …], such as old log-probabilities, or per sequence, such as a reward.
            They are kept as they are. One of them has a meaning for the model's call: `routed_experts`, whole numbers
            [len, layers with a router, experts per token], are the experts that the routers then send tokens to.

    Whenever a batch is made of it, its plans, rows and outputs keep what `trainable` says then. Payloads are read when
    they are asked for.
    """

    def __init__(self, tokens: TokenSequence, trainable: TokenSequence | None = None, **payloads: Any) -> None:
        """As above.

        Raises:
            PayloadError: a payload has the name of a mask, which `trainable` should be, or nearly `routed_experts`.
        """
        for name in payloads:
            _check_is_meant(name)
        self.tokens = tokens
        self.trainable = trainable
        self._payloads = payloads
        self._counted: dict[str, Hashable] | None = None

    @property
    def payloads(self) -> dict[str, Any]:
        """What belongs to the sequence, the same dict in all batches that the sample is in; entries may be set."""
        return self._payloads

    def __repr__(self) -> str:
        return f"Sample({len(self.tokens)} tokens, payloads: {', '.join(self.payloads) or 'none'})"

    def key(self, name: str, number: int) -> Hashable:
        """A payload that samples have in common, to be compared: the number in an array or tensor of one.

        Args:
            name: of the payload.
            number: of the sample, for errors.

        Raises:
            PayloadError: there is no such payload, or nothing can be equal to it.
        """
        value = payload_of(self, number, name)
        try:
            found: Hashable = value.item() if hasattr(value, "item") else value
            hash(found)
            is_key = _can_be_equal(found) and (found is not None or value is None)
        except (TypeError, ValueError, RuntimeError):
            is_key = False
        # The units of a date of NumPy are lost in its number.
        if not is_key or isinstance(value, np.datetime64 | np.timedelta64):
            raise _no_key(value, number, name)
        if self._counted is not None and self._counted.setdefault(name, found) != found:
            raise _renamed(self._counted[name], number, name)
        return found

    @property
    def is_trained(self) -> NDArray[np.bool_]:
        """Which tokens a loss counts, bool [len].

        Raises:
            InputError: `trainable` has not one bool or number for every token.
        """
        if self.trainable is None:
            mask = np.ones(len(self.tokens), np.bool_)
        else:
            mask = zeros_and_ones(self.trainable, "`trainable`", len(self.tokens))
        mask[:1] = False
        return mask

    def as_it_is(self) -> Sample:
        """What a batch keeps of it, with the same payloads: what is done to `trainable` later is not seen.

        Raises:
            InputError: as `is_trained`.
        """
        kept = Sample(self.tokens, self.is_trained)
        kept._payloads = self._payloads
        kept._counted = {}
        return kept


def is_mask_name(name: str) -> bool:
    """Whether a payload of this name is meant to say what is trained on: `labels`, `completion_mask`, `trainible`."""
    is_mask = name == "labels" or name.lower().endswith(("mask", "masks"))
    return is_mask or bool(difflib.get_close_matches(name, ["trainable"], cutoff=0.8))


def _check_is_meant(name: str) -> None:
    """Refuses names of payloads that would change what is computed, if they were read."""
    if name != ROUTED and difflib.get_close_matches(name, [ROUTED], cutoff=0.9):
        raise PayloadError(
            f"A sample cannot have the payload {name!r}.",
            why=f"it looks like {ROUTED!r}, which says to which experts tokens are sent, and would not be read.",
            hint=f"Sample(tokens, {ROUTED}=…), or another name.",
        )
    if is_mask_name(name):
        raise PayloadError(
            f"A sample cannot have the payload {name!r}.",
            why="no loss reads it, so that all tokens would be trained on.",
            hint="which tokens are trained on is said by trainable: Sample(tokens, trainable=[0, …, 1]), of labels "
            "[label != -100 for label in labels]; a mask for something else needs another name.",
        )


@dataclass(frozen=True)
class Counts:
    """What losses are divided by, over all samples of a batch, however they are packed.

    Attributes:
        tokens: trained tokens, of every sample its own.
        sequences: samples with a trained token.
        group_tokens: trained tokens of every group that has any.
        pairs: preferences.
    """

    tokens: int = 0
    sequences: int = 0
    group_tokens: Mapping[Hashable, int] = field(default_factory=dict)
    pairs: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Those of two batches, of one step or of two ranks.

        Groups of one name are one group: all ranks have to name them alike, and none may give the name of another
        prompt, as ranks do that count their prompts from 0. Pairs of one name are two: both samples of a preference
        have to be in one of the batches.
        """
        groups = Counter(self.group_tokens)
        groups.update(other.group_tokens)
        return Counts(
            self.tokens + other.tokens, self.sequences + other.sequences, dict(groups), self.pairs + other.pairs
        )


def counts_of(samples: Iterable[Sample]) -> Counts:
    """Counts of some samples.

    Raises:
        InputError: `trainable` of a sample does not fit its tokens, or its group or pair cannot be compared.
    """
    trained = []
    for number, sample in enumerate(samples):
        _check_kind(sample, number)
        trained.append((sample, int(_kept(sample, number).is_trained.sum())))
    groups: Counter[Hashable] = Counter()
    for number, (sample, tokens) in enumerate(trained):
        if tokens and GROUP in sample.payloads:
            groups[sample.key(GROUP, number)] += tokens
    pairs = {sample.key(PAIR, number) for number, (sample, _) in enumerate(trained) if PAIR in sample.payloads}
    with_tokens = [tokens for _, tokens in trained if tokens]
    return Counts(sum(with_tokens), len(with_tokens), dict(groups), len(pairs))


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples, in the order of their sequences.

    Attributes:
        all: the samples.
        batch: those of the batch that they are a part of; None where they are all of it.
        is_complete: whether these are all samples of the batch; False where more may come, as with a `Planner`.
    """

    all: tuple[Sample, ...]
    batch: Samples | None = None
    is_complete: bool = True

    @cached_property
    def counts(self) -> Counts | None:
        """What is counted over the whole batch; None where that is not known."""
        if self.batch is not None:
            return self.batch.counts
        return counts_of(self.all) if self.is_complete else None

    def of(self, places: Iterable[int]) -> Samples:
        """Some of them, with the counts of the batch."""
        return Samples(tuple(self.all[place] for place in places), self.batch or self)


def batch_of(inputs: Sequences, first: int = 0) -> Batch:
    """The batch of some samples, or of sequences as `as_batch` takes them.

    Args:
        inputs: the samples or sequences.
        first: the number that errors give to the first one.

    Raises:
        PayloadError: samples differ in their payloads, or are mixed with sequences, or `trainable` does not fit, or
            recorded experts are not usable.
        InputError: as `as_batch`.
    """
    if isinstance(inputs, Mapping) and ROUTED in inputs:
        raise _of_samples()
    if not isinstance(inputs, Sequence) or not any(isinstance(given, Sample) for given in inputs):
        return as_batch(inputs, first)
    samples: tuple[Any, ...] = tuple(inputs)
    for number, sample in enumerate(samples, first):
        _check_kind(sample, number)
    batch = as_batch([sample.tokens for sample in samples], first)
    for number, sample in enumerate(samples, first):
        _check_payloads(sample, number, samples[0], first)
    kept = tuple(_kept(sample, number) for number, sample in enumerate(samples, first))
    batch = replace(batch, samples=Samples(kept))
    return _with_choices(batch, first) if ROUTED in samples[0].payloads else batch


def _with_choices(batch: Batch, first: int) -> Batch:
    """With recorded experts as an input of the model, so that no token is shared by sequences that differ in them."""
    assert batch.samples is not None
    recordings = [per_token(sample, number, ROUTED) for number, sample in enumerate(batch.samples.all, first)]
    numbers, choices = number_choices(recordings, first)
    return replace(batch, inputs={**batch.inputs, ROUTED: numbers}, tables={ROUTED: choices})


def _of_samples() -> PayloadError:
    return PayloadError(
        f"The inputs hold {ROUTED!r} as a list of its own.",
        why="recorded experts are a payload of samples.",
        hint=f"pass [Sample(tokens, {ROUTED}=…), …].",
    )


def _check_kind(sample: Any, number: int) -> None:
    if not isinstance(sample, Sample):
        raise PayloadError(
            f"Element {number} is a {type(sample).__name__} among samples.",
            why="the sequences of a call are samples, or none of them is.",
            hint="wrap it: Sample(tokens).",
        )


def _check_payloads(sample: Sample, number: int, other: Sample, first: int) -> None:
    for name in other.payloads.keys() ^ sample.payloads.keys():
        without, having = (number, first) if name in other.payloads else (first, number)
        raise PayloadError(
            f"Sample {without} has no payload {name!r}, and sample {having} has.",
            why="what is asked of one sample is asked of all.",
            hint="give every sample of a batch the same payloads.",
        )


def _kept(sample: Sample, number: int) -> Sample:
    try:
        return sample.as_it_is()
    except InputError as error:
        raise type(error)(f"Sample {number}: {error.what}", why=error.why, hint=error.hint) from error.__cause__


def per_token(sample: Sample, number: int, name: str) -> NDArray[Any]:
    """A payload with one entry for every token, [len, …].

    Raises:
        TokenTypeError: it is no list, array or tensor.
        PayloadError: it is missing, has another length, or a number that is not finite where a token is trained on.
    """
    values = as_array(payload_of(sample, number, name), f"{name!r} of sample {number}", "numbers", _WHY, _HINT)
    if values.shape[:1] != (len(sample.tokens),):
        raise PayloadError(
            f"{name!r} of sample {number} has shape {values.shape} for {len(sample.tokens)} tokens.",
            why=_WHY,
            hint="its first dimension is along the tokens: those of the prompt and the last one have an entry, too.",
        )
    if values.dtype.kind == "f" and not np.isfinite(values[sample.is_trained]).all():
        is_wrong = ~np.isfinite(values).reshape(len(values), -1).all(1) & sample.is_trained
        where = int(np.flatnonzero(is_wrong)[0])
        raise PayloadError(
            f"{name!r} of sample {number} is {values[where]} at token {where}, which is trained on.",
            why="the loss or its gradient would be NaN: it takes finite numbers.",
            hint="set `trainable` to 0 there, or look for what computed it.",
        )
    return values


_WHY = "it has one entry for every token of its sample."
_HINT = "pass a list, array or tensor of numbers."


def _can_be_equal(value: Hashable) -> bool:
    """Whether another one that looks like it is equal to it: no NaN, tensor, or object that is compared by identity."""
    if isinstance(value, tuple | frozenset):
        return all(map(_can_be_equal, value))
    if value is None or isinstance(value, str | int | Enum):
        return True
    if is_dataclass(value) and not all(_can_be_equal(getattr(value, part.name)) for part in fields(value)):
        return False
    # Tensors are hashed by identity, though they compare their numbers: alone, and in an object.
    is_by_identity = type(value).__eq__ is object.__eq__ or hasattr(value, "data_ptr")
    return not is_by_identity and bool(value == value) and hash(copy.deepcopy(value)) == hash(value)


def _no_key(value: Any, number: int, name: str) -> PayloadError:
    return PayloadError(
        f"{name!r} of sample {number} is {value!r}.",
        why="samples are compared by it.",
        hint="pass a number or a text that is the same in the samples that belong together.",
    )


def _renamed(before: Hashable, number: int, name: str) -> PayloadError:
    return PayloadError(
        f"{name!r} of sample {number} was {before!r} when the samples of its batch were counted.",
        why="losses are divided by those counts.",
        hint="set it before the first loss, or plan the samples anew.",
    )


def payload_of(sample: Sample, number: int, name: str) -> Any:
    """A payload of a sample.

    Raises:
        PayloadError: there is none of this name.
    """
    if name not in sample.payloads:
        raise PayloadError(
            f"Sample {number} has no payload {name!r}.",
            why="it was asked for.",
            hint=f"Sample(tokens, {name}=…); it has {', '.join(map(repr, sample.payloads)) or 'none'}.",
        )
    return sample.payloads[name]
