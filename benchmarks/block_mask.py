"""Block masks of trees for flex_attention: python benchmarks/block_mask.py. Runs on a CPU alone.

Median milliseconds of `tree_block_mask` for a row that is new, for tiles of 64 and of 128 rows, beside torch's
`create_block_mask`, which computes all pairs: compiled, since otherwise it holds them in memory, and for the shorter
rows. *lists* is the part that is always computed on the CPU; the tables are filled in where the attention is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from attention import Spec, segment_table
from helpers.timing import keep_freed_memory
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from tree_compile.runtime.block_mask import NARROW_TILE, TILE, block_lists, tree_block_mask

ROUNDS = 9
LONGEST_FOR_TORCH = 32_768


def forest(prompts: int) -> list[Spec]:
    """A prompt, branches of it, and nine segments for each in all: 736 tokens."""
    return [(160, [(64, [(64, [])] * 8)])] * prompts


def rows() -> list[tuple[int, Tensor]]:
    """Row lengths with the segments in them; about 1,600 in the longest."""
    return [(32_768, segment_table(forest(44))), (131_072, segment_table(forest(160)))]


def milliseconds(step: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median time of a step, after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:]) * 1e3


def per_token(table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """position and subtree_end, int64 [T]; padding rows are roots of their own."""
    lengths = table[:, 1] - table[:, 0]
    position, subtree_end = torch.zeros(tokens, dtype=torch.int64), torch.arange(1, tokens + 1)
    used = int(lengths.sum())
    position[:used] = torch.arange(used) + (table[:, 4] - table[:, 0]).repeat_interleave(lengths)
    subtree_end[:used] = table[:, 2].repeat_interleave(lengths)
    return position, subtree_end


def measure(tokens: int, table: Tensor, tile: int, with_torch: bool) -> None:
    """Prints one line."""
    position, subtree_end = per_token(table, tokens)

    def lists() -> None:
        block_lists.cache_clear()
        block_lists(table.numpy().tobytes(), tokens, 0, 0, tile, subtree_end.device)

    def whole() -> None:
        block_lists.cache_clear()
        tree_block_mask(table, position, subtree_end, 0, 0, tile)

    compiled, mask_mod = (
        torch.compile(create_block_mask),
        tree_block_mask(table, position, subtree_end, 0, 0, tile).mask_mod,
    )

    def theirs() -> None:
        compiled(mask_mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=tile)

    other = f"{milliseconds(theirs, 3):19.1f}" if with_torch and tokens <= LONGEST_FOR_TORCH else f"{'-':>19}"
    times = f"{milliseconds(lists):10.1f}{milliseconds(whole):10.1f}{other}"
    print(f"{tokens:>9,}{len(table):>10,}{tile:>6}{times}", flush=True)


def main() -> None:
    """Measures every row with both tiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-torch", action="store_true", help="leave create_block_mask out, which takes minutes")
    with_torch = not parser.parse_args().without_torch
    torch.set_num_threads(1)
    # As on a GPU, where torch keeps freed memory: otherwise most of the time goes into asking for pages.
    keep_freed_memory()
    print(f"{'tokens':>9}{'segments':>10}{'tile':>6}{'lists ms':>10}{'mask ms':>10}{'create_block_mask':>19}")
    for tokens, table in rows():
        for tile in (NARROW_TILE, TILE):
            measure(tokens, table, tile, with_torch)


if __name__ == "__main__":
    main()
