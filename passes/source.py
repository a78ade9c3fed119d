"""Where a node of a captured graph comes from: the line of the user's model."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

from tree_compile.errors import SourceLine

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)[^\n]*(?:\n +(?!File ")(?P<code>[^\n]+))?')
_NOT_THE_USERS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.join("tree_compile", "capture.py"),
    "<eval_with_key>",
)


def source_line(node: fx.Node) -> SourceLine | None:
    """The innermost frame of the node's stack trace that is neither torch's nor ours; None if there is none."""
    return line_of_trace(node.meta.get("stack_trace") or "")


def is_users(file: str) -> bool:
    """Whether `file` is neither torch's nor ours."""
    return not any(path in file for path in _NOT_THE_USERS)


def line_of_trace(trace: str) -> SourceLine | None:
    """The innermost frame of a printed stack trace that is neither torch's nor ours; None if there is none."""
    users = [frame for frame in _FRAME.finditer(trace) if is_users(frame["file"])]
    if not users:
        return None
    frame = users[-1]
    return SourceLine(frame["file"], int(frame["line"]), (frame["code"] or "").strip())


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that the node was captured in; "" at the top."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1] if paths else ""
