"""Models of transformers that are not causal token by token are refused."""

import pytest
from transformers import BertConfig, BertLMHeadModel

from tree_compile import treecompile
from tree_compile.errors import (
    BidirectionalAttentionError,
    ControlFlowError,
    DropoutError,
    LengthDependentError,
)
from tree_compile.tiny import tiny_model


def encoder(kind):
    return lambda: tiny_model(kind, is_decoder=False)


def bert():
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertLMHeadModel(BertConfig(**sizes, intermediate_size=16, attention_probs_dropout_prob=0.0))


def longrope():
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope["original_max_position_embeddings"] = 64
    return tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)


def dynamic_rope():
    return tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})


def dropped_attention():
    return tiny_model("gpt2", attn_pdrop=0.1)


def dropped_attention_by_hand():
    return tiny_model("gpt2", attn_pdrop=0.1, attn_implementation="eager")


REFUSED = [
    ("bert", bert, BidirectionalAttentionError, "modeling_bert.py", "no mask"),
    ("roberta", encoder("roberta"), BidirectionalAttentionError, "modeling_roberta.py", "no mask"),
    ("electra", encoder("electra"), BidirectionalAttentionError, "modeling_electra.py", "no mask"),
    ("phi3 with longrope", longrope, LengthDependentError, "modeling_phi3.py", "for a prefix alone"),
    ("llama with dynamic rope", dynamic_rope, ControlFlowError, "modeling_rope_utils.py", "one way through the code"),
    ("gpt2 with dropout", dropped_attention, DropoutError, "modeling_gpt2.py", "has no dropout"),
    ("gpt2 with dropout by hand", dropped_attention_by_hand, DropoutError, "modeling_gpt2.py", "has no dropout"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "file", "why"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_model_is_refused(make, error, file, why):
    with pytest.raises(error) as raised:
        treecompile(make(), backend="eager", self_check=False).explain()
    assert type(raised.value) is error
    assert raised.value.where.file.endswith(file)
    assert why in raised.value.why
    assert raised.value.hint


def test_attention_dropout_is_accepted_in_eval_mode():
    assert treecompile(dropped_attention().eval(), min_shared_tokens=1, backend="eager", self_check=False).check().ok
