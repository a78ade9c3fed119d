"""The settings of torch around a call, which the code of a model can ask for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import distributed

_SWITCHES = (
    "_get_deterministic_algorithms",
    "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cudnn_enabled",
    "_get_mkldnn_deterministic",
    "_get_mkldnn_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_flash_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
)
_FOUND = [(name.removeprefix("_get_"), getattr(torch._C, name)) for name in _SWITCHES if hasattr(torch._C, name)]


def switches(device: str) -> Iterator[tuple[str, str, Hashable]]:
    """Path, name and value of every setting; `device` is the type of device of the model."""
    yield "torch", "get_default_dtype()", torch.get_default_dtype()
    yield "torch", "autocast", autocast_dtype(device)
    yield "torch", "get_default_device()", str(torch.get_default_device())
    yield "torch", "get_num_threads()", torch.get_num_threads()
    for name, ask in _FOUND:
        yield "torch", name, ask()
    if distributed.is_available() and distributed.is_initialized():
        yield "torch.distributed", "rank", (distributed.get_rank(), distributed.get_world_size())


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of autocast; None where it is off, or is unknown on such a device, as on the meta device."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
