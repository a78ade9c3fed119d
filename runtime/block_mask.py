"""Block masks for flex_attention, made on the host from segment intervals and never from [T, T] entries.

The tiles of a column are one run of rows. Token k is seen by the rows from k to `subtree_end[k]`, without a gap. So
from the diagonal on, a column is needed as far down as the greatest `subtree_end` of its tokens, and visible throughout
as far down as the least. Two numbers per column say all; windows and chunks then only drop tiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tree_compile.runtime.layout import END, POSITION, START, SUBTREE_END
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.transfers import READS_ON_HOST, stream_of, to_device

__all__ = ["NARROW_TILE", "TILE", "block_lists", "count_tiles", "tile_of", "tree_block_mask"]

TILE = 128
NARROW_TILE = 64
_WIDEST_FOR_TILE = 192

_TABLES = tuple(f"{kind}_{part}" for kind in ("kv", "full_kv", "q", "full_q") for part in ("num_blocks", "indices"))

Flags = NDArray[np.bool_]


class Tiles(NamedTuple):
    """Tiles of a mask, by column and then by row: one entry each.

    Attributes:
        row: of queries, int64 [N].
        column: of keys, int64 [N].
        full: whether all of its pairs are visible, bool [N].
    """

    row: IntArray
    column: IntArray
    full: Flags


def tile_of(width: int) -> int:
    """Rows of a tile for heads that are `width` wide.

    flex_attention's own tiles have to divide those of the mask. For heads of up to 192 some GPUs have tiles of 128 rows
    by default. Wider ones do not fit in shared memory like that: there, tiles have 64 rows at most, and a mask as fine
    as that leaves out more.
    """
    return TILE if width <= _WIDEST_FOR_TILE else NARROW_TILE


def tree_block_mask(
    segments: Tensor, position: Tensor, subtree_end: Tensor, window: int, chunk: int, tile: int = TILE
) -> BlockMask:
    """The mask of `tree_attention` for flex_attention; can be traced by torch.compile with a dynamic row length.

    Args:
        segments: int64 [S, 5] on the CPU, as `tree_attention` takes it.
        position: int64 [T] on the device of the attention.
        subtree_end: int64 [T] on the same device.
        window: as in `tree_attention`.
        chunk: as in `tree_attention`.
        tile: rows and columns of a tile; `tile_of` says which are good.

    Returns:
        A block mask of T by T. Without window and chunk it lists exactly the tiles that `create_block_mask` lists; with
        them it may list a few empty tiles more, and a few full ones as partial.
    """
    length, *tables = block_tables(segments, subtree_end, window, chunk, tile)

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
        BLOCK_SIZE=(tile, tile),
        mask_mod=visible,
        **dict(zip(_TABLES, tables, strict=True)),
    )


# A custom op, since its sizes are known from T alone while its values are computed on the host. Its results are always
# new tensors: compiled code may reuse their memory.
@torch.library.custom_op("tree_compile::block_tables", mutates_args=(), tags=READS_ON_HOST)
def block_tables(segments: Tensor, subtree_end: Tensor, window: int, chunk: int, tile: int) -> list[Tensor]:
    """Tokens without padding [1], then counts [1, 1, n] and tile indices [1, 1, n, n], int32, n = ceil(T / tile).

    In this order: partial tiles by row, full tiles by row, partial tiles by column, full tiles by column.
    """
    tokens, device = subtree_end.shape[0], subtree_end.device
    length, *lists = block_lists(segments.numpy().tobytes(), tokens, window, chunk, tile, device, stream_of(device))
    tables = [length.clone()]
    for count, place, other in zip(*[iter(lists)] * 3, strict=True):
        n = len(count)
        indices = count.new_zeros(n * n).scatter_(0, place.long(), other)
        tables += [count.clone()[None, None], indices.view(1, 1, n, n)]
    return tables


@block_tables.register_fake
def _(segments: Tensor, subtree_end: Tensor, window: int, chunk: int, tile: int) -> list[Tensor]:  # noqa: ARG001
    tiles = (subtree_end.shape[0] + tile - 1) // tile
    shapes = [(1, 1, tiles), (1, 1, tiles, tiles)] * 4
    return [subtree_end.new_empty(shape, dtype=torch.int32) for shape in [(1,), *shapes]]


# All layers of a model ask for the same few. What is listed goes to the device, and not the tables, which are nearly
# empty: those have a quarter of a gigabyte for 262,144 tokens in tiles of 64.
@lru_cache(maxsize=4)
def block_lists(
    segments: bytes, tokens: int, window: int, chunk: int, tile: int, device: torch.device, _stream: int = 0
) -> tuple[Tensor, ...]:
    """Tokens without padding [1], then `_listed` of the four kinds of `block_tables`; int32, views of one buffer."""
    table = np.frombuffer(segments, np.int64).reshape(-1, 5)
    tiles = tiles_of(table, tokens, window, chunk, tile)
    n = -(-tokens // tile)
    by_row = np.argsort(tiles.row.astype(np.min_scalar_type(n)), kind="stable")
    arrays = [table[:, END].max(keepdims=True)]
    for first, other, full in (
        (tiles.row[by_row], tiles.column[by_row], tiles.full[by_row]),
        (tiles.column, tiles.row, tiles.full),
    ):
        arrays += [*_listed(first[~full], other[~full], n), *_listed(first[full], other[full], n)]
    packed = to_device(np.concatenate(arrays, dtype=np.int32), device)
    return packed.split([len(array) for array in arrays])


def tiles_of(table: IntArray, tokens: int, window: int, chunk: int, tile: int) -> Tiles:
    """The tiles in which some pair is visible; with window or chunk, perhaps a few more."""
    stop, full_stop = _column_ends(table, tokens, tile)
    n = len(stop)
    count = np.maximum(stop - np.arange(n), 0)
    column = np.repeat(np.arange(n), count)
    row = column + _place_in_run(count)
    tiles = Tiles(row, column, (row > column) & (row < full_stop[column]))
    return _within(tiles, *_positions(table, n, tile), window, chunk) if window or chunk else tiles


def count_tiles(table: IntArray, tokens: int, tile: int) -> tuple[int, int]:
    """How many tiles need the mask entry by entry, and how many are visible throughout, without window and chunk."""
    stop, full_stop = _column_ends(table, tokens, tile)
    diagonal = np.arange(len(stop))
    full = int(np.maximum(full_stop - diagonal - 1, 0).sum())
    return int(np.maximum(stop - diagonal, 0).sum()) - full, full


def _column_ends(table: IntArray, tokens: int, tile: int) -> tuple[IntArray, IntArray]:
    """For each column of tiles one past the last row that is needed, and one past the last that is full: [n] each."""
    ends = _by_tile(table[:, SUBTREE_END], table, -(-tokens // tile), tile)
    # Behind the last token everything is 0: no column of padding is needed, and none with padding is full.
    return -(-ends.max(1) // tile), ends.min(1) // tile


def _by_tile(values: IntArray, table: IntArray, n: int, tile: int) -> IntArray:
    """A value of each segment for its tokens, [n, tile]; 0 behind the last one."""
    per_token = np.repeat(values, table[:, END] - table[:, START])
    return np.pad(per_token, (0, n * tile - len(per_token))).reshape(n, tile)


def _positions(table: IntArray, n: int, tile: int) -> tuple[IntArray, IntArray]:
    """Lowest and highest position in each tile; padding does not count."""
    row = np.arange(n * tile).reshape(n, tile)
    position = row + _by_tile(table[:, POSITION] - table[:, START], table, n, tile)
    is_token = row < table[:, END].max()
    low = position.min(1, where=is_token, initial=np.iinfo(np.int64).max)
    return low, position.max(1, where=is_token, initial=-1)


def _within(tiles: Tiles, low: IntArray, high: IntArray, window: int, chunk: int) -> Tiles:
    """The tiles in which some pair can be within window and chunk; full ones where all pairs are."""
    query_low, query_high = low[tiles.row], high[tiles.row]
    key_low, key_high = low[tiles.column], high[tiles.column]
    near = within = np.ones(len(tiles.row), bool)
    if window:
        near, within = near & (query_low - key_high < window), within & (query_high - key_low < window)
    if chunk:
        near = near & (query_low // chunk <= key_high // chunk) & (query_high // chunk >= key_low // chunk)
        within = within & (query_low // chunk == key_high // chunk) & (query_high // chunk == key_low // chunk)
    return Tiles(tiles.row[near], tiles.column[near], (tiles.full & within)[near])


def _listed(first: IntArray, other: IntArray, n: int) -> tuple[IntArray, IntArray, IntArray]:
    """How many tiles each of `first` has, ascending, where in a table [n, n] they stand, and what stands there."""
    count = np.bincount(first, minlength=n)
    return count, first * n + _place_in_run(count), other


def _place_in_run(count: IntArray) -> IntArray:
    """0, 1, … for each count, one after the other."""
    return np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
