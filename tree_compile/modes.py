"""A model, or torch around it, in another mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from tree_compile.patches import replaced


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        # Not by `model.eval()`: a module's own `train` may do more than what is undone below.
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout keeps everything, in any mode: for this thread, and for modules and functions of torch.nn alike."""

    def keep(input: Tensor, *_args: Any, **_options: Any) -> Tensor:  # noqa: A002
        return input

    with ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(replaced(functional, name, keep))
        yield


@contextmanager
def without_hooks_on_saved_tensors() -> Iterator[None]:
    """Hooks that a caller has put around are not called: a capture has tensors without values."""

    def same(tensor: Tensor) -> Tensor:
        return tensor

    with ExitStack() as stack:
        # Only where there are any: compiled code is compiled again for hooks.
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            stack.enter_context(saved_tensors_hooks(same, same))
        yield
