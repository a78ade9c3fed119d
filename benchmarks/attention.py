"""Tree attention against unshared per-sequence attention on one CPU thread: python benchmarks/attention.py.

Forward and backward, float32, 8 heads of width 64. For each tree: the time of `tree_attention` over the time of
`scaled_dot_product_attention` on every sequence alone, the ratio that the number of (query, key) pairs allows, and the
ratio of the two. Medians of rounds in turn of processor time, which other programs disturb less than wall time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from helpers.timing import seconds_in_turn
from torch import Tensor

from tree_compile.runtime.attention import tree_attention

HEADS, WIDTH = 8, 64

Spec = tuple[int, list["Spec"]]


@dataclass(frozen=True)
class Case:
    """A tree of (length, children), and the attention that is measured on it."""

    name: str
    forest: list[Spec]
    window: int = 0
    softcap: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether the target applies."""
        return not self.window and not self.softcap


def cases() -> list[Case]:
    """The trees that the target is stated for, and others for information."""
    star: list[Spec] = [(2048, [(512, [])] * 8)]
    fork: list[Spec] = [(1024, [(512, [(128, [])] * 4)] * 4)]
    return [
        Case("2048 -> 8 x 512", star),
        Case("1024 -> 4 x 512 -> 4 x 128", fork),
        Case("2048 -> 8 x 512, window 256", star, window=256),
        Case("2048 -> 8 x 512, softcap 30", star, softcap=30.0),
        Case("2048 -> 256 x 8", [(2048, [(8, [])] * 256)]),
        Case("spine of 2000 one-token segments, each with a one-token leaf", [spine(2000)]),
    ]


def spine(length: int) -> Spec:
    """A chain of one-token segments in which every one has a leaf, too."""
    spec: Spec = (1, [])
    for _ in range(length - 1):
        spec = (1, [spec, (1, [])])
    return spec


def segment_table(forest: list[Spec]) -> Tensor:
    """The segments in pre-order, as `tree_attention` takes them."""
    table: list[list[int]] = []
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
    return torch.tensor(table)


def leaf_paths(table: Tensor) -> list[list[tuple[int, int]]]:
    """Row ranges of the sequence that ends at each leaf."""
    segments = table.tolist()
    parents = {segment[3] for segment in segments}
    paths = []
    for leaf in set(range(len(segments))) - parents:
        path, index = [], leaf
        while index >= 0:
            path.append((segments[index][0], segments[index][1]))
            index = segments[index][3]
        paths.append(path[::-1])
    return paths


def pair_ideal(table: Tensor) -> float:
    """Pairs that causal attention computes on the tree over pairs that it computes on all sequences alone."""
    rows = table[:, 1] - table[:, 0]
    shared = (rows * table[:, 4] + rows * (rows + 1) // 2).sum()
    lengths = torch.tensor([sum(end - start for start, end in path) for path in leaf_paths(table)])
    return float(shared / (lengths * (lengths + 1) // 2).sum())


def shared_step(case: Case, table: Tensor, inputs: list[Tensor], grad: Tensor) -> Callable[[], None]:
    """Forward and backward of the tree as one row."""
    query, key, value = inputs
    position, subtree_end = torch.empty(0), torch.empty(0)  # only CUDA reads them

    def step() -> None:
        out = tree_attention(
            query,
            key,
            value,
            table,
            position,
            subtree_end,
            scale=WIDTH**-0.5,
            window=case.window,
            softcap=case.softcap,
        )
        torch.autograd.grad(out, inputs, grad)

    return step


def unshared_step(table: Tensor, inputs: list[Tensor], grad: Tensor, limit: int) -> Callable[[], None]:
    """Forward and backward of plain causal attention on up to `limit` sequences, each alone."""
    batches = []
    for path in itertools.islice(leaf_paths(table), limit):
        rows = torch.cat([torch.arange(*part) for part in path])
        alone = [tensor.detach()[:, :, rows].requires_grad_() for tensor in inputs]
        batches.append((alone, grad[:, :, rows].contiguous()))

    def step() -> None:
        for alone, upper in batches:
            out = torch.nn.functional.scaled_dot_product_attention(alone[0], alone[1], alone[2], is_causal=True)
            torch.autograd.grad(out, alone, upper)

    return step


def measure(case: Case, rounds: int, limit: int = 8) -> dict[str, Any]:
    """Seconds of both ways and their ratio; many sequences are measured by the first `limit` and scaled up."""
    table = segment_table(case.forest)
    tokens = int(table[:, 2].max())
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, tokens, WIDTH)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape, generator=generator)
    steps = [shared_step(case, table, inputs, grad), unshared_step(table, inputs, grad, limit)]
    shared, unshared = map(statistics.median, seconds_in_turn(steps, rounds))
    lengths = [sum(end - start for start, end in path) for path in leaf_paths(table)]
    unshared *= sum(n * n for n in lengths) / sum(n * n for n in lengths[:limit])
    ratio, ideal = shared / unshared, pair_ideal(table)
    return {
        "case": case.name,
        "segments": len(table),
        "shared_ms": shared * 1e3,
        "unshared_ms": unshared * 1e3,
        "ratio": ratio,
        "ideal": ideal,
        "over_ideal": ratio / ideal,
        "target": 1.1 if case.plain and len(table) < 100 else None,
    }


def main() -> None:
    """Measure every case and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.json:
        print(f"{'tree':62}{'tree ms':>9}{'alone ms':>10}{'ratio':>8}{'ideal':>8}{'over ideal':>12}{'at most':>9}")
    for case in cases():
        result = measure(case, arguments.rounds)
        if arguments.json:
            print(json.dumps(result), flush=True)
            continue
        numbers = "{shared_ms:9.1f}{unshared_ms:10.1f}{ratio:8.3f}{ideal:8.3f}{over_ideal:12.2f}".format(**result)
        print(f"{case.name:62}{numbers}{result['target'] or '-':>9}", flush=True)


if __name__ == "__main__":
    main()
