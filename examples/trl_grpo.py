"""TRL's GRPO with a tree model: `python examples/trl_grpo.py`, half a minute on two cores.

It needs `pip install -e '.[examples]'`. One method of GRPOTrainer is overridden: that which computes log-probabilities
of a padded batch. The completions of a prompt share it, so the tree model computes each prompt once. What comes back
is in TRL's padded layout, and all else is TRL's: generation, rewards, advantages, the loss.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tree_compile import TreeModel, treecompile
from tree_compile.tiny import tiny_model

PROMPTS = [
    "Write lower-case letters, as many as you can, and nothing else. Begin: ",
    "Now again, more of them, please: ",
]


class TreeGRPOTrainer(GRPOTrainer):
    """A GRPOTrainer of text models, in one process.

    Args:
        *arguments: as of GRPOTrainer.
        tree_options: keyword arguments of `treecompile`.
        **others: as of GRPOTrainer.
    """

    def __init__(self, *arguments: Any, tree_options: dict[str, Any] | None = None, **others: Any) -> None:
        super().__init__(*arguments, **others)
        if self.accelerator.num_processes > 1:
            raise NotImplementedError("gradients of several processes are reduced by a wrapper that is passed by here")
        self._tree_options = tree_options or {}
        self._tree_models: dict[nn.Module, TreeModel] = {}

    def _tree_model(self, model: nn.Module) -> TreeModel:
        """That of the policy or of the reference; the parameters are those of the model itself."""
        model = self.accelerator.unwrap_model(model)
        if model not in self._tree_models:
            self._tree_models[model] = treecompile(model, **self._tree_options)
        return self._tree_models[model]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probabilities and entropies [batch, logits_to_keep] of the completions; 0 on padding."""
        if compute_aux_loss or any(value is not None for value in images.values()):
            raise NotImplementedError("this is for text, without the load-balancing loss of experts")
        sequences = [ids[mask == 1] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        with self.accelerator.autocast():
            found = self._tree_model(model)(sequences).at_temperature(self.temperature)
            # Asked for first, so that the head is computed once for both.
            entropy = found.entropy if compute_entropy else None
            kept = attention_mask[:, -logits_to_keep:] == 1
            return _padded(found.logprobs, kept), None if entropy is None else _padded(entropy, kept), None


def _padded(values: Any, kept: Tensor) -> Tensor:
    """The last values of every sequence [len - 1] where the batch has its completion, `kept` [batch, length]."""
    ends = [own[len(own) - count :] for own, count in zip(values, kept.sum(1).tolist(), strict=True)]
    flat = torch.cat(ends)
    return flat.new_zeros(kept.shape).masked_scatter(kept, flat)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are bytes, with one for padding and one for the end."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def letters(completions: list[str], **_: Any) -> list[float]:
    """The reward: how much of a completion is lower-case letters."""
    return [sum("a" <= sign <= "z" for sign in text) / max(len(text), 1) for text in completions]


def trainer_of(model: nn.Module, folder: str, backend: str, **arguments: Any) -> TreeGRPOTrainer:
    """A trainer on PROMPTS, 8 completions each."""
    # TRL switches gradient checkpointing off and on for generation, and a model that changes is captured again.
    settings: dict[str, Any] = {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 24, "temperature": 0.9,
        "learning_rate": 3e-3, "logging_steps": 1, "report_to": [], "bf16": False, "use_cpu": True,
        "output_dir": folder, "save_strategy": "no", **arguments,
    }  # fmt: skip
    return TreeGRPOTrainer(
        model, letters, GRPOConfig(**settings), processing_class=byte_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        tree_options={"min_shared_tokens": 16, "backend": backend},
    )  # fmt: skip


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--backend", default="inductor", help='"eager" computes without torch.compile')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("qwen3", vocab_size=258)
        trainer_of(model, folder, options.backend, max_steps=options.steps).train()


if __name__ == "__main__":
    main()
