"""A model in another mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
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
