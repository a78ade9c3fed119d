"""Block masks for flex_attention, made on the host from segment intervals and never from [T, T] entries."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["TILE", "tree_block_mask"]

TILE = 128

_TABLES = tuple(f"{kind}_{part}" for kind in ("kv", "full_kv", "q", "full_q") for part in ("num_blocks", "indices"))

Tiles = NDArray[np.bool_]
Counts = NDArray[np.int64]


def tree_block_mask(segments: Tensor, position: Tensor, subtree_end: Tensor, window: int, chunk: int) -> BlockMask:
    """The mask of `tree_attention` for flex_attention; can be traced by torch.compile with a dynamic row length.

    Args:
        segments: int64 [S, 5] on the CPU, as `tree_attention` takes it.
        position: int64 [T] on the device of the attention.
        subtree_end: int64 [T] on the same device.
        window: as in `tree_attention`.
        chunk: as in `tree_attention`.

    Returns:
        A block mask of T by T with tiles of `TILE` rows. Without window and chunk it lists exactly the tiles that
        `create_block_mask` lists; with them it may list a few empty tiles more, and a few full ones as partial.
    """
    length, *tables = block_tables(segments, subtree_end, window, chunk)

    # Padding rows are roots of their own in `subtree_end`; `length` hides them even from themselves.
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        seen = (key <= query) & (query < subtree_end[key]) & (query < length[0])
        if window:
            seen = seen & (position[query] - position[key] < window)
        if chunk:
            seen = seen & (position[query] // chunk == position[key] // chunk)
        return seen

    tokens = subtree_end.shape[0]
    return BlockMask(
        seq_lengths=(tokens, tokens),
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visible,
        **dict(zip(_TABLES, tables, strict=True)),
    )


# A custom op, since its sizes are known from T alone while its values are computed on the host. Its results are always
# new tensors: compiled code may reuse their memory.
@torch.library.custom_op("tree_compile::block_tables", mutates_args=())
def block_tables(segments: Tensor, subtree_end: Tensor, window: int, chunk: int) -> list[Tensor]:
    """Tokens without padding [1], then counts [1, 1, n] and tile indices [1, 1, n, n], int32, n = ceil(T / TILE).

    In this order: partial tiles by row, full tiles by row, partial tiles by column, full tiles by column.
    """
    tokens, device = subtree_end.shape[0], subtree_end.device
    return [table.clone() for table in _cached_tables(segments.numpy().tobytes(), tokens, window, chunk, device)]


@block_tables.register_fake
def _(segments: Tensor, subtree_end: Tensor, window: int, chunk: int) -> list[Tensor]:  # noqa: ARG001
    tiles = (subtree_end.shape[0] + TILE - 1) // TILE
    shapes = [(1, 1, tiles), (1, 1, tiles, tiles)] * 4
    return [subtree_end.new_empty(shape, dtype=torch.int32) for shape in [(1,), *shapes]]


# All layers of a model ask for the same few.
@lru_cache(maxsize=4)
def _cached_tables(segments: bytes, tokens: int, window: int, chunk: int, device: torch.device) -> tuple[Tensor, ...]:
    table = np.frombuffer(segments, np.int64).reshape(-1, 5)
    partial, full = tile_kinds(table, tokens, window, chunk)
    tables = [np.array([table[:, 1].max()], np.int32)]
    for tiles in (partial, full, partial.T, full.T):
        tables += _listed(tiles)
    return tuple(torch.from_numpy(array).to(device) for array in tables)


def tile_kinds(table: Counts, tokens: int, window: int, chunk: int) -> tuple[Tiles, Tiles]:
    """Which tiles [n, n], queries first, need the mask entry by entry, and which are visible throughout."""
    pairs = _pairs_below_diagonal(table, tokens)
    some = pairs > 0
    full = np.tril(pairs == TILE * TILE, -1)
    if window or chunk:
        near, within = _position_bounds(table, tokens, window, chunk)
        some, full = some & near, full & within
    return some & ~full, full


def _pairs_below_diagonal(table: Counts, tokens: int) -> Counts:
    """Entries of each tile on or below the diagonal tile in which a key's segment holds or is above the query's.

    Strictly below the diagonal tiles this is the number of visible pairs.
    """
    tiles = (tokens + TILE - 1) // TILE
    edges = np.arange(tiles + 1) * TILE
    pairs = np.zeros((tiles, tiles), np.int64)
    for start, end, last, _, _ in table.tolist():
        if start == end:
            continue
        first, key_stop, query_stop = start // TILE, (end - 1) // TILE + 1, (last - 1) // TILE + 1
        queries = _overlap(edges[first : query_stop + 1], start, last)
        keys = _overlap(edges[first : key_stop + 1], start, end)
        pairs[first:query_stop, first:key_stop] += np.outer(queries, keys)
    return np.tril(pairs)


def _overlap(edges: Counts, start: int, end: int) -> Counts:
    """How many rows of [start, end) lie between each pair of neighbouring edges."""
    inside = np.clip(edges, start, end)
    return np.diff(inside)


def _position_bounds(table: Counts, tokens: int, window: int, chunk: int) -> tuple[Tiles, Tiles]:
    """Tiles in which some pair can be within window and chunk, and tiles in which all pairs are."""
    low, high = _tile_positions(table, tokens)
    queries_low, queries_high = low[:, None], high[:, None]
    near = within = np.ones((len(low), len(low)), bool)
    if window:
        near = near & (queries_low - high < window)
        within = within & (queries_high - low < window)
    if chunk:
        near = near & (queries_low // chunk <= high // chunk) & (queries_high // chunk >= low // chunk)
        within = within & (queries_low // chunk == high // chunk) & (queries_high // chunk == low // chunk)
    return near, within


def _tile_positions(table: Counts, tokens: int) -> tuple[Counts, Counts]:
    """Lowest and highest position in each tile; padding does not count."""
    tiles = (tokens + TILE - 1) // TILE
    low = np.full(tiles * TILE, np.iinfo(np.int64).max // 2)
    high = np.full(tiles * TILE, -1)
    for start, end, _, _, first in table.tolist():
        low[start:end] = high[start:end] = np.arange(first, first + end - start)
    return low.reshape(tiles, TILE).min(1), high.reshape(tiles, TILE).max(1)


def _listed(tiles: Tiles) -> list[NDArray[np.int32]]:
    """Counts [1, 1, n] and ascending indices [1, 1, n, n] of the marked tiles of each row; 0 behind the last."""
    count = tiles.sum(1, dtype=np.int32)
    rows, columns = np.nonzero(tiles)
    indices = np.zeros(tiles.shape, np.int32)
    indices[rows, np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)] = columns
    return [count[None, None], indices[None, None]]
