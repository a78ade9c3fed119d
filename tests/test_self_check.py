"""The check of the first call catches a rewrite that is wrong, also where the proof does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.differential.test_compressed import compressed
from tree_compile import selfcheck, treecompile
from tree_compile.comparison import Gap, gap, relative_difference
from tree_compile.errors import SelfCheckError
from tree_compile.models.sparse_mla import Indexer, SparseMLA, SparseMLAConfig, rotate
from tree_compile.passes import attention
from tree_compile.passes.plan_inputs import RowTables
from tree_compile.passes.token_rules import RULES
from tree_compile.runtime import topk_index, window_attention
from tree_compile.runtime.attention import tree_attention
from tree_compile.runtime.topk_index import highest
from tree_compile.selfcheck import CheckReport
from tree_compile.tiny import tiny_model

SEQUENCES = [[3, 1, 4, 1, 5], [3, 1, 4, 2, 6]]


def table_in_row_order(self: RowTables, node: fx.Node, dim: int) -> fx.Node:
    """A rewrite that leaves a position table at 0, 1, 2, … along the row."""
    return node


def position_in_row_order(self: RowTables, node: fx.Node, dim: int, first: int) -> fx.Node:
    """A rewrite that leaves positions at 0, 1, 2, … along the row."""
    return node


def attention_that_sees_siblings(query: Tensor, key: Tensor, value: Tensor, *plan: Tensor, **options: Any) -> Tensor:
    """Plain causal attention over the row."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options["scale"], enable_gqa=True)


@pytest.fixture(params=["llama", "gpt2", "qwen3"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return tiny_model(request.param)


def test_self_check_passes_a_right_rewrite(model: nn.Module) -> None:
    assert len(treecompile(model, backend="eager")(SEQUENCES)) == 2


def test_self_check_catches_positions_that_are_not_gathered(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, no_proof: None
) -> None:
    monkeypatch.setattr(RowTables, "at_positions", table_in_row_order)
    monkeypatch.setattr(RowTables, "positions", position_in_row_order)
    with pytest.raises(SelfCheckError, match="differ on a small random tree"):
        treecompile(model, backend="eager")(SEQUENCES)


def test_self_check_catches_a_sibling_that_is_left_visible(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, attention_that_sees_siblings, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_that_sees_siblings)
    with pytest.raises(SelfCheckError, match="differ on a small random tree"):
        treecompile(model, backend="eager")(SEQUENCES)


def test_self_check_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, attention_that_sees_siblings, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_that_sees_siblings)
    assert len(treecompile(tiny_model("llama"), backend="eager", self_check=False)(SEQUENCES)) == 2


def test_self_check_leaves_modes_and_random_numbers_as_they_were() -> None:
    model = tiny_model("llama").train()
    state = torch.get_rng_state()
    treecompile(model, backend="eager")(SEQUENCES)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


@pytest.fixture
def no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every graph pass the token-axis proof."""
    from tree_compile.passes.token_axis import ProveTokenAxis

    monkeypatch.setattr(ProveTokenAxis, "__call__", lambda self, _: ())


class OnlyInTraining(nn.Module):
    """Attends in training alone, and drops."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(16, 8), drop, nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))[:, None]
        if self.training:
            x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x[:, 0])


class OwnDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(x, 0.1, self.training)


def test_self_check_sees_what_a_model_does_in_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, attention_that_sees_siblings, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_that_sees_siblings)
    with pytest.raises(SelfCheckError, match="differ on a small random tree"):
        treecompile(OnlyInTraining(nn.Dropout(0.1)), backend="eager")(SEQUENCES)


def test_self_check_of_a_model_with_a_dropout_of_its_own_is_that_of_eval_mode() -> None:
    model = treecompile(OnlyInTraining(OwnDropout()), backend="eager")
    assert len(model(SEQUENCES)) == 2
    assert model.unpacked.training


class Attention(nn.Module):
    """Returns `finish(logits, x)`, where only the logits come from an attention."""

    def __init__(self, finish: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.head, self.finish = nn.Embedding(16, 8), nn.Linear(8, 16), finish

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return self.finish(self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True)), x)


def fill(value: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, x: logits.masked_fill(torch.arange(16) > 11, value)


FINISHES = {
    "-inf": fill(-torch.inf),
    "least float": fill(torch.finfo(torch.float32).min),
    "-1e9": fill(-1e9),
    "beside a greater output": lambda logits, x: (x * 1e5, logits),
}


@pytest.mark.parametrize("finish", FINISHES.values(), ids=FINISHES)
def test_self_check_looks_past_fills_and_other_outputs(
    finish: Callable[[Tensor, Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert treecompile(Attention(finish), backend="eager").check(SEQUENCES).ok
    monkeypatch.setitem(RULES, attention_that_sees_siblings, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_that_sees_siblings)
    with pytest.raises(SelfCheckError, match="differ on a small random tree: "):
        treecompile(Attention(finish), backend="eager")(SEQUENCES)


def test_difference_of_numbers_that_are_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    masked = torch.tensor([1.0, nan, -inf])
    assert gap(masked, masked.clone()) == Gap(0.0, 1.0)
    for other in ([1.0, 0.0, -inf], [1.0, nan, inf], [1.0, nan, 0.0], [1.0, nan]):
        assert gap(masked, torch.tensor(other)).difference == inf
        assert gap(torch.tensor(other), masked).difference == inf
    assert relative_difference([[masked]], [[masked, masked]]) == inf


class OneGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def attention_with_a_wrong_gradient(query: Tensor, *others: Any, **options: Any) -> Tensor:
    result: Tensor = OneGradient.apply(tree_attention(query, *others, **options))
    return result


@pytest.mark.parametrize("place", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_also_where_the_first_call_needs_none(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, attention_with_a_wrong_gradient, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_with_a_wrong_gradient)
    model = Attention(lambda logits, x: logits)
    with place():
        assert not treecompile(model, backend="eager", self_check=False).check(SEQUENCES).ok
        with pytest.raises(SelfCheckError, match="in the gradient of"):
            treecompile(model, backend="eager")(SEQUENCES)


class OneLost(torch.autograd.Function):
    """Gives its input back, without the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)


def attention_with_a_lost_gradient_of_queries(query: Tensor, *others: Any, **options: Any) -> Tensor:
    result: Tensor = tree_attention(OneLost.apply(query), *others, **options)
    return result


class WithBiases(nn.Module):
    """Whose keys have a bias, the gradient of which is the rounding of 0."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.share = share
        self.embed = nn.Embedding(32, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        attended = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)
        return self.head(x + self.share * attended)


@pytest.mark.parametrize("seed", [0, 4])
def test_gradient_that_is_rounding_alone_is_no_difference_in_half_precision(seed: int) -> None:
    torch.manual_seed(seed)
    shared = [token % 32 for token in range(96)]
    report = treecompile(WithBiases().bfloat16(), backend="eager").check([[*shared, 1, 2], [*shared, 3]])
    assert (report.greatest_gradient_difference or 0) < 0.1


def test_lost_gradient_beside_much_greater_ones_is_found_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, attention_with_a_lost_gradient_of_queries, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_with_a_lost_gradient_of_queries)
    torch.manual_seed(0)
    report = treecompile(WithBiases(share=0.05).bfloat16(), backend="eager", self_check=False).check(SEQUENCES)
    assert not report.ok
    assert report.worst_parameter.startswith("query")


def test_softmax_in_fewer_bits_than_the_model_allows_their_rounding() -> None:
    def attend(scores: Tensor) -> Tensor:
        return scores.softmax(-1, dtype=torch.float32).double()

    class Softmax(WithBiases):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            scores = (self.query(x) @ self.key(x).mT / 4).masked_fill(
                torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1), -torch.inf
            )
            return self.head(attend(scores) @ self.value(x))

    report = treecompile(Softmax().double(), backend="eager").check(SEQUENCES)
    assert report.ok, report
    assert report.tolerance == pytest.approx(1e-4)


def test_check_without_gradients_says_so() -> None:
    report = treecompile(Attention(lambda logits, x: logits.detach()), backend="eager").check(SEQUENCES)
    assert report.ok
    assert report.greatest_gradient_difference is None
    assert "gradients" not in str(report)


class MeanGradient(torch.autograd.Function):
    """Gives every feature the mean of the gradients of all."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.mean(-1, keepdim=True).expand_as(gradient)


def attention_with_mean_gradients(query: Tensor, *others: Any, **options: Any) -> Tensor:
    result: Tensor = MeanGradient.apply(tree_attention(query, *others, **options))
    return result


def test_weights_of_the_loss_are_random_beside_an_output_of_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(ids)
            return F.scaled_dot_product_attention(x, x, x, is_causal=True), x.argmax(-1)

    monkeypatch.setitem(RULES, attention_with_mean_gradients, RULES[attention.tree_attention])
    monkeypatch.setattr(attention, "tree_attention", attention_with_mean_gradients)
    with pytest.raises(SelfCheckError, match="in the gradient of"):
        treecompile(Attending(), backend="eager")(SEQUENCES)


def test_first_call_and_report_allow_the_same() -> None:
    report = CheckReport(1e-5, 5e-4, 1e-4, "head.weight", 10, 5, 1)
    assert report.ok
    assert report.gradient_tolerance == pytest.approx(1e-3)
    assert not replace(report, greatest_gradient_difference=2e-3).ok
    assert not replace(report, greatest_output_difference=2e-4).ok
    assert not replace(report, greatest_gradient_difference=float("nan")).ok


@pytest.mark.parametrize(("output", "gradient"), [(1e-5, 2e-3), (2e-4, 1e-5), (1e-5, 5e-4)])
def test_first_call_raises_what_the_report_refuses(
    output: float, gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = CheckReport(output, gradient, 1e-4, "head.weight", 10, 5, 1)
    monkeypatch.setattr(selfcheck, "compare", lambda *_: report)
    with contextlib.nullcontext() if report.ok else pytest.raises(SelfCheckError, match="rounding allows"):
        treecompile(Attention(lambda logits, x: logits), backend="eager")(SEQUENCES)


def lowest(scores: Tensor, k: int) -> Tensor:
    """A choice that is the wrong way round."""
    return highest(-scores.masked_fill(scores.isinf(), -torch.inf), k)


MANY_KEYS: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v32": lambda: tiny_model("deepseek_v32", experts_implementation="batched_mm", index_topk=2048),
    "compressed": lambda: compressed(entries_per_token=512),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MANY_KEYS)
def test_self_check_catches_a_wrong_choice_of_more_keys_than_it_has_tokens(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MANY_KEYS[name]().eval().to(dtype)
    assert len(treecompile(model, backend="eager")(SEQUENCES)) == 2
    for module in (topk_index, window_attention):
        monkeypatch.setattr(module, "highest", lowest)
    with pytest.raises(SelfCheckError, match="differ on a small random tree"):
        treecompile(model, backend="eager")(SEQUENCES)


class IndexerThatCounts(Indexer):
    """One that goes by the number of keys that it asked for."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        chosen = super().forward(x, cos, sin)
        assert chosen.shape[-1] == min(self.config.chosen, x.shape[1])
        return chosen


def test_model_that_goes_by_the_number_of_its_chosen_keys_is_compared_as_it_is() -> None:
    model = SparseMLA(SparseMLAConfig(vocab_size=50, layers=2, chosen=30))
    for block in model.blocks:
        if block.indexer is not None:
            block.indexer.__class__ = IndexerThatCounts
    assert len(treecompile(model, backend="eager")(SEQUENCES)) == 2


class IndexerByOperator(Indexer):
    """Chooses by an operator that is not seen to be a choice of keys."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary = self.config.rotary
        query, key = self.query(x).unflatten(-1, (self.config.index_heads, -1)), self.key(x)
        query = torch.cat([rotate(query[..., :rotary], cos[:, None], sin[:, None]), query[..., rotary:]], -1)
        key = torch.cat([rotate(key[..., :rotary], cos, sin), key[..., rotary:]], -1)
        scores = torch.einsum("bqhd,bkd->bqhk", query, key).relu()
        scores = torch.einsum("bqhk,bqh->bqk", scores, self.weights(x))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        hidden = scores.masked_fill(later, float("-inf"))
        return torch.ops.aten.topk.default(hidden, min(self.config.chosen, x.shape[1]))[1]


def test_model_whose_choice_is_not_seen_is_compared_as_it_is() -> None:
    torch.manual_seed(0)
    model = SparseMLA(SparseMLAConfig(vocab_size=50, layers=2, chosen=30))
    for block in model.blocks:
        if block.indexer is not None:
            block.indexer.__class__ = IndexerByOperator
    assert len(treecompile(model, backend="eager")(SEQUENCES)) == 2
