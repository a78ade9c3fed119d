"""How a row becomes the arguments of a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tree_compile import plan_rows
from tree_compile.inputs import graph_inputs
from tree_compile.runtime import transfers

CPU = torch.device("cpu")
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8, 9, *tail] for tail in ([1, 2], [3], [])]
WINDOWS = ((4, "tokens"), (4, "ranges"), (4, "last"))


def arguments() -> tuple[object, ...]:
    row = plan_rows(SEQUENCES, min_shared_tokens=1).rows[0]
    return graph_inputs(row, CPU, carries_state=True, windows=WINDOWS)


def test_all_that_goes_to_the_device_goes_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def counted(values: np.ndarray, device: torch.device) -> Tensor:
        copies.append(values.size)
        return torch.from_numpy(values).to(device)

    monkeypatch.setattr(transfers, "to_device", counted)
    found = arguments()
    # Segments, the ranges of windows and the number of positions are read on the host.
    sent = [value for place, value in enumerate(found) if isinstance(value, Tensor) and place not in (1, 10)]
    assert copies == [sum(value.numel() for value in sent)]


def test_every_argument_has_its_own_memory_from_the_start() -> None:
    tensors = [value for value in arguments() if isinstance(value, Tensor)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors) > 9
    assert all(tensor.storage_offset() == 0 for tensor in tensors)
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
