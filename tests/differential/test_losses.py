"""Losses and their gradients equal the plain forms over the unpacked model's logits, however the batch is packed."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential.double import InDouble
from tests.differential.trees import random_sequences
from tree_compile import Plan, Sample, TreeModel, distributions, losses, plan_rows, treecompile
from tree_compile.errors import PayloadError, PlanError, TokenTypeError, UnsupportedArgumentError
from tree_compile.runtime.next_tokens import next_tokens
from tree_compile.runtime.planner import Planner
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
CONSTANT = 37.0


@cache
def tree_model() -> TreeModel:
    with InDouble():
        model = treecompile(tiny_model("llama").double(), backend="eager", min_shared_tokens=1)
        model([[1, 2, 3]])
    return model


@cache
def samples() -> list[Sample]:
    """In pairs, some of which are duplicates or prefixes of others; some prompts are not trained on."""
    rng = np.random.default_rng(0)
    sequences = [s for s in random_sequences(3, 128) if len(s) > 1]
    sequences = sequences[: len(sequences) // 2 * 2]
    return [
        Sample(
            tokens,
            rng.random(len(tokens)) < 0.7 if i % 3 else None,
            old_logprobs=torch.tensor(rng.normal(-5, 0.4, len(tokens))),
            reference_logprobs=rng.normal(-5, 0.4, len(tokens)).tolist(),
            advantages=rng.normal(size=len(tokens)),
            advantage=float(rng.normal()),
            group=i % 4,
            pair=i // 2,
            chosen=bool(i % 2),
        )
        for i, tokens in enumerate(sequences)
    ]


class Plain:
    """One sample as a training script without packing reads it: the trained tokens, and what belongs to them."""

    def __init__(self, model: nn.Module, sample: Sample, temperature: float = 1.0) -> None:
        tokens = torch.tensor(sample.tokens)
        logits = model(tokens[None]).logits[0, :-1] / temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        trained = torch.tensor(np.ones(len(tokens)) if sample.trainable is None else sample.trainable).bool()[1:]
        given = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in sample.payloads.items()}
        self.logprobs, self.group = logprobs[trained], sample.payloads["group"]
        self.old, self.reference, self.advantages = (
            given[name][1:][trained] for name in ("old_logprobs", "reference_logprobs", "advantages")
        )
        self.advantage, self.pair, self.chosen = given["advantage"], sample.payloads["pair"], sample.payloads["chosen"]

    def clipped(self, advantage: Tensor, low: float, high: float) -> Tensor:
        ratio = torch.exp(self.logprobs - self.old)
        return -torch.min(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)


def plain_kl(one: Plain) -> Tensor:
    return torch.exp(one.reference - one.logprobs) - (one.reference - one.logprobs) - 1


def plain_cispo(one: Plain) -> Tensor:
    return -torch.exp(one.logprobs - one.old).detach().clip(max=4.0) * one.advantage * one.logprobs


TERMS: dict[str, tuple[Callable[..., Tensor], Callable[[Plain], Tensor]]] = {
    "sft": (losses.sft, lambda one: -one.logprobs),
    "grpo": (losses.grpo, lambda one: one.clipped(one.advantage, 0.2, 0.2)),
    "ppo_clip": (losses.ppo_clip, lambda one: one.clipped(one.advantages, 0.2, 0.2)),
    "cispo": (losses.cispo, plain_cispo),
    "kl_to_reference": (losses.kl_to_reference, plain_kl),
}


def normalised(normaliser: str, terms: list[Tensor], groups: list[int]) -> Tensor:
    """The plain forms of the normalisers, over the terms of every sample's trained tokens."""
    some = [own for own in terms if len(own)]
    if normaliser == "per_token":
        return torch.cat(some).mean()
    if normaliser == "per_sequence":
        return torch.stack([own.mean() for own in some]).mean()
    if normaliser == "constant":
        return torch.cat(some).sum() / CONSTANT
    by_group = {group: [own for own, other in zip(terms, groups, strict=True) if other == group] for group in groups}
    return torch.stack([torch.cat(own).mean() for own in by_group.values()]).mean()


def gradients(model: nn.Module, losses_of: Callable[[], Iterator[Tensor]]) -> tuple[float, list[Tensor]]:
    """The sum of some losses and its gradients, each loss with a backward pass of its own."""
    model.zero_grad()
    total = 0.0
    for loss in losses_of():
        total += float(loss.detach())
        loss.backward()
    return total, [parameter.grad.clone() for parameter in model.parameters()]


def require_equal(expected: tuple[float, list[Tensor]], found: tuple[float, list[Tensor]]) -> None:
    assert math.isclose(expected[0], found[0], rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    for one, other in zip(expected[1], found[1], strict=True):
        assert float((one - other).abs().max()) <= TOLERANCE * float(one.abs().max())


@pytest.mark.parametrize("row_tokens", [None, 45])
@pytest.mark.parametrize("normaliser", losses.NORMALISERS)
@pytest.mark.parametrize("name", TERMS)
def test_losses_equal_their_plain_forms(name: str, normaliser: str, row_tokens: int | None) -> None:
    loss, term = TERMS[name]
    options: dict[str, Any] = {"normaliser": normaliser, "constant": CONSTANT if normaliser == "constant" else None}
    model, batch = tree_model().unpacked, samples()
    plan = plan_rows(batch, row_tokens, min_shared_tokens=1)
    assert plan.packed_tokens < plan.input_tokens
    assert (len(plan.rows) >= 5) is (row_tokens is not None)

    def plain() -> Iterator[Tensor]:
        ones = [Plain(model, sample) for sample in batch]
        yield normalised(normaliser, [term(one) for one in ones], [one.group for one in ones])

    with InDouble():
        expected = gradients(model, plain)
        require_equal(expected, gradients(model, lambda: (loss(out, **options) for out in tree_model().rows(plan))))
        require_equal(expected, gradients(model, lambda: iter([loss(tree_model()(plan), **options)])))


@pytest.mark.parametrize("name", TERMS)
def test_losses_at_a_temperature_equal_their_plain_forms(name: str) -> None:
    loss, term = TERMS[name]
    model, batch = tree_model().unpacked, samples()
    plan = plan_rows(batch, 45, min_shared_tokens=1)

    def plain() -> Iterator[Tensor]:
        yield normalised("per_token", [term(Plain(model, sample, 0.6)) for sample in batch], [])

    with InDouble():
        outs = (out.at_temperature(0.6) for out in tree_model().rows(plan))
        found = gradients(model, lambda: (loss(out, normaliser="per_token") for out in outs))
        require_equal(gradients(model, plain), found)


@pytest.mark.parametrize("row_tokens", [None, 45])
def test_preferences_equal_their_plain_form(row_tokens: int | None) -> None:
    model, batch = tree_model().unpacked, samples()
    plan = plan_rows(batch, row_tokens, min_shared_tokens=1)

    def plain() -> Iterator[Tensor]:
        ones = [Plain(model, sample) for sample in batch]
        margin = {(one.pair, one.chosen): (one.logprobs - one.reference).sum() for one in ones}
        pairs = [margin[pair, True] - margin[pair, False] for pair in range(len(batch) // 2)]
        yield torch.stack([F.softplus(-0.3 * difference) for difference in pairs]).mean()

    with InDouble():
        found = gradients(model, lambda: iter([losses.dpo(tree_model()(plan), beta=0.3)]))
        require_equal(gradients(model, plain), found)


def test_parts_of_a_batch_that_were_planned_apart_add_up_with_its_counts() -> None:
    model, batch = tree_model().unpacked, samples()
    parts = batch[:6], batch[6:]
    counts = losses.counts_of(parts[0]) + losses.counts_of(parts[1])
    assert counts == losses.counts_of(batch)
    for normaliser in ("per_token", "per_sequence", "per_group"):
        with InDouble():
            whole = gradients(model, lambda: iter([losses.sft(tree_model()(batch), normaliser=normaliser)]))  # noqa: B023
            apart = gradients(
                model,
                lambda: (losses.sft(tree_model()(part), normaliser=normaliser, counts=counts) for part in parts),  # noqa: B023
            )
        require_equal(whole, apart)


def test_rows_that_were_sent_keep_their_samples_and_the_counts_of_the_batch() -> None:
    plan = plan_rows(samples(), 45, min_shared_tokens=1)
    for row in plan.rows:
        sent = pickle.loads(pickle.dumps(row))
        assert sent.counts == losses.counts_of(samples())
        assert sent.samples.keys() == set(row.sequence_ids)
        first, second = (losses.sft(tree_model()(either), normaliser="per_token") for either in (sent, row))
        assert torch.equal(first, second)


# Payloads


def test_payloads_are_given_back_as_they_were() -> None:
    batch = samples()
    out = tree_model()(batch)
    for number, sample in enumerate(batch):
        assert out.payload("old_logprobs")[number] is sample.payloads["old_logprobs"]


def test_payload_in_the_layout_of_the_row_follows_its_tokens() -> None:
    batch = [Sample(tokens, doubled=[2 * token for token in tokens]) for tokens in ([1, 2, 3], [1, 2, 4, 5], [6])]
    for row in plan_rows(batch, min_shared_tokens=1, row_tokens=8, pad_rows=True).rows:
        assert row.payload("doubled").tolist() == (2 * row.tokens).tolist()


def test_payload_that_differs_on_shared_tokens_is_read_by_sequence() -> None:
    (row,) = plan_rows([Sample([1, 2, 3], gain=[1, 2, 3]), Sample([1, 2, 4], gain=[1, 5, 3])], min_shared_tokens=1).rows
    with pytest.raises(PayloadError, match="'gain' of sample 1 differs"):
        row.payload("gain")


@pytest.mark.parametrize("change", ["another mask", "written into"])
def test_batch_keeps_what_was_trained_on_and_the_next_one_reads_it_anew(change: str) -> None:
    marks = torch.tensor([0, 1, 0, 0])
    sample = Sample([1, 2, 3, 4], marks)
    earlier = tree_model()([sample])
    expected = [losses.sft(tree_model()([Sample([1, 2, 3, 4], given)]), normaliser="per_token")
                for given in ([0, 1, 0, 0], [0, 0, 1, 1])]  # fmt: skip
    if change == "written into":
        marks.copy_(torch.tensor([0, 0, 1, 1]))
    else:
        sample.trainable = [0, 0, 1, 1]
    assert torch.equal(losses.sft(earlier, normaliser="per_token"), expected[0])
    assert torch.equal(losses.sft(tree_model()([sample]), normaliser="per_token"), expected[1])
    assert losses.counts_of([sample]).tokens == 2


def test_sample_may_get_other_tokens_for_the_next_batch() -> None:
    sample = Sample([1, 2, 3])
    earlier = tree_model()([sample])
    sample.tokens = [1, 2, 3, 4]
    assert [len(out.trained_logprobs[0]) for out in (earlier, tree_model()([sample]))] == [2, 3]


def test_payload_that_is_set_after_the_call_is_read_by_the_loss() -> None:
    sample = Sample([1, 2, 3], old_logprobs=[-5.0] * 3, advantage=0.0)
    out = tree_model()([sample])
    assert float(losses.grpo(out, normaliser="per_token").detach()) == 0
    sample.payloads["advantage"] = 1.0
    assert float(losses.grpo(out, normaliser="per_token").detach()) != 0
    with pytest.raises(AttributeError):
        sample.payloads = {}  # type: ignore[misc]


def test_context_alone_is_shared_by_what_samples_train_on() -> None:
    batch = [Sample([1, 2, 3, 4], [0, 0, 1, 1]), Sample([1, 2, 3, 5], [0, 0, 1, 1])]
    assert plan_rows(batch, min_shared_tokens=1).packed_tokens == 5
    assert plan_rows(batch, min_shared_tokens=1, share="context").packed_tokens == 7


def test_marks_beside_those_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="trainable is given beside samples"):
        plan_rows([Sample([1, 2], [0, 1])], share="context", trainable=[[1, 1]])


def test_samples_of_several_rows_are_in_the_order_of_their_numbers() -> None:
    batch = [Sample([1, 2]), Sample([3, 4, 5]), Sample([6])]
    out = tree_model()(plan_rows(batch, 3, min_shared_tokens=1))
    assert [number for result in out.row_results for number in result.row.sequence_ids] != [0, 1, 2]
    assert list(out.samples) == [0, 1, 2]
    assert [len(sample.tokens) for sample in out.samples.values()] == [2, 3, 1]


NUMBERS = np.array([0.25, 0.5, -0.75])
ARRAYS: dict[str, Any] = {
    "backwards": NUMBERS[::-1].copy()[::-1],
    "other bytes": NUMBERS.astype(">f4"),
    "long": NUMBERS.astype(np.longdouble),
    "half": NUMBERS.astype(np.float16),
    "of bytes": np.frombuffer(NUMBERS.tobytes()),
    "bfloat16": torch.tensor(NUMBERS, dtype=torch.bfloat16),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ARRAYS)
def test_payload_may_be_an_array_of_any_kind(name: str) -> None:
    expected, found = (
        losses.kl_to_reference(tree_model()([Sample([1, 2, 3], reference_logprobs=given)]), normaliser="per_token")
        for given in (NUMBERS.tolist(), ARRAYS[name])
    )
    assert torch.equal(expected, found)


@pytest.mark.parametrize("name", ["old_logprobs", "advantage"])
def test_payload_that_requires_a_gradient_is_refused(name: str) -> None:
    given = {"old_logprobs": torch.zeros(2), "advantage": torch.ones(())}
    given[name].requires_grad_()
    with pytest.raises(PayloadError, match=f"'{name}' of sample 0 requires a gradient"):
        losses.grpo(tree_model()([Sample([1, 2], **given)]), normaliser="per_token")


NAN = [-1.0, float("nan"), -1.0]
BAD: dict[str, tuple[list[Any], str]] = {
    "missing": ([Sample([1, 2, 3], old_logprobs=[0.0] * 3, advantage=1.0), Sample([1, 2, 4], advantage=1.0)],
                "Sample 1 has no payload 'old_logprobs', and sample 0 has"),
    "too short": ([Sample([1, 2, 3], old_logprobs=[0.0] * 2, advantage=1.0)],
                  r"'old_logprobs' of sample 0 has shape \(2,\) for 3 tokens"),
    "nan": ([Sample([1, 2, 3], old_logprobs=NAN, advantage=1.0)], "'old_logprobs' of sample 0 is nan at token 1"),
    "not flat": ([Sample([1, 2], old_logprobs=[[0.0], [0.0]], advantage=1.0)],
                 r"'old_logprobs' of sample 0 has shape \(2, 1\)"),
    "text": ([Sample([1, 2], old_logprobs="ab", advantage=1.0)], "'old_logprobs' of sample 0 is a str"),
    "nowhere": ([Sample([1, 2], advantage=1.0)], "Sample 0 has no payload 'old_logprobs'"),
    "text for a number": ([Sample([1, 2], old_logprobs=[0.0, 0.0], advantage="1")], "'advantage' of sample 0 is '1'"),
    "no float": ([Sample([1, 2], old_logprobs=[0.0, 0.0], advantage=10**400)], "'advantage' of sample 0 is 1000"),
    "a list of trained numbers": (
        [Sample([1, 2], old_logprobs=[torch.ones((), requires_grad=True)] * 2, advantage=1.0)],
        "'old_logprobs' of sample 0 is not a flat list of numbers"),
    "no number": ([Sample([1, 2], old_logprobs=[0.0, 0.0], advantage=[1.0, 2.0])], "'advantage' of sample 0 is"),
    "no mask": ([Sample([1, 2], [1], old_logprobs=[0.0, 0.0], advantage=1.0)],
                r"Sample 0: `trainable` has shape \(1,\) for 2 tokens"),
    "mask with two dimensions": ([Sample([1, 2], np.ones((2, 2)), old_logprobs=[0.0, 0.0], advantage=1.0)],
                                 r"Sample 0: `trainable` has shape \(2, 2\) for 2 tokens"),
    "mask without dimensions": ([Sample([1, 2], np.array(1), old_logprobs=[0.0, 0.0], advantage=1.0)],
                                r"Sample 0: `trainable` has shape \(\) for 2 tokens"),
    "infinite": ([Sample([1, 2], old_logprobs=[0.0, -math.inf], advantage=1.0)],
                 "'old_logprobs' of sample 0 is -inf at token 1"),
    "none": ([Sample([1, 2], old_logprobs=[None, -1.0], advantage=1.0)],
             "'old_logprobs' of sample 0 has shape .* and type object"),
    "no sample": ([Sample([1, 2], old_logprobs=[0.0, 0.0], advantage=1.0), [1, 2]], "Element 1 is a list among"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_payload_is_named_with_its_sample(name: str) -> None:
    batch, message = BAD[name]
    with pytest.raises((PayloadError, TokenTypeError), match=message):
        losses.grpo(tree_model()(batch), normaliser="per_token")


def test_nan_where_nothing_is_trained_is_not_read() -> None:
    out = tree_model()([Sample([1, 2, 3], [1, 0, 1], old_logprobs=NAN, advantage=1.0)])
    assert bool(losses.grpo(out, normaliser="per_token").isfinite())


def test_row_without_trained_tokens_adds_nothing() -> None:
    model = tree_model().unpacked
    batch = [Sample([1, 2, 3], [0, 0, 0]), Sample([4], [1]), Sample([5, 6, 7], [0, 1, 1])]
    rows = plan_rows(batch, 3, min_shared_tokens=1).rows
    found = [gradients(model, lambda: iter([losses.sft(tree_model()(row), normaliser="per_token")])) for row in rows]  # noqa: B023
    whole = gradients(model, lambda: iter([losses.sft(tree_model()(batch), normaliser="per_token")]))
    assert sorted(total for total, _ in found)[:2] == [0.0, 0.0]
    assert max(total for total, _ in found) == pytest.approx(whole[0])


def test_loss_of_sequences_without_payloads_is_refused() -> None:
    with pytest.raises(PlanError, match="are no samples"):
        losses.sft(tree_model()([[1, 2, 3]]), normaliser="per_token")


NO_NUMBERS = (math.nan, None, "1", [1.0], torch.ones(2), 1j)
NO_DIVISORS = (-1.0, 0, math.inf, 10**400, *NO_NUMBERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normaliser": "mean"}, "normaliser is 'mean'"),
        *(({"normaliser": "constant", "constant": it}, "it must be a number above 0") for it in NO_DIVISORS),
        *(({"normaliser": "per_token", "constant": it}, "it must be left out") for it in (3.0, -1.0, 0, math.nan)),
        *(({"normaliser": "per_token", "counts": it}, "it must be what losses.counts_of returns") for it in (3, {})),
        ({"normaliser": "constant", "constant": 1.0, "counts": losses.Counts(9, 9)}, "counts is .* must be left out"),
    ],
)
@pytest.mark.parametrize("loss", [term for term, _ in TERMS.values()])
def test_options_without_meaning_are_refused_before_anything_is_computed(
    loss: Callable[..., Tensor], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        loss(None, **options)


@pytest.mark.parametrize(
    ("sides", "message"),
    [([True], "has one sample"), ([True, True], "two samples that are chosen")],
)
def test_half_of_a_preference_is_refused(sides: list[bool], message: str) -> None:
    batch = [Sample([1, 2, i], reference_logprobs=[0.0] * 3, pair=7, chosen=side) for i, side in enumerate(sides)]
    with pytest.raises(PayloadError, match=f"pair 7 {message}|pair 7 has {message}"):
        losses.dpo(tree_model()(batch))


def test_constant_of_numpy_is_a_number() -> None:
    out = tree_model()([Sample([1, 2, 3])])
    loss = losses.sft(out, normaliser="constant", constant=np.float64(3))
    assert torch.equal(loss, losses.sft(out, normaliser="constant", constant=3))


@pytest.mark.parametrize("value", [-0.1, *NO_NUMBERS])
@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (losses.grpo, "clip_low"),
        (losses.grpo, "clip_high"),
        (losses.ppo_clip, "clip"),
        (losses.cispo, "clip_high"),
    ],
)
def test_clip_that_is_not_0_or_more_is_refused(loss: Callable[..., Tensor], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a number of 0 or more"):
        loss(None, normaliser="per_token", **{name: value})


@pytest.mark.parametrize("beta", NO_DIVISORS, ids=lambda beta: repr(beta)[:9])
def test_beta_that_is_not_above_zero_is_refused(beta: Any) -> None:
    with pytest.raises(ValueError, match=r"beta is .*; it must be a number above 0"):
        losses.dpo(None, beta=beta)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("normaliser", "counts", "message"),
    [
        ("per_token", losses.Counts(tokens=1), "counts has 1 trained tokens, and this output alone has 2"),
        ("per_token", losses.Counts(tokens=math.nan), "counts has nan trained tokens"),  # type: ignore[arg-type]
        ("per_token", losses.Counts(tokens=math.inf), "counts has inf trained tokens"),  # type: ignore[arg-type]
        ("per_sequence", losses.Counts(tokens=9), "counts has 0 sequences, and this output alone has 1"),
        ("per_group", losses.Counts(9, 9, {"b": 9}), "counts has 0 tokens of the group 'a'"),
    ],
)
def test_counts_that_do_not_cover_the_output_are_refused(normaliser: str, counts: Any, message: str) -> None:
    out = tree_model()([Sample([1, 2, 3], group="a")])
    with pytest.raises(ValueError, match=message):
        losses.sft(out, normaliser=normaliser, counts=counts)


def test_counts_without_the_pairs_of_the_output_are_refused() -> None:
    batch = [Sample([1, 2], reference_logprobs=[0.0] * 2, pair=1, chosen=side) for side in (True, False)]
    with pytest.raises(ValueError, match="counts has 0 pairs, and this output alone has 1"):
        losses.dpo(tree_model()(batch), counts=losses.Counts(9, 9))


@dataclass(frozen=True)
class Key:
    """Something that samples of a group have in common."""

    value: Any


class ComparesTensors:
    """Equal to others of its kind, but for its hash, which is that of a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.tensor(1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComparesTensors) and bool(self.tensor == other.tensor)

    def __hash__(self) -> int:
        return hash(self.tensor)


def test_group_that_is_renamed_after_it_was_counted_is_refused() -> None:
    plan = plan_rows([Sample([i, i + 1, i + 2], group=i // 2) for i in range(4)], 3)
    sft = [losses.sft(out, normaliser="per_group") for out in tree_model().rows(plan)]
    for row in plan.rows:
        for sample in row.samples.values():
            sample.payloads["group"] = 0
    out = tree_model()(plan.rows[-1])
    assert len(sft) == 4
    with pytest.raises(PayloadError, match="was 1 when the samples of its batch were counted"):
        losses.sft(out, normaliser="per_group")


@pytest.mark.parametrize("name", ["group", "pair"])
@pytest.mark.parametrize(
    "value",
    [
        [1, 2], np.ones(2), torch.ones(2), math.nan, (torch.tensor(1),), ("a", math.nan), object(),
        np.datetime64("NaT"), np.datetime64("2026"), Key(torch.tensor(1)), Key(math.nan), ComparesTensors(),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_no_group_and_no_pair(name: str, value: Any) -> None:
    batch = [Sample([1, 2], **{name: 1}), Sample([1, 3], **{name: value})]
    with pytest.raises(PayloadError, match=f"'{name}' of sample 1 is "):
        losses.counts_of(batch)
    with pytest.raises(PayloadError, match=f"'{name}' of sample 1 is "):
        losses.sft(tree_model()(batch), normaliser="per_token")


@pytest.mark.parametrize(
    "group", ["a", b"a", 1, 1.5, None, ("a", 1), frozenset({1}), np.float32(2), torch.tensor(3), Key("a"), UUID(int=3)]
)
def test_what_can_be_compared_is_one_group(group: Any) -> None:
    copy = pickle.loads(pickle.dumps(group))
    assert len(losses.counts_of([Sample([1, 2], group=group), Sample([1, 3], group=copy)]).group_tokens) == 1


@pytest.mark.parametrize("chosen", ["False", math.nan, 2, [True]])
def test_which_sample_is_chosen_is_true_or_false(chosen: Any) -> None:
    batch = [Sample([1, 2], reference_logprobs=[0.0] * 2, pair=1, chosen=side) for side in (True, chosen)]
    with pytest.raises(PayloadError, match="'chosen' of sample 1 is"):
        losses.dpo(tree_model()(batch))


def test_two_losses_over_one_output_compute_the_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, calls = tree_model().unpacked, samples(), []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return next_tokens(*args, **options)

    def both(first: Any, second: Any) -> Tensor:
        return losses.grpo(first, normaliser="per_token") + losses.kl_to_reference(second, normaliser="per_token")

    monkeypatch.setattr(distributions, "next_tokens", counted)
    with InDouble():
        apart = gradients(model, lambda: iter([both(tree_model()(batch), tree_model()(batch))]))
        assert len(calls) == 2
        out = tree_model()(batch)
        require_equal(apart, gradients(model, lambda: iter([both(out, out)])))
    assert len(calls) == 3


def test_rows_that_are_planned_on_their_own_keep_the_counts_of_the_batch() -> None:
    model, plan = tree_model().unpacked, plan_rows(samples(), 45, min_shared_tokens=1)
    alone = [plan.of_row(index) for index in range(len(plan.rows))]
    for normaliser in ("per_token", "per_sequence", "per_group"):
        with InDouble():
            whole = gradients(model, lambda: iter([losses.sft(tree_model()(plan), normaliser=normaliser)]))  # noqa: B023
            apart = gradients(model, lambda: (losses.sft(tree_model()(row), normaliser=normaliser) for row in alone))  # noqa: B023
        require_equal(whole, apart)


# Rows of a planner


def rows_given_out(batch: list[Sample]) -> list[Plan]:
    planner = Planner(45, 1, rows_waiting=2, plan_seconds=0)
    early = [ready.plan for sample in batch for ready in planner.add(sample)]
    assert len(early) > 1
    return early + [ready.plan for ready in planner.flush()]


@pytest.mark.parametrize(
    ("normaliser", "counts"),
    [
        ("per_token", losses.counts_of(samples())),
        ("per_group", losses.counts_of(samples())),
        ("per_sequence", losses.Counts(sequences=len(samples()))),
        ("constant", None),
    ],
)
def test_losses_of_rows_that_are_given_out_early_add_up_to_that_of_the_batch(normaliser: str, counts: Any) -> None:
    model, options = tree_model().unpacked, {"normaliser": normaliser, "constant": None if counts else CONSTANT}
    plans = rows_given_out(samples())
    with InDouble():
        whole = gradients(model, lambda: iter([losses.grpo(tree_model()(samples()), **options)]))
        apart = gradients(model, lambda: (losses.grpo(tree_model()(plan), counts=counts, **options) for plan in plans))
    require_equal(whole, apart)


def test_counts_that_are_not_known_when_a_row_is_given_out_are_asked_for() -> None:
    plan = rows_given_out(samples())[0]
    sent = pickle.loads(pickle.dumps(plan.rows[0]))
    assert sent.samples.keys() == plan.rows[0].samples.keys()
    for given in (plan, sent):
        with pytest.raises(PlanError, match="counted over the whole batch is not known"):
            losses.sft(tree_model()(given), normaliser="per_token")


# Payloads that go to the model


@pytest.mark.parametrize("name", ["position_ids", "input_ids"])
def test_payload_with_the_name_of_an_argument_of_the_model_is_refused(name: str) -> None:
    batch = [Sample([1, 2, 3], **{name: [0, 1, 2]})]
    calls = (tree_model(), tree_model().plan, lambda batch: tree_model()(plan_rows(batch)))
    for call in calls:
        with pytest.raises(UnsupportedArgumentError, match=f"payload `{name}` of the samples") as raised:
            call(batch)
        assert "give it another name" in raised.value.hint


def test_payload_in_the_layout_of_the_row_has_a_type_for_all_samples() -> None:
    batch = [Sample([1, 2, 3], gain=[0, 0, 1]), Sample([4, 5, 6], gain=[0.5, 0.5, math.nan], trainable=[0, 1, 0])]
    (row,) = plan_rows(batch, min_shared_tokens=1).rows
    np.testing.assert_array_equal(row.payload("gain"), [0, 0, 1, 0.5, 0.5, math.nan])


@pytest.mark.parametrize("number", [2**60 + 1, 2**63 + 1])
def test_payload_whose_type_for_all_samples_would_round_is_refused(number: Any) -> None:
    gains = np.array([0, number], np.uint64), np.array([0.5, 0.5])
    (row,) = plan_rows([Sample([1, 2], gain=gains[0]), Sample([3, 4], gain=gains[1])], min_shared_tokens=1).rows
    with pytest.raises(PayloadError, match="'gain' of sample 0 has numbers that float64 cannot hold"):
        row.payload("gain")


@pytest.mark.parametrize("other", [[[0.5], [0.5]], ["a", "b"]])
def test_payload_of_another_form_in_another_sample_is_refused(other: Any) -> None:
    (row,) = plan_rows([Sample([1, 2], gain=[0, 1]), Sample([3, 4], gain=other)], min_shared_tokens=1).rows
    with pytest.raises(PayloadError, match=r"An entry of 'gain' .* in sample 1, .* in sample 0"):
        row.payload("gain")


@pytest.mark.parametrize("name", ["labels", "mask", "trainible", "attention_mask"])
def test_sample_with_a_mask_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(PayloadError, match=f"cannot have the payload '{name}'") as raised:
        Sample([1, 2], **{name: [0, 1]})
    assert "trainable=[0, …, 1]" in str(raised.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: losses.sft(out, normaliser="per_token"),
        lambda out: losses.load_balancing(out, top_k=1),
        lambda out: losses.expert_counts(out, top_k=1),
    ],
)
def test_loss_of_one_sequence_of_an_output_says_what_it_takes(loss: Callable[[Any], Tensor]) -> None:
    with pytest.raises(TypeError, match=r"for out in tree_model.rows\(samples\)"):
        loss(tree_model()([Sample([1, 2, 3])])[0])


def test_counts_name_the_sample_that_is_not_usable() -> None:
    with pytest.raises(PayloadError, match="Sample 1: `trainable`"):
        losses.counts_of([Sample([1, 2]), Sample([1, 2], [1])])
    with pytest.raises(PayloadError, match="Element 0 is a list among samples"):
        losses.counts_of([[1, 2]])  # type: ignore[list-item]


def test_values_of_sequences_are_copied_and_sent() -> None:
    rewards = tree_model()([Sample([1, 2], reward=0.5), Sample([1, 3], reward=2.0)]).payload("reward")
    for again in (copy.copy(rewards), copy.deepcopy(rewards), pickle.loads(pickle.dumps(rewards))):
        assert list(again) == [0.5, 2.0]


def test_sample_whose_trained_tokens_are_weighted_is_refused() -> None:
    with pytest.raises(TokenTypeError, match=r"Sample 1: `trainable` holds 0.5"):
        tree_model().plan([Sample([1, 2]), Sample([1, 2], trainable=[0, 0.5])])
