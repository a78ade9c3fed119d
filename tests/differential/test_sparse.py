"""Attention over the keys that an indexer chose: outputs and all gradients equal those of the unpacked model."""

from __future__ import annotations

import importlib
from collections import Counter
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
from tests.differential.trees import Sequences, deep_sequences, long_sequences, random_sequences
from tree_compile import TreeModel, plan_rows, treecompile
from tree_compile.errors import TokenMixingError
from tree_compile.models.sparse_mla import SparseMLA, SparseMLAConfig
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 2e-5
VOCABULARY = 128


def sparse_mla() -> nn.Module:
    torch.manual_seed(0)
    model = SparseMLA(SparseMLAConfig(vocab_size=VOCABULARY, width=64, hidden=96, chosen=8))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def family(model_type: str, **settings: object) -> Callable[[], nn.Module]:
    """Of every query's keys 8 are chosen, by the scores of 32 heads: few heads would often all be cut off at 0."""
    return lambda: tiny_model(model_type, experts_implementation="batched_mm", index_n_heads=32, **settings)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v32": family("deepseek_v32"),
    "deepseek_v32 without scaled_dot_product_attention": family("deepseek_v32", attn_implementation="eager"),
    "glm_moe_dsa with layers that take the choice of another": family(
        "glm_moe_dsa", num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"]
    ),
    "hy_v4 with sinks": family("hy_v4"),
    "axk2": family("axk2"),
    "dots3_note_text with layers that see a window": family("dots3_note_text"),
    "sparse_mla": sparse_mla,
}
TREES: dict[str, tuple[Sequences, int | None]] = {
    "a random tree": (random_sequences(1, VOCABULARY), None),
    "another random tree in several rows": (random_sequences(2, VOCABULARY), 80),
    "a trunk with leaves at depth 8": (deep_sequences(3, VOCABULARY), None),
    "long segments": (long_sequences(1, VOCABULARY), None),
    "branches of one token": ([[5] * 30 + [number] for number in range(9)] + [[7], [5, 6]], None),
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


@pytest.mark.parametrize("chosen", [1, 2, 1_000])
def test_any_number_of_chosen_keys_equals_the_unpacked_model(chosen: int) -> None:
    sequences = random_sequences(4, VOCABULARY)
    with InDouble():
        model = tiny_model("deepseek_v32", index_topk=chosen, index_n_heads=32, experts_implementation="batched_mm")
        tree_model = treecompile(model.double(), min_shared_tokens=1, backend="eager")
        plan = tree_model.plan(sequences)
        reference, result = unpacked(model, sequences), packed(tree_model, plan)
    assert output_difference(reference, result) < TOLERANCE
    assert gradient_difference(reference, result) < TOLERANCE


def test_compiled_blocks_equal_the_unpacked_model() -> None:
    sequences = random_sequences(5, VOCABULARY)
    tree_model = treecompile(sparse_mla(), 200, min_shared_tokens=1, backend="inductor")
    require_exact(tree_model, tree_model.plan(sequences), sequences, FLOAT32_TOLERANCE, 10 * FLOAT32_TOLERANCE)


def test_explanation_names_the_indexers_and_their_attentions() -> None:
    explanation = tree_model_of("glm_moe_dsa with layers that take the choice of another").explain()
    became = Counter(finding.became for finding in explanation.findings)
    assert became["tree_topk_index, 8 of every token's ancestors, of equal scores the earliest"] == 2
    assert became["sparse_attention over the keys that an indexer chose, visible: k <= q"] == 4


# Indexers that choose something else than single tokens


def text_model(package: str, config: str, model: str, **settings: object) -> nn.Module:
    """The text part of a model that AutoModelForCausalLM does not know, tiny."""
    configurations = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    models = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    small = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    return getattr(models, model)(getattr(configurations, config)(**small, **settings))


def glm5_next() -> nn.Module:
    """Pools of 4 tokens are chosen."""
    return text_model(
        "glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel", num_key_value_heads=4, n_routed_experts=4,
        num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=24, v_head_dim=12, qk_nope_head_dim=16, qk_rope_head_dim=0,
        index_topk=8, index_head_dim=16, index_kpool=4, num_hidden_layers=2, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "indexed_attention"],
    )  # fmt: skip


def minimax_m3() -> nn.Module:
    """Blocks of 4 tokens are chosen, for each of two groups of heads."""
    return text_model(
        "minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", num_key_value_heads=2, head_dim=16,
        dense_intermediate_size=64, shared_intermediate_size=32, rotary_dim=8, num_local_experts=4,
        num_experts_per_tok=2, index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
        num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip


@pytest.mark.parametrize("model", [glm5_next, minimax_m3])
def test_choice_of_whole_blocks_is_refused(model: Callable[[], nn.Module]) -> None:
    with pytest.raises(TokenMixingError, match="mask or bias depends on the tokens") as caught:
        treecompile(model(), backend="eager")(random_sequences(1, VOCABULARY))
    assert caught.value.where is not None
    assert "modeling_" in caught.value.where.file


def mistral_large4(**settings: object) -> nn.Module:
    """Layers that take the choice of another, and layers without rotary positions."""
    small = {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16,
        "v_head_dim": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "index_topk": 8, "index_head_dim": 16,
        "index_n_heads": 32, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"],
    }  # fmt: skip
    return text_model("mistral_large4", "MistralLarge4TextConfig", "MistralLarge4TextModel", **small | settings)


def test_states_of_a_text_model_equal_those_of_the_unpacked_model() -> None:
    model = mistral_large4().eval()
    report = treecompile(model, min_shared_tokens=1, backend="eager").check(random_sequences(1, VOCABULARY))
    assert report.ok
    assert report.greatest_output_difference < FLOAT32_TOLERANCE
