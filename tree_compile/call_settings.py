"""The settings of torch that a call was made under: what it computes later is computed under them, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tree_compile.switches import autocast_dtype


@dataclass(frozen=True)
class CallSettings:
    """Settings of torch.

    Attributes:
        gradients: whether they are on.
        inference: whether inference mode is on.
        device: type of the device.
        autocast: dtype of autocast on the device; None where it is off.
    """

    gradients: bool
    inference: bool
    device: str
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> CallSettings:
        """Those that are in force."""
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device, autocast_dtype(device))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Computes under all of them."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.gradients), self.autocast_restored():
            yield

    @contextmanager
    def autocast_restored(self) -> Iterator[None]:
        """Computes under the autocast, as a backward pass does, which has its own gradients."""
        # Weights that were cast elsewhere may have been cast without gradients.
        with torch.autocast(self.device, self.autocast, self.autocast is not None, cache_enabled=False):
            yield
