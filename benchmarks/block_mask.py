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

import numpy as np
import torch
from helpers.timing import keep_freed_memory
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import create_block_mask

from tree_compile import Row, plan_rows
from tree_compile.runtime.block_mask import NARROW_TILE, TILE, block_lists, tree_block_mask

ROUNDS = 9
LONGEST_FOR_TORCH = 32_768


def sequences_of(prompts: int) -> list[NDArray[np.int64]]:
    """For each prompt of 160 tokens two branches of 64, and four ends of 64 for each of them: 800 tokens."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(prompts):
        prompt = rng.integers(0, 1 << 30, 160)
        for _ in range(2):
            branch = np.append(prompt, rng.integers(0, 1 << 30, 64))
            sequences += [np.append(branch, rng.integers(0, 1 << 30, 64)) for _ in range(4)]
    return sequences


def rows() -> list[Row]:
    """Rows of two lengths, with padding; about 1,600 segments in the longer."""
    sizes = ((40, 32_768), (146, 131_072))
    return [plan_rows(sequences_of(prompts), tokens, 1, pad_rows=True).rows[0] for prompts, tokens in sizes]


def milliseconds(step: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median time of a step, after one that warms up."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:]) * 1e3


def measure(row: Row, tile: int, with_torch: bool) -> None:
    """Prints one line."""
    tables = torch.from_numpy(row.segments), torch.from_numpy(row.position), torch.from_numpy(row.subtree_end)
    tokens = len(row.position)

    def lists() -> None:
        block_lists.cache_clear()
        block_lists(row.segments.tobytes(), tokens, 0, 0, tile, torch.device("cpu"))

    def whole() -> None:
        block_lists.cache_clear()
        tree_block_mask(*tables, 0, 0, tile)

    compiled = torch.compile(create_block_mask)
    mask_mod = tree_block_mask(*tables, 0, 0, tile).mask_mod

    def theirs() -> None:
        compiled(mask_mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=tile)

    other = f"{milliseconds(theirs, 3):19.1f}" if with_torch and tokens <= LONGEST_FOR_TORCH else f"{'-':>19}"
    times = f"{milliseconds(lists):10.1f}{milliseconds(whole):10.1f}{other}"
    print(f"{tokens:>9,}{len(row.segments):>10,}{tile:>6}{times}", flush=True)


def main() -> None:
    """Measures every row with both tiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-torch", action="store_true", help="leave create_block_mask out, which takes minutes")
    with_torch = not parser.parse_args().without_torch
    torch.set_num_threads(1)
    # As on a GPU, where torch keeps freed memory: otherwise most of the time goes into asking for pages.
    keep_freed_memory()
    print(f"{'tokens':>9}{'segments':>10}{'tile':>6}{'lists ms':>10}{'mask ms':>10}{'create_block_mask':>19}")
    for row in rows():
        for tile in (NARROW_TILE, TILE):
            measure(row, tile, with_torch)


if __name__ == "__main__":
    main()
