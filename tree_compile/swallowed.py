"""What a capture cannot follow is refused also where the model's own `try` catches the error."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch._subclasses import fake_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from tree_compile.errors import RefusedModelError
from tree_compile.passes.source import is_users
from tree_compile.patches import replaced

_OF_A_CAPTURE = (
    GuardOnDataDependentSymNode,
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
    RefusedModelError,
)
"""Errors that no call of the model outside of a capture meets."""


@contextlib.contextmanager
def nothing_swallowed() -> Iterator[None]:
    """Raises at its end the first error of a capture that the model has caught."""
    made: list[Exception] = []
    with contextlib.ExitStack() as stack:
        for kind in _OF_A_CAPTURE:
            stack.enter_context(replaced(kind, "__init__", _noting(kind.__init__, made)))
        yield
    for error in made:
        if _came_to_the_model(error):
            raise error


def _noting(make: Callable[..., None], made: list[Exception]) -> Callable[..., None]:
    def note(error: Exception, *args: Any, **others: Any) -> None:
        make(error, *args, **others)
        made.append(error)

    return note


def _came_to_the_model(error: Exception) -> bool:
    """An error that torch itself catches has no frame of the model in its trace."""
    return any(is_users(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))
