"""Tiny random models of the architectures that transformers has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tree_compile.errors import InputError

__all__ = ["tiny_model"]

# Each is used where the architecture has a setting of that name.
_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "mamba_n_groups": 2,
    "mamba_ngroups": 2,
    "mamba_dt_rank": 4,
}

# Each is used where the architecture's own default is not None, 0 or False.
_WHERE_ON: dict[str, Any] = {
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 8,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_DROPOUT = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
)

_LATENT_ATTENTION = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}

_STATE_THEN_ATTENTION = {"layer_types": ["linear_attention", "full_attention"]}

_MISSING = object()
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 16}

_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": _STATE_THEN_ATTENTION,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2},
    "kimi_linear": _STATE_THEN_ATTENTION,
    "lara_mini": _STATE_THEN_ATTENTION,
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "minimax": {**_STATE_THEN_ATTENTION, "block_size": 32},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    "olmo_hybrid": _STATE_THEN_ATTENTION,
    "qwen3_5_moe_text": _STATE_THEN_ATTENTION,
    "qwen3_5_text": _STATE_THEN_ATTENTION,
    "qwen3_next": _STATE_THEN_ATTENTION,
    "qwen4_exp_text": _STATE_THEN_ATTENTION,
    "bailing_hybrid": {"layer_group_size": 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "d_model": 64,
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots3_note_text": {
        **_LATENT_ATTENTION,
        **{f"swa_{name}": size for name, size in _LATENT_ATTENTION.items()},
        "head_dim": 24,
        "swa_head_dim": 24,
        "num_attention_heads": 4,
        "swa_num_attention_heads": 4,
        "num_hidden_layers": 3,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "index_head_dim": 16,
        "shared_experts_intermediate_size": 32,
        "n_group": 1,
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.5,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "index_topk": 3,
        "hc_sinkhorn_iters": 3,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gpt_oss": {"rope_parameters": {**_YARN, "rope_theta": 150_000.0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]},
    "longcat_flash": {
        **_LATENT_ATTENTION,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "qk_head_dim": 24,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "xlnet": {"d_head": 16},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_head_dim": 16, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_model(model_type: str, **overrides: Any) -> nn.Module:
    """Builds a tiny random causal language model, the same one each time.

    Windows and chunks are of 8 tokens, there are few experts, and there is no dropout. All parameters are random, also
    those that an untrained model has at 0 or 1.

    Args:
        model_type: the name that transformers gives to the architecture, such as "llama".
        overrides: settings of the architecture's config.

    Returns:
        A float32 model in training mode that takes `input_ids` [batch, length].

    Raises:
        InputError: transformers is not installed, or does not know the name, or cannot build the model.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        hint = "pip install transformers, or name a function of your own as module:factory."
        what = f"Building the model {model_type!r} needs the package transformers."
        raise InputError(what, why="it is not installed.", hint=hint) from error
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError as error:
        hint = 'give a model_type as it stands in a config.json, such as "llama", or module:factory.'
        why = "a name without a colon is an architecture in transformers."
        raise InputError(f"transformers knows no model type {model_type!r}.", why=why, hint=hint) from error
    try:
        config = AutoConfig.for_model(model_type, **{**_settings(model_type, known), **overrides})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            _spread_parameters(model)
    except Exception as error:
        hint = "build it yourself and name the function that does as module:factory."
        what = f"transformers cannot build a tiny {model_type!r}: {str(error).rstrip('. ')}."
        raise InputError(what, why="few and small layers do not suit every architecture.", hint=hint) from error
    return model


def _settings(model_type: str, known: Any) -> dict[str, Any]:
    settings = {name: value for name, value in _SIZES.items() if _has_setting(known, name)}
    settings |= {name: value for name, value in _WHERE_ON.items() if _setting(known, name)}
    if getattr(known, "is_decoder", None) is False and not getattr(known, "is_encoder_decoder", False):
        settings["is_decoder"] = True  # an encoder's causal language model is causal only then
    settings |= {name: 0.0 for name in _DROPOUT if hasattr(known, name)}
    if _has_setting(known, "kv_lora_rank"):
        settings.pop("head_dim", None)
        settings |= _LATENT_ATTENTION
    settings |= {name: _settings_of_part(known, name) for name in getattr(known, "sub_configs", {})}
    return settings | _OF_TYPE.get(model_type, {})


def _settings_of_part(known: Any, name: str) -> Any:
    """Settings of a part with a config of its own, such as the text model of a model that sees."""
    part = getattr(known, name, None)
    if part is None or not name.endswith(("text_config", "decoder", "decoder_config")):
        return part
    own = {"model_type": part.model_type} if part.model_type else {}
    return own | _settings(part.model_type, part)


def _setting(known: Any, name: str, otherwise: Any = None) -> Any:
    """A setting; those that vary from layer to layer have no value of the whole model."""
    try:
        return getattr(known, name, otherwise)
    except Exception:
        return otherwise


def _has_setting(known: Any, name: str) -> bool:
    derived = getattr(type(known), name, None)
    return _setting(known, name, _MISSING) is not _MISSING and not isinstance(derived, property)


@torch.no_grad()
def _spread_parameters(model: nn.Module) -> None:
    """Moves biases, gains and sinks off the 0 or 1 at which mistakes in them would not show."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.05)
