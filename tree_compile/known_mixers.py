"""Functions of other libraries that carry a state along the tokens, and the op of ours that each is.

While a model is captured, a call of one of them becomes one node (`runtime.mixers`), by whatever name the model calls
it. Add your own with `register_mixer`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tree_compile.errors import TokenMixingError
from tree_compile.passes.source import line_of_stack
from tree_compile.patches import recoded, replaced
from tree_compile.runtime import causal_convolution as conv
from tree_compile.runtime import linear_recurrence as linear
from tree_compile.runtime.mixers import MIXERS, Mixer, checked_calls, one_node
from tree_compile.runtime.selective_scan import selective_scan

__all__ = ["kept_whole", "register_mixer"]

Replacement = Callable[..., Any]


def register_mixer(function: Callable[..., Any], replacement: Replacement) -> None:
    """Says what a function that carries a state along the tokens is.

    Args:
        function: a Python function that models call. Functions that are declared with `runtime.mixers.mixer` need no
            entry.
        replacement: is called instead while a model is captured, with the arguments by the names that `function` gives
            them, and with the defaults of `function` for what it names as well; returns what `function` would, with
            `one_node(op, …)` for what it computes.

    Raises:
        TypeError: `function` is not a Python function.
    """
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        raise TypeError(f"function is {function!r}; it must be a Python function")
    _OF_USERS[plain] = replacement


@contextlib.contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Known functions as one node each, in this thread; all of them are themselves again afterwards.

    One capture at a time: two threads that exchange a function's code would not know whose turn it is to put it back.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(checked_calls(_unfit))
        for function, replacement in _functions().items():
            stack.enter_context(recoded(function, _by_own_names(function, replacement)))
        for kind in {type(module) for module in model.modules()}:
            for name, method in _METHODS.get((kind.__module__, kind.__name__), {}).items():
                stack.enter_context(replaced(kind, name, method))
        yield


def _functions() -> dict[types.FunctionType, Replacement]:
    """All that are known, in libraries that have been imported."""
    found = {inspect.unwrap(mixer.op): _declared(mixer) for mixer in MIXERS.values()}
    for prefix, table in _OF_LIBRARIES.items():
        for name, module in list(sys.modules.items()):
            if name.startswith(prefix):
                known = ((getattr(module, function, None), given) for function, given in table.items())
                found |= {inspect.unwrap(function): given for function, given in known if callable(function)}
    found |= _OF_USERS
    return {function: given for function, given in found.items() if isinstance(function, types.FunctionType)}


def _by_own_names(function: types.FunctionType, replacement: Replacement) -> Replacement:
    """Calls `replacement` with the arguments by the names that `function` gives them, however they were passed."""
    signature = inspect.signature(function)
    rest = next((p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), "")
    asked = inspect.signature(replacement).parameters
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
    defaults = {name: value for name, value in defaults.items() if name in asked}

    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in asked.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        others = given.pop(rest, {})
        for name in () if takes_all else (given | others).keys() - asked.keys():
            raise _not_taken(function.__name__, name)
        return replacement(**(defaults | given), **others)

    return call


def _not_taken(function: str, name: str) -> TokenMixingError:
    return TokenMixingError(
        f"{function} is called with `{name}`, which its replacement does not take.",
        where=line_of_stack(),
        why="register_mixer passes a replacement what the function is called with, by the function's own names.",
        hint=f"give the replacement an argument {name}, or leave it out of the call.",
    )


def _declared(mixer: Mixer) -> Replacement:
    """A call of the op itself, on unpacked sequences."""

    def replacement(**given: Any) -> Any:
        _require_unused({name: given.pop(name, None) for name in ("tree", "initial_state", "output_final_state")})
        node = one_node(mixer.op, **given)
        return node if mixer.state is None else (node, None)

    return replacement


def _refused(what: str, hint: str) -> TokenMixingError:
    return TokenMixingError(
        f"A layer that carries a state from token to token {what}.",
        where=line_of_stack(),
        why="no op that takes its place over a tree has this form.",
        hint=hint,
    )


def _unfit(op: Callable[..., Any], why: str) -> TokenMixingError:
    return TokenMixingError(
        f"A layer that carries a state from token to token has arguments that {op.__name__} does not take.",
        where=line_of_stack(),
        why=f"{why}.",
        hint=f"give them the shapes that {op.__module__}.{op.__name__} names, or compute the layer in another way "
        "(docs/recurrence.md: register_mixer).",
    )


def _require_unused(given: dict[str, Any]) -> None:
    """Refuses what is left of the arguments, where it changes what is computed."""
    for name, value in given.items():
        is_unused = value is None or value is False or name in _WITHOUT_EFFECT
        if not is_unused:
            raise TokenMixingError(
                f"A layer that carries a state from token to token is called with `{name}`.",
                where=line_of_stack(),
                why="what takes its place over a tree has no such argument.",
                hint=_INSTEAD.get(name, f"compute what {name} does before or after the call."),
            )


_WITHOUT_EFFECT = {"chunk_size", "disable_recompute", "use_mambapy", "use_associative_scan", "use_graph"}
_UNPACKED = "pass one unpacked sequence: a list of them is packed."
_WHOLE = "leave it out: a sequence is passed whole, and starts from no state."
_NOT_RETURNED = "switch caches off, for example with use_cache=False: every state belongs to a place in the tree."
_INSTEAD = {
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "seq_idx", "tree"), _UNPACKED),
    **dict.fromkeys(("initial_state", "initial_states", "cache"), _WHOLE),
    **dict.fromkeys(("output_final_state", "return_final_states", "return_last_state"), _NOT_RETURNED),
    "attention_mask": "leave it out: sequences are passed without padding.",
}


# Convolutions


def _causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """transformers' `causal_conv1d_fn`, [B, D, T]."""
    _require_unused(others)
    values = hidden_states.to(weight.dtype).transpose(1, 2)
    out = one_node(conv.causal_convolution, values=values, weight=weight, bias=bias).transpose(1, 2)
    return _activated(out, activation).to(hidden_states.dtype)


def _causal_conv1d(x: Tensor, **others: Any) -> Tensor:
    """The function of the package causal_conv1d, [B, D, T]."""
    return _causal_conv(x, **others)


def _activated(values: Tensor, activation: str | None) -> Tensor:
    if activation in ("silu", "swish"):
        return F.silu(values)
    if activation is None:
        return values
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](values)
    return activated


# Delta rules and linear attention


def _delta_of_transformers(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' functions, which compute in float32 and take no scale."""
    _require_unused(others)
    tensors = {"query": query, "key": key, "value": value, "decay": g, "beta": beta}
    tensors = {name: x.to(torch.float32) for name, x in tensors.items()}
    return one_node(linear.delta_rule, **tensors, normalize=use_qk_l2norm_in_kernel).to(query.dtype), None


def _delta_of_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    _require_unused(others)
    tensors = {"query": q, "key": k, "value": v, "decay": g}
    tensors["beta"] = torch.ones_like(v[..., 0]) if beta is None else beta
    return one_node(linear.delta_rule, **tensors, scale=scale, normalize=use_qk_l2norm_in_kernel).to(q.dtype), None


def _linear_of_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    _require_unused(others)
    decay = g_gamma if g is None else g if g_gamma is None else g + g_gamma
    return one_node(linear.linear_attention, query=q, key=k, value=v, decay=decay, scale=scale).to(q.dtype), None


def _lightning(layer_idx: int, num_layers: int, **given: Any) -> tuple[Tensor, None]:
    heads = given["v"].shape[2]
    numbers = torch.arange(heads, dtype=torch.float32, device=given["v"].device)
    return _linear_of_fla(g_gamma=-(8 / heads * (1 - layer_idx / num_layers)) * numbers, **given)


def _retention(**given: Any) -> tuple[Tensor, None]:
    numbers = torch.arange(given["v"].shape[2], dtype=torch.float32, device=given["v"].device)
    return _linear_of_fla(g_gamma=(1 - torch.exp2(-5.0 - numbers)).log(), **given)


def _minimax(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """The loop of lightning attention over blocks of tokens."""
    _require_unused({"attention_mask": attention_mask, "cache": cache})
    shape = (*hidden_states.shape[:2], self.num_attention_heads, 3 * self.head_dim)
    query, key, value = self.act_fn(self.qkv_proj(hidden_states)).reshape(shape).split(self.head_dim, dim=3)
    decay = -self.slope_rate.reshape(-1)
    out = one_node(linear.linear_attention, query=query, key=key, value=value, decay=decay, scale=1.0)
    out = self.norm(out.reshape(*hidden_states.shape[:2], -1))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out), None


# State spaces


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    **others: Any,
) -> Tensor:  # fmt: skip
    """transformers' `mamba2_chunk_scan`, which computes and returns float32."""
    _require_unused(others)
    step = torch.clamp(_step(dt, dt_bias, dt_softplus), min=dt_limit[0], max=dt_limit[1])
    values, step, write, read = (x.float() for x in (hidden_states, step, B, C))
    return one_node(linear.state_space_scan, values=values, step=step, rate=A, write=write, read=read, skip=D)


def _mamba2_kernel(x: Tensor, dt: Tensor, z: Tensor | None = None, **others: Any) -> Tensor:
    """`mamba_chunk_scan_combined` of the package mamba_ssm, which computes in float32."""
    out = _mamba2(x, dt.float(), **others)
    return (out if z is None else out * F.silu(z.float())).to(x.dtype)


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """The loop of Mamba's scan over tokens, [B, D, T]; what is written is rounded to float32 first."""
    _require_unused(others)
    step = _step(dt, None if delta_bias is None else delta_bias[..., None], delta_softplus)
    values, write = (x.float().to(step.dtype) for x in (hidden_states, B))
    values, step, write, read = (x.transpose(1, 2) for x in (values, step, write, C))
    out = one_node(selective_scan, values=values, step=step, rate=A, write=write, read=read).transpose(1, 2)
    # Not by the op's `skip`: the loop adds this to rounded outputs, in the dtype of the model.
    out = out if D is None else out + hidden_states * D[None, :, None]
    return out if z is None else out * F.silu(z)


def _selective_scan_kernel(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None, **others: Any
) -> Tensor:
    """`selective_scan_fn` of the package mamba_ssm, which computes in float32."""
    if A.is_complex() or B.dim() != 3 or C.dim() != 3:
        raise _refused("has complex, fixed or grouped parameters", "use real A [D, N], and B and C [B, N, T].")
    gate = None if z is None else z.float()
    return _selective_scan(u.float(), delta.float(), A, B, C, z=gate, **others).to(u.dtype)


def _cannot_be_captured(name: str) -> Replacement:
    def refuse(**_given: Any) -> NoReturn:
        raise _refused(f"is the fused kernel {name}", "use the model's plain layers instead.")

    return refuse


_OF_FLA: dict[str, Replacement] = {
    "chunk_gated_delta_rule": _delta_of_fla,
    "fused_recurrent_gated_delta_rule": _delta_of_fla,
    "chunk_kda": _delta_of_fla,
    "fused_recurrent_kda": _delta_of_fla,
    "chunk_delta_rule": _delta_of_fla,
    "fused_recurrent_delta_rule": _delta_of_fla,
    "chunk_gla": _linear_of_fla,
    "chunk_simple_gla": _linear_of_fla,
    "chunk_lightning_attn": _lightning,
    "chunk_retention": _retention,
}
_OF_TRANSFORMERS: dict[str, Replacement] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _delta_of_transformers,
    "torch_recurrent_gated_delta_rule": _delta_of_transformers,
    "chunk_kimi_delta_attention": _delta_of_transformers,
    "recurrent_kimi_delta_attention": _delta_of_transformers,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _selective_scan,
}
# A later entry wins: a module of transformers may hold the function of causal_conv1d itself, under the same name.
_OF_LIBRARIES: dict[str, dict[str, Replacement]] = {
    "transformers.models.": _OF_TRANSFORMERS,
    "fla.ops": _OF_FLA,
    "causal_conv1d": {"causal_conv1d_fn": _causal_conv1d},
    "mamba_ssm.ops": {
        "mamba_chunk_scan_combined": _mamba2_kernel,
        "mamba_split_conv1d_scan_combined": _cannot_be_captured("mamba_split_conv1d_scan_combined"),
        "selective_scan_fn": _selective_scan_kernel,
    },
}
"""By the start of the names of a library's modules, then by the function's name in them."""
_METHODS: dict[tuple[str, str], dict[str, Replacement]] = {
    ("transformers.models.minimax.modeling_minimax", "MiniMaxLightningAttention"): {"forward": _minimax},
}
_OF_USERS: dict[types.FunctionType, Replacement] = {}
