"""A row as the arguments of a rewritten graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tree_compile.passes.plan_inputs import TREE_INPUTS
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import READ_ON_HOST, tree_of_segments
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.transfers import send
from tree_compile.runtime.windows import windows_of_row

FEWEST_TOKENS = 2
"""torch.compile makes a program of its own for sizes 0 and 1, and torch.export assumes at least 2."""


def graph_inputs(
    row: Row, device: torch.device, *, carries_state: bool, windows: Sequence[tuple[int, str]]
) -> tuple[Any, ...]:
    """All arguments of a rewritten graph for one row; `carries_state` and `windows` as in `Rewritten`."""
    inputs = _row_arguments(row, max((window for window, _ in windows), default=0))
    tree = _tree_arguments(row) if carries_state else []
    return _on_device([*inputs, *tree, *_window_arguments(row, windows)], device)


def _row_arguments(row: Row, least: int) -> list[Any]:
    """The arguments of every graph, arrays for the device and what is read on the host; tables of `least` positions."""
    inputs = [_padded(values)[None] for values in row.inputs.values()]
    rows = np.arange(len(row.tokens), max(len(row.tokens), FEWEST_TOKENS)) + 1
    subtree_end = np.concatenate([row.subtree_end, rows])
    length = max(int(row.position.max()) + 1, FEWEST_TOKENS, least)
    return [*inputs, torch.from_numpy(_padded(row.segments)), _padded(row.position), subtree_end, length]


def _tree_arguments(row: Row) -> list[Any]:
    """The arguments that follow where the graph has layers that carry a state, in the order of TREE_INPUTS."""
    tree = tree_of_segments(row.segments, row.parent, FEWEST_TOKENS)
    fields = [(name, getattr(tree, name)) for name in TREE_INPUTS.values()]
    return [tensor if name in READ_ON_HOST else tensor.numpy() for name, tensor in fields]


def _window_arguments(row: Row, fields: Sequence[tuple[int, str]]) -> list[Any]:
    """The arguments that follow where the graph pools windows: fields of `WindowTables`, each with its window."""
    tables = {window: windows_of_row(row, window, FEWEST_TOKENS) for window in dict(fields)}
    arrays = [(name, getattr(tables[window], name)) for window, name in fields]
    return [torch.from_numpy(array) if name == "ranges" else array for name, array in arrays]


def _on_device(arguments: Sequence[Any], device: torch.device) -> tuple[Any, ...]:
    """The arguments with the arrays among them sent to a device; tensors and numbers stay where they are."""
    sent = iter(send([argument for argument in arguments if isinstance(argument, np.ndarray)], device))
    return tuple(next(sent) if isinstance(argument, np.ndarray) else argument for argument in arguments)


def _padded(values: np.ndarray[Any, Any]) -> IntArray:
    """With zeros at the end where there are few, int64."""
    missing = max(0, FEWEST_TOKENS - len(values))
    return np.pad(values.astype(np.int64, copy=False), ((0, missing), *[(0, 0)] * (values.ndim - 1)))
