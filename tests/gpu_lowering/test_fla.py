"""fla's kernels, called for each depth of the tree or once for all, compute what the ops for the CPU do."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.gpu_lowering.scripts import KERNELS, printed_by
from tree_compile.runtime import recurrence_fla, sparse_kernels

FLOAT32_TOLERANCE = 1e-5
DEPTHS = 3
"""Of the row that the script computes."""
ONCE = [
    "chunk_gated_delta_rule_fwd_intra",
    "chunk_fwd_o",
    "recompute_w_u_fwd",
    "chunk_bwd_dv_local",
    "chunk_bwd_dqkwg",
    "prepare_wy_repr_bwd",
]
PER_DEPTH = {
    "chunk_gated_delta_rule_fwd_h": DEPTHS + 1,  # once more for all segments, in the backward pass
    "chunk_gated_delta_rule_bwd_dhu": DEPTHS,
}
CALLS = dict.fromkeys(ONCE, 1) | PER_DEPTH | {"chunk_local_cumsum": 2}  # forward and backward
CASES = {
    "gated_delta_rule": CALLS | {"l2norm": 2},  # of queries and of keys
    "gated_delta_rule from zeros": CALLS,
    "gated_delta_rule by depth": {},
    "kda": {},
    "gla": {},
    "simple_gla": {},
}
"""How often each function of fla is called for the gated delta rule of a whole row, by case of the script."""


def are_installed() -> bool:
    found = [importlib.util.find_spec(name) is not None for name in ("fla", "triton")]
    return all(found) or (KERNELS / "fla").is_dir()


@pytest.mark.skipif(not are_installed(), reason="fla-core and triton are not installed: make test does")
def test_kernels_over_a_tree_equal_the_ops_for_the_cpu():
    found = printed_by("fla_in_interpreter.py", packages=KERNELS)
    assert {case: calls for case, (_, _, calls) in found.items()} == CASES
    for difference, told, _ in found.values():
        assert difference < FLOAT32_TOLERANCE
        assert len(told) == 2
        assert all("first derivatives only" in error for error in told)


@pytest.mark.parametrize(
    ("cuda", "capability", "triton", "work"),
    [
        ("12.8", (8, 0), "3.5.0", True),
        ("12.8", (9, 0), "3.3.1", True),
        ("12.8", (9, 0), "3.4.0", False),
        ("12.8", (9, 0), "3.7.0+git1a2b3c4", False),
        ("12.8", (9, 0), "3.7.1", True),
        (None, (9, 4), "3.4.0", True),
    ],
)
def test_kernels_are_left_out_where_triton_compiles_them_wrongly(monkeypatch, cuda, capability, triton, work):
    found = {"fla": True, "triton": True, "tilelang": None}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    # The module alone says its version: it may have been installed as pytorch-triton.
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert recurrence_fla._work_here.__wrapped__(torch.device("cuda")) is work


@pytest.mark.parametrize(("version", "known"), [("0.6.0", True), ("0.6.3rc1", True), ("0.5.1", False), ("0.60", False)])
def test_functions_inside_of_fla_are_called_in_versions_where_they_are_known(monkeypatch, version, known):
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__version__=version))
    assert recurrence_fla._parts_are_known.__wrapped__() is known


@pytest.mark.parametrize(
    ("cuda", "capability", "work"), [("12.8", (9, 0), True), ("12.8", (8, 9), False), (None, (9, 0), False)]
)
def test_sparse_kernels_are_for_hopper_alone(monkeypatch, cuda, capability, work):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert sparse_kernels._work_here.__wrapped__(torch.device("cuda")) is work
