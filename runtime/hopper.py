"""Which GPUs are Hopper: the only ones that some kernels are written for, or wrong on."""

from __future__ import annotations

import torch

__all__ = ["is_hopper"]


def is_hopper(device: torch.device) -> bool:
    """Whether a CUDA device is one of NVIDIA's of compute capability 9; AMD's MI200 and MI300 give that number too."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9
