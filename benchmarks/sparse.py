"""Sparse index attention against its dense form on one CPU thread: python benchmarks/sparse.py [--tokens 4096 16384].

A prompt of a quarter of the row with six continuations, an indexer of 32 heads of width 64 that keeps `--chosen` keys,
and attention of 4 heads of width 64, float32. Three things are printed for every row length:

- the pairs of query and key that the indexer scored, counted as they are scored, beside the pairs of the tree. Queries
  whose ancestors are all kept are not scored; they are counted apart, and the sum is that of the tree;
- processor time of selection and attention, forward and backward, over that of the dense form: scores of all pairs of
  the row, masked; top k; scaled_dot_product_attention with a mask of all pairs. It runs in blocks of 256 queries, since
  it would not fit into memory otherwise; all blocks cost the same, and of a row of more than 32 blocks 8 are run;
- the peak of memory above the inputs, and what the scores and the mask of the dense form would take as models write it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_compile.runtime import topk_index
from tree_compile.runtime.sparse_attention import sparse_attention
from tree_compile.runtime.topk_index import tree_topk_index

INDEX_HEADS, INDEX_WIDTH, HEADS, WIDTH = 32, 64, 4, 64
BLOCK, MOST_BLOCKS, SAMPLED = 256, 32, 8


def segment_table(tokens: int) -> Tensor:
    """A prompt of a quarter of the row, then six continuations of equal length."""
    prompt = tokens // 4
    edges = torch.linspace(prompt, tokens, 7).long().tolist()
    rows = [[start, end, end, 0, prompt] for start, end in itertools.pairwise(edges)]
    return torch.tensor([[0, prompt, tokens, -1, 0], *rows])


def pairs_of(segments: Tensor) -> int:
    """Pairs of a token and an ancestor, itself included."""
    return sum(
        (end - start) * position + (end - start) * (end - start + 1) // 2
        for start, end, _, _, position in segments.tolist()
    )


def kept_unscored(segments: Tensor, chosen: int) -> int:
    """Pairs of blocks in which every query keeps all that it sees."""
    return sum(
        (end - start) * above + (end - start) * (end - start + 1) // 2
        for start, end, above in topk_index._blocks(segments)
        if above + end - start <= chosen
    )


class Inputs:
    """Random inputs of an indexer and of an attention."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        self.segments = segment_table(tokens)
        self.index_query = torch.randn(1, tokens, INDEX_HEADS, INDEX_WIDTH)
        self.index_key = torch.randn(1, tokens, INDEX_WIDTH)
        self.index_weights = torch.randn(1, tokens, INDEX_HEADS)
        self.attention = [torch.randn(1, HEADS, tokens, WIDTH, requires_grad=True) for _ in range(3)]

        self.subtree_end = torch.repeat_interleave(self.segments[:, 2], self.segments[:, 1] - self.segments[:, 0])

    def visible(self, rows: slice) -> Tensor:
        """Which keys of the row some queries see, bool [1, n, T]."""
        key = torch.arange(len(self.subtree_end))
        query = key[rows, None]
        return ((key <= query) & (query < self.subtree_end))[None]

    @property
    def index(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and weights of the indexer."""
        return self.index_query, self.index_key, self.index_weights


def counted(select: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What `select` gives, and how many pairs were scored for it."""
    scored, weighed = 0, topk_index._weighed

    def count(scores: Tensor, weights: Tensor) -> Tensor:
        nonlocal scored
        scored += scores.shape[0] * scores.shape[2]
        return weighed(scores, weights)

    topk_index._weighed = count
    try:
        return select(), scored
    finally:
        topk_index._weighed = weighed


def dense_selection(inputs: Inputs, rows: slice, chosen: int) -> Tensor:
    """The selection of some queries as models write it, over all keys of the row."""
    query, key, weights = inputs.index
    scores = torch.matmul(query[:, rows], key.mT.unsqueeze(1)).relu_()
    scores = torch.matmul(weights[:, rows].unsqueeze(-2), scores).squeeze(-2)
    return scores.masked_fill_(~inputs.visible(rows), -torch.inf).topk(chosen, dim=-1).indices


def dense_attention(inputs: Inputs, rows: slice, index: Tensor) -> None:
    """The attention of some queries as models write it, forward and backward, with a mask over all keys of the row."""
    visible = inputs.visible(rows)
    mask = torch.zeros_like(visible).scatter_(-1, index, True) & visible
    query, key, value = inputs.attention
    out = F.scaled_dot_product_attention(query[:, :, rows], key, value, attn_mask=mask.unsqueeze(1), scale=0.1)
    backward(out, inputs)


def dense_seconds(inputs: Inputs, tokens: int, chosen: int) -> dict[str, float]:
    """Processor time of the dense form for the whole row."""
    blocks = [slice(start, min(tokens, start + BLOCK)) for start in range(0, tokens, BLOCK)]
    some = blocks if len(blocks) <= MOST_BLOCKS else blocks[:: len(blocks) // SAMPLED]
    selection = seconds(lambda: [dense_selection(inputs, rows, chosen) for rows in some])
    lists = [dense_selection(inputs, rows, chosen) for rows in some]
    attention = seconds(lambda: [dense_attention(inputs, *both) for both in zip(some, lists, strict=True)])
    share = tokens / sum(rows.stop - rows.start for rows in some)
    return {"selection": selection * share, "attention": attention * share}


def seconds(step: Callable[[], Any]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def peak_bytes(step: Callable[[], Any]) -> int:
    """The most resident memory while `step` runs, above that before."""
    ctypes.CDLL(None).malloc_trim(0)
    before, most, done = _resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    done.set()
    watcher.join()
    return most


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def backward(out: Tensor, inputs: Inputs) -> None:
    """Gradients of queries, keys and values."""
    torch.autograd.grad(out.sum(), inputs.attention)


def measure(tokens: int, chosen: int, rounds: int) -> dict[str, Any]:
    """All that is printed of one row length."""
    inputs = Inputs(tokens)

    def select() -> Tensor:
        return tree_topk_index(*inputs.index, inputs.segments, chosen)

    index, scored = counted(select)

    def attend() -> None:
        backward(sparse_attention(*inputs.attention, index, scale=0.1), inputs)

    peaks = {"selection": peak_bytes(select), "attention": peak_bytes(attend)}
    own = [{"selection": seconds(select), "attention": seconds(attend)} for _ in range(rounds)]
    dense = [dense_seconds(inputs, tokens, chosen) for _ in range(rounds)]
    return {
        "tokens": tokens, "chosen": chosen, "pairs of the tree": pairs_of(inputs.segments), "scored": scored,
        "kept without a score": kept_unscored(inputs.segments, chosen), "peak bytes": peaks,
        "seconds": medians(own), "dense seconds": medians(dense),
        "dense bytes": {"selection": tokens**2 * INDEX_HEADS * 4, "attention": tokens**2},
    }  # fmt: skip


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each time."""
    return {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}


def show(result: dict[str, Any]) -> None:
    """Prints one row length."""
    if result["scored"] + result["kept without a score"] != result["pairs of the tree"]:
        raise SystemExit(f"the pairs that were scored are not those of the tree: {result}")
    print(f"\nT = {result['tokens']:,}, {result['chosen']} chosen")
    print(f"  pairs of the tree {result['pairs of the tree']:,}")
    print(f"  scored {result['scored']:,} and kept without a score {result['kept without a score']:,}: equal")
    for what in ("selection", "attention"):
        own, dense = result["seconds"][what], result["dense seconds"][what]
        peak, of_dense = result["peak bytes"][what] / 1e6, result["dense bytes"][what] / 1e6
        print(
            f"  {what} {own:.2f} s, dense {dense:.2f} s, ratio {own / dense:.2f}; "
            f"peak memory {peak:,.0f} MB, dense {of_dense:,.0f} MB"
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384, 65_536])
    parser.add_argument("--chosen", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for tokens in arguments.tokens:
        rounds = 1 if tokens > 8192 else arguments.rounds
        results.append(measure(tokens, arguments.chosen, rounds))
        if not arguments.json:
            show(results[-1])
    if arguments.json:
        print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
