"""Compiled blocks: alike ones share code, and new trees and lengths compile nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters

from tests.differential.trees import deep_sequences, long_sequences, random_sequences
from tree_compile import programs, treecompile
from tree_compile.blocks import compiled
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.tiny import tiny_model


def traced(section: fx.GraphModule) -> object:
    """As `compiled`, without the slow code generation: what is counted is how often torch.compile traces."""
    return torch.compile(section, backend="aot_eager", dynamic=True, fullgraph=True)


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setitem(programs.BACKENDS, "inductor", traced)


def step(model: nn.Module, sequences: list[list[int]]) -> None:
    out = model(sequences)
    sum(part.square().mean() for part in out.logits).backward()


@pytest.mark.parametrize("model_type", ["dense", "llama", "mistral", "qwen3_moe", "mamba2"])
def test_new_trees_and_row_lengths_compile_nothing_after_two_steps(model_type: str) -> None:
    config = DenseConfig(vocab_size=128, width=32, layers=3, heads=2, kv_heads=1, hidden=48)
    model = Dense(config) if model_type == "dense" else tiny_model(model_type)
    tree_model = treecompile(model, min_shared_tokens=1, self_check=False)
    for seed in (0, 1):
        step(tree_model, random_sequences(seed, 128))
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0

    lengths = set()
    for seed in range(2, 5):
        lengths.add(tree_model.plan(random_sequences(seed, 128)).packed_tokens)
        step(tree_model, random_sequences(seed, 128))
    step(tree_model, long_sequences(0, 128))
    step(tree_model, deep_sequences(0, 128))
    step(tree_model, [[1], [2]])
    step(tree_model, [[3]])
    assert len(lengths) == 3
    assert counters["stats"]["unique_graphs"] == graphs


def test_model_is_captured_once_though_its_parameters_are_marked_by_dynamo() -> None:
    model = tiny_model("llama")
    tree_model = treecompile(model, min_shared_tokens=1, self_check=False)
    step(tree_model, random_sequences(0, 128))
    (kept,) = tree_model._programs.values()
    assert any(name.startswith("_dynamo") for parameter in model.parameters() for name in vars(parameter))
    step(tree_model, random_sequences(1, 128))
    assert list(tree_model._programs.values()) == [kept]


def test_blocks_of_the_same_form_share_their_code() -> None:
    model = Dense(DenseConfig(vocab_size=128, width=32, layers=6, heads=2, kv_heads=1, hidden=48))
    tree_model = treecompile(model, self_check=False)
    assert tree_model([[1, 2, 3]]).logits[0].shape == (3, 128)
    explanation = tree_model.explain()
    # Before the blocks, the six of them, the norm behind them, and the head.
    assert explanation.blocks == (9, 4)
    assert counters["stats"]["unique_graphs"] == 4


def test_every_sequence_of_a_row_has_a_backward_pass_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(programs.BACKENDS, "inductor", compiled)
    model = Dense(DenseConfig(vocab_size=16, width=8, layers=1, heads=2, kv_heads=1, hidden=8)).double()
    tree_model = treecompile(model, min_shared_tokens=1, self_check=False)
    sequences = [[1, 2, 3], [1, 2, 4]]
    out = tree_model(sequences)
    for i in range(2):
        out.logits[i].square().mean().backward(retain_graph=i == 0)
    found = model.head.weight.grad
    model.zero_grad()
    torch.stack([model(torch.tensor([tokens])).square().mean() for tokens in sequences]).sum().backward()
    torch.testing.assert_close(found, model.head.weight.grad)
