"""Layers that carry a state along the tokens: outputs and all gradients equal those of the unpacked model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from tests.differential.comparison import (
    gradient_difference,
    output_difference,
    packed,
    require_exact,
    unpacked,
)
from tests.differential.double import InDouble
from tests.differential.trees import long_sequences, random_sequences
from tree_compile import TreeModel, plan_rows, treecompile
from tree_compile.models.hybrid import Hybrid, HybridConfig
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-4
VOCABULARY = 128
HAVE_EXPERTS = {
    "bailing_hybrid", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "lara_mini", "minimax", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_next",
}  # fmt: skip


def hybrid() -> nn.Module:
    torch.manual_seed(0)
    model = Hybrid(HybridConfig(vocab_size=VOCABULARY, width=32, head_width=8, hidden=24))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def family(model_type: str) -> Callable[[], nn.Module]:
    settings = {"experts_implementation": "batched_mm"} if model_type in HAVE_EXPERTS else {}
    return lambda: tiny_model(model_type, **settings)


def minimax() -> nn.Module:
    """Its decays are tables that are rounded to float32 when the model is built: here they are made anew in float64."""
    model = family("minimax")().double()
    for layer in model.modules():
        if hasattr(layer, "decay_factors"):
            layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{
        name: family(name)
        for name in (
            "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
            "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid",
            "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
        )
    },
    "hybrid": hybrid,
    "minimax": minimax,
}  # fmt: skip


@cache
def tree_model_of(name: str) -> TreeModel:
    """Captured once for all trees; rows are planned by the tests."""
    with InDouble():
        tree_model = treecompile(FAMILIES[name]().double(), backend="eager")
        tree_model([[1, 2, 3]])
    return tree_model


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_equal_the_unpacked_model_in_float64(name: str) -> None:
    sequences = random_sequences(2, VOCABULARY)
    plan = plan_rows(sequences, 80, min_shared_tokens=1)
    assert plan.packed_tokens < plan.input_tokens
    assert len(plan.rows) > 1
    with InDouble():
        require_exact(tree_model_of(name), plan, sequences, TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_long_segments_equal_the_unpacked_model_in_float64(name: str) -> None:
    sequences = long_sequences(1, VOCABULARY)
    plan = plan_rows(sequences, min_shared_tokens=1)
    assert plan.packed_tokens < plan.input_tokens
    assert max(map(len, sequences)) > 256
    with InDouble():
        require_exact(tree_model_of(name), plan, sequences, TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_single_sequences_single_tokens_and_padding_equal_the_unpacked_model(name: str) -> None:
    tree_model = tree_model_of(name)
    for sequences in ([[3, 1, 4, 1, 5, 9] * 7], [[7]], [[7], [7], [8]]):
        padded = plan_rows(sequences, 50, min_shared_tokens=1, pad_rows=True)
        with InDouble():
            reference = unpacked(tree_model.unpacked, sequences)
            for plan in (plan_rows(sequences, min_shared_tokens=1), padded):
                result = packed(tree_model, plan)
                assert output_difference(reference, result) < TOLERANCE
                assert gradient_difference(reference, result) < TOLERANCE


def test_compiled_blocks_equal_the_unpacked_model() -> None:
    sequences = long_sequences(5, VOCABULARY)
    model = FAMILIES["lfm2"]()
    tree_model = treecompile(model, 700, min_shared_tokens=1, backend="inductor")
    require_exact(tree_model, tree_model.plan(sequences), sequences, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_half_precision_model_is_within_its_rounding(name: str) -> None:
    tree_model = treecompile(tiny_model(name).bfloat16().eval(), min_shared_tokens=1, backend="eager")
    report = tree_model.check(random_sequences(8, VOCABULARY))
    assert report.ok, report
    assert report.greatest_output_difference < 3e-2


@pytest.mark.parametrize("name", ["mamba2", "olmo_hybrid"])
def test_call_under_autocast_is_within_its_rounding(name: str) -> None:
    tree_model = treecompile(FAMILIES[name]().eval(), min_shared_tokens=1, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        report = tree_model.check(random_sequences(8, VOCABULARY))
    assert report.ok, report
