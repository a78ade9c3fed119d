"""What torch.export would lose without a word, or only notice at a loss for words, is refused during a capture."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from tree_compile.errors import CaptureError, LostGradientError, StatefulModelError, TokenMixingError
from tree_compile.passes.source import is_users, line_of_stack
from tree_compile.patches import original_of, recoded, replaced

_INITIAL_SEED: Any = torch.random.initial_seed
_SWITCHES_OF_AUTOCAST = ("set_autocast_enabled", "set_autocast_dtype", "set_autocast_cpu_enabled")
_PLAIN_DERIVATIVES = {("transformers.models.bloom.modeling_bloom", "GeLUFunction")}
"""Functions whose hand-written backward is the derivative of their forward, so that it may be dropped."""


@contextlib.contextmanager
def watching(model: nn.Module) -> Iterator[None]:
    """Refuses hooks on gradients and saved tensors, hand-written backwards, recurrent layers, and lost switches.

    Lost are inference mode, and switches of gradients inside of regions with another autocast; refused are also
    questions whose answers change in every step of a training.

    Raises:
        CaptureError: the model switches autocast by something else than `torch.autocast`.
        LostGradientError: the model changes gradients in a way that a captured graph does not keep.
        StatefulModelError: the model asks for the gradient of a tensor, how often it was changed, or for the seed.
        TokenMixingError: a recurrent layer carries a state from token to token.
    """
    _require_no_backward_hooks(model)
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    handles = [module.register_forward_pre_hook(_refuse_recurrent) for module in recurrent]
    entered: list[bool] = []
    try:
        with (
            contextlib.ExitStack() as switches,
            replaced(Tensor, "register_hook", _refuse_hook),
            replaced(Tensor, "register_post_accumulate_grad_hook", _refuse_hook),
            replaced(Function, "apply", classmethod(_refuse_own_backward(original_of(Function.__dict__["apply"])))),
            replaced(saved_tensors_hooks, "__enter__", _refuse_saved_tensors_hooks(saved_tensors_hooks.__enter__)),
            replaced(torch.inference_mode, "__enter__", _refuse_inference_mode(torch.inference_mode.__enter__)),
            replaced(torch.autocast, "__enter__", _noted(torch.autocast.__enter__, entered)),
            replaced(torch.autocast, "__exit__", _left(torch.autocast.__exit__, entered)),
            replaced(torch.set_grad_enabled, "__init__", _refuse_switch(torch.set_grad_enabled.__init__, entered)),
            replaced(torch.enable_grad, "__enter__", _refuse_switch(torch.enable_grad.__enter__, entered)),
            replaced(Tensor, "grad", _refused_attribute("grad", "the gradient of a tensor")),
            replaced(Tensor, "_version", _refused_attribute("_version", "how often a tensor was changed")),
            recoded(_INITIAL_SEED, _refuse_seed),
        ):
            for name in _SWITCHES_OF_AUTOCAST:
                switches.enter_context(replaced(torch, name, _refuse_switch_of_autocast(getattr(torch, name))))
            yield
    finally:
        for handle in handles:
            handle.remove()


def _require_no_backward_hooks(model: nn.Module) -> None:
    for name, module in model.named_modules():
        require_no_backward_hook(module, name, "a captured graph has no modules, so the hook would not run.")


def require_no_backward_hook(module: nn.Module, name: str, why: str) -> None:
    """Refuses a module with a hook on its backward pass; `name` is empty for the outermost one.

    Raises:
        LostGradientError: it has one.
    """
    if module._backward_hooks or module._backward_pre_hooks:
        kind = type(module).__name__
        raise LostGradientError(
            f"The module {f'{name!r} ({kind})' if name else kind} has a backward hook.",
            why=why,
            hint="remove the hook, or put it on a parameter: parameter.register_hook(…) keeps working.",
        )


def _refuse_hook(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise LostGradientError(
        "The model puts a hook on the gradient of a tensor.",
        where=line_of_stack(),
        why="torch.export drops the hook, so gradients would be wrong.",
        hint="write what the hook does as operations, for example x * s + (x * (1 - s)).detach() to scale by s.",
    )


def _refuse_own_backward(apply: Any) -> Callable[..., Any]:
    def refuse(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _has_plain_derivative(function):
            return apply.__get__(None, function)(*args, **kwargs)
        raise LostGradientError(
            f"The model uses the torch.autograd.Function {function.__name__}.",
            where=line_of_stack(),
            why="torch.export keeps its forward and drops its backward, so gradients would be wrong.",
            hint="make it an operator with torch.library.custom_op and register_autograd, and give that a token rule.",
        )

    return refuse


def _has_plain_derivative(function: type[Function]) -> bool:
    return function.__module__.startswith("torch.") or (function.__module__, function.__name__) in _PLAIN_DERIVATIVES


def _refuse_inference_mode(enter: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(context: torch.inference_mode) -> Any:
        if not context.mode:
            return enter(context)
        raise LostGradientError(
            "The model switches to torch.inference_mode.",
            where=line_of_stack(),
            why="torch.export drops the switch, so gradients would flow where the model stops them.",
            hint="use torch.no_grad().",
        )

    return refuse


def _noted(enter: Callable[..., Any], entered: list[bool]) -> Callable[..., Any]:
    """Notes for every region with its own autocast whether there are gradients where it begins."""

    def enter_and_note(context: torch.autocast) -> Any:
        result = enter(context)
        entered.append(torch.is_grad_enabled())
        return result

    return enter_and_note


def _left(leave: Callable[..., Any], entered: list[bool]) -> Callable[..., Any]:
    def leave_and_forget(context: torch.autocast, *error: Any) -> Any:
        # A region that was entered before is not noted.
        del entered[-1:]
        return leave(context, *error)

    return leave_and_forget


def _refuse_switch_of_autocast(switch: Callable[..., None]) -> Callable[..., None]:
    """`torch.autocast` comes to it too."""

    def refuse(*args: Any, **others: Any) -> None:
        if not is_users(sys._getframe(2).f_code.co_filename):
            return switch(*args, **others)
        raise CaptureError(
            "The model switches autocast itself.",
            where=line_of_stack(),
            why="torch.export follows torch.autocast alone, so the graph would compute in another dtype.",
            hint="with torch.autocast(device, enabled=False): …",
        )

    return refuse


def _refuse_switch(switch: Callable[..., Any], entered: list[bool]) -> Callable[..., Any]:
    """`torch.no_grad` comes to `torch.set_grad_enabled` too, on its way in and out."""

    def refuse(context: Any, mode: bool = True) -> Any:
        if not entered or bool(mode) == entered[-1]:
            return switch(context) if isinstance(context, torch.enable_grad) else switch(context, mode)
        raise LostGradientError(
            f"The model switches gradients {'on' if mode else 'off'} inside of torch.autocast.",
            where=line_of_stack(),
            why="torch.export drops the switch there, so gradients would be wrong.",
            hint="swap the two, with torch.no_grad outside: with torch.no_grad(), torch.autocast(…): …",
        )

    return refuse


def _refused_attribute(name: str, meaning: str) -> property:
    attribute: Any = vars(torch._C.TensorBase)[name]

    def get(tensor: Tensor) -> Any:
        # The caller is before the frame of the replacement.
        if is_users(sys._getframe(2).f_code.co_filename):
            raise _asks_for(meaning)
        return attribute.__get__(tensor)

    return property(get, getattr(attribute, "__set__", None))


def _refuse_seed() -> int:
    if is_users(sys._getframe(2).f_code.co_filename):
        raise _asks_for("the seed of the random numbers")
    return torch.default_generator.initial_seed()


def _asks_for(meaning: str) -> StatefulModelError:
    return StatefulModelError(
        f"The model asks for {meaning}.",
        where=line_of_stack(),
        why="the answer changes from step to step, and a captured graph keeps one.",
        hint="ask for an attribute of the model, which the training loop sets.",
    )


def _refuse_saved_tensors_hooks(enter: Callable[..., Any]) -> Callable[..., Any]:
    """Those of torch's own, as of checkpoints, give back what was saved."""

    def refuse(context: saved_tensors_hooks) -> Any:
        kind = type(context)
        if kind is not saved_tensors_hooks and kind.__module__.startswith("torch."):
            return enter(context)
        raise LostGradientError(
            "The model puts hooks on the tensors that are saved for the backward pass.",
            where=line_of_stack(),
            why="torch.export drops the hooks, so gradients would be wrong where they change what was saved.",
            hint="put them around the call of the tree model instead.",
        )

    return refuse


def _refuse_recurrent(module: nn.Module, _args: Any) -> NoReturn:
    raise TokenMixingError(
        f"The recurrent layer {type(module).__name__} mixes tokens in a way that no rule covers.",
        where=line_of_stack(),
        why="it carries a state from token to token.",
        hint="use an attention, or write the recurrence as an op over the tree (docs/recurrence.md: mixer, "
        "register_mixer).",
    )
