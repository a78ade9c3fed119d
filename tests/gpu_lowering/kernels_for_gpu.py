"""Lowers what the product runs on a GPU; prints one JSON object, for every case what it became (`lowering.Lowered`).

Arguments: names of cases; without any, all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lowering import graph_of, lowered, lowered_as_traced, on_gpu
from torch import Tensor

from tree_compile.runtime import next_tokens
from tree_compile.runtime.attention import tree_attention
from tree_compile.runtime.causal_convolution import causal_convolution
from tree_compile.runtime.linear_recurrence import linear_attention
from tree_compile.runtime.next_tokens import Asked, States
from tree_compile.runtime.row_tree import CHUNK, RowTree

ROWS = (4096, 1000, 5003)
"""Tokens of the rows that a function is called with, one after the other."""
SHORT_ROWS = (29, 60)
"""As in the comparison of the first call: torch has other kernels for so few queries."""
ATTENTION = ["query", "key", "value", "segments", "position", "subtree_end"]
VOCABULARY = 128_256
CHANNELS = 1024


def attention(heads: int, key_heads: int, width: int, rows: Sequence[int] = ROWS, **options: float) -> dict[str, Any]:
    """Attention over a tree with some of the options of `tree_attention`."""
    function = graph_of(tree_attention, ATTENTION, scale=width**-0.5, **options)
    return lowered(function, partial(attention_inputs, heads, key_heads, width), rows)


def attention_with_sinks(heads: int, key_heads: int, width: int) -> dict[str, Any]:
    """The same with one more logit per head."""
    function = graph_of(tree_attention, [*ATTENTION, "sinks"], scale=width**-0.5)

    def inputs(tokens: int) -> list[Tensor]:
        return [*attention_inputs(heads, key_heads, width, tokens), on_gpu(heads, trained=True)]

    return lowered(function, inputs, ROWS)


def attention_inputs(heads: int, key_heads: int, width: int, tokens: int) -> list[Tensor]:
    """The tensors of `ATTENTION` for a row; longer rows have more segments."""
    query, key, value = (on_gpu(1, count, tokens, width, trained=True) for count in (heads, key_heads, key_heads))
    segments = torch.empty(max(2, tokens // 100), 5, dtype=torch.int64)
    return [query, key, value, segments, *(on_gpu(tokens, dtype=torch.int64) for _ in range(2))]


def convolution() -> dict[str, Any]:
    """A short convolution over a tree, with an activation behind it."""

    def function(values: Tensor, weight: Tensor, bias: Tensor, *tree: Tensor) -> Tensor:
        return F.silu(causal_convolution(values, weight, bias, RowTree(*tree)))

    def inputs(tokens: int) -> list[Tensor]:
        values = on_gpu(1, tokens, CHANNELS, trained=True)
        return [values, on_gpu(CHANNELS, 4, trained=True), on_gpu(CHANNELS, trained=True), *tree_of(tokens)]

    return lowered(function, inputs, ROWS)


def recurrence() -> dict[str, Any]:
    """Linear attention with a decay over a tree, by chunks and torch's own operations.

    The delta rule has the same pieces and a triangular system, and takes inductor several times as long.
    """

    def function(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, *tree: Tensor) -> Tensor:
        return linear_attention(query, key, value, decay, RowTree(*tree))[0]

    def inputs(tokens: int) -> list[Tensor]:
        query, key, value = (on_gpu(1, tokens, 8, 128, trained=True) for _ in range(3))
        return [query, key, value, on_gpu(1, tokens, 8, dtype=torch.float32, trained=True), *tree_of(tokens)]

    return lowered(function, inputs, ROWS)


def tree_of(tokens: int) -> RowTree:
    """Fake tensors in the shapes of the tree of a row."""
    chunks = -(-tokens // CHUNK) + 7
    on_device = (on_gpu(count, dtype=torch.int64) for count in (tokens, chunks * CHUNK, tokens))
    on_cpu = (torch.empty(shape, dtype=torch.int64) for shape in ((chunks,), (tokens // 100, 5)))
    return RowTree(*on_device, *on_cpu)


def logprobs() -> dict[str, Any]:
    """Log-probabilities and entropies of two chunks of states, and the gradients of the states and the head's weight.

    The product runs them without torch.compile. Where labels are divided among the chunks it reads numbers from the
    device, which fake tensors do not have; here every state has one label.
    """
    next_tokens._chunks = lambda states, asked: [(part, part) for part in states.chunks(len(asked.rows))]

    def step(hidden: Tensor, weight: Tensor, rows: Tensor, owner: Tensor, labels: Tensor) -> Sequence[Tensor]:
        states = States(hidden, [weight], lambda part, values: F.linear(part, values[0]), VOCABULARY, weight.dtype)
        found = next_tokens.next_tokens(states, Asked(rows, owner, labels), 0.7, entropy=True)
        return torch.autograd.grad(found.logprobs.sum() + found.entropy.sum(), [hidden, weight])

    def inputs(tokens: int) -> list[Tensor]:
        weight = on_gpu(VOCABULARY, CHANNELS, trained=True)
        return [on_gpu(tokens, CHANNELS, trained=True), weight, *(on_gpu(tokens, dtype=torch.int64) for _ in range(3))]

    return lowered_as_traced(step, inputs, 1000)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "tree": partial(attention, 32, 8, 128),
    "window": partial(attention, 4, 2, 64, window=500),
    "softcap": partial(attention, 4, 2, 64, softcap=30.0),
    "sinks": partial(attention_with_sinks, 4, 2, 64),
    "wide heads": partial(attention, 4, 2, 256),
    "short rows": partial(attention, 8, 1, 256, SHORT_ROWS),
    "convolution": convolution,
    "recurrence": recurrence,
    "logprobs": logprobs,
}


def main() -> None:
    """Lowers the cases that are named."""
    print(json.dumps({name: CASES[name]() for name in sys.argv[1:] or CASES}))


if __name__ == "__main__":
    main()
