"""Pretends a GPU of NVIDIA's Hopper generation on a machine without one, for torch's compiler and for Triton.

Tensors on it are fake, and kernels are compiled but not launched. It changes torch for the rest of the process, and
reaches into private parts of torch, so it is for scripts that run by themselves, with the version of torch that it was
written for.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["DEVICE", "pretend_gpu"]

DEVICE = torch.device("cuda", 0)

_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
)
_CAPABILITY = (_PROPERTIES.major, _PROPERTIES.minor)

# Its operators last as long as it does.
_ON_GPU = torch.library.Library("aten", "IMPL")


class _Driver:
    """What Triton asks its driver about the device."""

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The first one."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The same as torch knows it."""
        return DEVICE

    def is_active(self) -> bool:
        """Whether it is there."""
        return True


def pretend_gpu() -> None:
    """Pretends the GPU from here on.

    Before it, the library of `pretended_gpu.cpp` is loaded before torch; after it torch's compiler is.
    """
    _pretend_in_torch()
    _pretend_in_triton()
    _keep_constants_on_the_cpu()
    _compile_here()


def _pretend_in_torch() -> None:
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "synchronize": None,
        "get_device_capability": _CAPABILITY,
        "get_device_properties": _PROPERTIES,
        "get_device_name": _PROPERTIES.name,
        "get_arch_list": ["sm_90"],
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_DeviceGuard": contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, _always(answers[name]))
    torch._C._cuda_getCurrentRawStream = _always(0)
    torch.version.cuda = "13.0"
    # As torch does itself where it finds no GPU: no number of a fake tensor is put on the device.
    FakeTensorMode.avoid_device_init = True


def _pretend_in_triton() -> None:
    from torch._inductor.runtime import triton_helpers

    driver.set_active(_Driver())
    triton_helpers.set_driver_to_gpu = lambda: driver.set_active(_Driver())


def _compile_here() -> None:
    from torch._inductor import config

    # Others, and other processes, know of no GPU.
    config.compile_threads = 1
    config.force_disable_caches = True
    # It hands binaries to a launcher in C++, and what they need is lost.
    config.use_static_cuda_launcher = False


def _keep_constants_on_the_cpu() -> None:
    """Numbers that are folded while a graph is lowered are made on its device in earnest, and so need a place."""
    _ON_GPU.impl("empty.memory_format", lambda *args, **options: torch.empty(*args, **_on_cpu(options)), "CUDA")
    _ON_GPU.impl("empty_strided", lambda *args, **options: torch.empty_strided(*args, **_on_cpu(options)), "CUDA")


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"device": "cpu"}


def _always(answer: Any) -> Any:
    return lambda *_args, **_kwargs: answer
