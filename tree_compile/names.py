"""Which variables, modules and classes of the user code comes to by the names in it."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from tree_compile.passes.source import is_own

_LOOK_UP = ("globals", "__globals__", "modules")
"""Names of the dictionaries in which code may look up its variables by strings."""


@functools.cache
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of variables and attributes, and strings that may be such, also in functions inside."""
    inside = (name for const in code.co_consts for name in _names_of_constant(const))
    return tuple(dict.fromkeys((*code.co_names, *inside)))


def _names_of_constant(const: Any) -> Iterator[str]:
    if isinstance(const, types.CodeType):
        yield from names_in(const)
    elif isinstance(const, tuple | frozenset):
        for part in const:
            yield from _names_of_constant(part)
    elif isinstance(const, str) and all(part.isidentifier() for part in const.strip(".").split(".")):
        yield const.strip(".")


@functools.cache
def variables_in(code: types.CodeType) -> tuple[str, ...]:
    """Names of the global variables that code may use: an attribute may be called like one that it does not use."""
    if any(name in _LOOK_UP for name in names_in(code)):
        return names_in(code)
    return tuple(dict.fromkeys(_global_names(code)))


def _global_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME")):
            yield instruction.argval
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)


def read_modules(code: types.CodeType, around: Mapping[str, Any]) -> list[tuple[str, types.ModuleType]]:
    """The user's modules that code comes to by its names, also where it imports them itself; each with its path."""
    names = names_in(code)
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


@functools.cache
def is_users_class(kind: Any) -> bool:
    """Whether a class is of the user's own code."""
    return _is_users_module(kind.__module__)


@functools.cache
def _is_users_module(name: str) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
        return False
    return is_own(str(getattr(sys.modules.get(name), "__file__", None) or ""))


def content_of(cell: types.CellType) -> Any:
    """The cell itself where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell
