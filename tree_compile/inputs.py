"""A row as the arguments of a rewritten graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tree_compile.passes.plan_inputs import TREE_INPUTS
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import tree_of_segments
from tree_compile.runtime.windows import windows_of_row

_FEWEST_TOKENS = 2
"""torch.compile makes a program of its own for sizes 0 and 1, and torch.export assumes at least 2."""


def graph_inputs(
    row: Row, device: torch.device, *, carries_state: bool, windows: Sequence[tuple[int, str]]
) -> tuple[Any, ...]:
    """All arguments of a rewritten graph for one row; `carries_state` and `windows` as in `Rewritten`."""
    inputs = row_inputs(row, device, max((window for window, _ in windows), default=0))
    tree = tree_arguments(row, device) if carries_state else ()
    return (*inputs, *tree, *window_arguments(row, device, windows))


def row_inputs(row: Row, device: torch.device, least: int = 0) -> tuple[Any, ...]:
    """The arguments of a rewritten graph for one row, in its order; tables are made for `least` positions at least."""
    inputs = [_on_device(values, device)[None] for values in row.inputs.values()]
    position = _on_device(row.position, device)
    rows = np.arange(len(row.tokens), max(len(row.tokens), _FEWEST_TOKENS)) + 1
    subtree_end = torch.from_numpy(np.concatenate([row.subtree_end, rows])).to(device, non_blocking=True)
    length = max(int(row.position.max()) + 1, _FEWEST_TOKENS, least)
    return (*inputs, _segments(row), position, subtree_end, length)


def tree_arguments(row: Row, device: torch.device) -> tuple[Tensor, ...]:
    """The arguments that follow where the graph has layers that carry a state, in the order of TREE_INPUTS."""
    tree = tree_of_segments(row.segments, row.parent, _FEWEST_TOKENS).to(device)
    return tuple(getattr(tree, name) for name in TREE_INPUTS.values())


def window_arguments(row: Row, device: torch.device, fields: Sequence[tuple[int, str]]) -> tuple[Tensor, ...]:
    """The arguments that follow where the graph pools windows: fields of `WindowTables`, each with its window."""
    tables = {window: windows_of_row(row, window, _FEWEST_TOKENS) for window in dict(fields)}
    tensors = {(window, name): torch.from_numpy(getattr(tables[window], name)) for window, name in fields}
    return tuple(
        tensor if name == "ranges" else tensor.to(device, non_blocking=True) for (_, name), tensor in tensors.items()
    )


def _segments(row: Row) -> Tensor:
    missing = max(0, _FEWEST_TOKENS - len(row.segments))
    return torch.from_numpy(np.pad(row.segments, ((0, missing), (0, 0))))


def _on_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    missing = max(0, _FEWEST_TOKENS - len(values))
    padded = np.pad(values.astype(np.int64, copy=False), ((0, missing), *[(0, 0)] * (values.ndim - 1)))
    return torch.from_numpy(padded).to(device, non_blocking=True)
