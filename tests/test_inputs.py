"""How a row becomes the arguments of a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tree_compile import plan_rows
from tree_compile.inputs import graph_inputs
from tree_compile.passes.plan_inputs import TREE_INPUTS
from tree_compile.runtime import transfers

CPU = torch.device("cpu")
META = torch.device("meta")
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8, 9, *tail] for tail in ([1, 2], [3], [])]
WINDOWS = ((4, "tokens"), (4, "ranges"), (4, "last"))


NAMES = [
    "ids", "segments", "position", "subtree_end", "length",
    *TREE_INPUTS.values(), *(f"windows_{field}" for _, field in WINDOWS),
]  # fmt: skip


def arguments(device: torch.device = CPU) -> tuple[object, ...]:
    row = plan_rows(SEQUENCES, min_shared_tokens=1).rows[0]
    return graph_inputs(row, device, carries_state=True, windows=WINDOWS)


def test_what_operators_read_on_the_host_stays_there() -> None:
    named = zip(NAMES, arguments(META), strict=True)
    on_host = [name for name, value in named if not isinstance(value, Tensor) or value.device == CPU]
    assert on_host == ["segments", "length", "chunk_parent", "windows_ranges"]


def test_all_that_goes_to_the_device_goes_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def counted(values: np.ndarray, device: torch.device) -> Tensor:
        copies.append(values.size)
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(transfers, "to_device", counted)
    sent = [value for value in arguments(META) if isinstance(value, Tensor) and value.device == META]
    assert copies == [sum(value.numel() for value in sent)]


def test_every_argument_has_its_own_memory_from_the_start() -> None:
    tensors = [value for value in arguments() if isinstance(value, Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors) > 9
    assert all(tensor.storage_offset() == 0 for tensor in tensors)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
