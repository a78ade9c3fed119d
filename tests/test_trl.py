"""TRL's GRPOTrainer with the tree model of examples/trl_grpo.py computes what it computes by itself."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.differential.double import InDouble
from tree_compile.tiny import tiny_model

trl = pytest.importorskip("trl", reason="the example needs the package trl")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "trl_grpo.py"
PROMPTS, COMPLETIONS, KEPT = [20, 20, 18, 18, 25], [3, 6, 1, 0, 4], 6
PAD, LONGEST = 257, 25


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE), run_name="example")


def model() -> nn.Module:
    return tiny_model("qwen3", vocab_size=258).double()


def padded_batch() -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, completions on the right, one of them left out as TRL does with those cut short."""
    draw = torch.Generator().manual_seed(1)
    prompts = {size: torch.randint(0, 256, (size,), generator=draw) for size in sorted(set(PROMPTS))}
    ids, masks = [], []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        answer = torch.randint(0, 256, (completion,), generator=draw)
        sides = (LONGEST - prompt, KEPT - completion)
        ids.append(torch.cat([torch.full((sides[0],), PAD), prompts[prompt], answer, torch.full((sides[1],), PAD)]))
        masks.append(torch.cat([torch.zeros(sides[0]), torch.ones(prompt + completion), torch.zeros(sides[1])]).long())
    return torch.stack(ids), torch.stack(masks)


def computed(method: Any, trainer: Any) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of a loss over both."""
    ids, mask = padded_batch()
    weights = torch.rand(2, len(ids), KEPT, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logprobs, entropy, _ = method(trainer, trainer.model, ids, mask, KEPT, compute_entropy=True)
    kept = mask[:, -KEPT:]
    loss = (weights[0] * logprobs * kept).sum() + (weights[1] * entropy * kept).sum()
    parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, parameters)]


def test_log_probabilities_entropies_and_gradients_are_those_of_trl(example: dict[str, Any], tmp_path: Path) -> None:
    trainer = example["trainer_of"](model(), str(tmp_path), "eager")
    kind = type(trainer)
    with InDouble():
        found = computed(kind._get_per_token_logps_and_entropies, trainer)
        expected = computed(trl.GRPOTrainer._get_per_token_logps_and_entropies, trainer)
    assert found[0].shape == (len(PROMPTS), KEPT)
    plan = trainer._tree_model(trainer.model).plan([ids[mask == 1] for ids, mask in zip(*padded_batch(), strict=True)])
    assert plan.packed_tokens == plan.input_tokens - 20 - 18
    for one, other in zip(found, expected, strict=True):
        # TRL has float32 in its backward pass.
        assert float((one - other).abs().max()) < 1e-6 * float(other.abs().max())


def test_steps_are_those_of_trl(example: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name in ("TreeGRPOTrainer", "GRPOTrainer"):
        own = model()
        # A step of Adam would be as long where a gradient is little more than rounding.
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "disable_tqdm": True}
        trainer = example["trainer_of"](own, str(tmp_path), "eager", **settings)
        if name == "GRPOTrainer":
            trainer.__class__ = trl.GRPOTrainer
        before = [parameter.detach().clone() for parameter in own.parameters()]
        with InDouble():
            trainer.train()
        assert all(not torch.equal(one, other) for one, other in zip(own.parameters(), before, strict=True))
        found.append(([entry["reward"] for entry in trainer.state.log_history if "reward" in entry], own))
    assert found[0][0] == found[1][0]
    assert any(reward > 0 for reward in found[0][0])
    for one, other in zip(found[0][1].parameters(), found[1][1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_what_the_example_is_not_for_is_refused(example: dict[str, Any], tmp_path: Path) -> None:
    trainer = example["trainer_of"](model(), str(tmp_path), "eager")
    ids, mask = padded_batch()
    for more in ({"compute_aux_loss": True}, {"pixel_values": torch.zeros(1)}):
        with pytest.raises(NotImplementedError, match="for text"):
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, KEPT, **more)
