"""Which attention the kernels of flash attention can compute on a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tree_compile.runtime.flash_kernels import has_capped_kernels, has_kernels, widest_head

__all__ = ["AttentionForm", "Reason", "is_cuda", "why_not_flash"]


class AttentionForm(NamedTuple):
    """What is known of an attention before there is a row.

    Attributes:
        device: where it is computed.
        dtype: of query, key and value, as the kernels would get them.
        width: of the wider of keys and values.
        options: names of the options of `tree_attention` that it has.
    """

    device: torch.device
    dtype: torch.dtype
    width: int
    options: frozenset[str]


def is_cuda(device: torch.device) -> bool:
    """Whether attention there is by flex_attention or by kernels of flash attention."""
    return device.type == "cuda"


class Reason(NamedTuple):
    """Why the kernels cannot compute an attention, and what to try."""

    why: str
    hint: str


_AUTO = 'leave attention="auto", which takes flex_attention here.'
_UNKNOWN_OPTIONS = {
    "window": "it has a sliding window, which goes along a path; the kernels' own goes along the tokens of a segment",
    "chunk": "it is in chunks of positions, which the kernels do not know",
    "key_bias": "it has a bias per key, which the kernels do not take",
    "pair_bias": "it has a mask or bias of all pairs, which the kernels do not take",
}


def why_not_flash(form: AttentionForm) -> Reason | None:
    """Why the kernels cannot compute an attention; None where they can."""
    for option in sorted(form.options - {"softcap"}):
        return Reason(_UNKNOWN_OPTIONS[option], _AUTO)
    if form.dtype not in (torch.float16, torch.bfloat16):
        name = str(form.dtype).removeprefix("torch.")
        # Autocast leaves float64 alone, and the model may have it off around its attention.
        hint = "call the model under torch.autocast, or with it off make the model half precision: model.bfloat16()."
        return Reason(f"the kernels take float16 and bfloat16, not {name}", hint)
    if not has_kernels(form.device):
        return Reason(
            f"torch has no flash attention for the device {form.device}",
            "use a build of torch for CUDA and a GPU from Ampere on, or " + _AUTO,
        )
    if form.width > widest_head(form.device):
        return Reason(f"its heads are {form.width} wide, and the kernels take {widest_head(form.device)}", _AUTO)
    if "softcap" in form.options and not has_capped_kernels():
        return Reason(
            "it has a soft cap, which torch's kernels have not", "install flash-attn from 2.7 on, below 3, or " + _AUTO
        )
    return None
