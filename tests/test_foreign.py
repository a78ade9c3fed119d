"""Settings of transformers' models are changed for the capture alone, and make no difference to the result."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tree_compile import treecompile
from tree_compile.errors import CaptureError
from tree_compile.experts import loops_over_all_experts
from tree_compile.foreign import capturable, plain_checkpoints
from tree_compile.tiny import tiny_model

pytest.importorskip("transformers")

SEQUENCES = [[5, 9, 7, 3, *range(10, 10 + extra)] for extra in (3, 12, 20)]
WITH_BOTH = ("llama", "qwen3", "gpt2", "mistral", "deepseek_v3")
WITH_ITS_OWN = ("gemma2", "gpt_oss")


def build(model_type, attention, **settings):
    return tiny_model(model_type, attn_implementation=attention, **settings).double()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", WITH_BOTH)
def test_model_is_exact_with_either_attention(model_type, attention):
    experts = {"experts_implementation": "batched_mm"} if model_type == "deepseek_v3" else {}
    model = build(model_type, attention, **experts)
    assert model.config._attn_implementation == attention
    report = treecompile(model, backend="eager", min_shared_tokens=1, self_check=False).check(SEQUENCES)
    assert max(report.greatest_output_difference, report.greatest_gradient_difference) < 2e-6


@pytest.mark.parametrize("model_type", WITH_ITS_OWN)
def test_model_that_has_no_other_attention_is_exact_with_its_own(model_type):
    experts = {"experts_implementation": "batched_mm"} if model_type == "gpt_oss" else {}
    model = build(model_type, "eager", **experts)
    report = treecompile(model, backend="eager", min_shared_tokens=1, self_check=False).check(SEQUENCES)
    assert max(report.greatest_output_difference, report.greatest_gradient_difference) < 2e-6


def test_flex_attention_is_switched_for_the_capture_and_given_back():
    model, plain = build("llama", "flex_attention"), build("llama", "sdpa")
    plain.load_state_dict(model.state_dict())
    out = treecompile(model, backend="eager", min_shared_tokens=1, self_check=False)(SEQUENCES)
    assert model.config._attn_implementation == "flex_attention"
    for sequence, part in zip(SEQUENCES, out, strict=True):
        expected = plain(torch.tensor([sequence]), use_cache=False).logits[0]
        torch.testing.assert_close(part.logits, expected, rtol=1e-9, atol=1e-9)


def test_settings_are_given_back_after_an_error():
    model = build("qwen3_moe", "sdpa")
    model.config._attn_implementation_internal = "flash_attention_2"
    model.config._experts_implementation_internal = "eager"
    seen = []

    def stop():
        seen.extend([model.config._attn_implementation, model.config._experts_implementation])
        raise CaptureError("stop")

    with pytest.raises(CaptureError), capturable(model):
        stop()
    assert seen == ["sdpa", "batched_mm"]
    assert model.config._attn_implementation == "flash_attention_2"
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize("model_type", ["dbrx", "longcat_flash"])
def test_loop_over_all_experts_computes_what_the_loop_over_hit_ones_does(model_type):
    model = tiny_model(model_type).double().eval()
    kinds = {type(module): type(module).forward for module in model.modules()}
    tokens = torch.tensor(SEQUENCES[2])[None]
    expected = model(tokens, use_cache=False).logits
    with loops_over_all_experts(model):
        assert any(kind.forward is not forward for kind, forward in kinds.items())
        torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-12, atol=1e-12)
    assert all(kind.forward is forward for kind, forward in kinds.items())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_is_computed_once(use_reentrant):
    model, calls = torch.nn.Linear(3, 3), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    x = torch.ones(2, 3, requires_grad=True)
    for are_plain, expected in ((True, 1), (False, 2)):
        calls.clear()
        with plain_checkpoints(model) if are_plain else nullcontext():
            checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == expected


def test_checkpoints_of_a_layer_are_off_and_on_again():
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    with plain_checkpoints(model):
        assert not model.model.gradient_checkpointing
    assert model.model.gradient_checkpointing


def test_backward_of_bloom_is_that_of_its_forward():
    from transformers.models.bloom.modeling_bloom import GeLUFunction, bloom_gelu_forward

    value = torch.linspace(-6, 6, 200, dtype=torch.float64, requires_grad=True)
    (by_hand,) = torch.autograd.grad(GeLUFunction.apply(value).sum(), value)
    (derivative,) = torch.autograd.grad(bloom_gelu_forward(value).sum(), value)
    torch.testing.assert_close(by_hand, derivative, rtol=1e-6, atol=1e-7)


def test_frozen_embeddings_under_gradient_checkpointing_are_exact():
    model = tiny_model("llama").double().train()
    model.model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    hooks = dict(model.model.embed_tokens._forward_hooks)
    tree = treecompile(model, min_shared_tokens=1, backend="eager", self_check=False)
    tree([[1, 2, 3], [1, 2, 4]]).logits[1].sum().backward()
    assert hooks
    assert model.model.embed_tokens._forward_hooks == hooks
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model(torch.tensor([[1, 2, 4]]), use_cache=False).logits.sum().backward()
    torch.testing.assert_close(model.model.layers[0].self_attn.q_proj.weight.grad, gradient)


def test_experts_that_have_no_float64_are_compared_in_float64():
    model = tiny_model("qwen3_moe", experts_implementation="grouped_mm").double()
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
    assert tree_model.check().ok
    assert model.config._experts_implementation == "grouped_mm"
