"""Functions of fla, causal_conv1d and mamba_ssm: what takes their place computes what they are defined to."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tree_compile.errors import TokenMixingError
from tree_compile.known_mixers import _OF_LIBRARIES

FLA_FILES = Path(sys.prefix) / "kernels" / "fla" / "ops"
FLA, MAMBA = _OF_LIBRARIES["fla.ops"], _OF_LIBRARIES["mamba_ssm.ops"]
TOKENS, HEADS, D, N = 40, 4, 6, 3

Inputs = dict[str, Tensor]


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


# fla


def naive(package: str, function: str, *inputs: Tensor) -> Tensor:
    """The outputs of fla's own definition; its file is read alone, since fla needs a GPU to be imported."""
    spec = importlib.util.spec_from_file_location(package, FLA_FILES / package / "naive.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "einops", types.SimpleNamespace(rearrange=None))  # only other functions use it
        spec.loader.exec_module(module)
    return getattr(module, function)(*inputs)[0]


def gated_delta(q, k, v, g, beta):
    return naive("gated_delta_rule", "naive_recurrent_gated_delta_rule", q, k, v, beta, g)


def kimi_delta(q, k, v, g, beta):
    return naive("kda", "naive_recurrent_kda", q, k, v, g, beta)


def delta(q, k, v, beta):
    inputs = (x.transpose(1, 2) for x in (q, k, v, beta))
    return naive("delta_rule", "delta_rule_recurrence", *inputs).transpose(1, 2)


def gated_linear(q, k, v, g):
    return naive("gla", "naive_recurrent_gla", q, k, v, g)


def simple_linear(q, k, v, g):
    return naive("simple_gla", "naive_recurrent_simple_gla", q, k, v, g)


def by_head(decay: list[float]) -> Callable[..., Tensor]:
    return lambda q, k, v: simple_linear(q, k, v, torch.tensor(decay).expand(v.shape[:3]))


def fla_inputs(*names: str) -> Inputs:
    heads = (1, TOKENS, HEADS)
    made = {name: torch.randn(*heads, D) for name in "qkv"}
    made["k"] = F.normalize(made["k"], dim=-1)
    made |= {"g": F.logsigmoid(torch.randn(heads)), "beta": torch.rand(heads)}
    made["channels"] = F.logsigmoid(torch.randn(*heads, D))
    return {"g" if name == "channels" else name: made[name] for name in ("q", "k", "v", *names)}


FROM_FLA = {
    "chunk_gated_delta_rule": (gated_delta, ("g", "beta"), {}),
    "fused_recurrent_gated_delta_rule": (gated_delta, ("g", "beta"), {}),
    "chunk_kda": (kimi_delta, ("channels", "beta"), {}),
    "fused_recurrent_kda": (kimi_delta, ("channels", "beta"), {}),
    "chunk_delta_rule": (delta, ("beta",), {}),
    "fused_recurrent_delta_rule": (delta, ("beta",), {}),
    "chunk_gla": (gated_linear, ("channels",), {}),
    "chunk_simple_gla": (simple_linear, ("g",), {}),
    "chunk_lightning_attn": (by_head([0.0, -1.5, -3.0, -4.5]), (), {"layer_idx": 1, "num_layers": 4}),
    "chunk_retention": (by_head([-0.0317487, -0.0157484, -0.0078432, -0.0039139]), (), {}),
}


def test_every_function_of_fla_is_compared():
    assert FROM_FLA.keys() == FLA.keys()


@pytest.mark.skipif(not FLA_FILES.is_dir(), reason="fla-core is not installed: make test does")
@pytest.mark.parametrize("name", FROM_FLA)
def test_function_of_fla_is_its_definition(name):
    definition, names, options = FROM_FLA[name]
    inputs = fla_inputs(*names)
    out, state = FLA[name](**inputs, **options)
    assert state is None
    assert difference(out, definition(**inputs)) < 1e-5


@pytest.mark.skipif(not FLA_FILES.is_dir(), reason="fla-core is not installed: make test does")
def test_simple_linear_attention_adds_the_decays_of_heads_and_tokens():
    inputs, by_head = fla_inputs("g"), torch.tensor([0.0, -0.5, -1.0, -2.0])
    out, _ = FLA["chunk_simple_gla"](**inputs, g_gamma=by_head)
    assert difference(out, simple_linear(**inputs | {"g": inputs["g"] + by_head})) < 1e-5


def test_fused_recurrent_rule_without_decay_and_beta_is_one_of_0_and_1():
    inputs = fla_inputs()
    out, _ = FLA["fused_recurrent_gated_delta_rule"](**inputs)
    ones = torch.ones(1, TOKENS, HEADS)
    wanted, _ = FLA["chunk_delta_rule"](**inputs, beta=ones)
    assert difference(out, wanted) < 1e-5


# causal_conv1d


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_causal_conv1d_is_its_definition(activation):
    x, weight, bias = torch.randn(2, D, TOKENS), torch.randn(D, 4), torch.randn(D)
    out = _OF_LIBRARIES["causal_conv1d"]["causal_conv1d_fn"](x=x, weight=weight, bias=bias, activation=activation)
    wanted = F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=D)
    assert difference(out, wanted if activation is None else F.silu(wanted)) < 1e-5


# mamba_ssm


def mamba2(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, dt_limit):
    step = F.softplus(dt + dt_bias).clamp(*dt_limit)
    state, out = torch.zeros(*x.shape[2:], B.shape[-1]), []
    for t in range(x.shape[1]):
        write, read = (part[0, t].repeat_interleave(HEADS // part.shape[2], 0) for part in (B, C))
        decay = (step[0, t] * A).exp()[:, None, None]
        state = decay * state + (step[0, t][:, None] * x[0, t])[..., None] * write[:, None]
        out.append((state * read[:, None]).sum(-1) + x[0, t] * D.reshape(HEADS, -1))
    return torch.stack(out)[None] * F.silu(z)


def mamba2_inputs() -> Inputs:
    return {
        "x": torch.randn(1, TOKENS, HEADS, D), "dt": torch.randn(1, TOKENS, HEADS), "A": -torch.rand(HEADS),
        "B": torch.randn(1, TOKENS, 2, N), "C": torch.randn(1, TOKENS, 2, N), "D": torch.randn(HEADS),
        "z": torch.randn(1, TOKENS, HEADS, D), "dt_bias": torch.randn(HEADS),
    }  # fmt: skip


def mamba(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
    step = F.softplus(delta + delta_bias[:, None])
    state, out = torch.zeros(A.shape), []
    for t in range(u.shape[2]):
        written = (step[0, :, t] * u[0, :, t])[:, None] * B[0, :, t]
        state = (step[0, :, t, None] * A).exp() * state + written
        out.append((state * C[0, :, t]).sum(-1) + u[0, :, t] * D)
    return torch.stack(out, -1)[None] * F.silu(z)


def mamba_inputs() -> Inputs:
    return {
        "u": torch.randn(1, D, TOKENS), "delta": torch.randn(1, D, TOKENS), "A": -torch.rand(D, N),
        "B": torch.randn(1, N, TOKENS), "C": torch.randn(1, N, TOKENS), "D": torch.randn(D),
        "z": torch.randn(1, D, TOKENS), "delta_bias": torch.randn(D),
    }  # fmt: skip


FROM_MAMBA = {
    "mamba_chunk_scan_combined": (
        mamba2,
        mamba2_inputs,
        {"chunk_size": 256, "dt_softplus": True, "dt_limit": (0.1, 1.0)},
    ),
    "selective_scan_fn": (mamba, mamba_inputs, {"delta_softplus": True}),
}


@pytest.mark.parametrize("name", FROM_MAMBA)
def test_function_of_mamba_ssm_is_its_definition(name):
    definition, make, options = FROM_MAMBA[name]
    inputs = make()
    assert difference(MAMBA[name](**inputs, **options), definition(**inputs, **options)) < 1e-5


@pytest.mark.parametrize("name", FROM_MAMBA)
def test_function_of_mamba_ssm_computes_half_precision_in_float32(name):
    _, make, options = FROM_MAMBA[name]
    half = {key: value.bfloat16() for key, value in make().items()}
    wanted = MAMBA[name](**{key: value.float() for key, value in half.items()}, **options)
    assert torch.equal(MAMBA[name](**half, **options), wanted.bfloat16())


def test_skip_for_each_channel_of_a_head_is_added():
    inputs = mamba2_inputs() | {"D": torch.randn(HEADS, D)}
    options = FROM_MAMBA["mamba_chunk_scan_combined"][2]
    out = MAMBA["mamba_chunk_scan_combined"](**inputs, **options)
    assert difference(out, mamba2(**inputs, **options)) < 1e-5


@pytest.mark.parametrize(
    ("name", "changed", "why"),
    [
        ("selective_scan_fn", {"A": torch.zeros(D, N, dtype=torch.complex64)}, "complex"),
        ("selective_scan_fn", {"B": torch.zeros(D, N)}, "fixed"),
        ("mamba_split_conv1d_scan_combined", {}, "fused kernel"),
    ],
)
def test_form_without_an_op_is_refused(name, changed, why):
    with pytest.raises(TokenMixingError, match=why):
        MAMBA[name](**mamba_inputs() | changed)
