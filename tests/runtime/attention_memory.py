"""Prints by how many bytes forward and backward of tree_attention raise the peak of this process.

Arguments: T, then one JSON object of options for each step to take.
"""

from __future__ import annotations

import json
import resource
import sys

import torch

from tests.runtime.trees import segment_table
from tree_compile.runtime.attention import tree_attention


def peak() -> int:
    """Highest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def step(tokens: int, options: dict[str, object]) -> None:
    """One forward and backward of a trunk with fifteen branches of its length, `tokens` rows in all."""
    table = segment_table([(tokens // 16, [(tokens // 16, [])] * 15)])
    inputs = [torch.randn(1, 1, tokens, 8).requires_grad_() for _ in range(3)]
    unused = torch.empty(0)
    out = tree_attention(inputs[0], inputs[1], inputs[2], table, unused, unused, scale=0.3, **options)
    torch.autograd.grad(out.sum(), inputs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokens, *steps = (json.loads(argument) for argument in sys.argv[1:])
    for options in steps:
        step(256, options)  # loads the libraries
    before = peak()
    for options in steps:
        step(tokens, options)
    sys.stdout.write(str(peak() - before))
