"""Whether a row is faster by kernels of flash attention or by flex_attention, estimated from its segments.

The unit is the time that flex_attention takes for one pair of one head in tiles without a mask, forward and backward.
All constants are estimates from published throughput and from what the paths read and write; no run on a GPU has
confirmed them. A wrong one costs time and changes no result.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tree_compile.runtime.block_mask import count_tiles
from tree_compile.runtime.flash_calls import Pairs, pairs_of_calls
from tree_compile.runtime.sequences import IntArray

__all__ = ["flash_is_faster"]

_MASKED_PAIR = 1.5
"""A pair in a partial tile, for which the mask function is computed."""
_FLASH_PAIR = 0.7
"""A pair in a call of a flash kernel: they reach more of a GPU's peak than generated ones."""
_QUERY_TILE, _KEY_TILE = 128, 64
"""What a flash kernel rounds the queries and keys of a sequence up to."""
_CALL = 3e7
"""A call, forward and backward, for all heads together: some 30 launches of 5 microseconds, at 5 picoseconds a pair."""
_QUERY = 600.0
"""A query of one head in a call: its rows are gathered, and its output and gradient read, merged and written."""


def flash_is_faster(segments: IntArray, tokens: int, heads: int, tile: int) -> bool:
    """Whether a row's attention is estimated to be faster by kernels of flash attention.

    Args:
        segments: int64 [S, 5], as `tree_attention` takes them, as an array.
        tokens: T, the length of the row with its padding.
        heads: of the queries.
        tile: rows of a tile of flex_attention's block mask.
    """
    return _is_faster(segments.tobytes(), tokens, heads, tile)


@lru_cache(maxsize=16)
def _is_faster(segments: bytes, tokens: int, heads: int, tile: int) -> bool:
    table = np.frombuffer(segments, np.int64).reshape(-1, 5)
    return sum(_cost_of_call(pairs, heads) for pairs in pairs_of_calls(table)) < _cost_of_flex(table, tokens, tile)


def _cost_of_flex(table: IntArray, tokens: int, tile: int) -> float:
    partial, full = count_tiles(table, tokens, tile)
    return tile * tile * (full + _MASKED_PAIR * partial)


def _cost_of_call(of: Pairs, heads: int) -> float:
    queries, keys = (side[:, 1] - side[:, 0] for side in of[:2])
    pairs = _rounded_up(queries, _QUERY_TILE) * _rounded_up(keys, _KEY_TILE)
    if of.causal:
        # What lies above the diagonal is left out, tile by tile.
        pairs = (pairs + _rounded_up(queries, _QUERY_TILE) * _KEY_TILE) // 2
    return _FLASH_PAIR * float(pairs.sum()) + _QUERY * float(queries.sum()) + _CALL / heads


def _rounded_up(counts: IntArray, multiple: int) -> IntArray:
    return -(-counts // multiple) * multiple
