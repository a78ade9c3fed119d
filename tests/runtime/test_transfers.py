"""What reads the plan on the host, and what is kept on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.differential.trees import random_sequences
from tree_compile import plan_rows
from tree_compile.runtime import (  # noqa: F401 - their operators
    block_mask,
    depth_calls,
    flash_attention,
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
    calls = depth_calls.depth_calls(torch.from_numpy(np.pad(row.segments, ((0, 2), (0, 0)))), torch.device("cpu"))
    assert sorted(calls.rows.tolist()) == list(range(row.length))
    parts = zip(calls.depths, calls.rows.split([call.tokens for call in calls.depths]), strict=True)
    ends: list[int] = []
    for depth, (call, rows) in enumerate(parts):
        offsets = call.packed.offsets
        starts = rows[offsets[:-1]].tolist()
        above = [ends[parent] for parent in call.parents.tolist()] if depth else [-1] * len(starts)
        assert row.parent[starts].tolist() == above
        assert torch.equal(offsets, call.offsets_on_cpu)
        ends = rows[offsets[1:] - 1].tolist()


def test_segments_are_cut_into_chunks_of_their_own() -> None:
    offsets, chunks, chunk_offsets = depth_calls._packed(np.array([0, 1, 65, 130, 260]))
    assert offsets.tolist() == [0, 1, 65, 130, 260]
    assert chunks.tolist() == [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2]]
    assert chunk_offsets.tolist() == [0, 1, 2, 4, 7]


def test_tables_of_a_row_are_those_of_its_depths_one_after_the_other() -> None:
    row = plan_rows([[1] * 70, [1] * 3 + [2] * 65 + [5], [1] * 3 + [2] * 65 + [3], [4] * 64], min_shared_tokens=1).rows[
        0
    ]
    calls = depth_calls.depth_calls(torch.from_numpy(row.segments), torch.device("cpu"))
    tables = [call.packed for call in calls.depths]
    assert len(tables) == 3
    assert torch.equal(calls.packed.chunks[:, 1], torch.cat([table.chunks[:, 1] for table in tables]))
    for of_all, by_depth in [
        (calls.packed.offsets, [table.offsets for table in tables]),
        (calls.packed.chunk_offsets, [table.chunk_offsets for table in tables]),
    ]:
        assert torch.equal(of_all.diff(), torch.cat([table.diff() for table in by_depth]))


def test_tables_that_are_sent_in_one_copy_have_their_shapes_and_their_own_memory() -> None:
    arrays = [np.arange(6).reshape(2, 3), np.empty(0, np.int64), np.arange(5)]
    found = send(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in found] == [array.tolist() for array in arrays]
    assert all(tensor.storage_offset() == 0 for tensor in found)
    assert to_device(arrays[0], torch.device("meta")).device.type == "meta"
