"""What is kept for the backward pass, and dropout."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from tests.differential.trees import long_sequences
from tree_compile import TreeModel, programs, treecompile
from tree_compile.errors import LostGradientError
from tree_compile.tiny import tiny_model

SEQUENCES = long_sequences(0, 128)


def kept(tree_model: TreeModel) -> tuple[int, list[Tensor]]:
    """Bytes that a step keeps beside the parameters, and its gradients."""
    tree_model(SEQUENCES)
    own = {parameter.data_ptr() for parameter in tree_model.parameters()}
    sizes: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(seen, lambda tensor: tensor):
        out = tree_model(SEQUENCES)
    loss = sum(part.sum() for part in out.logprobs)
    return sum(sizes.values()), list(torch.autograd.grad(loss, list(tree_model.parameters())))


def partitioned(section: fx.GraphModule) -> object:
    """As `compiled`, without the slow code generation."""
    return torch.compile(section, backend="aot_eager_decomp_partition", dynamic=True, fullgraph=True)


def test_memory_budget_of_compiled_blocks_keeps_less_and_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(programs.BACKENDS, "inductor", partitioned)
    found = []
    for budget in (1.0, 0.3):
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=budget):
            found.append(
                kept(treecompile(tiny_model("llama", num_hidden_layers=1), min_shared_tokens=1, self_check=False))
            )
    (all_bytes, expected), (few_bytes, gradients) = found
    assert few_bytes < all_bytes / 2
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_budget_with_dropout_is_refused() -> None:
    tree_model = treecompile(
        tiny_model("gpt2", num_hidden_layers=1, attn_pdrop=0.0, resid_pdrop=0.1).train(), self_check=False
    )
    with (
        functorch_config.patch(activation_memory_budget=0.5),
        pytest.raises(LostGradientError, match=r"activation_memory_budget is 0\.5"),
    ):
        tree_model(SEQUENCES)


def test_gradient_checkpointing_of_transformers_keeps_what_is_kept_without_it() -> None:
    model = tiny_model("llama")
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager", self_check=False)
    without, expected = kept(tree_model)
    model.gradient_checkpointing_enable()
    found, gradients = kept(tree_model)
    assert found == without
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_hooks_around_the_first_call_see_the_tensors_of_the_row_alone() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.data_ptr())  # a tensor without values, as a capture has, has none
        return tensor

    tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
    for count in (1, 2):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = tree_model(SEQUENCES[:2])
        if count == 1:
            first = len(seen)
        out.logits[0].sum().backward()
    assert first > 0
    assert len(seen) == 2 * first


class Drops(nn.Module):
    """Attends, and drops half of the features of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        mixed = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.dropout(mixed[:, 0], 0.5, self.training)


BRANCHES = [[1, 2, 3, 4, 4], [1, 2, 3, 5, 4], [7, 4]]


@cache
def tree_model_of(backend: str) -> TreeModel:
    return treecompile(Drops(), min_shared_tokens=1, backend=backend)


@pytest.fixture(params=["eager", "inductor"])
def drops(request: pytest.FixtureRequest) -> TreeModel:
    return tree_model_of(request.param).train()


def masks(tree_model: TreeModel) -> tuple[list[Tensor], list[Tensor]]:
    """By what dropout multiplied the outputs of every sequence: 0 or 2; and the outputs."""
    found = list(tree_model(BRANCHES))
    tree_model.eval()
    whole = [tree_model.unpacked(torch.tensor([tokens]))[0] for tokens in BRANCHES]
    tree_model.train()
    return [(one / other).detach() for one, other in zip(found, whole, strict=True)], found


def test_dropout_has_one_mask_for_each_token_of_the_row(drops: TreeModel) -> None:
    (first, second, third), _ = masks(drops)
    assert torch.equal(first[:3], second[:3])
    others = [first[3], first[4], second[3], second[4], *third, first[0], first[1], first[2]]
    assert len({tuple(mask.round().tolist()) for mask in others}) == len(others)
    assert {round(value) for mask in others for value in mask.tolist()} == {0, 2}
    drawn = torch.stack([torch.cat(masks(drops)[0]) for _ in range(60)])
    assert float((drawn.mean(0) - 1).abs().max()) < 0.75  # six standard deviations
    assert float(drawn.mean()) == pytest.approx(1, abs=0.03)


def test_gradients_are_those_of_the_masks_that_were_drawn(drops: TreeModel) -> None:
    found, outputs = masks(drops)
    weight = drops.unpacked.embed.weight
    (gradient,) = torch.autograd.grad(sum(part.square().sum() for part in outputs), weight)
    drops.eval()
    unpacked = [drops.unpacked(torch.tensor([tokens]))[0] * mask for tokens, mask in zip(BRANCHES, found, strict=True)]
    (expected,) = torch.autograd.grad(sum(part.square().sum() for part in unpacked), weight)
    torch.testing.assert_close(gradient, expected)


def test_check_compares_without_dropout_and_leaves_the_mode(drops: TreeModel) -> None:
    report = drops.check(BRANCHES)
    assert report.ok
    assert report.greatest_output_difference < 1e-12
    assert drops.training
