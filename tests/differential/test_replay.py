"""Routers of the tree model send tokens to recorded experts, as the unpacked model's do when they are made to."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.differential.comparison import Result, gradient_difference, output_difference, run
from tests.differential.double import InDouble
from tests.differential.trees import random_sequences
from tree_compile import Plan, Planner, Sample, TreeModel, losses, plan_rows, treecompile
from tree_compile.errors import PayloadError, ReplayError, TokenTypeError
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-5
SEQUENCES = random_sequences(3, 128)
ROWS = {"one row": (None, False), "several rows": (45, False), "padded rows": (48, True)}

Routed = tuple[Tensor, Tensor, Tensor]


def by_softmax(router: Any, states: Tensor, experts: Tensor) -> Routed:
    logits = nn.functional.linear(states.reshape(-1, states.shape[-1]), router.weight)
    weights = logits.softmax(-1).gather(1, experts)
    return logits, weights / weights.sum(-1, keepdim=True), experts


def by_softmax_as_it_is(router: Any, states: Tensor, experts: Tensor) -> Routed:
    logits = nn.functional.linear(states.reshape(-1, states.shape[-1]), router.weight)
    return logits, logits.softmax(-1).gather(1, experts), experts


def by_sigmoid(router: Any, states: Tensor, experts: Tensor) -> Routed:
    logits = nn.functional.linear(states.reshape(-1, states.shape[-1]), router.weight)
    weights = logits.sigmoid().gather(1, experts)
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor, experts


def by_softmax_of_the_chosen(router: Any, states: Tensor, experts: Tensor) -> Routed:
    logits = nn.functional.linear(states.reshape(-1, states.shape[-1]), router.weight, router.bias)
    return logits, logits.gather(1, experts).softmax(-1), experts


FAMILIES: dict[str, tuple[Callable[..., Routed], dict[str, Any]]] = {
    "qwen3_moe": (by_softmax_as_it_is, {"norm_topk_prob": False}),
    "mixtral": (by_softmax, {}),
    "deepseek_v3": (by_sigmoid, {}),
    "gpt_oss": (by_softmax_of_the_chosen, {}),
}


@cache
def tree_model(family: str) -> TreeModel:
    with InDouble():
        found = treecompile(model_of(family).double(), backend="eager", min_shared_tokens=1)
        found(samples(family)[:2])
    return found


def model_of(family: str, experts: str = "batched_mm") -> nn.Module:
    return tiny_model(family, experts_implementation=experts, **FAMILIES[family][1])


def routers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


@cache
def samples(family: str) -> list[Sample]:
    """With the choices of a model whose weights are others, so that some choices are others, too."""
    model = model_of(family).double()
    own = [choices_alone(model, sequence) for sequence in SEQUENCES]
    with torch.no_grad():
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    recorded = [choices_alone(other, sequence) for sequence in SEQUENCES]
    changed = np.concatenate([a != b for a, b in zip(own, recorded, strict=True)])
    assert (changed.mean(axis=(0, 2)) > 0.05).all()  # in every layer
    return [Sample(tokens, routed_experts=one) for tokens, one in zip(SEQUENCES, recorded, strict=True)]


def choices_alone(model: nn.Module, sequence: Sequence[int]) -> Any:
    """What the routers of a model choose for a sequence that it is run on alone, [len, layers, top_k]."""
    found: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda _module, _args, out: found.append(out[2])) for r in routers_of(model)]
    with torch.no_grad(), InDouble():
        model(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


@contextlib.contextmanager
def made_to_choose(family: str, model: nn.Module, experts: Any) -> Iterator[None]:
    """The routers of the model itself, written anew, with the experts of one sequence [len, layers, top_k]."""
    formula, routers = FAMILIES[family][0], routers_of(model)
    for layer, router in enumerate(routers):
        chosen = torch.as_tensor(experts)[:, layer]
        vars(router)["forward"] = lambda states, router=router, chosen=chosen: formula(router, states, chosen)
    try:
        yield
    finally:
        for router in routers:
            del vars(router)["forward"]


def alone(family: str, model: nn.Module, batch: Sequence[Sample]) -> Result:
    def logits_of() -> Iterator[Tensor]:
        for sample in batch:
            with made_to_choose(family, model, sample.payloads["routed_experts"]):
                yield model(torch.as_tensor(sample.tokens)[None]).logits[0]

    return run(model, lambda: list(logits_of()))


@cache
def all_alone(family: str) -> Result:
    with InDouble():
        return alone(family, tree_model(family).unpacked, samples(family))


@cache
def without_replay(family: str) -> Result:
    with InDouble():
        return packed(tree_model(family), plan_rows(SEQUENCES, min_shared_tokens=1))


def packed(model: TreeModel, plan: Plan) -> Result:
    return run(model.unpacked, lambda: list(model(plan).logits))


def planned(family: str, rows: str) -> Plan:
    row_tokens, pad_rows = ROWS[rows]
    plan = plan_rows(samples(family), row_tokens, min_shared_tokens=1, pad_rows=pad_rows)
    assert len(plan.rows) >= 5 if row_tokens else len(plan.rows) == 1
    return plan


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_equals_the_unpacked_model_whose_routers_are_made_to_choose(family: str, rows: str) -> None:
    model, plan = tree_model(family), planned(family, rows)
    reference, without = all_alone(family), without_replay(family)
    assert plan.packed_tokens < plan.input_tokens
    with InDouble():
        result = packed(model, plan)
    assert output_difference(reference, result) < TOLERANCE
    assert gradient_difference(reference, result) < TOLERANCE
    assert output_difference(reference, without) > 100 * TOLERANCE
    assert gradient_difference(reference, without) > 100 * TOLERANCE


class Gathers(TorchDispatchMode):
    """Notes by which numbers scores of experts are taken."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts, self.indices = experts, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.gather.default and args[0].shape[-1] == self.experts:
            self.indices.append(args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_takes_the_recorded_experts_of_every_sequence(family: str) -> None:
    (row,) = planned(family, "one row").rows
    model = tree_model(family)
    config: Any = model.unpacked.config
    experts = next(getattr(config, name) for name in ("n_routed_experts", "num_local_experts", "num_experts")
                   if getattr(config, name, None))  # fmt: skip
    with InDouble(), torch.no_grad(), Gathers(experts) as seen:
        model(row)
    recorded = [sample.payloads["routed_experts"] for sample in samples(family)]
    assert len(seen.indices) == recorded[0].shape[1]
    for layer, index in enumerate(seen.indices):
        for i in row.sequence_ids:
            assert torch.equal(index[row.path(i)], torch.as_tensor(recorded[i][:, layer]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_replay_with_sorted_experts_equals_the_unpacked_model_in_float32(family: str) -> None:
    model = treecompile(model_of(family, "grouped_mm"), backend="eager", min_shared_tokens=1)
    batch = samples(family)
    reference, result = alone(family, model.unpacked, batch), packed(model, model.plan(batch))
    assert output_difference(reference, result) < FLOAT32_TOLERANCE
    assert gradient_difference(reference, result) < FLOAT32_TOLERANCE


def test_tokens_with_the_same_choices_are_shared_as_without_recordings() -> None:
    plain = plan_rows(SEQUENCES, min_shared_tokens=1)
    assert planned("qwen3_moe", "one row").packed_tokens == plain.packed_tokens


def test_tokens_with_other_choices_are_not_shared() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    experts = np.random.default_rng(0).random((8, 2, 4)).argsort(-1)[..., :2]
    others = experts.copy()
    others[5, 1] = others[5, 1, ::-1]  # the same two in another order: another choice, as weights follow it
    batch = [Sample(tokens, routed_experts=one) for one in (experts, others, experts)]
    model = tree_model("qwen3_moe")
    plan = plan_rows(batch, min_shared_tokens=1)
    assert (plan.packed_tokens, plan.input_tokens) == (8 + 3, 24)
    with InDouble():
        reference, result = alone("qwen3_moe", model.unpacked, batch), packed(model, plan)
    assert output_difference(reference, result) < TOLERANCE
    assert gradient_difference(reference, result) < TOLERANCE


def test_rows_that_were_sent_and_plans_that_were_loaded_keep_what_is_replayed(tmp_path: Any) -> None:
    model, plan = tree_model("qwen3_moe"), planned("qwen3_moe", "several rows")
    plan.save(tmp_path / "plan.npz")
    loaded = Plan.load(tmp_path / "plan.npz").with_sequences(samples("qwen3_moe"))
    with InDouble(), torch.no_grad():
        for row, again in zip(plan.rows, loaded.rows, strict=True):
            expected = model(row).logits
            sent = pickle.loads(pickle.dumps(row))
            for i in row.sequence_ids:
                assert torch.equal(model(sent).logits[i], expected[i])
                assert torch.equal(model(again).logits[i], expected[i])


def test_losses_of_samples_are_those_of_the_replayed_model() -> None:
    model, batch = tree_model("mixtral"), samples("mixtral")
    with InDouble(), torch.no_grad():
        found = sum(losses.sft(out, normaliser="constant", constant=1.0) for out in model.rows(batch))
        expected = 0.0
        for sample in batch:
            with made_to_choose("mixtral", model.unpacked, sample.payloads["routed_experts"]):
                ids = torch.as_tensor(sample.tokens)
                logits = model.unpacked(ids[None]).logits[0]
                expected += float(nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
    assert float(found) == pytest.approx(expected, rel=TOLERANCE)


def test_check_compares_with_the_unpacked_model_that_replays_too() -> None:
    model = tree_model("qwen3_moe")
    with InDouble():
        assert model.check(samples("qwen3_moe")).ok
        assert model.check().ok


# What is refused

GOOD = [[[0, 1], [2, 3]]] * 3
TOKENS = [1, 2, 3]
BAD: dict[str, tuple[Any, str]] = {
    "too short": (GOOD[:2], r"'routed_experts' of sample 1 has shape \(2, 2, 2\) for 3 tokens"),
    "without layers": ([[0, 1]] * 3, r"of sample 1 has shape \(3, 2\) and type int64"),
    "no numbers": (np.array(GOOD) + 0.5, r"of sample 1 has shape \(3, 2, 2\) and type float64"),
    "not recorded": ([*GOOD[:2], [[0, 1], [2, -1]]], "of sample 1 holds -1 at token 2, layer 1"),
    "not recorded, without a sign": (np.array([*GOOD[:2], [[0, 1], [2, 2**64 - 1]]], np.uint64),
                                     "of sample 1 holds 18446744073709551615 at token 2, layer 1"),
    "not in 64 bits": (np.array([*GOOD[:2], [[0, 2**63], [2, 3]]], np.uint64), "of sample 1 holds 9223372036854775808"),
    "twice": ([*GOOD[:2], [[0, 1], [3, 3]]], "of sample 1 holds expert 3 twice at token 2, layer 1"),
    "other layers": ([[[0, 1]]] * 3, r"sample 1 has \[1, 2\] numbers for a token, and \[2, 2\] for a token of"),
    "out of range": ([*GOOD[:2], [[0, 1], [2, 4]]], "of sample 1 holds expert 4"),
    "text": ("abc", "of sample 1 is a str"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_recording_is_named_with_its_sample(name: str) -> None:
    recorded, message = BAD[name]
    batch = [Sample(TOKENS, routed_experts=GOOD), Sample(TOKENS, routed_experts=recorded)]
    with pytest.raises((PayloadError, TokenTypeError), match=message):
        tree_model("qwen3_moe")(batch)


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 1)])
def test_recording_of_another_model_is_refused(shape: tuple[int, ...]) -> None:
    recorded = np.broadcast_to(np.arange(shape[2]), shape)
    with pytest.raises(PayloadError, match=r"sample 0 has \[.*\] numbers for a token") as raised:
        tree_model("qwen3_moe")([Sample(TOKENS, routed_experts=recorded)])
    assert "2 routers, and each chooses 2 of 4 experts" in str(raised.value)


def test_recording_for_some_samples_alone_is_refused() -> None:
    with pytest.raises(PayloadError, match="Sample 1 has no payload 'routed_experts', and sample 0 has"):
        tree_model("qwen3_moe")([Sample(TOKENS, routed_experts=GOOD), Sample(TOKENS)])


def test_recording_beside_sequences_is_refused() -> None:
    with pytest.raises(PayloadError, match="as a list of its own"):
        tree_model("qwen3_moe")({"input_ids": [TOKENS], "routed_experts": [[0, 1, 2]]})


def test_planner_refuses_recordings() -> None:
    with pytest.raises(PayloadError, match="Sample 0 has recorded experts"):
        Planner(64).add(Sample(TOKENS, routed_experts=GOOD))  # type: ignore[arg-type]


class ChoosesTwiceRouter(nn.Module):
    """A router of the user's own that falls back to a second choice."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.top_k, self.weight = inner.top_k, inner.weight

    def forward(self, states: Tensor) -> Routed:
        logits = nn.functional.linear(states.reshape(-1, states.shape[-1]), self.weight)
        first, second = logits.topk(self.top_k), (-logits).topk(self.top_k)
        weights = torch.where(first.values > 0, first.values, second.values)
        return logits, weights, torch.where(first.values > 0, first.indices, second.indices)


def with_routers(kind: Callable[[Any], nn.Module]) -> nn.Module:
    model = model_of("qwen3_moe")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate = kind(layer.mlp.gate)  # type: ignore[union-attr]
    return model


class OwnRouter(nn.Module):
    """A router of the user's own that takes experts and their weights from its scores by `chosen`."""

    def __init__(self, inner: Any, chosen: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.top_k, self.weight, self.chosen = inner.top_k, inner.weight, chosen

    def forward(self, states: Tensor) -> Routed:
        logits = nn.functional.linear(states.reshape(-1, states.shape[-1]), self.weight)
        weights, experts = self.chosen(logits.softmax(-1), self.top_k)
        return logits, weights, experts


def in_one_group(scores: Tensor) -> Tensor:
    """Scores outside of the better half of the experts are 0."""
    groups = scores.view(-1, 2, 2)
    best = groups.sum(-1).topk(1).indices
    kept = torch.zeros_like(groups[..., 0])
    kept.scatter_(1, best, 1.0)
    return (groups * kept[..., None]).view_as(scores)


def from_groups_by_gather(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    masked = in_one_group(scores)
    experts = masked.topk(k).indices
    return masked.gather(1, experts), experts


def from_groups_that_are_scaled(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    masked = in_one_group(scores)
    experts = torch.topk(masked, k=k).indices
    return (2 * masked).gather(1, experts), experts


def from_the_least(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    least = scores.topk(k, largest=False)
    return least.values, least.indices


def groups_for_the_choice_alone(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    experts = torch.topk(input=in_one_group(scores), k=k, dim=1, sorted=False)[1]
    return scores.gather(1, experts), experts


def test_router_that_reads_groups_for_its_choice_alone_is_replayed_in_any_form_of_topk() -> None:
    torch.manual_seed(0)
    model = with_routers(lambda inner: OwnRouter(inner, groups_for_the_choice_alone))
    recorded = np.random.default_rng(0).random((8, 2, 4)).argsort(-1)[..., :2]
    tree_model = treecompile(model, backend="eager", min_shared_tokens=1)
    found = tree_model([Sample(range(8), routed_experts=recorded)]).logits[0]
    with made_to_choose("qwen3_moe", model, recorded):
        expected = model(torch.arange(8)[None]).logits[0]
    torch.testing.assert_close(found, expected)


class TableRouter(nn.Module):
    """A router whose weights are no parameter."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.top_k = [inner], inner.top_k

    def forward(self, states: Tensor) -> Any:
        return self.inner[0](states)


def with_an_idle_router() -> nn.Module:
    model = model_of("qwen3_moe")
    model.idle = copy.deepcopy(routers_of(model)[0])
    return model


def with_different_routers() -> nn.Module:
    model = model_of("qwen3_moe")
    routers_of(model)[0].top_k = 1  # type: ignore[assignment]
    return model


GROUPS = {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}
REFUSED: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "without a router": (lambda: tiny_model("llama"), 2, "has no router that is known"),
    "a table of token ids": (
        lambda: tiny_model("deepseek_v4"),
        3,
        "DeepseekV4HashRouter takes 0 topk over",
    ),
    "weights of groups": (lambda: tiny_model("deepseek_v2", **GROUPS), 2, "from the groups of experts that it chose"),
    "two choices": (lambda: with_routers(ChoosesTwiceRouter), 2, "ChoosesTwiceRouter takes 2 topk over its experts"),
    "a choice of the least": (
        lambda: with_routers(lambda inner: OwnRouter(inner, from_the_least)),
        2,
        "OwnRouter takes 0 topk over its experts",
    ),
    "weights of groups by gather": (
        lambda: with_routers(lambda inner: OwnRouter(inner, from_groups_by_gather)),
        2,
        "OwnRouter takes its weights from the groups of experts that it chose",
    ),
    "weights of groups that are scaled": (
        lambda: with_routers(lambda inner: OwnRouter(inner, from_groups_that_are_scaled)),
        2,
        "OwnRouter takes its weights from the groups of experts that it chose",
    ),
    "weights that are no parameter": (lambda: with_routers(TableRouter), 2, "TableRouter has no parameter"),
    "not called": (with_an_idle_router, 3, "Qwen3MoeTopKRouter is not called"),
    "different routers": (with_different_routers, 2, "differently many experts: 1 of 4, 2 of 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_model_whose_choices_cannot_be_replayed_is_refused_with_a_reason(name: str) -> None:
    factory, layers, message = REFUSED[name]
    recorded = np.broadcast_to(np.arange(2), (3, layers, 2))
    with pytest.raises(ReplayError, match=message) as raised:
        treecompile(factory(), backend="eager")([Sample(TOKENS, routed_experts=recorded)])
    assert raised.value.where is not None
    assert "routed_experts" in raised.value.hint
