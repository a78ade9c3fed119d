"""Random prefix trees for tests, as segment tables."""

from __future__ import annotations

import random

import torch
from torch import Tensor

Spec = tuple[int, list["Spec"]]


def segment_table(forest: list[Spec]) -> Tensor:
    """The table of nested (length, children), in pre-order; at least 2 entries, padded with zeros."""
    table: list[list[int]] = []
    # (node, parent, position); None marks the point after a node's subtree.
    stack: list[tuple[Spec | None, int, int]] = [(spec, -1, 0) for spec in reversed(forest)]
    row = 0
    while stack:
        spec, parent, position = stack.pop()
        if spec is None:
            table[parent][2] = row
            continue
        length, children = spec
        index = len(table)
        table.append([row, row + length, 0, parent, position])
        row += length
        stack.append((None, index, 0))
        stack.extend((child, index, position + length) for child in reversed(children))
    table.extend([0] * 5 for _ in range(2 - len(table)))
    return torch.tensor(table)


def random_forest(rng: random.Random, tokens: int, longest: int, depth: int = 8, branch: int = 3) -> list[Spec]:
    """Trees with about `tokens` tokens in all and segments of 1 to `longest` tokens."""
    left = tokens

    def grow(level: int) -> Spec:
        nonlocal left
        length = rng.randint(1, longest)
        left -= length
        wanted = rng.choice([0, 2, branch]) if level < depth else 0
        return length, [grow(level + 1) for _ in range(wanted) if left > 0]

    forest = []
    while left > 0:
        forest.append(grow(1))
    return forest


def row_tensors(table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """position and subtree_end, int64 [T]; padding rows are roots of their own."""
    position, subtree_end = torch.zeros(tokens, dtype=torch.int64), torch.arange(1, tokens + 1)
    for start, end, last, _, first in table.tolist():
        position[start:end] = torch.arange(first, first + end - start)
        subtree_end[start:end] = last
    return position, subtree_end
