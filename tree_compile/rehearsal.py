"""Calls a model before it is captured: caches fill with real tensors, and what a graph would not keep is found."""

from __future__ import annotations

import contextlib
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tree_compile.errors import LostGradientError, RefusedModelError, SourceLine, StatefulModelError
from tree_compile.passes.source import frame_of_the_model, line_of_frame, line_of_trace
from tree_compile.patches import replaced
from tree_compile.state import first_difference, state_of

_LENGTHS = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127)
_SHORT = (31, 29, 23, 19, 17, 13, 11, 7, 5, 3)
"""For models with few positions."""


@dataclass(frozen=True)
class Rehearsal:
    """What calls of the model showed.

    Attributes:
        example: inputs `(1, T)` that the model takes, with a T that no dimension of its parameters has.
        error: what has to be raised, unless something more telling is found.
    """

    example: tuple[Tensor, ...]
    error: RefusedModelError | None = None


def call_model(
    model: nn.Module, input_names: Sequence[str], values: Sequence[Tensor], keywords: Mapping[str, Any]
) -> Any:
    """Calls `model` on inputs of shape `(1, T)`: the first by position, so that its name is free, the rest by name."""
    return model(values[0], **dict(zip(input_names[1:], values[1:], strict=True)), **keywords)


def device_of(model: nn.Module) -> torch.device:
    """Device of the model's first parameter or buffer; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def rehearse(model: nn.Module, input_names: Sequence[str], keywords: Mapping[str, Any]) -> Rehearsal:
    """Calls `model` a few times in the mode that it is in; buffers and random numbers are left as they were."""
    calls = [_Call(model, input_names, example, keywords) for example in _examples(model, len(input_names))]
    with _untouched(model):
        call = next((call for call in calls if _works(call)), None)
        if call is None:
            return Rehearsal(calls[0].example)  # the capture will say why
        return Rehearsal(call.example, _lost_gradient(call) or _memory(call))


def _works(call: _Call) -> bool:
    try:
        call()
    except Exception:
        return False
    return True


@dataclass(frozen=True)
class _Call:
    model: nn.Module
    input_names: Sequence[str]
    example: tuple[Tensor, ...]
    keywords: Mapping[str, Any]

    def __call__(self) -> Any:
        return call_model(self.model, self.input_names, self.example, self.keywords)


def _examples(model: nn.Module, count: int) -> Iterator[tuple[Tensor, ...]]:
    """Inputs to try, one by one; token ids are small enough for any vocabulary."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    first = next((length for length in _LENGTHS if length not in sizes), 131)
    for length in (first, *(length for length in _SHORT if length not in sizes)):
        ids = torch.arange(length, device=device_of(model))[None] % 2
        yield tuple(ids.clone() for _ in range(count))


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    device = device_of(model)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for buffer, values in before:
            if not torch.equal(buffer, values):
                buffer.data.copy_(values)


# Gradients


def _lost_gradient(call: _Call) -> LostGradientError | None:
    """An error where the output's gradient reaches a tensor that is not a parameter of the model."""
    own = {id(parameter) for parameter in call.model.parameters()}
    with torch.autograd.detect_anomaly(check_nan=False):
        leaves = [leaf for leaf in pytree.tree_leaves(call()) if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    stack: list[Any] = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
    while stack:
        node = stack.pop()
        for source, _ in node.next_functions:
            variable = getattr(source, "variable", None)
            if variable is not None and id(variable) not in own:
                trace = node.metadata.get("traceback_", ())
                return _not_registered(tuple(variable.shape), line_of_trace("".join(trace)))
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)
    return None


def _not_registered(shape: tuple[int, ...], where: SourceLine | None) -> LostGradientError:
    return LostGradientError(
        f"The model uses a tensor of shape {list(shape)} that needs a gradient and is not one of its parameters.",
        where=where,
        why="a captured graph has it as a constant, so it would get no gradient.",
        hint="register it: self.name = nn.Parameter(…), or nn.ParameterList([…]) for a list; "
        "or call requires_grad_(False) on it.",
    )


# Memory from call to call


def _memory(call: _Call) -> StatefulModelError | None:
    """An error where a call changes what the next one computes with."""
    state, of_python, of_numpy = state_of(call.model), random.getstate(), _numpy_position()
    call()
    if random.getstate() != of_python or _numpy_position() != of_numpy:
        return _draws(_line_of_draw(call))
    name = first_difference(state, state_of(call.model))
    return None if name is None else _changes(name, _line_of_change(call, name))


def _numpy_position() -> str:
    return str(np.random.get_state())


def _line_of_draw(call: _Call) -> SourceLine | None:
    found: list[SourceLine] = []

    def profile(frame: types.FrameType, event: str, function: Any) -> None:
        drawn = isinstance(getattr(function, "__self__", None), (random.Random, np.random.RandomState))
        if event == "c_call" and drawn and (line := _line_of(frame)) is not None:
            found.append(line)

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return found[0] if found else None


def _line_of_change(call: _Call, name: str) -> SourceLine | None:
    """The line that sets the attribute of a module."""
    set_attribute: Callable[..., None] = nn.Module.__setattr__
    found: list[SourceLine] = []
    paths = {id(module): path for path, module in call.model.named_modules()}

    def note(module: nn.Module, attribute: str, value: Any) -> None:
        is_it = f"{paths.get(id(module))}.{attribute}".removeprefix(".") == name
        if is_it and (line := _line_of(sys._getframe(1))) is not None:
            found.append(line)
        set_attribute(module, attribute, value)

    with replaced(nn.Module, "__setattr__", note):
        call()
    return found[0] if found else None


def _line_of(frame: types.FrameType) -> SourceLine | None:
    of_model = frame_of_the_model(frame)
    return None if of_model is None else line_of_frame(of_model)


def _draws(where: SourceLine | None) -> StatefulModelError:
    return StatefulModelError(
        "The model draws random numbers from Python's or NumPy's generator.",
        where=where,
        why="a captured graph keeps the numbers of its capture, for all calls.",
        hint="draw them with torch, as tensors of one number per token, or outside of the model.",
    )


def _changes(name: str, where: SourceLine | None) -> StatefulModelError:
    return StatefulModelError(
        f"A call of the model changes its {name!r}.",
        where=where,
        why="a captured graph keeps the value of its capture, and changes nothing.",
        hint="leave it alone in forward, for example by changing it in the training loop, or in eval mode.",
    )
