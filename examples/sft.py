"""Fine-tunes a small model on the bundled rollouts: `python examples/sft.py`, half a minute on two cores.

A batch is all attempts at two tasks, so that what attempts have in common is computed once. A worker plans the next
batch meanwhile. Every row has a forward and a backward pass of its own; the gradients add up to that of the batch.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch.utils.data import DataLoader

from tree_compile import Sample, losses, treecompile, treecompile_collate
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.rollouts import BUNDLED, BYTE_VOCABULARY, read_rollouts

ATTEMPTS = 8
ROW_TOKENS = 8_192


def tasks() -> list[list[Sample]]:
    """All attempts at each task. The loss is taken on what the assistant wrote."""
    samples = [Sample(rollout.tokens, rollout.trainable) for rollout in read_rollouts(BUNDLED)]
    return [samples[first : first + ATTEMPTS] for first in range(0, len(samples), ATTEMPTS)]


def train(steps: int, backend: str) -> list[float]:
    """Takes some steps; the loss of each."""
    torch.manual_seed(0)
    model = Dense(DenseConfig(vocab_size=BYTE_VOCABULARY, width=64, layers=2, heads=2, kv_heads=1, hidden=176))
    tree_model = treecompile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    collate = treecompile_collate(row_tokens=ROW_TOKENS)
    loader = DataLoader(tasks(), 2, shuffle=True, collate_fn=collate, num_workers=1, persistent_workers=True)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    found = []
    for step, planned in zip(range(1, steps + 1), epochs, strict=False):
        loss = 0.0
        for out in tree_model.rows(planned):
            of_row = losses.sft(out, normaliser="per_token")
            of_row.backward()
            loss += of_row.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"step {step}: loss {loss:.3f}, gradient {norm:.2f}, {planned.input_tokens:,} tokens in, "
            f"{planned.packed_tokens:,} computed in {len(planned.rows)} rows"
        )
        found.append(loss)
    return found


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--backend", default="inductor", help='"eager" computes without torch.compile')
    options = parser.parse_args()
    train(options.steps, options.backend)


if __name__ == "__main__":
    main()
