"""Operations that a model computes with autocast switched off, while it is on around the tree model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(device: str, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """`function(*args, **options)` with autocast switched off for devices of the type `device`."""
    with torch.autocast(device, enabled=False):
        return function(*args, **options)


@functools.cache
def kept_off(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a device and the arguments of `function`, which computes it in the dtype of its operands.

    A graph holds Python functions as targets only, not as arguments, so `without_autocast` alone does not do.
    """

    def call(device: str, /, *args: Any, **options: Any) -> Any:
        return without_autocast(device, function, *args, **options)

    call.__name__ = call.__qualname__ = f"{function.__name__}_without_autocast"
    call.__wrapped__ = function  # type: ignore[attr-defined]
    globals()[call.__name__] = call  # the text of a graph imports its functions by name
    return call
