"""Outputs and all gradients equal those of the unpacked model, run sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.differential.comparison import (
    gradient_difference,
    output_difference,
    packed,
    require_exact,
    unpacked,
)
from tests.differential.double import InDouble
from tests.differential.trees import Sequences, deep_sequences, random_sequences
from tree_compile import TreeModel, plan_rows, treecompile
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-5
VOCABULARY = 128


def dense() -> nn.Module:
    torch.manual_seed(0)
    return Dense(DenseConfig(vocab_size=VOCABULARY, width=64, layers=2, heads=4, kv_heads=2, hidden=96))


class TorchEncoder(nn.Module):
    """torch's own layers with a causal mask, of which they are not told that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        return self.head(self.encoder(self.embedding(input_ids), mask=mask))


def family(model_type: str, **settings: object) -> Callable[[], nn.Module]:
    return lambda: tiny_model(model_type, **settings)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": family("llama"),
    "qwen3": family("qwen3"),
    "qwen3_moe": family("qwen3_moe", experts_implementation="batched_mm"),
    "mistral with a window shorter than the sequences": family("mistral"),
    "gemma2 with softcap and window": family("gemma2"),
    "gemma3_text": family("gemma3_text"),
    "gpt2 with learned positions": family("gpt2"),
    "gpt_oss with sinks": family("gpt_oss", experts_implementation="batched_mm"),
    "bloom with ALiBi": family("bloom"),
    "llama4_text with chunks": family("llama4_text"),
    "deepseek_v3 with MLA and experts": family("deepseek_v3", experts_implementation="batched_mm"),
    "olmo3": family("olmo3"),
    "dense": dense,
    "torch's TransformerEncoder": TorchEncoder,
}

TREES: dict[str, tuple[Sequences, int | None]] = {
    "a random tree": (random_sequences(1, VOCABULARY), None),
    "another random tree in several rows": (random_sequences(2, VOCABULARY), 80),
    "a trunk with leaves at depth 8": (deep_sequences(3, VOCABULARY), None),
    "two sequences that differ in their last token": ([[5] * 11 + [7], [5] * 11 + [8]], None),
}


@cache
def tree_model_of(name: str) -> TreeModel:
    """Captured once for all trees; rows are planned by the tests."""
    with InDouble():
        tree_model = treecompile(FAMILIES[name]().double(), backend="eager")
        tree_model([[1, 2, 3]])
    return tree_model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tree", TREES)
def test_outputs_and_gradients_equal_the_unpacked_model_in_float64(name: str, tree: str) -> None:
    sequences, row_tokens = TREES[tree]
    tree_model, plan = tree_model_of(name), plan_rows(sequences, row_tokens, min_shared_tokens=1)
    assert plan.packed_tokens < plan.input_tokens
    assert len(plan.rows) > 1 or row_tokens is None
    with InDouble():
        require_exact(tree_model, plan, sequences, TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_single_sequences_and_single_tokens_equal_the_unpacked_model(name: str) -> None:
    tree_model = tree_model_of(name)
    for sequences in ([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]], [[7]], [[7], [7], [8]]):
        with InDouble():
            reference = unpacked(tree_model.unpacked, sequences)
            result = packed(tree_model, plan_rows(sequences, min_shared_tokens=1))
        assert output_difference(reference, result) < TOLERANCE
        assert gradient_difference(reference, result) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_sorted_experts_equal_the_unpacked_model_in_float32(name: str) -> None:
    sequences = random_sequences(4, VOCABULARY)
    model = tiny_model(name, experts_implementation="grouped_mm")
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
    assert "grouped_mm" in tree_model.graph("captured")
    require_exact(tree_model, tree_model.plan(sequences), sequences, FLOAT32_TOLERANCE)


def test_compiled_blocks_equal_the_unpacked_model() -> None:
    sequences = random_sequences(5, VOCABULARY)
    model = FAMILIES["gemma2 with softcap and window"]()
    tree_model = treecompile(model, 80, min_shared_tokens=1, backend="inductor")
    require_exact(tree_model, tree_model.plan(sequences), sequences, FLOAT32_TOLERANCE)


def test_short_shared_prefixes_are_computed_apart_and_still_exact() -> None:
    sequences = random_sequences(6, VOCABULARY)
    tree_model, plan = tree_model_of("llama"), plan_rows(sequences, min_shared_tokens=4)
    assert plan.packed_tokens > plan_rows(sequences, min_shared_tokens=1).packed_tokens
    with InDouble():
        reference, result = unpacked(tree_model.unpacked, sequences), packed(tree_model, plan)
    assert output_difference(reference, result) < TOLERANCE
    assert gradient_difference(reference, result) < TOLERANCE


def test_padded_rows_are_exact_and_of_one_length() -> None:
    sequences = random_sequences(7, VOCABULARY)
    tree_model, plan = tree_model_of("qwen3_moe"), plan_rows(sequences, 96, min_shared_tokens=1, pad_rows=True)
    assert {len(row.tokens) for row in plan.rows} == {96}
    with InDouble():
        reference, result = unpacked(tree_model.unpacked, sequences), packed(tree_model, plan)
    assert output_difference(reference, result) < TOLERANCE
    assert gradient_difference(reference, result) < TOLERANCE
