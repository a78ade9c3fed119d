"""The kernels of flash attention for sequences of several lengths: torch's own, and those of flash-attn 2.

All of them take queries [n, Hq, width], keys and values [m, Hk, width] in half precision, and give the log-sum-exp as
float32 [Hq, n]. Where the backward is given the output and the log-sum-exp of a whole softmax, of which the call is a
part, its gradients are the call's part of the whole ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from tree_compile.runtime.flash_calls import VarlenCall

__all__ = ["FlashKernels", "has_capped_kernels", "has_kernels", "kernels_for", "widest_head"]

_WIDEST = 256
_WIDEST_ON_SMALL = 192

Forward = Callable[[Tensor, Tensor, Tensor, VarlenCall, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, VarlenCall, float], tuple[Tensor, Tensor, Tensor]]


class FlashKernels(NamedTuple):
    """A kernel and its backward.

    Attributes:
        forward: of query, key, value, call and scale: output [n, Hq, width] and log-sum-exp [Hq, n].
        backward: of the gradient of the output, query, key, value, output, log-sum-exp, call and scale:
            gradients of query, key and value.
    """

    forward: Forward
    backward: Backward


def kernels_for(softcap: float) -> FlashKernels:
    """torch's own; those of flash-attn 2 where there is a soft cap, which torch's have not."""
    if softcap:
        return FlashKernels(partial(_capped_forward, softcap=softcap), partial(_capped_backward, softcap=softcap))
    return FlashKernels(_forward, _backward)


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether torch's kernels are there and run on a device: NVIDIA's from Ampere on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def has_capped_kernels() -> bool:
    """Whether flash-attn 2 is installed, from 2.7 on, whose functions have the names of arguments used here."""
    try:
        found = importlib.import_module("flash_attn").__version__
    except ImportError:  # it is missing, or was built for another torch
        return False
    return "2.7" <= TorchVersion(found) < "3"


@cache
def widest_head(device: torch.device) -> int:
    """Width of the widest head that the backward takes: the small GPUs of a generation have less shared memory."""
    major, minor = torch.cuda.get_device_capability(device)
    return _WIDEST_ON_SMALL if (major == 8 and minor > 0) or major == 12 else _WIDEST


def _forward(query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        call.query_offsets,
        call.key_offsets,
        call.longest_query,
        call.longest_key,
        0.0,  # dropout
        call.causal,
        False,  # the weights themselves
        scale=scale,
    )
    return out, lse


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        call.query_offsets,
        call.key_offsets,
        call.longest_query,
        call.longest_key,
        0.0,  # dropout, and so no state of random numbers is read
        call.causal,
        query.new_zeros(2, dtype=torch.uint64),
        query.new_empty(0),
        scale=scale,
    )
    return gradients


def _capped_forward(
    query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float, *, softcap: float
) -> tuple[Tensor, Tensor]:
    package = importlib.import_module("flash_attn.flash_attn_interface")
    out, lse, *_ = package._flash_attn_varlen_forward(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=call.query_offsets,
        cu_seqlens_k=call.key_offsets,
        max_seqlen_q=call.longest_query,
        max_seqlen_k=call.longest_key,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=call.causal,
        softcap=softcap,
    )
    return out, lse


def _capped_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, call: VarlenCall, scale: float,
    *, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    package = importlib.import_module("flash_attn.flash_attn_interface")
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    package._flash_attn_varlen_backward(
        dout=grad,
        q=query,
        k=key,
        v=value,
        out=out,
        softmax_lse=lse,
        dq=gradients[0],
        dk=gradients[1],
        dv=gradients[2],
        cu_seqlens_q=call.query_offsets,
        cu_seqlens_k=call.key_offsets,
        max_seqlen_q=call.longest_query,
        max_seqlen_k=call.longest_key,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=call.causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=softcap,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return gradients
