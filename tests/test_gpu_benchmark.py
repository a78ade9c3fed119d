"""The GPU benchmark runs on a CPU at small sizes, so that it is right when it meets a GPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tree_compile.models.dense import DenseConfig
from tree_compile.models.hybrid import HybridConfig
from tree_compile.models.sparse_mla import SparseMLAConfig

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    monkeypatch.setitem(sys.modules, "gpu", gpu)
    return gpu


def small(gpu: ModuleType) -> object:
    return gpu.Sizes(
        DenseConfig(layers=1), HybridConfig(layers=4), SparseMLAConfig(layers=1, chosen=40),
        tree_tokens=80, shrink=512, rounds=1, backend="eager",
    )  # fmt: skip


def test_operators_are_those_of_their_definitions(gpu: ModuleType) -> None:
    torch.manual_seed(0)
    found = list(gpu.operators(CPU, small(gpu)))
    assert len(found) == 9
    for result in found:
        assert result["float32"] < 2e-5
        assert 1e-4 < result["bfloat16"] < 0.05


def test_operator_that_is_wrong_is_told(gpu: ModuleType) -> None:
    case = next(iter(gpu.cases(CPU, 80)))
    wrong = dataclasses.replace(case, run=lambda inputs: case.run(inputs) * 1.01)
    assert gpu.greatest_difference(wrong, CPU, torch.float32) > 5e-3


def test_models_are_checked_in_both_precisions(gpu: ModuleType) -> None:
    found = list(gpu.models(CPU, small(gpu)))
    assert [result["dtype"] for result in found] == ["float32", "bfloat16"] * 3
    for result in found:
        assert result["outputs"] < 2 * result["own_rounding"]
        assert 0 < result["own_rounding"] < (0.5 if result["dtype"] == "bfloat16" else 1e-5)


def test_speed_of_every_batch_has_the_compression_of_its_tree(gpu: ModuleType) -> None:
    full = [gpu.plan_rows(batch.sequences, None, 1) for batch in gpu.batches(100)]
    assert [round(plan.input_tokens / plan.packed_tokens, 2) for plan in full] == [2.96, 9.06, 2.0, 1.67]
    assert max(len(tokens) for tokens in gpu.batches(100)[1].sequences) == 16_290
    found = list(gpu.speed(CPU, small(gpu)))
    assert [result["goal"] for result in found] == [None, 0.75, 1.7, None]
    for result in found:
        assert result["eta"] == pytest.approx(result["speed_up"] / result["compression"])
        assert result["tree"]["rows"] <= result["without_sharing"]["rows"]


def test_benchmark_without_a_gpu_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main()
    assert capsys.readouterr().out == "needs a CUDA GPU; nothing was measured\n"
