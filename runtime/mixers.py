"""Ops that carry a state along the tokens, and how each stands in a captured graph: as one node."""

from __future__ import annotations

import contextlib
import inspect
import json
import linecache
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tree_compile.errors import SourceLine, TokenMixingError
from tree_compile.runtime.counts import a_kind

__all__ = ["MIXERS", "Mixer", "call_of", "computed_in", "mixer", "one_node", "require_rank", "require_shape"]

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
StateShape = Callable[[Mapping[str, Sequence[Any]]], tuple[int, ...]]


@dataclass(frozen=True)
class Mixer:
    """An op over a row's tree.

    Attributes:
        op: takes the tensors and options by name, and `tree`, a `RowTree`, or None for unpacked sequences; returns a
            tensor, or a tuple that starts with it.
        tokens: for each tensor by name its dimension along the tokens, None where it has none, as a parameter.
        like: the name of the tensor whose shape, dtype and token dimension the result has.
        state: the shape of a state from the shapes of the tensors by name; None where the op returns none. An op with
            states returns a pair, whose second entry are final states.
        keys: the tensor whose last dimension bounds where the kernels of `recurrence_fla` can take its place; None
            where there are none.
        over: what the op goes over, as `explain()` tells: "chunks", each with a state, "ancestors" of every token, or
            "" where that is not known.
    """

    op: Callable[..., Any]
    tokens: Mapping[str, int | None]
    like: str
    state: StateShape | None
    keys: str | None
    over: str = ""


MIXERS: dict[str, Mixer] = {}
"""By the name of the op, as it stands in captured graphs."""


def mixer(
    tokens: Mapping[str, int | None],
    like: str,
    *,
    state: StateShape | None = None,
    keys: str | None = None,
    over: str = "",
) -> Callable[[Callable[Arguments, Returned]], Callable[Arguments, Returned]]:
    """Declares an op over a row's tree, so that models that call it can be compiled.

    While a model is captured, a call of the op becomes one node; in the rewritten graph the op is called with the
    row's tree.

    Args:
        tokens: as in `Mixer`. The op has an argument `tree` besides, and options.
        like: as in `Mixer`.
        state: as in `Mixer`.
        keys: as in `Mixer`.
        over: as in `Mixer`.

    Raises:
        ValueError: another op of that name has been declared, the op has no such arguments, or `over` is unknown. A
            module that is loaded again may declare its own anew.
    """

    def declare(op: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        known = MIXERS.get(op.__name__)
        if known is not None and known.op is not op and not _replaces(op, known.op):
            raise ValueError(f"there is a mixer {op.__name__} in {known.op.__module__}; choose another name")
        _check_names(op, tokens, like)
        if over not in ("", "ancestors", "chunks") or (over == "chunks" and state is None):
            raise ValueError(f"over is {over!r}; it must be 'chunks', where there is a state, 'ancestors' or ''")
        if isinstance(op, types.FunctionType) and op.__module__.startswith(f"{__package__}."):
            _OWN[op.__name__] = _copy_of(op)
        MIXERS[op.__name__] = Mixer(op, dict(tokens), like, state, keys, over)
        return op

    return declare


_OWN: dict[str, Callable[..., Any]] = {}
"""The ops of this package as they are: while a model is captured, a call of one becomes a node."""


def _copy_of(op: types.FunctionType) -> Callable[..., Any]:
    copy = types.FunctionType(op.__code__, op.__globals__, op.__name__, op.__defaults__, op.__closure__)
    copy.__kwdefaults__ = op.__kwdefaults__
    return copy


def _replaces(op: Callable[..., Any], known: Callable[..., Any]) -> bool:
    """Whether `op` has the name of `known` in its module too. What functions make has none there."""
    names = [(function.__module__, function.__qualname__) for function in (op, known)]
    return names[0] == names[1] and "<locals>" not in op.__qualname__


def _check_names(op: Callable[..., Any], tokens: Mapping[str, int | None], like: str) -> None:
    known = inspect.signature(op).parameters
    for name in (*tokens, "tree"):
        if name not in known:
            raise ValueError(f"{op.__name__} has no argument {name}; it has {', '.join(known)}")
    if tokens.get(like) is None:
        raise ValueError(f"like is {like!r}; it must be a tensor of {op.__name__} with a dimension along the tokens")


def computed_in(values: Tensor) -> torch.dtype:
    """The dtype in which ops carry states: float64 where the values are, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def require_rank(name: str, tensor: Tensor, rank: int) -> None:
    """Refuses the argument `name` of an op where its sizes would be taken for those of other dimensions.

    Raises:
        ValueError: `tensor` has another number of dimensions.
    """
    if tensor.dim() != rank:
        raise ValueError(f"{name} is {tuple(tensor.shape)}; it must have {rank} dimensions, not {tensor.dim()}")


def require_shape(name: str, tensor: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Refuses the argument `name` of an op where broadcasting would take it for something else.

    Raises:
        ValueError: `tensor` is given, and has none of the shapes.
    """
    if tensor is not None and all(tuple(tensor.shape) != shape for shape in shapes):
        raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be {' or '.join(map(str, shapes))}")


def one_node(op: Callable[..., Any], **arguments: Any) -> Tensor:
    """The first result of a call of `op`, as one node of the graph that is being captured.

    Args:
        op: declared with `mixer`.
        arguments: its tensors, and options that JSON can hold.

    Raises:
        TypeError: an option is something else, such as a tensor.
    """
    tensors = [arguments.pop(name, None) for name in MIXERS[op.__name__].tokens]
    for name, value in arguments.items():
        if not isinstance(value, bool | int | float | str | None):
            what = f"{name} of {op.__name__} is {a_kind(value)}"
            raise TypeError(f"{what}; it must be a plain number, or a tensor that `tokens` names")
    if _ON_MISFIT and (why := _misfit(op.__name__, tensors, arguments)) is not None:
        raise _ON_MISFIT[-1](op, why)
    node: Tensor = torch.ops.tree_compile.mixer(op.__name__, tensors, json.dumps(arguments))
    return node


_ON_MISFIT: list[Callable[[Callable[..., Any], str], Exception]] = []


@contextlib.contextmanager
def checked_calls(on_misfit: Callable[[Callable[..., Any], str], Exception]) -> Iterator[None]:
    """`one_node` raises what `on_misfit` makes of an op of this package and of what it says against its arguments."""
    _ON_MISFIT.append(on_misfit)
    try:
        yield
    finally:
        _ON_MISFIT.pop()


def _misfit(name: str, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> str | None:
    """What an op of this package has against the shapes of its arguments; other ops may do more than look at them."""
    op = _OWN.get(name)
    if op is None:
        return None
    sizes = {str(size) for tensor in tensors if tensor is not None for size in tensor.shape}
    tokens = next(size for size in _TOKENS if str(size) not in sizes)
    with _disable_current_modes():
        given = {key: _shown(tensor, tokens) for key, tensor in zip(MIXERS[name].tokens, tensors, strict=True)}
        try:
            op(**given, **options)
        except ValueError as error:
            return re.sub(rf"\b{tokens}\b", "T", str(error))
        except (RuntimeError, NotImplementedError):
            return None  # of no concern here: tensors without values cannot do everything
    return None


_TOKENS = (61, 59, 53, 47, 43, 41, 37, 31)


def _shown(tensor: Tensor | None, tokens: int) -> Tensor | None:
    """A tensor of the same shape and dtype that has no values."""
    if tensor is None:
        return None
    sizes: list[Any] = list(tensor.shape)
    shape = [tokens if isinstance(size, torch.SymInt) else size for size in sizes]
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def call_of(name: str, tensors: list[Any], options: str) -> tuple[Mixer, dict[str, Any]]:
    """A mixer, and the arguments of its op by name, from those of its node."""
    found = MIXERS[name]
    given = {key: value for key, value in zip(found.tokens, tensors, strict=True) if value is not None}
    return found, given | json.loads(options)


torch.library.define("tree_compile::mixer", "(str name, Tensor?[] tensors, str options) -> Tensor")


@torch.library.impl("tree_compile::mixer", "CompositeExplicitAutograd")
def _unpacked(name: str, tensors: list[Any], options: str) -> Tensor:
    found, arguments = call_of(name, tensors, options)
    result = found.op(**arguments)
    first: Tensor = result if found.state is None else result[0]
    memory = {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
    if first.untyped_storage()._cdata in memory:
        raise _shares_memory(found.op)
    return first.contiguous()


def _shares_memory(op: Callable[..., Any]) -> TokenMixingError:
    code = inspect.unwrap(op).__code__
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return TokenMixingError(
        f"The op {op.__name__} returns an argument, or a view of one.",
        where=SourceLine(code.co_filename, code.co_firstlineno, line),
        why="a graph takes what it returns for a tensor of its own, and a model may write into that.",
        hint="return a copy, such as values.clone().",
    )


@torch.library.register_fake("tree_compile::mixer")  # type: ignore[untyped-decorator]
def _like(name: str, tensors: list[Any], _options: str) -> Tensor:
    found = MIXERS[name]
    like: Tensor = dict(zip(found.tokens, tensors, strict=True))[found.like]
    return like.new_empty(like.shape)
