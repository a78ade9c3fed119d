"""A part of another library or of a model, replaced for a while, in one thread."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from tree_compile.forks import free_in_forks

_CHANGING = threading.RLock()
free_in_forks(_CHANGING)


class _Replaced:
    """Stands in a class for what it replaces: every thread but those that replace it finds the original."""

    def __init__(self, original: Any, is_inherited: bool) -> None:
        self.original, self.is_inherited = original, is_inherited
        self.functions: dict[int, list[Any]] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        chosen = self.chosen()
        return chosen.__get__(instance, owner) if hasattr(chosen, "__get__") else chosen

    def chosen(self) -> Any:
        mine = self.functions.get(threading.get_ident())
        return mine[-1] if mine else self.original


class _ReplacedProperty(_Replaced):
    """The same for what can be set."""

    def __set__(self, instance: Any, value: Any) -> None:
        self.chosen().__set__(instance, value)


class _ReplacedInModule(_Replaced):
    """The same for a function of a module, which is called as it stands there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen()(*args, **kwargs)


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """`function` as what this thread calls `name` of a class or a module `owner`; other threads call what was there."""
    thread = threading.get_ident()
    with _CHANGING:
        place = _place(owner, name)
        place.functions.setdefault(thread, []).append(function)
    try:
        yield
    finally:
        with _CHANGING:
            place.functions[thread].pop()
            if not place.functions[thread]:
                del place.functions[thread]
            if not place.functions:
                _restore(owner, name, place)


@contextlib.contextmanager
def setting(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`value` as the attribute `name` of one object, such as a config: for all threads."""
    inherited, own = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextlib.contextmanager
def recoded(function: types.FunctionType, replacement: Callable[..., Any]) -> Iterator[None]:
    """`replacement` as what `function` runs in this thread, however a caller got hold of the function.

    A model may have bound it as an attribute, in a partial or in a closure: so its code is exchanged, not its name.
    """
    kept = {name: getattr(function, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
    original = types.FunctionType(
        kept["__code__"], function.__globals__, function.__name__, kept["__defaults__"], function.__closure__
    )
    original.__kwdefaults__ = kept["__kwdefaults__"]
    thread = threading.get_ident()

    def chosen() -> Callable[..., Any]:
        return replacement if threading.get_ident() == thread else original

    free = function.__code__.co_freevars
    try:
        # In this order, so that a call from another thread never meets code without its defaults.
        function.__kwdefaults__ = {**(kept["__kwdefaults__"] or {}), "_chosen_by_tree_compile": chosen}
        function.__code__ = _run_chosen.__code__.replace(co_freevars=free)
        yield
    finally:
        function.__code__ = kept["__code__"]
        function.__kwdefaults__ = kept["__kwdefaults__"]


def _run_chosen(*args: Any, _chosen_by_tree_compile: Callable[[], Callable[..., Any]], **kwargs: Any) -> Any:
    return _chosen_by_tree_compile()(*args, **kwargs)


def original_of(value: Any) -> Any:
    """What stands in a class when nothing is replaced."""
    return value.original if isinstance(value, _Replaced) else value


def _place(owner: Any, name: str) -> _Replaced:
    """Where the functions of all threads are, put there by the first one."""
    own = vars(owner).get(name)
    if isinstance(own, _Replaced):
        return own
    inherited = name not in vars(owner)
    if isinstance(owner, types.ModuleType):
        place: _Replaced = _ReplacedInModule(getattr(builtins, name) if inherited else own, inherited)
    else:
        original = inspect.getattr_static(owner, name)
        place = (_ReplacedProperty if hasattr(original, "__set__") else _Replaced)(original, inherited)
    setattr(owner, name, place)
    return place


def _restore(owner: Any, name: str, place: _Replaced) -> None:
    if place.is_inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, place.original)
