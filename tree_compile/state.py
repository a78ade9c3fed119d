"""What a captured graph depends on: a model whose state has changed is captured again."""

from __future__ import annotations

import argparse
import enum
import functools
import itertools
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tree_compile.passes.source import is_own
from tree_compile.patches import original_of
from tree_compile.unpacked import device_of

_EXACT = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN = (*_EXACT, enum.Enum)
_BY_TEXT = (float, complex)
"""nan is not equal to itself, and 0.0 is equal to -0.0."""
_CACHED = type(functools.cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, _CACHED)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OF_A_CLASS = (*_PLAIN, *_BY_TEXT, *_SEQUENCES, dict)
_WRAPPERS = (staticmethod, classmethod, property, functools.partial, types.MethodType)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_ENTRIES = 64
"""A container with more entries is data, such as a tokenizer's: only which objects it holds is looked at."""
_MOST_IDENTITIES = 4_096
_SMALL_ARRAY = 1 << 16
_DEEPEST = 6
_OF_AN_OBJECT = 2
"""An object of another library counts as two levels: from there one comes to all kinds of things."""
_TRAINING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.utils.data.DataLoader)
"""What a trainer has beside the model, and changes in every step."""

_BUSY = ("_io", "_thread", "asyncio", "concurrent", "io", "logging", "multiprocessing", "queue", "threading")
"""Modules of the standard library whose objects change beside a model, as loggers do."""

Entry = tuple[str, str, Hashable]


class State(NamedTuple):
    """What a captured graph depends on.

    Attributes:
        modes: for every module, whether it trains.
        ambient: the settings of torch around the call: autocast and the default dtype.
        entries: path, name and value of hooks, parameters, buffers, and of the settings of modules, of their classes,
            of the objects in them, and of the user's own functions.
    """

    modes: tuple[bool, ...]
    ambient: tuple[Entry, ...]
    entries: tuple[Entry, ...]


def state_of(model: nn.Module, keywords: Mapping[str, Any] | None = None) -> State:
    """Changes whenever a captured graph of `model`, called with `keywords`, may no longer be the model."""
    reader = _Reader(model)
    reader.read_module("", model)
    reader.read("forward_kwargs", "", keywords, 0)
    for name in ("forward", "forward_pre", "backward", "backward_pre"):
        reader.read_hooks("hooks of all modules", getattr(nn.modules.module, f"_global_{name}_hooks"))
    return State(tuple(reader.modes), tuple(_ambient(device_of(model).type)), tuple(reader.entries))


def _ambient(device: str) -> Iterator[Entry]:
    yield "torch", "get_default_dtype()", torch.get_default_dtype()
    yield "torch", "autocast", torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def first_difference(before: State, after: State) -> str | None:
    """Name of the first entry in which two states differ."""
    entries = ((*state.ambient, *state.entries) for state in (before, after))
    for old, new in itertools.zip_longest(*entries):
        if old != new:
            path, name, _ = new or old
            return f"{path}.{name}".strip(".")
    return None


class _Same:
    """Equal to itself alone. It keeps the object, so that no other one can come to have its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Reads every module, class, function and object once; where it comes to one again, it notes which one it is."""

    def __init__(self, model: nn.Module) -> None:
        parameters = (parameter for module in model.modules() for parameter in module._parameters.values())
        self._registered = frozenset(map(id, parameters))
        self.modes: list[bool] = []
        self.entries: list[Entry] = []
        self._seen: dict[int, tuple[int, Any]] = {}

    def read_module(self, path: str, module: nn.Module) -> None:
        if not self._is_new(path, "", module):
            return
        attributes = vars(module)
        self.modes.append(module.training)
        self._read_class(path, type(module))
        for kind in _HOOKS:
            if attributes.get(kind):
                self.read_hooks(f"{path}.hooks", attributes[kind])
        self.entries += _parameters(path, module, self._registered)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                self.entries.append((path, name, _tensor(buffer)))
        for name, value in attributes.items():
            if name not in _OF_EVERY_MODULE:
                self.read(path, name, value, 0)
        for name, child in module._modules.items():
            if child is not None:
                self.read_module(f"{path}.{name}" if path else name, child)

    def read_hooks(self, path: str, hooks: Mapping[int, Any]) -> None:
        for number, hook in hooks.items():
            self.entries.append((path, "", number))
            self.read(path, str(number), hook, 0)

    def read(self, path: str, name: str, value: Any, depth: int) -> None:
        """The settings in a value, each with its name."""
        kind = type(value)
        if kind in _EXACT:
            self.entries.append((path, name, (kind, value)))
        elif kind is float:
            self.entries.append((path, name, repr(value)))
        elif isinstance(value, nn.Module):
            self.read_module(f"{path}.{name}".strip("."), value)
        elif (found := _value(value)) is not None:
            self.entries.append((path, name, (kind, found)))
        elif isinstance(value, type):
            self._read_class(f"{path}.{name}".strip("."), value)
        elif self._is_new(path, name, value):
            self._read_parts(f"{path}.{name}".strip("."), value, depth)

    def _is_new(self, path: str, name: str, value: Any) -> bool:
        place = self._seen.get(id(value))
        if place is not None:
            self.entries.append((path, name, place[0]))
            return False
        self._seen[id(value)] = (len(self._seen), value)
        return True

    def _read_parts(self, path: str, value: Any, depth: int) -> None:
        self.entries.append((path, "", type(value)))  # type: ignore[arg-type]
        if isinstance(value, _FUNCTIONS):
            self._read_function(path, value)
            return
        is_container = isinstance(value, (*_SEQUENCES, Mapping))
        if depth >= _DEEPEST or isinstance(value, _TRAINING) or (is_container and len(value) > _MOST_ENTRIES):
            self.entries.append((path, "", (_Same(value), _identities(value) if is_container else None)))
            return
        is_open = is_container or isinstance(value, _WRAPPERS) or type(value) in _NAMESPACES
        is_users = not is_open and _is_users_class(type(value))  # type: ignore[arg-type]
        if is_users:
            self._read_class(path, type(value))
        parts = _parts(value)
        if parts is None:
            self.entries.append((path, "", _text(value)))
            return
        below = depth + (1 if is_open or is_users else _OF_AN_OBJECT)
        for key, part in parts:
            self.read(path, str(key), part, below)

    # Code

    def _read_class(self, path: str, kind: type) -> None:
        """What a class and its bases say, those of torch left out."""
        self.entries.append((path, "", kind))
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = (len(self._seen), kind)
        self.entries.append((path, "forward", _Same(getattr(kind, "forward", None))))
        for base in kind.__mro__[:-1]:
            is_users = _is_users_class(base)
            is_torchs = base.__module__ == "torch" or base.__module__.startswith("torch.")
            if is_users or (issubclass(kind, nn.Module) and not is_torchs):
                self._read_own_class(base, is_users)

    def _read_own_class(self, kind: type, is_users: bool) -> None:
        path = kind.__qualname__
        for name, found in tuple(vars(kind).items()):
            value = original_of(found)
            if isinstance(value, (types.FunctionType, *_WRAPPERS)):
                self.entries.append((path, name, _Same(value)))
                if is_users:
                    self.read(path, name, value, 0)
            elif not name.startswith(("__", "_abc")) and (is_users or isinstance(value, _OF_A_CLASS)):
                self.read(path, name, value, 0)

    def _read_function(self, path: str, function: Any) -> None:
        """The function; of the user's own ones also what they take from around them."""
        self.entries.append((path, "", function))
        code = getattr(function, "__code__", None)
        if code is None or not is_own(code.co_filename):
            self._read_wrapped(path, function)
            return
        self.entries.append((path, "", code))
        self._read_attributes(path, function)
        for number, cell in enumerate(function.__closure__ or ()):
            if (value := _content(cell)) is not cell:
                self._read_of_code(code.co_freevars[number], value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._read_of_code(path, value)
        names, around = _names(code), function.__globals__
        for name in names:
            if name in around:
                self._read_of_code(name, around[name])
        for path, module in _modules(names, around):
            for name in names:
                if name in vars(module):
                    self._read_of_code(f"{path}.{name}", vars(module)[name])

    def _read_attributes(self, path: str, function: Any) -> None:
        """What was set on a function, as in `gate.scale = 3`."""
        for name, value in getattr(function, "__dict__", {}).items():
            self._read_of_code(f"{path}.{name}", value)

    def _read_wrapped(self, path: str, function: Any) -> None:
        """What a decorator of another library is around: its own variables, such as caches, are left alone."""
        wrapped = getattr(function, "__dict__", {}).get("__wrapped__")
        if wrapped is not None:
            self._read_attributes(path, function)
        for value in (wrapped, *map(_content, _cells(function))):
            # A bound method is of the decorator itself, or what it is around.
            kind: Any = type(getattr(value, "__self__", value))
            if isinstance(value, (types.FunctionType, _CACHED, functools.partial)) or _is_users_class(kind):
                self._read_of_code(getattr(value, "__name__", ""), value)

    def _read_of_code(self, name: str, value: Any) -> None:
        """Of the objects that code takes from around it, those of other libraries and loggers are left alone."""
        followed = (*_PLAIN, *_BY_TEXT, *_SEQUENCES, *_FUNCTIONS, *_WRAPPERS, Mapping, Tensor, nn.Module, type)
        is_plain = isinstance(value, followed) or _value(value) is not None
        kind: Any = type(value)
        if (is_plain and not _is_others_class(value)) or _is_users_class(kind) or _is_quiet(kind):
            self.read(f"variable {name}", "", value, 0)


def _parameters(path: str, module: nn.Module, registered: Container[int]) -> Iterator[Entry]:
    """Those that the model knows of are parameters of a graph too; others are constants in it, as their values were."""
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in registered:
            yield path, name, _tensor(parameter)
        elif parameter is not None:
            yield path, name, (
                id(parameter), parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad,
            )  # fmt: skip


def _tensor(tensor: Tensor) -> Hashable:
    """Also tells of writes; of one through `.data` only where it brings other memory."""
    version = None if tensor.is_inference() else tensor._version
    memory = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else None
    return _Same(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, version, memory


def _value(value: Any) -> Hashable | None:
    """What a value without parts is; None where it has parts."""
    if isinstance(value, _PLAIN):
        return value if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, _BY_TEXT):
        return repr(value)
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, np.ndarray):
        small = value.tobytes() if value.nbytes <= _SMALL_ARRAY and not value.dtype.hasobject else None
        return _Same(value), value.shape, value.dtype.str, value.ctypes.data, small
    if isinstance(value, Iterator):
        return _Same(value), operator.length_hint(value, -1), repr(value) if type(value) is itertools.count else None
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


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Named parts of a container or an object; None where they cannot be seen."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, _SEQUENCES):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("self", value.__self__), ("function", value.__func__)]
    if isinstance(value, property):
        return [("get", value.fget), ("set", value.fset)]
    if isinstance(value, (staticmethod, classmethod)):
        return [("function", value.__func__)]
    slots = _slots(type(value))  # type: ignore[arg-type]
    if not slots and not hasattr(value, "__dict__"):
        return None
    own = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return own + list(getattr(value, "__dict__", {}).items())


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    members = (vars(base).items() for base in kind.__mro__ if base.__module__ != "builtins")
    slots = (name for own in members for name, value in own if isinstance(value, types.MemberDescriptorType))
    return tuple(name for name in slots if name != "__dict__")


def _text(value: Any) -> Hashable:
    """Values of the standard library, such as ranges and dates, are what they print; others are known by identity."""
    is_standard = type(value).__module__.partition(".")[0] in sys.stdlib_module_names
    return repr(value) if is_standard else _Same(value)


def _identities(value: Any) -> Hashable:
    if len(value) > _MOST_IDENTITIES:
        return len(value)
    parts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
    return len(value), hash(tuple(map(id, parts)))


def _cells(function: Any) -> tuple[types.CellType, ...]:
    return getattr(function, "__closure__", None) or ()


def _content(cell: types.CellType) -> Any:
    """The cell itself where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names of variables and attributes, also of functions inside."""
    inside = (name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const))
    return tuple(dict.fromkeys((*code.co_names, *inside)))


@functools.cache
def _is_users_class(kind: Any) -> bool:
    return _is_users_module(kind.__module__)


@functools.cache
def _is_quiet(kind: Any) -> bool:
    """Whether objects of this class of the standard library are what was put into them."""
    root = kind.__module__.partition(".")[0]
    return kind is not type and root in sys.stdlib_module_names and root not in (*_BUSY, "__main__")


@functools.cache
def _is_users_module(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        return False
    return is_own(str(getattr(sys.modules.get(name), "__file__", None) or ""))


def _modules(names: Sequence[str], around: Mapping[str, Any]) -> list[tuple[str, types.ModuleType]]:
    """The user's modules that code comes to by its `names`, also where it imports them itself; each with its path."""
    found: dict[int, tuple[str, types.ModuleType]] = {}
    stack = [
        (name, value) for name in names for value in ([around[name]] if name in around else _imported(name, around))
    ]
    while stack:
        path, module = stack.pop()
        if isinstance(module, types.ModuleType) and id(module) not in found and _is_users_module(module.__name__):
            found[id(module)] = path, module
            stack += [(f"{path}.{name}", vars(module)[name]) for name in names if name in vars(module)]
    return list(found.values())


def _imported(name: str, around: Mapping[str, Any]) -> Iterator[types.ModuleType]:
    """The modules that an `import name` inside of a function may mean, as far as they have been imported."""
    package = str(around.get("__package__") or "").split(".")
    for end in range(len(package) + 1):
        path = ".".join(part for part in (*package[:end], name) if part)
        if path in sys.modules:
            yield sys.modules[path]


def _is_others_class(value: Any) -> bool:
    return isinstance(value, type) and not _is_users_class(value)
