"""The graphs of a tree model as text: golden, readable, and runnable."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from tree_compile import plan_rows, treecompile
from tree_compile.inputs import graph_inputs
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.tiny import tiny_model


class OneHead(nn.Module):
    """The least model with a position and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(20, 8), nn.Embedding(64, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1], device=input_ids.device))
        return self.head(
            nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        )


def statements(model: nn.Module, stage: str = "rewritten") -> str:
    """The operations of a stage, without comments, imports and annotations."""
    lines = treecompile(model, backend="eager").graph(stage).split("def forward")[1].splitlines()[1:]
    kept = [line.strip().partition(";")[0] for line in lines if line.strip() and not line.strip().startswith("#")]
    return "\n".join(_without_annotation(line) for line in kept if ".weight" not in line and ".bias" not in line)


def _without_annotation(line: str) -> str:
    name, equals, value = line.partition(" = ")
    return f"{name.partition(':')[0]}{equals}{value}"


def attention_calls(model: nn.Module) -> str:
    """The calls of tree attention, without the operands."""
    calls = [line for line in statements(model).splitlines() if "_tree_attention(" in line]
    return "\n".join(line.partition("plan_subtree_end, ")[2] for line in calls)


def test_rewritten_graph_of_a_least_model() -> None:
    assert_expected_inline(
        statements(OneHead()),
        """\
embedding = torch.ops.aten.embedding.default(model_embed_weight, input_ids)
embedding_1 = torch.ops.aten.embedding.default(model_place_weight, plan_position)
add = torch.ops.aten.add.Tensor(embedding, embedding_1)
unsqueeze = torch.ops.aten.unsqueeze.default(add, 1)
unsqueeze_1 = torch.ops.aten.unsqueeze.default(add, 1)
unsqueeze_2 = torch.ops.aten.unsqueeze.default(add, 1)
tree_attention = tree_compile_runtime_attention_tree_attention(unsqueeze, unsqueeze_1, unsqueeze_2, plan_segments, plan_position, plan_subtree_end, scale = 0.3535533905932738)
select = torch.ops.aten.select.int(tree_attention, 1, 0)
linear = torch.ops.aten.linear.default(select, model_head_weight, model_head_bias)
return (linear,)""",
    )


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "dense"])
def test_graph_text_runs_with_the_model_as_self(name: str) -> None:
    config = DenseConfig(vocab_size=128, width=32, layers=2, heads=2, kv_heads=1, hidden=48)
    model = Dense(config) if name == "dense" else tiny_model(name)
    tree_model = treecompile(model, backend="eager")
    row = plan_rows([[3, 1, 4, 1, 5], [3, 1, 4, 2, 6, 6]], min_shared_tokens=1).rows[0]
    names: dict[str, Any] = {}
    exec(tree_model.graph("rewritten"), names)
    forward = names["Captured"].forward
    (logits,) = forward(model, *graph_inputs(row, torch.device("cpu"), carries_state=False, windows=()))
    assert torch.allclose(logits[0][row.path(1)], tree_model(row).logits[1], atol=1e-6)


def test_every_stage_has_a_text_and_others_are_named() -> None:
    tree_model = treecompile(OneHead(), backend="eager")
    with pytest.raises(ValueError, match="there is no stage 'lowered'; there are ") as raised:
        tree_model.graph("lowered")
    stages = re.findall(r"'([^']+)'", str(raised.value).partition("there are ")[2])
    passes = [
        "gradient modes",
        "batch norm",
        "functional",
        "made by shape",
        "windows",
        "window attention",
        "attention",
        "mixers",
    ]
    passes += ["convolutions", "positions", "window sizes", "token axis", "autocast"]
    assert stages == ["captured", *passes, "rewritten"]
    for stage in stages:
        assert "def forward(self, input_ids" in tree_model.graph(stage)
    assert "scaled_dot_product_attention" in tree_model.graph("captured")


def test_attention_of_a_window_and_a_softcap() -> None:
    assert_expected_inline(
        attention_calls(tiny_model("gemma2")),
        """\
scale = 0.25, window = 8, softcap = 50.0)
scale = 0.25, softcap = 50.0)""",
    )


def test_attention_with_sinks() -> None:
    assert_expected_inline(
        attention_calls(tiny_model("gpt_oss")),
        """\
scale = 0.25, window = 8, sinks = model_model_layers_0_self_attn_sinks)
scale = 0.25, sinks = model_model_layers_1_self_attn_sinks)""",
    )


def test_attention_of_a_chunk() -> None:
    assert_expected_inline(
        attention_calls(tiny_model("llama4_text")),
        """\
scale = 0.25, chunk = 8)
scale = 0.25)""",
    )


def test_attention_with_a_bias_per_key() -> None:
    assert_expected_inline(
        attention_calls(tiny_model("bloom")),
        """\
scale = 0.25, key_bias = reshape_default_3)
scale = 0.25, key_bias = reshape_default_8)""",
    )
