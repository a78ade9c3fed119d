"""Where a node of a captured graph comes from: the line of the user's model."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import traceback
import types
from collections.abc import Sequence

import torch
from torch import fx, nn

from tree_compile import errors
from tree_compile.errors import SourceLine

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?[^\n]*(?:\n +(?!File ")(?P<code>[^\n]+))?'
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_MODELS = os.path.join(_PACKAGE, "models", "")
"""Models that come with this package are as those of a user."""
_STANDARD = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost frame of the node's stack trace that is in the model, as `line_of_trace`."""
    return line_of_trace(node.meta.get("stack_trace") or "")


@functools.cache
def is_users(file: str) -> bool:
    """Whether `file` is neither torch's nor ours."""
    is_ours = _PACKAGE in file and _MODELS not in file
    return not is_ours and _TORCH not in file and "<eval_with_key>" not in file


@functools.cache
def is_own(file: str) -> bool:
    """Whether `file` is the user's own: not that of an installed package or of Python either."""
    return is_users(file) and _INSTALLED not in file and _STANDARD not in file


def line_of_trace(trace: str) -> SourceLine | None:
    """The innermost frame of a printed stack trace that is in the model; None if there is none.

    Frames of torch and of this package are never in the model, nor are those of other packages that the model calls.
    """
    frames = list(_FRAME.finditer(trace))[::-1]
    place = _place_in_model([(frame["file"], frame["function"] or "") for frame in frames])
    if place is None:
        return None
    frame = frames[place]
    return SourceLine(frame["file"], int(frame["line"]), (frame["code"] or "").strip())


def line_of_stack() -> SourceLine | None:
    """The line of the model that is running now, as `line_of_trace`."""
    return line_of_trace("".join(traceback.format_stack()[:-1]))


def frame_of_the_model(innermost: types.FrameType) -> types.FrameType | None:
    """The frame among `innermost` and its callers that `line_of_trace` would choose."""
    frames, current = [innermost], innermost.f_back
    while current is not None:
        frames.append(current)
        current = current.f_back
    place = _place_in_model([(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames])
    return None if place is None else frames[place]


def _place_in_model(frames: Sequence[tuple[str, str]]) -> int | None:
    """Which of the frames (file, function), innermost first, is the model's; None if none is.

    The innermost `forward` says whose code the model is: of a file of an installed package, or of the user's own files.
    """
    users = [place for place, (file, _) in enumerate(frames) if is_users(file)]
    model = next((frames[place][0] for place in users if frames[place][1] == "forward"), "")
    is_models = (lambda file: file == model) if _INSTALLED in model else (lambda file: _INSTALLED not in file)
    return next((place for place in users if is_models(frames[place][0])), users[0] if users else None)


def line_of_frame(frame: types.FrameType) -> SourceLine:
    """The line at which `frame` is."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return SourceLine(file, line, linecache.getline(file, line).strip())


def line_of_code(innermost: types.FrameType) -> SourceLine | None:
    """The line at which the frame of the model is, among `innermost` and its callers."""
    frame = frame_of_the_model(innermost)
    return None if frame is None else line_of_frame(frame)


def line_of_forward(model: nn.Module) -> SourceLine | None:
    """Where the model's `forward` begins."""
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None:
        return None
    text = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return SourceLine(code.co_filename, code.co_firstlineno, text)


def module_path(node: fx.Node) -> str:
    """Dotted path in the user's model of the innermost module that the node was captured in; "" at the top."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    # A capture wraps the model as its own module `model`.
    return str(paths[-1]).removeprefix("model").removeprefix(".") if paths else ""
