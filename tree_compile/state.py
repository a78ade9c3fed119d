"""What a captured graph depends on: a model whose state has changed is captured again."""

from __future__ import annotations

import enum
import itertools
import random
import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MOST_ENTRIES = 64
"""A container with more entries is data, such as a tokenizer's, and not a setting."""
_DEEPEST = 3

Entry = tuple[str, Hashable]


class State(NamedTuple):
    """What a captured graph depends on.

    Attributes:
        modes: for every module, whether it trains.
        entries: named hooks, parameters, buffers, and attributes of modules and of the objects in them.
    """

    modes: tuple[bool, ...]
    entries: tuple[Entry, ...]


def state_of(model: nn.Module) -> State:
    """Changes whenever a captured graph of `model` may no longer be the model."""
    modules = list(model.named_modules())
    seen: set[int] = set()
    entries: list[Entry] = []
    for path, module in modules:
        entries += [(f"{path}.hooks", _hooks(module)), *_tensors(path, module)]
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE:
                entries += _values(f"{path}.{name}", value, seen, 0)
    return State(tuple(module.training for _, module in modules), tuple(entries))


def first_difference(before: State, after: State) -> str | None:
    """Name of the first entry in which two states differ."""
    for old, new in itertools.zip_longest(before.entries, after.entries):
        if old != new:
            return str((new or old)[0]).removeprefix(".")
    return None


def _hooks(module: nn.Module) -> tuple[int, ...]:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return tuple(number for hooks in kinds for number in hooks)


def _tensors(path: str, module: nn.Module) -> Iterator[Entry]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{path}.{name}", (id(parameter), parameter.dtype, parameter.device, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield f"{path}.{name}", _identity(buffer)


def _identity(tensor: Tensor) -> Hashable:
    """Also tells of writes; of one through `.data` only where it brings other memory."""
    version = None if tensor.is_inference() else tensor._version
    memory = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else None
    return id(tensor), tensor.dtype, tensor.device, tensor.requires_grad, version, memory


def _values(name: str, value: Any, seen: set[int], depth: int) -> Iterator[Entry]:
    """The settings in an attribute, each with its name."""
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, float):
        yield name, repr(value)  # nan is not equal to itself
    elif isinstance(value, Tensor):
        yield name, _identity(value)
    elif (drawn := _drawn(value)) is not None:
        yield name, drawn
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        yield name, id(value)
    elif not isinstance(value, (nn.Module, types.ModuleType)) and id(value) not in seen and depth < _DEEPEST:
        seen.add(id(value))
        parts = _parts(value)
        if len(parts) <= _MOST_ENTRIES or not isinstance(value, _CONTAINERS):
            for key, part in parts:
                yield from _values(f"{name}.{key}", part, seen, depth + 1)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def _drawn(value: Any) -> Hashable | None:
    """How far a generator of random numbers is; None for anything else."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return str(value.get_state()) if isinstance(value, np.random.RandomState) else None
