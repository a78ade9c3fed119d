"""transformers' Trainer takes the steps of a plain loop over sequences with the tree model of examples/trainer.py."""

from __future__ import annotations

import copy
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.differential.double import InDouble
from tree_compile import Sample, treecompile
from tree_compile.tiny import tiny_model

pytest.importorskip("accelerate", reason="Trainer needs the package accelerate")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "trainer.py"
RATE, NORM, STEPS = 1e-2, 0.5, 2
SYSTEM = [5, 9, 7, 3, 8] * 14
TASKS = [
    [Sample(SYSTEM + [10 + task, 20 + attempt] * (1 + task + attempt), [0] * 70 + [1, 1] * (1 + task + attempt))
     for attempt in range(3)]
    for task in range(4)
]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE), run_name="example")


def double_model() -> nn.Module:
    return tiny_model("llama").double()


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 1, "max_grad_norm": NORM,
        "gradient_accumulation_steps": len(TASKS), "learning_rate": RATE, "lr_scheduler_type": "constant",
        "optim": "adamw_torch", "logging_steps": 1, "save_steps": STEPS, "disable_tqdm": True, **more,
    }  # fmt: skip


def plain_losses(model: nn.Module) -> list[float]:
    """Steps over the whole data without padding, packing or parts; the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    samples, found = [sample for task in TASKS for sample in task], []
    for _ in range(STEPS):
        terms = []
        for sample in samples:
            tokens = torch.tensor(sample.tokens)
            logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            terms.append(-logprobs[torch.from_numpy(sample.is_trained[1:])])
        loss = torch.cat(terms).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_steps_of_trainer_are_those_of_a_plain_loop_and_what_it_saves_is_the_model(
    example: dict[str, Any], tmp_path: Path
) -> None:
    plain, model = double_model(), double_model()
    before = copy.deepcopy(model.state_dict())
    with InDouble():
        losses = plain_losses(plain)
        trainer = example["trainer_of"](treecompile(model, backend="eager"), TASKS, **arguments(tmp_path))
        trainer.train()
    assert len({len(task[0].tokens) for task in TASKS}) == len(TASKS)  # batches of a step that count differently
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-6)  # Trainer adds losses up in float32
    assert min(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry) > NORM
    for name, value in plain.state_dict().items():
        assert float((value - before[name]).abs().max()) > RATE / 2
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-7, atol=1e-9)
    again = type(model).from_pretrained(tmp_path / f"checkpoint-{STEPS}", dtype=torch.float64)
    assert again.config.hidden_size == model.config.hidden_size
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_trainer_goes_on_from_its_checkpoint_and_evaluates(example: dict[str, Any], tmp_path: Path) -> None:
    def trainer() -> Any:
        settings = arguments(tmp_path, save_steps=1, gradient_accumulation_steps=2, data_seed=3)
        return example["trainer_of"](treecompile(tiny_model("llama"), backend="eager"), TASKS, **settings)

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.state.global_step == STEPS
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value)
    assert resumed.evaluate()["eval_loss"] == pytest.approx(whole.evaluate()["eval_loss"])


def test_trainer_computes_in_bfloat16_where_it_is_told_to(example: dict[str, Any], tmp_path: Path) -> None:
    tree_model, seen = treecompile(tiny_model("llama"), backend="eager"), []
    tree_model.register_forward_hook(lambda _model, _inputs, out: seen.append(out.logits[0].dtype))
    settings = arguments(tmp_path, bf16=True, max_steps=1, save_strategy="no")
    example["trainer_of"](tree_model, TASKS, **settings).train()
    assert seen == [torch.bfloat16] * len(TASKS)
    assert all(parameter.dtype == torch.float32 for parameter in tree_model.parameters())


RANKS = """
import runpy, sys
from pathlib import Path
from tests.test_trainer import EXAMPLE, TASKS, arguments
from tree_compile import treecompile
from tree_compile.tiny import tiny_model

settings = arguments(Path(sys.argv[1]), gradient_accumulation_steps=2, save_strategy="no", ddp_backend="gloo")
trainer = runpy.run_path(str(EXAMPLE), run_name="example")["trainer_of"](
    treecompile(tiny_model("llama"), backend="eager"), TASKS, **settings
)
trainer.train()
if trainer.is_world_process_zero():
    print("FOUND", *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
"""


def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, tmp_path],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (found,) = re.findall(r"FOUND (.*)", done.stdout) or [done.stderr]
    assert [float(loss) for loss in found.split()] == pytest.approx(plain_losses(tiny_model("llama")), rel=1e-5)
