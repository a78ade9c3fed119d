"""Integers that were made on the host -> the device of a model."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["to_device"]


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
