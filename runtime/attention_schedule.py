"""Which kernel calls compute a row's attention on the CPU: integers only, from the table of segments.

Two kinds of call cover the visible (query, key) pairs, each pair once:

- a *segment call*: all queries of a segment's subtree against the segment's own keys. The queries are contiguous and so
  are the keys; "own tokens causally, descendants fully" is exactly the stock kernel's causal mask.
- a *block call*: up to `BLOCK` consecutive queries, on whatever branches, against all keys that any of them sees, with
  a mask. A key above the block's first row that one of the queries sees is an ancestor of that first row
  (k < first <= q < subtree_end[k]), so one path serves the whole block.

Segment calls are best for long segments, block calls for trees of many short ones. What a block computes in vain is
bounded: a path that gets shorter inside a block must be grown again token by token, so it is O(tokens * BLOCK) in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BLOCK", "Call", "Keys", "Schedule", "schedule"]

BLOCK = 128
_MANY_RANGES = 32

# Costs in units of one (query, key) pair, fitted to forward and backward of the stock kernel at 8 heads of width 64.
_CALL_COST = 600_000.0  # of a call, divided by the number of channels: a pair costs the more, the more channels it has
_MERGE_COST = 20.0  # of a query row in a segment call: its log-sum-exp merge and the kernel's work per row
_CAUSAL_WASTE = 384  # keys beyond the diagonal that a causal call computes for each query, by its tile sizes
_BLOCK_PAIR_COST = 1.25  # of a pair in a block call, which gathers keys and reads a mask
_BLOCK_ROW_COST = 1.15 * BLOCK  # of a query row in a block call: the invisible part of its block

Range = tuple[int, int]
Rows = NDArray[np.int64]


class Segment(NamedTuple):
    """One entry of the segment table; rows are half-open intervals."""

    start: int
    end: int
    subtree_end: int
    parent: int
    position: int


@dataclass(frozen=True)
class Keys:
    """Ascending key rows: as ranges, or as an index where the ranges would be many."""

    count: int
    ranges: tuple[Range, ...]
    index: Tensor | None


class Call(NamedTuple):
    """Query rows [start, end) against `keys`; causal calls are segment calls and need no mask."""

    start: int
    end: int
    keys: Keys
    causal: bool


class Schedule(NamedTuple):
    """The calls of a row, and the int32 tables [tokens] from which block calls make their masks."""

    calls: tuple[Call, ...]
    position: Tensor
    subtree_end: Tensor


def schedule(table: Tensor, window: int, chunk: int, channels: int | None, block: int = BLOCK) -> Schedule:
    """The calls that cover every visible pair once.

    Args:
        table: int64 [S, 5] on the CPU, as `tree_attention` takes it.
        window: as in `tree_attention`.
        chunk: as in `tree_attention`.
        channels: query heads times width, to weigh the two kinds of call: a query may then be in several calls, whose
            results must be merged. None: block calls only, with each query in one.
        block: the most query rows of a block call.

    Raises:
        ValueError: the table is not one of segments.
    """
    if table.dim() != 2 or table.shape[1] != len(Segment._fields) or table.dtype != torch.int64:
        raise ValueError(f"segments must be int64 [S, {len(Segment._fields)}], not {table.dtype} {tuple(table.shape)}")
    return _cached_schedule(table.numpy().tobytes(), window, chunk, channels, block)


# All layers of a model and both directions ask for the same few schedules.
@lru_cache(maxsize=16)
def _cached_schedule(table: bytes, window: int, chunk: int, channels: int | None, block: int) -> Schedule:
    segments = [Segment(*entry) for entry in np.frombuffer(table, np.int64).reshape(-1, 5).tolist()]
    if channels is None:
        calls = _block_calls(segments, 0, window, chunk, block)
    else:
        calls = _mixed_calls(segments, _CALL_COST / channels, block)
    return Schedule(tuple(calls), *_tables(segments))


def _tables(segments: list[Segment]) -> tuple[Tensor, Tensor]:
    tokens = max(segment.end for segment in segments)
    position, subtree_end = np.zeros((2, tokens), np.int32)
    for start, end, last, _, first in segments:
        position[start:end] = np.arange(first, first + end - start)
        subtree_end[start:end] = last
    return torch.from_numpy(position), torch.from_numpy(subtree_end)


def _mixed_calls(segments: list[Segment], call_cost: float, block: int) -> Iterator[Call]:
    """Segment calls from the roots down; block calls for runs of sibling subtrees where those are cheaper."""
    in_blocks = _cheaper_in_blocks(segments, call_cost)
    index = 0
    while index < len(segments):
        segment = segments[index]
        if not in_blocks[index]:
            if segment.start < segment.end:
                yield Call(segment.start, segment.subtree_end, _as_keys(np.arange(segment.start, segment.end)), True)
            index += 1
            continue
        after = _end_of_run(segments, index, in_blocks)
        yield from _block_calls(segments[index:after], segment.position, 0, 0, block)
        index = after


def _cheaper_in_blocks(segments: list[Segment], call_cost: float) -> list[bool]:
    """Whether block calls are the cheaper way for each whole subtree, by the cost constants."""
    in_blocks = [False] * len(segments)
    below_cost, below_pairs = [0.0] * len(segments), [0] * len(segments)
    for index in range(len(segments) - 1, -1, -1):
        start, end, last, parent, _ = segments[index]
        own, rows = end - start, last - start
        if own == 0:
            continue
        pairs = own * (own + 1) // 2 + own * (rows - own) + below_pairs[index]
        by_block = _BLOCK_PAIR_COST * pairs + (_BLOCK_ROW_COST + call_cost / BLOCK) * rows
        computed = own * min(own, own // 2 + _CAUSAL_WASTE) + own * (rows - own)
        by_segment = call_cost + computed + _MERGE_COST * rows + below_cost[index]
        in_blocks[index] = by_block < by_segment
        if parent >= 0:
            below_cost[parent] += min(by_block, by_segment)
            below_pairs[parent] += pairs
    return in_blocks


def _end_of_run(segments: list[Segment], index: int, in_blocks: list[bool]) -> int:
    """One past the last segment of the run of sibling subtrees that starts at `index` and goes in blocks."""
    parent, row = segments[index].parent, segments[index].subtree_end
    after = index + 1
    while after < len(segments):
        segment = segments[after]
        if segment.start == row:
            if segment.parent != parent or not in_blocks[after]:
                break
            row = segment.subtree_end
        after += 1
    return after


def _block_calls(segments: list[Segment], base: int, window: int, chunk: int, block: int) -> Iterator[Call]:
    """Block calls for all rows of consecutive segments; keys at positions below `base` are left out."""
    path: Rows = np.zeros(max(s.position + s.end - s.start for s in segments) - base, np.int64)
    pending: tuple[int, int, int, Rows] | None = None  # first row, end, lowest position, the path above the first row
    for segment in segments:
        row = segment.start
        while row < segment.end:
            position = segment.position + row - segment.start
            if pending is None or row - pending[0] == block:
                if pending is not None:
                    yield _block_call(*pending, base, window, chunk)
                pending = (row, row, position, path[: position - base].copy())
            end = min(segment.end, pending[0] + block)
            path[position - base : position - base + end - row] = np.arange(row, end)
            pending = (pending[0], end, min(pending[2], position), pending[3])
            row = end
    if pending is not None:
        yield _block_call(*pending, base, window, chunk)


def _block_call(start: int, end: int, lowest: int, above: Rows, base: int, window: int, chunk: int) -> Call:
    oldest = max(0, lowest - window + 1) if window else 0
    if chunk:
        oldest = max(oldest, lowest // chunk * chunk)
    return Call(start, end, _as_keys(np.concatenate([above[max(0, oldest - base) :], np.arange(start, end)])), False)


def _as_keys(rows: Rows) -> Keys:
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    if len(breaks) >= _MANY_RANGES:
        return Keys(len(rows), (), torch.from_numpy(rows))
    firsts, lasts = rows[np.r_[0, breaks]], rows[np.r_[breaks, len(rows)] - 1]
    return Keys(len(rows), tuple(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)), None)
