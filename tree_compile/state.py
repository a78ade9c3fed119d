"""What a captured graph depends on: a model whose state has changed is captured again."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tree_compile.names import content_of, is_users_class, names_in, read_modules, variables_in
from tree_compile.passes.source import is_own
from tree_compile.patches import original_of
from tree_compile.switches import switches
from tree_compile.unpacked import device_of
from tree_compile.values import (
    BY_TEXT,
    CONTAINERS,
    EXACT,
    HOLDERS,
    PLAIN,
    WRAPPERS,
    Same,
    attributes_of,
    behind,
    identities,
    of_any_values,
    of_tensor,
    of_value,
    parts_of,
    text_of,
)

_CACHED = type(functools.cache(lambda: None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, _CACHED)
_OF_A_CLASS = (*PLAIN, *BY_TEXT, list, tuple, set, frozenset, deque, dict)
_OF_EVERY_CLASS = frozenset([*vars(type("Plain", (), {})), "__annotations__", "_abc_impl", "__abstractmethods__"])
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_ENTRIES = 64
"""A container with more entries is data, such as a tokenizer's: only which objects it holds is looked at."""
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
        ambient: the settings of torch around the call, such as autocast and the default dtype.
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
    return State(tuple(reader.modes), tuple(switches(device_of(model).type)), tuple(reader.entries))


def first_difference(before: State, after: State) -> str | None:
    """Name of the first entry in which two states differ."""
    entries = ((*state.ambient, *state.entries) for state in (before, after))
    for old, new in itertools.zip_longest(*entries):
        if old != new:
            path, name, _ = new or old
            return f"{path}.{name}".strip(".")
    return None


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
                self.entries.append((path, name, of_tensor(buffer)))
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
        value = behind(value)
        kind: Any = type(value)
        if kind in EXACT:
            self.entries.append((path, name, (kind, value)))
        elif kind is float:
            self.entries.append((path, name, repr(value)))
        elif isinstance(value, nn.Module):
            self.read_module(f"{path}.{name}".strip("."), value)
        elif (found := of_value(value)) is not None:
            self.entries.append((path, name, (kind, found)))
            if is_users_class(kind) and self._is_new(path, name, value):
                self._read_class(path, kind)
                self._read_all(f"{path}.{name}".strip("."), attributes_of(value), depth + 1)
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
        kind: Any = type(value)
        self.entries.append((path, "", kind))
        if isinstance(value, _FUNCTIONS):
            self._read_function(path, value)
            return
        is_container, is_users = isinstance(value, CONTAINERS), is_users_class(kind)
        if depth >= _DEEPEST or isinstance(value, _TRAINING):
            self.entries.append((path, "", (Same(value), identities(value) if is_container else None)))
            return
        if is_users:
            self._read_class(path, kind)
        is_open = is_container or is_users or isinstance(value, WRAPPERS) or kind in HOLDERS
        below = depth + (1 if is_open else _OF_AN_OBJECT)
        if is_container and (is_users or _is_quiet(kind)):
            self._read_all(path, attributes_of(value), below)
        if is_container and len(value) > _MOST_ENTRIES:
            self.entries.append((path, "", (Same(value), identities(value))))
        elif (parts := parts_of(value)) is None:
            self.entries.append((path, "", text_of(value)))
        else:
            self._read_all(path, parts, below)

    def _read_all(self, path: str, parts: Iterable[tuple[Any, Any]], depth: int) -> None:
        for key, part in parts:
            self.read(path, str(key), part, depth)

    # Code

    def _read_class(self, path: str, kind: Any) -> None:
        """What a class and its bases say, those of torch left out."""
        self.entries.append((path, "", kind))
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = (len(self._seen), kind)
        self.entries.append((path, "forward", Same(getattr(kind, "forward", None))))
        for base in kind.__mro__[:-1]:
            is_users = is_users_class(base)
            is_torchs = base.__module__ == "torch" or base.__module__.startswith("torch.")
            if is_users or (issubclass(kind, nn.Module) and not is_torchs):
                self._read_own_class(base, is_users)

    def _read_own_class(self, kind: type, is_users: bool) -> None:
        path = kind.__qualname__
        for name, found in tuple(vars(kind).items()):
            value = original_of(found)
            if isinstance(value, (types.FunctionType, *WRAPPERS)):
                self.entries.append((path, name, Same(value)))
                if is_users:
                    self.read(path, name, value, 0)
            elif name not in _OF_EVERY_CLASS and (is_users or isinstance(value, _OF_A_CLASS)):
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
            if (value := content_of(cell)) is not cell:
                self._read_of_code(code.co_freevars[number], value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._read_of_code(path, value)
        around = function.__globals__
        for name in variables_in(code):
            if name in around:
                self._read_of_code(name, around[name])
        for path, module in read_modules(code, around):
            for name in names_in(code):
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
        for value in (wrapped, *map(content_of, _cells(function))):
            # A bound method is of the decorator itself, or what it is around.
            kind: Any = type(getattr(value, "__self__", value))
            if isinstance(value, (types.FunctionType, _CACHED, functools.partial)) or is_users_class(kind):
                self._read_of_code(getattr(value, "__name__", ""), value)

    def _read_of_code(self, name: str, value: Any) -> None:
        """Of the objects that code takes from around it, those of other libraries and loggers are left alone."""
        value = behind(value)
        followed = (*PLAIN, *BY_TEXT, *CONTAINERS, *_FUNCTIONS, *WRAPPERS, Tensor, nn.Module, type)
        is_plain = isinstance(value, followed) or of_value(value) is not None
        kind: Any = type(value)
        if (is_plain and not _is_others_class(value)) or is_users_class(kind) or _is_quiet(kind):
            self.read(f"variable {name}", "", value, 0)


def _parameters(path: str, module: nn.Module, registered: Container[int]) -> Iterator[Entry]:
    """Those that the model knows of are parameters of a graph too; others are constants in it, as their values were."""
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in registered:
            yield path, name, of_tensor(parameter)
        elif parameter is not None:
            yield path, name, (id(parameter), of_any_values(parameter))


def _cells(function: Any) -> tuple[types.CellType, ...]:
    return getattr(function, "__closure__", None) or ()


@functools.cache
def _is_quiet(kind: Any) -> bool:
    """Whether objects of this class of the standard library are what was put into them."""
    root = kind.__module__.partition(".")[0]
    is_standard = root in sys.stdlib_module_names and root not in (*_BUSY, "__main__")
    return kind in HOLDERS or (kind is not type and is_standard)


def _is_others_class(value: Any) -> bool:
    return isinstance(value, type) and not is_users_class(value)
