"""Calls a model before it is captured: caches fill with real tensors, and what a graph would not keep is found."""

from __future__ import annotations

import contextlib
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
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
from tree_compile.unpacked import Unpacked

Example = tuple[Tensor, ...]

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

    example: Example
    error: RefusedModelError | None = None


def rehearse(unpacked: Unpacked) -> Rehearsal:
    """Calls the model a few times in the mode that it is in; buffers and random numbers are left as they were."""
    examples = list(_examples(unpacked))
    with _untouched(unpacked):
        example = next((example for example in examples if _works(unpacked, example)), None)
        if example is None:
            return Rehearsal(examples[0])  # the capture will say why
        return Rehearsal(example, _lost_gradient(unpacked, example) or _memory(unpacked, example))


def _works(unpacked: Unpacked, example: Example) -> bool:
    try:
        unpacked(example)
    except Exception:
        return False
    return True


def _examples(unpacked: Unpacked) -> Iterator[Example]:
    """Inputs to try, one by one; token ids are small enough for any vocabulary."""
    sizes = {size for parameter in unpacked.model.parameters() for size in parameter.shape}
    first = next((length for length in _LENGTHS if length not in sizes), 131)
    for length in (first, *(length for length in _SHORT if length not in sizes)):
        ids = torch.arange(length, device=unpacked.device)[None] % 2
        yield tuple(ids.clone() for _ in unpacked.input_names)


@contextlib.contextmanager
def _untouched(unpacked: Unpacked) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in unpacked.model.buffers()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    device = unpacked.device
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


def _lost_gradient(unpacked: Unpacked, example: Example) -> LostGradientError | None:
    """An error where the output's gradient reaches a tensor that is not a parameter of the model."""
    own = {id(parameter) for parameter in unpacked.model.parameters()}
    with torch.autograd.detect_anomaly(check_nan=False):
        leaves = [leaf for leaf in pytree.tree_leaves(unpacked(example)) if isinstance(leaf, Tensor)]
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


def _memory(unpacked: Unpacked, example: Example) -> StatefulModelError | None:
    """An error where a call changes what the next one computes with."""
    state, of_python, of_numpy = state_of(unpacked.model), random.getstate(), _numpy_position()
    unpacked(example)
    if random.getstate() != of_python or _numpy_position() != of_numpy:
        return _draws(_line_of_draw(unpacked, example))
    name = first_difference(state, state_of(unpacked.model))
    return None if name is None else _changes(name, _line_of_change(unpacked, example, name))


def _numpy_position() -> str:
    return str(np.random.get_state())


def _line_of_draw(unpacked: Unpacked, example: Example) -> SourceLine | None:
    found: list[SourceLine] = []

    def profile(frame: types.FrameType, event: str, function: Any) -> None:
        drawn = isinstance(getattr(function, "__self__", None), (random.Random, np.random.RandomState))
        if event == "c_call" and drawn and (line := _line_of(frame)) is not None:
            found.append(line)

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        unpacked(example)
    finally:
        sys.setprofile(previous)
    return found[0] if found else None


def _line_of_change(unpacked: Unpacked, example: Example, name: str) -> SourceLine | None:
    """The line that sets the attribute of a module."""
    set_attribute: Callable[..., None] = nn.Module.__setattr__
    found: list[SourceLine] = []
    paths = {id(module): path for path, module in unpacked.model.named_modules()}

    def note(module: nn.Module, attribute: str, value: Any) -> None:
        is_it = f"{paths.get(id(module))}.{attribute}".removeprefix(".") == name
        if is_it and (line := _line_of(sys._getframe(1))) is not None:
            found.append(line)
        set_attribute(module, attribute, value)

    with replaced(nn.Module, "__setattr__", note):
        unpacked(example)
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
