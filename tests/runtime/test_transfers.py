"""What reads the plan on the host, and what is kept on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.differential.trees import random_sequences
from tree_compile import plan_rows
from tree_compile.runtime import (  # noqa: F401 - their operators
    block_mask,
    flash_attention,
    recurrence_fla,
    selective_scan,
    sparse_attention,
    window_attention,
)
from tree_compile.runtime.transfers import send, to_device

ON_HOST = {"segments", "ranges", "parent"}
"""What operators call the tables that they read on the host."""
FOR_THE_CPU = {"tree_compile::tree_attention", "tree_compile::tree_attention_backward"}


def operators() -> list[torch._ops.OpOverload]:
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("tree_compile::")]
    return [getattr(torch.ops.tree_compile, schema.name.removeprefix("tree_compile::")).default for schema in schemas]


def test_operators_that_read_the_tree_on_the_host_are_kept_out_of_cuda_graphs() -> None:
    reading = [op for op in operators() if ON_HOST & {argument.name for argument in op._schema.arguments}]
    tagged = [op.name() for op in reading if torch.Tag.cudagraph_unsafe in op.tags]
    assert len(tagged) >= 8
    assert {op.name() for op in reading} - set(tagged) == FOR_THE_CPU


@pytest.mark.parametrize("seed", range(5))
def test_calls_for_depths_hold_every_token_once_behind_its_parent(seed: int) -> None:
    row = plan_rows(random_sequences(seed, 8), min_shared_tokens=1).rows[0]
    calls = recurrence_fla.depth_calls(torch.from_numpy(np.pad(row.segments, ((0, 2), (0, 0)))), torch.device("cpu"))
    assert sorted(calls.rows.tolist()) == list(range(row.length))
    parts = zip(calls.depths, calls.rows.split([call.tokens for call in calls.depths]), strict=True)
    ends: list[int] = []
    for depth, (call, rows) in enumerate(parts):
        starts = rows[call.offsets[:-1]].tolist()
        above = [ends[parent] for parent in call.parents.tolist()] if depth else [-1] * len(starts)
        assert row.parent[starts].tolist() == above
        assert torch.equal(call.offsets, call.offsets_on_cpu)
        ends = rows[call.offsets[1:] - 1].tolist()


def test_tables_that_are_sent_in_one_copy_have_their_shapes_and_their_own_memory() -> None:
    arrays = [np.arange(6).reshape(2, 3), np.empty(0, np.int64), np.arange(5)]
    found = send(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in found] == [array.tolist() for array in arrays]
    assert all(tensor.storage_offset() == 0 for tensor in found)
    assert to_device(arrays[0], torch.device("meta")).device.type == "meta"
