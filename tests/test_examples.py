"""The examples run as their commands say, in short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs an example in this process, and returns what it printed."""

    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setattr("sys.argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(pattern, text)]


def test_fine_tuning_lowers_its_loss_and_computes_fewer_tokens(run):
    printed = run("sft.py", "--steps", "2", "--backend", "eager")
    first, last = numbers(r"loss ([\d.]+)", printed)
    assert last < first
    given, computed = (numbers(rf"([\d,]+) {what}", printed) for what in ("tokens in", "computed"))
    assert all(2 * few < many for few, many in zip(computed, given, strict=True))


def test_preferences_are_learned(run):
    printed = run("dpo.py", "--epochs", "4", "--backend", "eager")
    found = numbers(r"loss ([\d.]+)", printed)
    assert found == sorted(found, reverse=True)
    assert found[0] < 0.6931  # log 2, where both sides are as likely as they were
    assert numbers(r"accuracy (\d+)%", printed)[-1] > 80


def test_trainer_writes_a_model_that_transformers_reads(run, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs the package accelerate")
    printed = run("trainer.py", "--steps", "1", "--backend", "eager", "--folder", str(tmp_path / "trained"))
    assert "read again" in printed
    assert numbers(r"'eval_loss': '([\d.]+)'", printed)[0] < numbers(r"'loss': '([\d.]+)'", printed)[0]


def test_trl_trains_with_a_tree_model(run):
    pytest.importorskip("trl", reason="the example needs the package trl")
    printed = run("trl_grpo.py", "--steps", "1", "--backend", "eager")
    (norm,), (_reward,) = (numbers(rf"'{name}': '([\d.]+)'", printed) for name in ("grad_norm", "reward"))
    assert norm > 0


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example_says_how_it_is_run(path):
    assert f"`python examples/{path.name}`" in path.read_text("utf-8").split('"""')[1]
