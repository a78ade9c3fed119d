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
from tree_compile.runtime.mixers import MIXERS, Mixer, one_node
from tree_compile.runtime.selective_scan import selective_scan

__all__ = ["kept_whole", "register_mixer"]

Replacement = Callable[..., Any]


def register_mixer(function: Callable[..., Any], replacement: Replacement) -> None:
    """Says what a function that carries a state along the tokens is.

    Args:
        function: a Python function that models call. Functions that are declared with `runtime.mixers.mixer` need no
            entry.
        replacement: takes the same arguments while a model is captured, and returns the same with
            `one_node(op, …)` for what the function computes.

    Raises:
        TypeError: `function` is not a Python function.
    """
    plain = inspect.unwrap(function)
    if not isinstance(plain, types.FunctionType):
        raise TypeError(f"function is {function!r}; it must be a Python function")
    _OF_USERS[plain] = replacement


@contextlib.contextmanager
def kept_whole(model: nn.Module) -> Iterator[None]:
    """Known functions as one node each, in this thread; all of them are themselves again afterwards."""
    with contextlib.ExitStack() as stack:
        for function, replacement in _functions().items():
            stack.enter_context(recoded(function, replacement))
        for kind in {type(module) for module in model.modules()}:
            for name, method in _METHODS.get((kind.__module__, kind.__name__), {}).items():
                stack.enter_context(replaced(kind, name, method))
        yield


def _functions() -> dict[types.FunctionType, Replacement]:
    """All that are known, in libraries that have been imported."""
    found = {_plain(mixer.op): _declared(mixer) for mixer in MIXERS.values()}
    for prefix, table in _OF_LIBRARIES.items():
        for name, module in list(sys.modules.items()):
            if name.startswith(prefix):
                known = ((getattr(module, function, None), given) for function, given in table.items())
                found |= {_plain(function): given for function, given in known if callable(function)}
    found |= _OF_USERS
    return {function: given for function, given in found.items() if isinstance(function, types.FunctionType)}


def _plain(function: Any) -> Any:
    return inspect.unwrap(function)


def _declared(mixer: Mixer) -> Replacement:
    """A call of the op itself, on unpacked sequences."""
    signature = inspect.signature(mixer.op)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        arguments = dict(given.arguments)
        if arguments.pop("tree", None) is not None:
            raise _refused("is given the tree of a row", "call it on unpacked sequences, without `tree`.")
        if mixer.state is not None:
            _require_no_state(arguments.pop("initial_state", None), arguments.pop("output_final_state", False))
        node = one_node(mixer.op, **arguments)
        return node if mixer.state is None else (node, None)

    return replacement


def _refused(what: str, hint: str) -> TokenMixingError:
    return TokenMixingError(
        f"A layer that carries a state from token to token {what}.",
        where=line_of_stack(),
        why="a sequence starts from no state, and every state belongs to a place in the tree.",
        hint=hint,
    )


def _require_no_state(initial_state: Any, output_final_state: Any) -> None:
    if initial_state is not None:
        raise _refused("starts from a given state", "leave initial states out: sequences are passed whole.")
    if output_final_state:
        raise _refused("returns its final state", "switch caches off, for example with use_cache=False.")


def _require_unused(arguments: dict[str, Any]) -> None:
    """Refuses arguments of other libraries' functions that change what is computed."""
    for name, value in arguments.items():
        is_unused = value is None or value is False or name in _WITHOUT_EFFECT
        if not is_unused:
            raise _refused(f"is called with `{name}`", f"leave {name} out.")


_WITHOUT_EFFECT = {
    "chunk_size", "head_first", "disable_recompute", "use_mambapy", "use_associative_scan", "use_graph", "mode",
    "layer_idx", "num_layers",
}  # fmt: skip


# Convolutions


def _causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
) -> Tensor:
    """transformers' `causal_conv1d_fn`, [B, D, T]."""
    _require_unused(others)
    out = one_node(
        conv.causal_convolution, values=hidden_states.to(weight.dtype).transpose(1, 2), weight=weight, bias=bias
    ).transpose(1, 2)
    return _activated(out, activation).to(hidden_states.dtype)


def _causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Any = None, initial_states: Any = None,
    return_final_states: bool = False, final_states_out: Any = None, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """The function of the package causal_conv1d, [B, D, T]."""
    _require_unused({"seq_idx": seq_idx, "final_states_out": final_states_out})
    _require_no_state(initial_states, return_final_states)
    return _causal_conv(x, weight, bias, activation)


def _activated(values: Tensor, activation: str | None) -> Tensor:
    if activation in ("silu", "swish"):
        return F.silu(values)
    if activation is None:
        return values
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](values)
    return activated


# Delta rules and linear attention


def _delta_like(op: Callable[..., Any]) -> Replacement:
    """The functions of transformers and fla that take query, key, value, decay and beta, all [B, T, H, …]."""

    def replacement(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **others: Any
    ) -> tuple[Tensor, None]:  # fmt: skip
        _require_no_state(others.pop("initial_state", None), others.pop("output_final_state", False))
        normalize, scale = others.pop("use_qk_l2norm_in_kernel", False), others.pop("scale", None)
        _require_unused(others)
        out = one_node(op, query=q, key=k, value=v, decay=g, beta=beta, normalize=normalize, scale=scale)
        return out.to(q.dtype), None

    return replacement


def _of_transformers(replacement: Replacement) -> Replacement:
    """transformers' functions have other names for the first arguments."""

    def renamed(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any, **others: Any) -> Any:
        _require_unused(dict.fromkeys(("positional arguments",), args or None))
        return replacement(query, key, value, g, beta, **others)

    return renamed


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **others: Any) -> tuple[Tensor, None]:
    _require_no_state(others.pop("initial_state", None), others.pop("output_final_state", False))
    normalize, scale = others.pop("use_qk_l2norm_in_kernel", False), others.pop("scale", None)
    _require_unused(others)
    return one_node(linear.delta_rule, query=q, key=k, value=v, beta=beta, normalize=normalize, scale=scale), None


def _gated_linear_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **others: Any) -> tuple[Tensor, None]:
    _require_no_state(others.pop("initial_state", None), others.pop("output_final_state", False))
    scale = others.pop("scale", None)
    _require_unused(others)
    return one_node(linear.gated_linear_attention, query=q, key=k, value=v, decay=g, scale=scale), None


def _simple_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, **others: Any
) -> tuple[Tensor, None]:
    _require_no_state(others.pop("initial_state", None), others.pop("output_final_state", False))
    scale = others.pop("scale", None)
    _require_unused(others)
    parts = [part for part in (g, None if g_gamma is None else g_gamma.expand(v.shape[:3])) if part is not None]
    decay = sum(parts, torch.zeros((), device=v.device)).expand(v.shape[:3])
    return one_node(linear.decay_linear_attention, query=q, key=k, value=v, decay=decay, scale=scale), None


def _lightning_attention(q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **others: Any) -> Any:
    heads = v.shape[2]
    slope = -(8 / heads * (1 - layer_idx / num_layers)) * torch.arange(heads, dtype=torch.float32, device=v.device)
    return _simple_linear_attention(q, k, v, g_gamma=slope, **others)


def _retention(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    heads = torch.arange(v.shape[2], dtype=torch.float32, device=v.device)
    return _simple_linear_attention(q, k, v, g_gamma=(1 - torch.exp2(-5.0 - heads)).log(), **others)


def _minimax(
    self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """The loop of lightning attention over blocks of tokens."""
    _require_no_state(cache, False)
    if attention_mask is not None:
        raise _refused("is given a mask", "leave attention_mask out: sequences are passed without padding.")
    shape = (*hidden_states.shape[:2], self.num_attention_heads, 3 * self.head_dim)
    query, key, value = self.act_fn(self.qkv_proj(hidden_states)).reshape(shape).split(self.head_dim, dim=3)
    decay = (-self.slope_rate.reshape(-1)).expand(value.shape[:3])
    out = one_node(linear.decay_linear_attention, query=query, key=key, value=value, decay=decay, scale=1.0)
    out = self.norm(out.reshape(*hidden_states.shape[:2], -1))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out), None


# State spaces


def _step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """transformers' `mamba2_chunk_scan`, whose result is in float32."""
    _require_no_state(initial_states, return_final_states)
    _require_unused(others)
    step = torch.clamp(_step(dt, dt_bias, dt_softplus), min=dt_limit[0], max=dt_limit[1])
    return one_node(linear.state_space_scan, values=hidden_states.float(), step=step, rate=A, write=B, read=C, skip=D)


def _mamba2_kernel(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """`mamba_chunk_scan_combined` of the package mamba_ssm."""
    out = _mamba2(
        x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit, return_final_states, **others
    )
    return (out if z is None else out * F.silu(z)).to(x.dtype)


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **others: Any,
) -> Tensor:  # fmt: skip
    """The loop of Mamba's scan over tokens, [B, D, T]."""
    _require_no_state(None, return_last_state)
    _require_unused(others)
    step = _step(dt, None if delta_bias is None else delta_bias[..., None], delta_softplus)
    values, step, write, read = (tensor.transpose(1, 2) for tensor in (hidden_states, step, B, C))
    out = one_node(selective_scan, values=values, step=step, rate=A, write=write, read=read, skip=D).transpose(1, 2)
    return out if z is None else out * F.silu(z)


def _cannot_be_captured(name: str) -> Replacement:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise _refused(f"is the fused kernel {name}", "use the model's plain layers instead.")

    return refuse


_OF_FLA: dict[str, Replacement] = {
    "chunk_gated_delta_rule": _delta_like(linear.gated_delta_rule),
    "fused_recurrent_gated_delta_rule": _delta_like(linear.gated_delta_rule),
    "chunk_kda": _delta_like(linear.kimi_delta_attention),
    "fused_recurrent_kda": _delta_like(linear.kimi_delta_attention),
    "chunk_delta_rule": _delta_rule,
    "fused_recurrent_delta_rule": _delta_rule,
    "chunk_gla": _gated_linear_attention,
    "chunk_simple_gla": _simple_linear_attention,
    "chunk_lightning_attn": _lightning_attention,
    "chunk_retention": _retention,
}
_OF_TRANSFORMERS: dict[str, Replacement] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _of_transformers(_delta_like(linear.gated_delta_rule)),
    "torch_recurrent_gated_delta_rule": _of_transformers(_delta_like(linear.gated_delta_rule)),
    "chunk_kimi_delta_attention": _of_transformers(_delta_like(linear.kimi_delta_attention)),
    "recurrent_kimi_delta_attention": _of_transformers(_delta_like(linear.kimi_delta_attention)),
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _selective_scan,
}
_OF_LIBRARIES: dict[str, dict[str, Replacement]] = {
    "transformers.models.": _OF_TRANSFORMERS,
    "fla.ops": _OF_FLA,
    "causal_conv1d": {"causal_conv1d_fn": _causal_conv1d},
    "mamba_ssm.ops": {
        "mamba_chunk_scan_combined": _mamba2_kernel,
        "mamba_split_conv1d_scan_combined": _cannot_be_captured("mamba_split_conv1d_scan_combined"),
        "selective_scan_fn": _selective_scan,
    },
}
"""By the start of the names of a library's modules, then by the function's name in them."""
_METHODS: dict[tuple[str, str], dict[str, Replacement]] = {
    ("transformers.models.minimax.modeling_minimax", "MiniMaxLightningAttention"): {"forward": _minimax},
}
_OF_USERS: dict[types.FunctionType, Replacement] = {}
