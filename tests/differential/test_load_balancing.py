"""Load balancing and counts of experts over packed rows equal those over the unpacked model's sequences."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.differential.double import InDouble
from tests.differential.trees import random_sequences
from tree_compile import Plan, Planner, Sample, TreeModel, losses, plan_rows, treecompile
from tree_compile.errors import OutputError, TokenMixingError
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
TOP_K = 2
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss")
SEQUENCES = random_sequences(3, 128)
ROWS = {"one row": (None, False), "several rows": (45, False), "padded rows": (48, True)}


@cache
def tree_model(family: str) -> TreeModel:
    with InDouble():
        model = tiny_model(family, experts_implementation="batched_mm").double()
        found = treecompile(model, backend="eager", forward_kwargs={"output_router_logits": True})
        found([[1, 2, 3]])
    return found


def planned(rows: str) -> Plan:
    row_tokens, pad_rows = ROWS[rows]
    plan = plan_rows(SEQUENCES, row_tokens, min_shared_tokens=1, pad_rows=pad_rows)
    assert plan.packed_tokens < plan.input_tokens
    assert len(plan.rows) >= 5 if row_tokens else len(plan.rows) == 1
    return plan


def logits_alone(family: str) -> list[tuple[Tensor, ...]]:
    """The logits of every router for every sequence, run alone."""
    model = tree_model(family).unpacked
    return [model(torch.tensor([s]), output_router_logits=True).router_logits for s in SEQUENCES]


@cache
def of_all_alone(family: str) -> tuple[float, list[Tensor]]:
    """The loss of all sequences, run alone, and its gradients."""
    with InDouble():
        return gradients(tree_model(family).unpacked, lambda: iter([of_transformers(family, logits_alone(family))]))


def of_transformers(family: str, logits: list[tuple[Tensor, ...]]) -> Tensor:
    """The loss of transformers, of the logits of several sequences one after the other."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    layers = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    found: Tensor = module.load_balancing_loss_func(layers, layers[0].shape[1], TOP_K)
    return found


def gradients(model: nn.Module, losses_of: Callable[[], Iterator[Tensor]]) -> tuple[float, list[Tensor]]:
    """The sum of some losses and its gradients, each loss with a backward pass of its own."""
    model.zero_grad()
    total = 0.0
    for loss in losses_of():
        total += float(loss.detach())
        loss.backward()
    return total, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def difference(one: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> tuple[float, float]:
    """How far the losses are apart, and the gradients, each relative to the greatest in `one`."""
    scale = max(float(gradient.abs().max()) for gradient in one[1])
    gap = max(float((a - b).abs().max()) for a, b in zip(one[1], other[1], strict=True))
    return abs(one[0] - other[0]) / one[0], gap / scale


def rows_with_counts(model: TreeModel, plan: Plan) -> Iterator[Tensor]:
    with torch.no_grad():
        counts = torch.stack([losses.expert_counts(out, top_k=TOP_K) for out in model.rows(plan)]).sum(0)
    for out in model.rows(plan):
        yield losses.load_balancing(out, top_k=TOP_K, counts=counts)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_load_balancing_equals_that_of_all_sequences_alone(family: str, rows: str) -> None:
    model, plan, expected = tree_model(family), planned(rows), of_all_alone(family)
    with InDouble():
        whole = gradients(model.unpacked, lambda: iter([losses.load_balancing(model(plan), top_k=TOP_K)]))
        by_row = gradients(model.unpacked, lambda: rows_with_counts(model, plan))
        results = model(plan).row_results
        every_token_once = [tuple(logits[: one.row.length] for logits in one.router_logits) for one in results]
        once = gradients(model.unpacked, lambda: iter([of_transformers(family, every_token_once)]))
    assert max(difference(expected, whole)) < TOLERANCE
    assert max(difference(expected, by_row)) < TOLERANCE
    assert min(difference(expected, once)) > 100 * TOLERANCE


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_router_logits_and_counts_are_those_of_every_sequence(family: str, rows: str) -> None:
    with InDouble():
        out, alone = tree_model(family)(planned(rows)), logits_alone(family)
    counts = torch.zeros_like(losses.expert_counts(out, top_k=TOP_K))
    for found, expected in zip(out.router_logits, alone, strict=True):
        for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
            counts[layer] += torch.bincount(theirs.topk(TOP_K).indices.flatten(), minlength=counts.shape[1])
    assert torch.equal(losses.expert_counts(out, top_k=TOP_K), counts)


PARTS: dict[str, Callable[[Plan], Any]] = {
    "row": lambda plan: plan.rows[0],
    "row that was sent": lambda plan: pickle.loads(pickle.dumps(plan.rows[0])),
    "plan of a row": lambda plan: plan.of_row(0),
    "row of a plan of a row, sent": lambda plan: pickle.loads(pickle.dumps(plan.of_row(0).of_row(0).rows[0])),
}


@pytest.mark.parametrize("part", PARTS)
def test_load_balancing_of_one_of_several_rows_is_refused_without_the_counts_of_all(part: str) -> None:
    out = tree_model("qwen3_moe")(PARTS[part](planned("several rows")))
    with pytest.raises(OutputError, match=rf"has {len(out)} sequences? of a batch of {len(SEQUENCES)}") as raised:
        losses.load_balancing(out, top_k=TOP_K)
    assert "losses.expert_counts" in raised.value.hint


@pytest.mark.parametrize("kind", [list, Sample])
def test_load_balancing_of_a_row_that_a_planner_gave_out_is_refused_without_counts(kind: Callable[..., Any]) -> None:
    planner = Planner(64, 1)
    planner.add(kind([1, 2, 3]))
    (ready,) = planner.flush()
    for given in (ready.plan, pickle.loads(pickle.dumps(ready.plan.rows[0]))):
        out = tree_model("qwen3_moe")(given)
        with pytest.raises(OutputError, match="has 1 sequence of a batch of which more may come"):
            losses.load_balancing(out, top_k=TOP_K)
        counts = losses.expert_counts(out, top_k=TOP_K)
        assert losses.load_balancing(out, top_k=TOP_K, counts=counts).requires_grad


@pytest.mark.parametrize("top_k", [0, 5, True, 2.0, "2", None])
def test_number_of_experts_that_there_are_not_is_refused(top_k: Any) -> None:
    with pytest.raises(ValueError, match=f"top_k is {top_k!r}; it must be between 1 and the number of experts, 4"):
        losses.load_balancing(tree_model("qwen3_moe")([[1, 2]]), top_k=top_k)


def test_counts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts has shape \(4,\) .* it must be \[layers, experts\], \(2, 4\)"):
        losses.load_balancing(tree_model("qwen3_moe")([[1, 2]]), top_k=TOP_K, counts=torch.ones(4, dtype=torch.int64))


OTHER_COUNTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "of a part": (lambda counts: counts // 2, "and this output alone has 12"),
    "of none": (torch.zeros_like, "has 0, 0 choices of each layer, and this output alone has 12"),
    "below zero": (lambda counts: counts + counts.new_tensor([-50, 50, 0, 0]), "and this output alone has 12"),
    "of one layer twice": (lambda counts: counts * counts.new_tensor([[1], [2]]), "has 12, 24 choices"),
    "a list": (Tensor.tolist, "counts is a list; it must be a tensor"),
    "means": (lambda counts: counts / 3, r"has shape \(2, 4\) and type torch\.float"),
}


@pytest.mark.parametrize("name", OTHER_COUNTS)
def test_counts_that_are_of_no_batch_with_the_output_are_refused(name: str) -> None:
    change, message = OTHER_COUNTS[name]
    out = tree_model("qwen3_moe")([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match=message):
        losses.load_balancing(out, top_k=TOP_K, counts=change(losses.expert_counts(out, top_k=TOP_K)))


def test_model_without_router_logits_is_told_how_to_return_them() -> None:
    out = treecompile(tiny_model("qwen3_moe"), backend="eager", self_check=False)([[1, 2, 3]])
    with pytest.raises(OutputError, match="no logits of routers") as raised:
        losses.load_balancing(out, top_k=TOP_K)
    assert "output_router_logits" in raised.value.hint
    assert not hasattr(out, "router_logits")


def test_loss_that_transformers_computes_of_one_call_is_left_out() -> None:
    out = tree_model("qwen3_moe")([[1, 2, 3], [1, 2]])
    assert out[0].aux_loss is None
    with pytest.raises(AttributeError, match=r"losses\.load_balancing\(out"):
        _ = out.aux_loss


class Balanced(Dense):
    """A model of the user's own that balances the first features of its states, as if they chose experts."""

    def __init__(self) -> None:
        super().__init__(DenseConfig(vocab_size=128, width=32, layers=1, heads=2, kv_heads=2, hidden=32))
        self.register_buffer("tokens_per_expert", torch.zeros(4))

    def gate(self, logits: Tensor) -> Tensor:
        return logits[..., :4].softmax(-1)


class ReturnsItsLoss(Balanced):
    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)
        gate = self.gate(logits)
        share = nn.functional.one_hot(gate.argmax(-1), 4).float().mean((0, 1))
        return {"logits": logits, "router_logits": gate[0], "aux_loss": (share * gate.mean((0, 1))).sum()}


class CountsItsTokens(Balanced):
    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        self.tokens_per_expert += torch.bincount(self.gate(logits).argmax(-1).flatten(), minlength=4)
        return logits


class ReturnsItsCounts(Balanced):
    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)
        return {"logits": logits, "counts": self.gate(logits).argmax(-1).flatten().bincount(minlength=4)}


def test_loss_over_the_tokens_of_a_row_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(TokenMixingError) as raised:
        treecompile(ReturnsItsLoss(), backend="eager")([[1, 2, 3]])
    assert "losses.load_balancing(out, top_k=" in raised.value.hint


def test_counts_that_a_router_keeps_in_a_buffer_are_refused() -> None:
    with pytest.raises(TokenMixingError, match="add_ cannot be followed") as raised:
        treecompile(CountsItsTokens(), backend="eager")([[1, 2, 3]])
    assert "parameter, a buffer or an input" in raised.value.why
    assert "losses.expert_counts(out, top_k=" in raised.value.hint


def test_counts_that_a_model_returns_are_refused() -> None:
    with pytest.raises(TokenMixingError):
        treecompile(ReturnsItsCounts(), backend="eager")([[1, 2, 3]])
