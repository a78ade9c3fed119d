"""`out.logprobs` against log_softmax of all logits, one CPU thread: python benchmarks/logprobs.py [--tokens 16384].

A model of an embedding and a head, so that little else is measured: one sequence, a vocabulary of 32,000, width 256,
float32, forward and backward. Printed are processor time over that of the plain form, the median of interleaved
rounds, and the peak of memory above what is there before a step, each form in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.timing import seconds_in_turn
from torch import Tensor, nn

from tree_compile import treecompile

VOCABULARY, WIDTH = 32_000, 256
TIME_TARGET, MEMORY_TARGET = 1.35, 0.35
Step = Callable[[], None]


class Head(nn.Module):
    """Logits of every token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary]."""
        return self.head(self.embed(ids))


def steps(tokens: int) -> dict[str, Step]:
    """Forward and backward in both forms."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Head()
    tree_model = treecompile(model, backend="eager", self_check=False)
    ids, weights = torch.randint(VOCABULARY, (tokens,)), torch.randn(tokens - 1)

    def in_parts() -> None:
        (tree_model([ids]).logprobs[0] * weights).sum().backward()

    def plain() -> None:
        logprobs = model(ids[None])[0, :-1].log_softmax(-1)
        (logprobs.gather(1, ids[1:, None])[:, 0] * weights).sum().backward()

    return {"in_parts": in_parts, "plain": plain}


def peak_bytes(name: str, tokens: int) -> int:
    """Memory that one step takes above what was there before, in a process of its own."""
    command = [sys.executable, __file__, "--tokens", str(tokens), "--peak", name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak(name: str, tokens: int) -> None:
    """Prints the peak of this process over one step, above what it held before, captured and with gradients."""
    step = steps(tokens)[name]
    step()
    ctypes.CDLL(None).malloc_trim(0)  # else memory that the first step gave back counts as held
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at what is held now
    before = held("VmRSS")
    step()
    print((held("VmHWM") - before) * 1024)


def held(kind: str) -> int:
    """Memory of this process, in units of 1,024 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{kind}:")).split()[1])


def measured(tokens: int, rounds: int) -> dict[str, float]:
    """Time and memory of both forms."""
    peaks = {name: peak_bytes(name, tokens) for name in ("in_parts", "plain")}
    in_parts, plain = (statistics.median(taken) for taken in seconds_in_turn(list(steps(tokens).values()), rounds))
    return {
        "tokens": tokens, "in_parts_s": in_parts, "plain_s": plain,
        "time": in_parts / plain, "time_at_most": TIME_TARGET,
        "in_parts_mb": peaks["in_parts"] / 1e6, "plain_mb": peaks["plain"] / 1e6,
        "memory": peaks["in_parts"] / peaks["plain"], "memory_at_most": MEMORY_TARGET,
    }  # fmt: skip


def main() -> None:
    """Print both ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--peak", choices=("in_parts", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print_peak(options.peak, options.tokens)
        return
    result = measured(options.tokens, options.rounds)
    print(json.dumps(result) if options.json else "  ".join(f"{name} {value:,.2f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
