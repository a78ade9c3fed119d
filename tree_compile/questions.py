"""Code that asks whether it is traced is told what it is told outside of a capture."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import _symbolic_trace

from tree_compile.patches import recoded

_QUESTIONS: tuple[Any, ...] = (
    torch.compiler.is_compiling,
    torch.compiler.is_exporting,
    _symbolic_trace.is_fx_tracing,
)
_LIBRARIES = ("torch", "transformers")
"""Those whose code is written for captures, and computes the same in both ways."""
_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in _LIBRARIES)


@contextlib.contextmanager
def answered_as_outside() -> Iterator[None]:
    """Branches of the user's code are those of the unpacked model, so that a capture sees what they depend on."""
    with contextlib.ExitStack() as stack:
        for question in _QUESTIONS:
            stack.enter_context(recoded(question, _answer(question)))
        yield


def _answer(question: types.FunctionType) -> Callable[[], bool]:
    truth = types.FunctionType(question.__code__, question.__globals__)

    def answer() -> bool:
        # The caller is before the frame of the replacement.
        return _is_for_libraries(sys._getframe(2)) and bool(truth())

    return answer


def _is_for_libraries(frame: types.FrameType | None) -> bool:
    """Whether it is a library that asks, not through one of its own functions that pass the question on."""
    while frame is not None and _is_of_a_library(frame) and frame.f_code.co_name.startswith("is_"):
        frame = frame.f_back
    return frame is None or _is_of_a_library(frame)


def _is_of_a_library(frame: types.FrameType) -> bool:
    return any(folder in frame.f_code.co_filename for folder in _FOLDERS)
