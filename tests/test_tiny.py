"""Tiny models are small, random in every parameter, and the same each time."""

import sys

import pytest
import torch

from tree_compile.errors import InputError
from tree_compile.tiny import tiny_model

transformers = pytest.importorskip("transformers")

FAMILIES = (
    *("llama", "qwen3", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "bloom", "llama4_text"),
    *("deepseek_v3", "olmo3", "phi3", "falcon", "mixtral"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_has_a_tiny_model_in_which_every_parameter_matters(family):
    model = tiny_model(family)
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    model(input_ids=torch.randint(3, 100, (1, 40)), use_cache=False).logits.square().sum().backward()
    silent = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert silent == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_parameter_is_constant(family):
    constant = [name for name, parameter in tiny_model(family).named_parameters() if not parameter.std() > 0]
    assert constant == []


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "olmo3"])
def test_window_is_shorter_than_a_test_sequence(family):
    assert tiny_model(family).config.sliding_window == 8


def test_chunk_is_shorter_than_a_test_sequence():
    assert tiny_model("llama4_text").config.attention_chunk_size == 8


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_training_mode_is_without_dropout(family):
    model = tiny_model(family)
    tokens = torch.randint(3, 100, (1, 10))
    assert model.training
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_same_model_comes_out_each_time_and_leaves_random_numbers_alone():
    state = torch.get_rng_state()
    first, second = tiny_model("gpt2").state_dict(), tiny_model("gpt2").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())


def test_overrides_reach_the_config():
    model = tiny_model("qwen3_moe", num_hidden_layers=1, experts_implementation="batched_mm")
    assert len(model.model.layers) == 1
    assert model.config._experts_implementation == "batched_mm"


def test_unknown_family_is_named():
    with pytest.raises(InputError, match="no model type 'llamma'"):
        tiny_model("llamma")


def test_family_that_cannot_be_built_is_named_with_the_reason():
    with pytest.raises(InputError, match="cannot build a tiny 'llama'"):
        tiny_model("llama", num_attention_heads=0)


def test_missing_transformers_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="needs the package transformers"):
        tiny_model("llama")
