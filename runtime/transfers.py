"""Integers that were made on the host -> the device of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tree_compile.runtime.sequences import IntArray

__all__ = ["READS_ON_HOST", "send", "stream_of", "to_device"]

READS_ON_HOST = (torch.Tag.cudagraph_unsafe,)
"""Tags of operators that read a tensor on the CPU: in a CUDA graph they would give what they gave for its first row."""


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The numbers of an array on a device; on CUDA the copy goes on while the caller does.

    Returns:
        A tensor of the same shape and dtype. On the CPU it is the array itself.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        # From pageable memory, a copy waits for all that the device has to do.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def stream_of(device: torch.device) -> int:
    """The stream that copies to a device go on; 0 off CUDA.

    A table that is kept belongs to it: on another stream it may not be there yet, or be gone before it was read.
    """
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def send(arrays: Sequence[IntArray], device: torch.device) -> list[Tensor]:
    """Arrays int64 as tensors on a device, in one copy.

    Returns:
        Tensors of the same shapes, each with its own memory: compiled code is compiled again for tensors that lie
        elsewhere in a buffer than those before.
    """
    packed = to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = packed.split([array.size for array in arrays])
    return [part.clone().view(array.shape) for part, array in zip(parts, arrays, strict=True)]
