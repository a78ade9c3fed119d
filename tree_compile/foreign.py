"""What stands in the way of a capture in other libraries' models, changed while it lasts.

Each setting chooses between implementations of the same mathematics, so the captured graph computes what the model
computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import transformer
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction

from tree_compile.experts import loops_over_all_experts
from tree_compile.patches import replaced, setting

_ATTENTION_THAT_TRACES = ("sdpa", "eager")
_EXPERTS_THAT_TRACE = ("grouped_mm", "batched_mm")
_EXPERTS_WITHOUT_DOUBLE = "grouped_mm"
_WITH_CHECKPOINTS = ("transformers", "peft")
_FOR_CHECKPOINTS = ("make_inputs_require_grads", "make_inputs_require_grad")


@contextlib.contextmanager
def capturable(model: nn.Module) -> Iterator[None]:
    """transformers' models with attention and experts in a form that torch.export can trace, and torch's own layers."""
    with contextlib.ExitStack() as changes, plain_checkpoints(model), loops_over_all_experts(model):
        changes.enter_context(replaced(transformer, "_detect_is_causal_mask", _says_causal))
        for config in _configs(model):
            for name, value in _changes(config, model):
                changes.enter_context(setting(config, name, value))
        yield


def _says_causal(_mask: Tensor | None, is_causal: bool | None = None, _size: int | None = None) -> bool:
    """Whether a causal kernel may take the place of the mask: not by looking at its entries, which a graph cannot."""
    return is_causal is True


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def _changes(config: Any, model: nn.Module) -> Iterator[tuple[str, str]]:
    attention = getattr(config, "_attn_implementation", None)
    if attention is not None and attention not in _ATTENTION_THAT_TRACES:
        yield "_attn_implementation_internal", "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
    experts = getattr(config, "_experts_implementation", None)
    if experts is not None and (experts not in _EXPERTS_THAT_TRACE or _fails_in_double(experts, model)):
        yield "_experts_implementation_internal", "batched_mm" if _has_double(model) else "grouped_mm"


def _fails_in_double(experts: str, model: nn.Module) -> bool:
    return experts == _EXPERTS_WITHOUT_DOUBLE and _has_double(model)


def _has_double(model: nn.Module) -> bool:
    return any(parameter.dtype == torch.float64 for parameter in model.parameters())


@contextlib.contextmanager
def experts_of_any_dtype(model: nn.Module) -> Iterator[None]:
    """Experts that transformers would compute by a function without float64, in another way where they need it."""
    with contextlib.ExitStack() as changes:
        for config in _configs(model) if _has_double(model) else ():
            if getattr(config, "_experts_implementation", None) == _EXPERTS_WITHOUT_DOUBLE:
                changes.enter_context(setting(config, "_experts_implementation_internal", "batched_mm"))
        yield


@contextlib.contextmanager
def plain_checkpoints(model: nn.Module) -> Iterator[None]:
    """What the model checkpoints is computed as it is, and once.

    A graph and `torch.autograd.grad` have no use for reentrant ones. On other devices than the CPU any checkpoint is
    computed again in a thread of autograd's, which knows nothing of what is replaced in this one.
    """
    with contextlib.ExitStack() as changes:
        changes.enter_context(replaced(CheckpointFunction, "apply", classmethod(_compute)))
        changes.enter_context(replaced(checkpoint, "_checkpoint_without_reentrant_generator", _keep_all))
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                changes.enter_context(setting(module, "gradient_checkpointing", False))
        yield


@contextlib.contextmanager
def without_gradients_of_embeddings(model: nn.Module) -> Iterator[None]:
    """A model without the hooks by which libraries let gradients come to checkpoints below frozen embeddings.

    They change no output and no gradient of a parameter; a graph has no checkpoints.
    """
    before = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    changed = [(hooks, own) for hooks, own in before if any(map(_is_for_checkpoints, own.values()))]
    for hooks, own in changed:
        for number, hook in own.items():
            if _is_for_checkpoints(hook):
                del hooks[number]
    try:
        yield
    finally:
        for hooks, own in changed:
            # A first call may have put more of them.
            all_hooks = {**own, **hooks}
            hooks.clear()
            hooks.update(all_hooks)


def _is_for_checkpoints(hook: Any) -> bool:
    library = str(getattr(hook, "__module__", "")).partition(".")[0]
    return library in _WITH_CHECKPOINTS and getattr(hook, "__name__", "") in _FOR_CHECKPOINTS


def _compute(_function: type[Function], run: Callable[..., Any], _preserve_random: bool, *args: Any) -> Any:
    return run(*args)


def _keep_all(*_args: Any, **_options: Any) -> Iterator[None]:
    """In the place of what surrounds the computation of a checkpoint that is not reentrant."""
    yield
