"""What a value is, and which parts it has: two values with the same answers compute the same."""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_EXACT = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
PLAIN = (*_EXACT, enum.Enum)
EXACT = frozenset(_EXACT)
BY_TEXT = (float, complex)
"""nan is not equal to itself, and 0.0 is equal to -0.0."""
CONTAINERS = (list, tuple, set, frozenset, deque, Mapping)
WRAPPERS = (staticmethod, classmethod, property, functools.partial, types.MethodType)
HOLDERS = (types.SimpleNamespace, Namespace, threading.local, ContextVar, weakref.ref)
"""Classes of the standard library whose objects are what was put into them."""
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
_OF_BYTES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array, bytearray, memoryview)
_NUMBERS = (*EXACT, float)
_MOST_IDENTITIES = 4_096
_SMALL_ARRAY = 1 << 16


class Same:
    """Equal to itself alone. It keeps the object, so that no other one can come to have its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def behind(value: Any) -> Any:
    """What a weak proxy stands for; None where that is gone. Any other value itself."""
    if type(value) not in _PROXIES:
        return value
    try:
        return value.__repr__.__self__
    except ReferenceError:
        return None


_MARK_OF_DYNAMO = "_dynamo_"


def of_tensor(tensor: Tensor) -> Hashable:
    """Also tells of writes; of one through `.data` only where it brings other memory."""
    version = None if tensor.is_inference() else tensor._version
    memory = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else None
    return Same(tensor), of_any_values(tensor), version, memory


def of_any_values(tensor: Tensor) -> Hashable:
    """What code can ask of a tensor, whatever its values are; of what was set on it, the plain values."""
    form = tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
    strides = tensor.stride() if tensor.layout is torch.strided else None
    set_on_it = (
        (name, type(found), repr(found))
        for name, found in vars(tensor).items()
        # torch.compile leaves such marks on parameters when it has compiled something that reads them.
        if type(found) in _NUMBERS and not name.startswith(_MARK_OF_DYNAMO)
    )
    return *form, strides, *set_on_it


def of_value(value: Any) -> Hashable | None:
    """What a value without parts is; None where it has parts."""
    if isinstance(value, PLAIN):
        return value if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, BY_TEXT):
        return repr(value)
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, np.ndarray):
        small = value.tobytes() if value.nbytes <= _SMALL_ARRAY and not value.dtype.hasobject else None
        return Same(value), value.shape, value.dtype.str, value.ctypes.data, small
    if isinstance(value, _OF_BYTES):
        seen = memoryview(value)
        return Same(value), seen.tobytes() if seen.nbytes <= _SMALL_ARRAY else None
    if isinstance(value, Iterator):
        return Same(value), operator.length_hint(value, -1), repr(value) if type(value) is itertools.count else None
    return _drawn(value)


def _drawn(value: Any) -> Hashable | None:
    """How far a generator of random numbers is; None for anything else."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return str(value.get_state()) if isinstance(value, np.random.RandomState) else None


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Named parts of a container or an object; None where they cannot be seen."""
    if isinstance(value, Mapping):
        # The name of a key is its text, which another key may have too.
        return [*value.items(), *(("a key", key) for key in value if type(key) is not str)]
    if isinstance(value, CONTAINERS):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords), *attributes_of(value)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, property):
        return [("get", value.fget), ("set", value.fset)]
    if isinstance(value, (staticmethod, classmethod)):
        return [("function", value.__func__)]
    if isinstance(value, ContextVar):
        return [("value", value.get(None))]
    if isinstance(value, weakref.ref):
        return [("object", value()), *attributes_of(value)]
    is_open = slots_of(type(value)) or hasattr(value, "__dict__")  # type: ignore[arg-type]
    return attributes_of(value) if is_open else None


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """What stands in the slots and the `__dict__` of an object."""
    slots = slots_of(type(value))  # type: ignore[arg-type]
    own = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    made = [("default_factory", value.default_factory)] if isinstance(value, defaultdict) else []
    return own + made + list(getattr(value, "__dict__", {}).items())


@functools.cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """Names of the slots of a class."""
    members = (vars(base).items() for base in kind.__mro__ if base.__module__ != "builtins")
    slots = (name for own in members for name, value in own if isinstance(value, types.MemberDescriptorType))
    return tuple(name for name in slots if name != "__dict__")


def text_of(value: Any) -> Hashable:
    """Values of the standard library, such as ranges and dates, are what they print; others are known by identity."""
    is_standard = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return repr(value) if is_standard else Same(value)


def identities(container: Any) -> Hashable:
    """Which objects a container holds; of a very long one, how many."""
    if len(container) > _MOST_IDENTITIES:
        return len(container)
    parts = (*container.keys(), *container.values()) if isinstance(container, Mapping) else container
    return len(container), hash(tuple(map(id, parts)))
