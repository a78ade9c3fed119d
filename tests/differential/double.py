"""Runs a model wholly in float64, also where its code asks for float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """Reads float32 as float64 in every call of torch.

    Norms, rotary tables and softmax of many models ask for float32 by design; its rounding would hide errors that are
    a million times as large as those of float64.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*(_wide(argument) for argument in args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
