"""Teaches a small model a preference: `python examples/dpo.py`, half a minute on two cores.

Requests are preferred polite. Both sides of a preference share their prompt, and all prompts begin alike. The
log-probabilities of the reference, which is the model before training, are computed once and go along as a payload.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch.utils.data import DataLoader

from tree_compile import Sample, TreeModel, losses, treecompile, treecompile_collate
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.output import TreeOutput

SYSTEM = "You write what a guest says to the waiter. One sentence.\n"
THINGS = ["tea", "water", "a spoon", "the bill", "some bread", "a menu", "more salt", "an ice cream"]
PLACES = ["at the bar", "by the window", "in the garden", "on the terrace"]


def preferences() -> list[tuple[Sample, Sample]]:
    """Pairs of a polite and a rude request, trained on from where the prompt ends."""
    pairs = []
    for number, (thing, place) in enumerate((thing, place) for thing in THINGS for place in PLACES):
        prompt = list(f"{SYSTEM}The guest sits {place} and wants {thing}: ".encode())
        answers = (f"May I have {thing}, please?", f"Give me {thing} now!")
        polite, rude = (prompt + list(answer.encode()) for answer in answers)
        marks = [[place >= len(prompt) for place in range(len(tokens))] for tokens in (polite, rude)]
        sides = zip((polite, rude), marks, (True, False), strict=True)
        pairs.append(tuple(Sample(ids, mark, pair=number, chosen=chosen) for ids, mark, chosen in sides))
    random.Random(0).shuffle(pairs)
    return pairs


@torch.no_grad()
def add_reference(model: TreeModel, pairs: list[tuple[Sample, Sample]]) -> None:
    """Gives every sample the log-probabilities that the model has now; the first token has none."""
    samples = [sample for pair in pairs for sample in pair]
    for sample, logprobs in zip(samples, model(samples).logprobs, strict=True):
        sample.payloads["reference_logprobs"] = [0.0, *logprobs.tolist()]


@torch.no_grad()
def accuracy(out: TreeOutput) -> float:
    """Of the preferences, the part whose chosen side has gained more on the reference than the other."""
    gains: dict[int, float] = {}
    for logprobs, sample in zip(out.logprobs, out.samples.values(), strict=True):
        gain = (logprobs - torch.tensor(sample.payloads["reference_logprobs"][1:]))[sample.is_trained[1:]].sum()
        sign = 1 if sample.payloads["chosen"] else -1
        gains[sample.payloads["pair"]] = gains.get(sample.payloads["pair"], 0.0) + sign * gain.item()
    return sum(gain > 0 for gain in gains.values()) / len(gains)


def train(epochs: int, backend: str) -> tuple[list[float], float]:
    """Trains; the loss of every step, and the accuracy on pairs that were left out."""
    torch.manual_seed(0)
    model = Dense(DenseConfig(vocab_size=256, width=64, layers=2, heads=2, kv_heads=1, hidden=176))
    tree_model = treecompile(model, min_shared_tokens=16, backend=backend)
    pairs = preferences()
    add_reference(tree_model, pairs)
    held_out, rest = pairs[:8], pairs[8:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collate = treecompile_collate(min_shared_tokens=16)
    found = []
    for epoch in range(1, epochs + 1):
        for planned in DataLoader(rest, 8, shuffle=True, collate_fn=collate):
            loss = losses.dpo(tree_model(planned), beta=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        right = accuracy(tree_model([sample for pair in held_out for sample in pair]))
        shares = planned.input_tokens / planned.packed_tokens
        print(
            f"epoch {epoch}: loss {found[-1]:.3f}, accuracy {right:.0%} held out, {shares:.1f} tokens in per computed"
        )
    return found, right


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--backend", default="inductor", help='"eager" computes without torch.compile')
    options = parser.parse_args()
    train(options.epochs, options.backend)


if __name__ == "__main__":
    main()
