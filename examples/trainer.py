"""Fine-tunes a model of transformers with its Trainer: `python examples/trainer.py`, half a minute on two cores.

It needs `pip install -e '.[examples]'`. Trainer's own loop does the rest: accumulation, clipping, logs, checkpoints.
Four things are said to it: batches are planned, the loss is divided by what is counted over all batches of a step,
evaluation has no labels beside the samples, and what is saved is the model itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tree_compile import Sample, TreeModel, losses, treecompile, treecompile_collate
from tree_compile.rollouts import BUNDLED, BYTE_VOCABULARY, read_rollouts
from tree_compile.tiny import tiny_model

ATTEMPTS = 8
plan = treecompile_collate()


def collate(elements: Sequence[Any]) -> dict[str, Any]:
    """A batch in the form that Trainer takes."""
    return {"planned": plan(elements)}


class TreeTrainer(Trainer):
    """A Trainer of a tree model on samples."""

    loss_is_scaled_for_ga = True

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of a step, and what is counted over them, on all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum(gather_object([batch["planned"].rows[0].counts for batch in batches]), losses.Counts())

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The part of the step's loss that a batch has. Ranks take the mean of their gradients, hence the factor."""
        out = model(inputs["planned"])
        loss = losses.sft(out, normaliser="per_token", counts=num_items_in_batch) * self.args.world_size
        return (loss, out) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        """The loss of a batch in an evaluation."""
        with torch.no_grad():
            return self.compute_loss(model, inputs) / self.args.world_size, None, None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Writes what `from_pretrained` reads, beside what Trainer writes."""
        tree_model, self.model = self.model, self.model.unpacked
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = tree_model


def trainer_of(tree_model: TreeModel, data: Sequence[Any], **arguments: Any) -> TreeTrainer:
    """A trainer on what `treecompile_collate` takes."""
    settings = TrainingArguments(remove_unused_columns=False, report_to=[], use_cpu=True, **arguments)
    return TreeTrainer(tree_model, settings, data_collator=collate, train_dataset=data, eval_dataset=data[:1])


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--backend", default="inductor", help='"eager" computes without torch.compile')
    parser.add_argument("--folder", type=Path, default=Path("trained"), help="where the model is written")
    options = parser.parse_args()
    model = tiny_model("llama", vocab_size=BYTE_VOCABULARY, max_position_embeddings=4_096)
    samples = [Sample(rollout.tokens, rollout.trainable) for rollout in read_rollouts(BUNDLED)]
    tasks = [samples[first : first + ATTEMPTS] for first in range(0, len(samples), ATTEMPTS)]
    trainer = trainer_of(
        treecompile(model, backend=options.backend), tasks, output_dir=str(options.folder), max_steps=options.steps,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, max_grad_norm=1.0, learning_rate=3e-3,
        logging_steps=1, save_steps=options.steps, eval_strategy="steps", eval_steps=options.steps,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    again = AutoModelForCausalLM.from_pretrained(options.folder)
    print(f"written to {options.folder}, and read again: {again.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
