"""fla's kernels, one call for each depth of the tree, compute what the ops for the CPU do."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.gpu_lowering.scripts import KERNELS, printed_by
from tree_compile.runtime import recurrence_fla, sparse_kernels

FLOAT32_TOLERANCE = 1e-5


def are_installed() -> bool:
    found = [importlib.util.find_spec(name) is not None for name in ("fla", "triton")]
    return all(found) or (KERNELS / "fla").is_dir()


@pytest.mark.skipif(not are_installed(), reason="fla-core and triton are not installed: make test does")
def test_kernels_over_a_tree_equal_the_ops_for_the_cpu():
    found = printed_by("fla_in_interpreter.py", packages=KERNELS)
    assert found.keys() == {"gated_delta_rule", "kda", "gla", "simple_gla"}
    for difference, told in found.values():
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


@pytest.mark.parametrize(
    ("cuda", "capability", "work"), [("12.8", (9, 0), True), ("12.8", (8, 9), False), (None, (9, 0), False)]
)
def test_sparse_kernels_are_for_hopper_alone(monkeypatch, cuda, capability, work):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert sparse_kernels._work_here.__wrapped__(torch.device("cuda")) is work
