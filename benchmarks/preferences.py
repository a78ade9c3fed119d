"""A step on preference pairs against the unpacked model, on one CPU thread: python benchmarks/preferences.py.

A decoder of 4 layers, 256 wide, with a vocabulary of 4,096; pairs with a prompt of 1,024 tokens and two responses of
256, float32, DPO, forward and backward, medians of interleaved rounds of processor time. Two ways to train unpacked
are measured: sequence by sequence with log_softmax over all logits, and the tree model without sharing. `ideal` is
tokens computed by tokens in, (P + 2R) / (2P + 2R).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from helpers.timing import seconds_in_turn

from tree_compile import Sample, losses, treecompile
from tree_compile.models.dense import Dense, DenseConfig

PROMPT, RESPONSE, VOCABULARY, TARGET = 1_024, 256, 4_096, 1.1
Step = Callable[[], None]


def samples_of(pairs: int) -> list[Sample]:
    """Two responses for every prompt."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for pair in range(pairs):
        prompt = torch.randint(VOCABULARY, (PROMPT,), generator=generator)
        for chosen in (True, False):
            tokens = torch.cat([prompt, torch.randint(VOCABULARY, (RESPONSE,), generator=generator)])
            trained = torch.arange(len(tokens)) >= PROMPT
            samples.append(
                Sample(tokens, trained, reference_logprobs=torch.zeros(len(tokens)), pair=pair, chosen=chosen)
            )
    return samples


def plain_step(model: Dense, samples: list[Sample]) -> None:
    """DPO as a script without packing has it: one pair at a time."""
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        margins = []
        for sample in (chosen, rejected):
            logprobs = model(sample.tokens[None])[0, PROMPT - 1 : -1].log_softmax(-1)
            margins.append(logprobs.gather(1, sample.tokens[PROMPT:, None]).sum())
        (-F.logsigmoid(0.1 * (margins[0] - margins[1])) * 2 / len(samples)).backward()


def tree_step(model: Dense, samples: list[Sample], min_shared_tokens: int) -> Step:
    """The same by the tree model, one pair in a row."""
    row_tokens = 2 * (PROMPT + RESPONSE) if min_shared_tokens > PROMPT else PROMPT + 2 * RESPONSE
    tree_model = treecompile(model, row_tokens, min_shared_tokens, backend="eager", self_check=False)
    counts = losses.counts_of(samples)
    pairs = [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def step() -> None:
        for pair in pairs:
            losses.dpo(tree_model(pair), counts=counts).backward()

    return step


def measured(pairs: int, rounds: int) -> dict[str, float]:
    """Times of a step, and the ratio against the ideal."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Dense(DenseConfig(vocab_size=VOCABULARY, width=256, layers=4, heads=4, kv_heads=4, hidden=704))
    samples = samples_of(pairs)
    steps: list[Step] = [
        tree_step(model, samples, 64), lambda: plain_step(model, samples), tree_step(model, samples, PROMPT + 1),
    ]  # fmt: skip
    packed, plain, unshared = (statistics.median(taken) for taken in seconds_in_turn(steps, rounds))
    ideal = (PROMPT + 2 * RESPONSE) / (2 * (PROMPT + RESPONSE))
    return {
        "pairs": pairs, "packed_s": packed, "unpacked_s": plain, "unshared_s": unshared, "ideal": ideal,
        "ratio": packed / plain, "over_ideal": packed / plain / ideal, "at_most": TARGET,
    }  # fmt: skip


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = measured(options.pairs, options.rounds)
    print(json.dumps(result) if options.json else "  ".join(f"{name} {value:,.3f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
