"""Calls a model before it is captured: caches fill with real tensors, and what a graph would not keep is found."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tree_compile.comparison import gap, relative_difference, tensors_of, tolerance
from tree_compile.errors import (
    LostGradientError,
    RefusedModelError,
    SourceLine,
    StatefulModelError,
    UnsupportedOutputError,
)
from tree_compile.passes.source import (
    is_own,
    line_of_code,
    line_of_forward,
    line_of_frame,
    line_of_stack,
    line_of_trace,
)
from tree_compile.patches import replaced
from tree_compile.state import State, first_difference, state_of
from tree_compile.unpacked import PlainModel, device_of, own_autocast_cache, own_random_numbers

_LENGTHS = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127)
_SHORT = (31, 29, 23, 19, 17, 13, 11, 7, 5, 3)
"""For models with few positions."""
_ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""By how much, of the greatest number, two calls may differ that add up in another order."""
_MOST_LINES = 2_000


@dataclass(frozen=True)
class Rehearsal:
    """What calls of the model showed.

    Attributes:
        example: inputs `(1, T)` that the model takes, with a T that no dimension of its parameters has.
        error: what has to be raised, unless something more telling is found.
    """

    example: tuple[Tensor, ...]
    error: RefusedModelError | None = None


def rehearse(plain: PlainModel) -> Rehearsal:
    """Calls the model a few times in its present mode; its tensors and random numbers are left as they were."""
    calls = [_Call(plain, example) for example in _examples(plain)]
    with untouched(plain.model):
        try:
            call = next((call for call in calls if _works(call)), None)
        except StatefulModelError as error:
            return Rehearsal(calls[0].example, error)
        if call is None:
            return Rehearsal(calls[0].example)  # the capture will say why
        return Rehearsal(call.example, _findings(call))


def grow(plain: PlainModel, tokens: int) -> None:
    """Shows the model a sequence of `tokens` tokens or more, so that caches that grow with it are long enough.

    A model that fails has no such cache; what it is told is then that the sequence is too long.
    """
    with untouched(plain.model), torch.inference_mode(False), torch.no_grad(), own_autocast_cache():
        for length in (1 << (tokens - 1).bit_length(), tokens):
            if _works(_Call(plain, example_of(plain, length))):
                return


def _works(call: _Call) -> bool:
    try:
        with _Protected(call.model):
            call()
    except StatefulModelError:
        raise
    except Exception:
        return _works_unprotected(call)
    return True


def _works_unprotected(call: _Call) -> bool:
    """Some operators of higher order cannot be watched."""
    before = _versions(call.model)
    try:
        call()
    except Exception:
        return False
    if _versions(call.model) != before:
        raise _writes_a_parameter(None)
    return True


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]


def _findings(call: _Call) -> RefusedModelError | None:
    found: list[SourceLine | None] = []
    with torch.autograd.detect_anomaly(check_nan=False), _hooks_on_nodes(found):
        outputs = tensors_of(call())
    if found:
        return _hook_on_a_node(found[0])
    if any(output.layout != torch.strided or output.is_quantized for output in outputs):
        return _unlike_arrays(line_of_forward(call.model))
    return _lost_gradient(call, outputs) or _memory(call, outputs)


@dataclass(frozen=True)
class _Call:
    plain: PlainModel
    example: tuple[Tensor, ...]

    def __call__(self) -> Any:
        """Every call draws the same random numbers."""
        with own_random_numbers(self.plain.device):
            return self.plain(self.example)

    @property
    def model(self) -> nn.Module:
        return self.plain.model

    def state(self) -> State:
        return state_of(self.model, self.plain.keywords)


def _examples(plain: PlainModel) -> Iterator[tuple[Tensor, ...]]:
    """Inputs to try, one by one; token ids are small enough for any vocabulary."""
    sizes = {size for parameter in plain.model.parameters() for size in parameter.shape}
    first = next((length for length in _LENGTHS if length not in sizes), 131)
    for length in (first, *(length for length in _SHORT if length not in sizes)):
        yield example_of(plain, length)


def example_of(plain: PlainModel, tokens: int) -> tuple[Tensor, ...]:
    """Inputs `(1, tokens)` whose token ids are small enough for any vocabulary."""
    ids = torch.arange(tokens, device=plain.device)[None] % 2
    return plain.shaped([ids.clone() for _ in plain.input_names])


def longer_example(plain: PlainModel, tokens: int) -> int:
    """A number of tokens, some four times as many, that no dimension of the model's parameters has."""
    sizes = {size for parameter in plain.model.parameters() for size in parameter.shape}
    return next(length for length in itertools.count(4 * tokens + 37, 2) if length not in sizes)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What is called inside leaves the model's tensors and all random numbers as they were."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    memory = [(parameter, parameter.data) for parameter in model.parameters()]
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with own_random_numbers(device_of(model)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for buffer, values in before:
            if not torch.equal(buffer, values):
                buffer.data.copy_(values)
        for parameter, data in memory:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data


class _Protected(TorchDispatchMode):
    """Refuses writes into the memory of parameters before they are done."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._memory = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            for argument, value in _arguments(function, args, kwargs):
                if argument.alias_info is not None and argument.alias_info.is_write and self._holds(value):
                    raise _writes_a_parameter(line_of_stack())
        return function(*args, **kwargs)

    def _holds(self, value: Any) -> bool:
        return any(tensor.untyped_storage()._cdata in self._memory for tensor in tensors_of(value))


def _arguments(function: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(function._schema.arguments):
        yield argument, args[place] if place < len(args) else kwargs.get(argument.name)


def _writes_a_parameter(where: SourceLine | None) -> StatefulModelError:
    done = "" if where else " The write of this first call has been done: load the model again."
    return StatefulModelError(
        f"A call of the model writes to one of its parameters.{done}",
        where=where,
        why="a captured graph changes nothing, so the next call would compute with the old values.",
        hint="leave parameters to the optimizer, or change them in the training loop.",
    )


# Gradients


@contextlib.contextmanager
def _hooks_on_nodes(found: list[SourceLine | None]) -> Iterator[None]:
    """Notes hooks that the model puts on nodes of autograd's graph: a node does not tell which hooks it has."""

    def profile(frame: types.FrameType, event: str, function: Any) -> None:
        registers = event == "c_call" and getattr(function, "__name__", "") in ("register_hook", "register_prehook")
        if registers and isinstance(getattr(function, "__self__", None), torch.autograd.graph.Node):
            found.append(line_of_code(frame))

    with _profiled(profile):
        yield


@contextlib.contextmanager
def _profiled(profile: Callable[[types.FrameType, str, Any], None]) -> Iterator[None]:
    """Calls `profile` for all that is called inside; a profiler that could not be put back is left alone."""
    previous: Any = sys.getprofile()
    # Before Python 3.12, that of cProfile is an object that sys.setprofile cannot take.
    if previous is not None and not callable(previous):
        yield
        return
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(previous)


def _hook_on_a_node(where: SourceLine | None) -> LostGradientError:
    return LostGradientError(
        "The model puts a hook on a node of autograd's graph.",
        where=where,
        why="torch.export drops the hook, so gradients would be wrong.",
        hint="write what the hook does as operations, for example x * s + (x * (1 - s)).detach() to scale by s.",
    )


def _lost_gradient(call: _Call, leaves: Sequence[Tensor]) -> LostGradientError | None:
    """An error where the output's gradient reaches a tensor that is not a parameter of the model."""
    own = {id(parameter) for parameter in call.model.parameters()}
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


def _memory(call: _Call, outputs: Sequence[Tensor]) -> StatefulModelError | None:
    """An error where a call changes what the next one computes with, or computes something else than the last one."""
    state, of_python, of_numpy = call.state(), random.getstate(), _numpy_position()
    again = tensors_of(call())
    without_gradients = _without_gradients(call)
    if random.getstate() != of_python or _numpy_position() != of_numpy:
        return _draws(_line_of_draw(call))
    name = first_difference(state, call.state())
    if name is not None:
        return _changes(name, _line_of_change(call, name) or _line_that_changes(call))
    if not _equal(outputs, again):
        return _wanders(line_of_forward(call.model))
    # Without gradients torch may choose another kernel.
    allowed = tolerance(tensor.dtype for tensor in outputs)
    if without_gradients is None or relative_difference([without_gradients], [outputs]) <= allowed:
        return None
    return _asks_for_gradients(line_of_forward(call.model))


def _without_gradients(call: _Call) -> list[Tensor] | None:
    """The outputs under `torch.no_grad`; None where the model fails there, so that no output can be wrong."""
    try:
        with torch.no_grad():
            return tensors_of(call())
    except Exception:
        return None


def _equal(outputs: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
    return len(outputs) == len(again) and all(map(_close, outputs, again))


def _close(a: Tensor, b: Tensor) -> bool:
    between = gap(a, b)
    return between.difference <= _ROUNDING.get(a.dtype, 0.0) * between.scale


def _numpy_position() -> str:
    return str(np.random.get_state())


def _line_of_draw(call: _Call) -> SourceLine | None:
    found: list[SourceLine] = []

    def profile(frame: types.FrameType, event: str, function: Any) -> None:
        drawn = isinstance(getattr(function, "__self__", None), (random.Random, np.random.RandomState))
        if event == "c_call" and drawn and (line := line_of_code(frame)) is not None:
            found.append(line)

    with _profiled(profile):
        call()
    return found[0] if found else None


def _line_that_changes(call: _Call) -> SourceLine | None:
    """The line of the user's own files after which the state has changed."""
    before, lines, found = call.state(), list[SourceLine](), list[SourceLine]()

    def trace(frame: types.FrameType, event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if found or len(lines) > _MOST_LINES or not is_own(file) or file.startswith("<"):
            return None
        if lines and event != "call" and call.state() != before:
            found.append(lines[-1])
        if event == "line":
            lines.append(line_of_frame(frame))
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return found[0] if found else None


def _line_of_change(call: _Call, name: str) -> SourceLine | None:
    """The line that sets the attribute of a module."""
    set_attribute: Callable[..., None] = nn.Module.__setattr__
    found: list[SourceLine] = []
    paths = {id(module): path for path, module in call.model.named_modules()}

    def note(module: nn.Module, attribute: str, value: Any) -> None:
        is_it = f"{paths.get(id(module))}.{attribute}".removeprefix(".") == name
        if is_it and (line := line_of_code(sys._getframe(1))) is not None:
            found.append(line)
        set_attribute(module, attribute, value)

    with replaced(nn.Module, "__setattr__", note):
        call()
    return found[0] if found else None


def _unlike_arrays(where: SourceLine | None) -> UnsupportedOutputError:
    return UnsupportedOutputError(
        "The model returns a sparse, nested or quantized tensor.",
        where=where,
        why="it cannot be split into one part for every sequence.",
        hint="return plain tensors; out[i].to_sparse() makes one of them sparse after the call.",
    )


def _draws(where: SourceLine | None) -> StatefulModelError:
    return StatefulModelError(
        "The model draws random numbers from Python's or NumPy's generator.",
        where=where,
        why="a captured graph keeps the numbers of its capture, for all calls.",
        hint="draw them with torch, as tensors of one number per token, or outside of the model.",
    )


def _wanders(where: SourceLine | None) -> StatefulModelError:
    return StatefulModelError(
        "Two calls of the model on the same tokens, with the same random numbers, give different outputs.",
        where=where,
        why="it computes with something that changes from call to call, of which a captured graph keeps one value.",
        hint="look for counters, generators, files and clocks that forward uses, and move them out of it.",
    )


def _asks_for_gradients(where: SourceLine | None) -> StatefulModelError:
    return StatefulModelError(
        "The model gives other outputs under torch.no_grad().",
        where=where,
        why="a captured graph takes the way through the code that is taken with gradients, for all calls.",
        hint="ask self.training, or an attribute of the model, instead of torch.is_grad_enabled().",
    )


def _changes(name: str, where: SourceLine | None) -> StatefulModelError:
    return StatefulModelError(
        f"A call of the model changes its {name!r}.",
        where=where,
        why="a captured graph keeps the value of its capture, and changes nothing.",
        hint="leave it alone in forward, for example by changing it in the training loop, or in eval mode.",
    )
