"""The GPU benchmark runs on a CPU at small sizes, so that it is right when it meets a GPU."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._dynamo.utils import counters

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
        tree_tokens=120, shrink=512, rounds=1, seconds=1.0, backend="eager",
    )  # fmt: skip


def results(gpu: ModuleType, section: str) -> list[dict]:
    return [result for _, result in gpu.measure([section], CPU, small(gpu))]


def test_operators_are_those_of_their_definitions(gpu: ModuleType) -> None:
    found = results(gpu, "operators")
    assert len({result["operator"] for result in found}) == 9
    # Kernels of flash attention take no float32.
    assert [result["dtype"] for result in found if result["operator"] == "attention, flash"] == ["bfloat16"]
    assert len(found) == 17
    for result in found:
        assert result["ok"]
        assert result["difference"] < (2e-6 if result["dtype"] == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operator_with_one_wrong_token_is_told(gpu: ModuleType, dtype: torch.dtype) -> None:
    case = next(iter(gpu.cases(CPU, gpu.FULL.tree_tokens)))
    depth = torch.tensor(case.run.args[0].position)
    keeps = (torch.arange(len(depth)) != depth.argmax())[:, None]
    assert gpu._operator(case, CPU, dtype)["ok"]
    wrong = dataclasses.replace(case, run=lambda inputs: case.run(inputs) * keeps)
    assert not gpu._operator(wrong, CPU, dtype)["ok"]


def test_models_are_checked_in_both_precisions(gpu: ModuleType) -> None:
    found = results(gpu, "models")
    assert [result["dtype"] for result in found] == ["float32", "bfloat16"] * 3
    for result in found:
        assert result["ok"]
        assert result["flex_outputs"] < 1.5 * result["own_rounding"]
        # There is one way on a CPU.
        assert result["flash_outputs"] is None
        assert 0 < result["own_rounding"] < (0.5 if result["dtype"] == "bfloat16" else 1e-5)


def test_sequences_of_the_models_are_longer_than_what_an_indexer_keeps(gpu: ModuleType) -> None:
    assert {len(tokens) for tokens in gpu._short_sequences()} == {240}
    assert gpu.FULL.sparse.chosen < 128


def test_batches_have_the_compression_that_they_are_named_for(gpu: ModuleType) -> None:
    plans = [gpu.plan_rows(batch.sequences, None, 1) for batch in gpu.batches(100)]
    assert [round(plan.input_tokens / plan.packed_tokens, 2) for plan in plans] == [2.96, 9.06, 2.0, 1.67]
    assert max(len(tokens) for tokens in gpu.batches(100)[1].sequences) == 16_290


def test_speed_of_every_batch_is_that_without_sharing_by_that_of_its_tree(gpu: ModuleType) -> None:
    _, *found = results(gpu, "speed")
    assert [result["way"] for result in found] == ["alone", "flex", "flash", "auto"] * 4
    assert [result["goal"] for result in found if result["way"] == "auto"] == [None, 0.75, 1.7, None]
    for place, result in enumerate(found):
        alone = found[place - place % 4]
        assert result["seconds"] == pytest.approx(sum(result["row_seconds"]))
        assert result["speed_up"] == pytest.approx(alone["seconds"] / result["seconds"])
        assert result["eta"] == pytest.approx(result["speed_up"] / result["compression"])
        assert (result["compression"] == 1) is (result["way"] == "alone")
        assert result["rows"] <= alone["rows"]


def test_rows_take_the_kernels_that_are_asked_for_and_tell_what_auto_takes(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.FlashGraph, "is_faster", lambda _, row: row > 1)
    graph = gpu.FlashGraph.__new__(gpu.FlashGraph)
    for kernels in gpu.KERNELS:
        with gpu.taking(kernels) as asked:
            assert [graph.is_faster(row) for row in (1, 2)] == [kernels == "flash"] * 2
        assert asked == [False, True]


def test_auto_takes_for_each_row_what_it_is_told(gpu: ModuleType) -> None:
    flex, flash = gpu.Timed([1.0, 2.0], 3, 7, [False, True]), gpu.Timed([4.0, 8.0], 2, 9, [False, True])
    assert gpu._by_row(flex, flash) == gpu.Timed([1.0, 8.0], 2, 9, [False, True])


@pytest.mark.parametrize(("compiling", "expected"), [(0, [0, 1]), (1, [1, 2]), (3, None)])
def test_round_in_which_something_was_compiled_is_not_timed(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, compiling: int, expected: list[int] | None
) -> None:
    rounds: list[int] = []

    def seconds(*_: object) -> float:
        rounds.append(len(rounds))
        counters["stats"]["unique_graphs"] += rounds[-1] < compiling
        return rounds[-1]

    monkeypatch.setattr(gpu, "_seconds", seconds)
    arguments = torch.nn.Module(), [None], CPU, dataclasses.replace(small(gpu), rounds=2)
    if expected is None:
        with pytest.raises(RuntimeError, match="compiled"):
            gpu._rounds(*arguments)
    else:
        assert gpu._rounds(*arguments) == [[number] for number in expected]


def test_batch_that_takes_long_is_timed_once(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_seconds", lambda *_: 1.0)
    for seconds, rounds in ((-1.0, 1), (1e9, 3)):
        sizes = dataclasses.replace(small(gpu), rounds=3, seconds=seconds)
        assert len(gpu._rounds(torch.nn.Module(), [None], CPU, sizes)) == rounds


def failing(gpu: ModuleType) -> Iterator[object]:
    """A section of two lines, of which the first is an error."""

    def run() -> dict:
        raise torch.OutOfMemoryError("too much\nof it")

    yield gpu.Task({"operator": "large", "dtype": "float32"}, run)
    yield gpu.Task({"operator": "small", "dtype": "float32"}, lambda: {"difference": 0.5})


def test_error_is_a_result_and_the_others_are_kept(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(gpu.SECTIONS, "operators", lambda *_: failing(gpu))
    assert gpu.write(gpu.measure(["operators"], CPU, small(gpu)), "NVIDIA H200") == 1
    written = json.loads((tmp_path / "results" / "gpu-nvidia-h200.json").read_text())
    assert written["versions"]["torch"] is not None
    large, little = written["operators"]
    assert large["error"] == "OutOfMemoryError: too much"
    assert little["difference"] == 0.5
    assert "OutOfMemoryError: too much" in capsys.readouterr().out


def test_results_are_written_before_the_next_is_found(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)

    def interrupted() -> Iterator[tuple[str, dict]]:
        yield "operators", {"operator": "small", "dtype": "float32", "difference": 0.5}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gpu.write(interrupted(), "GPU")
    assert json.loads((tmp_path / "gpu-gpu.json").read_text())["operators"][0]["difference"] == 0.5


def test_nothing_is_begun_after_the_latest_time(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LATEST", -1.0)
    monkeypatch.setitem(gpu.SECTIONS, "operators", lambda *_: failing(gpu))
    assert ["not begun" in result["error"] for result in results(gpu, "operators")] == [True, True]


@pytest.mark.parametrize(("seconds", "status"), [(1.0, 0), (2.0, 1)])
def test_missed_goal_is_a_failure(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: float, status: int
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    (agents, half_shared), alone = gpu.batches(100, 512)[1:3], gpu.Timed([3.0], 1, 0, [])
    timed = gpu.Timed([seconds], 1, 0, [])
    plan = gpu.plan_rows(half_shared.sequences, None, 1)
    result = {"batch": "half", "way": "auto"} | gpu._goal(half_shared, plan, timed, alone)
    assert gpu.write([("speed", result)], "GPU") == status
    # The goal of the other one is of the speed-up that is left of its compression.
    assert not gpu._goal(agents, gpu.plan_rows(agents.sequences, None, 1), timed, alone)["ok"]


def test_benchmark_without_a_gpu_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main() == 0
    assert capsys.readouterr().out == "needs a CUDA GPU; nothing was measured\n"
