"""Block masks from segment intervals against create_block_mask and the dense definition."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.runtime.attention_reference import visible_pairs
from tests.runtime.trees import Spec, random_forest, row_tensors, segment_table
from tree_compile.runtime.block_mask import NARROW_TILE, TILE, count_tiles, tile_of, tree_block_mask

KINDS = ("kv", "full_kv", "q", "full_q")
TILES = (NARROW_TILE, TILE)


def tiles(mask: BlockMask, kind: str) -> Tensor:
    """The listed tiles, bool [n, n]."""
    counts, indices = getattr(mask, f"{kind}_num_blocks")[0, 0], getattr(mask, f"{kind}_indices")[0, 0]
    listed = torch.zeros(indices.shape, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        listed[row, indices[row, :count].long()] = True
    return listed


def chain(rng: random.Random) -> list[Spec]:
    """Segments one below the other."""
    spec: Spec = (rng.randint(1, 200), [])
    for _ in range(rng.randint(1, 8)):
        spec = (rng.randint(1, 100), [spec])
    return [spec]


def star(rng: random.Random) -> list[Spec]:
    """One prompt, and endings of any length."""
    return [(rng.randint(1, 400), [(rng.randint(1, 150), []) for _ in range(rng.randint(2, 6))])]


def one_token_segments(rng: random.Random) -> list[Spec]:
    """Several roots, nearly all segments of one token."""
    return random_forest(rng, rng.randint(50, 400), 1) + [(rng.randint(1, 200), [])]


def forks(rng: random.Random) -> list[Spec]:
    """Branches upon branches, of up to so many tokens each."""
    return random_forest(rng, rng.choice([3, 300, 900]), rng.choice([2, 60, 500]))


SHAPES = (chain, star, one_token_segments, forks)


def random_row(seed: int) -> tuple[Tensor, int]:
    """The segments of a random tree, and the length of its row, with or without padding."""
    rng = random.Random(seed)
    table = segment_table(SHAPES[seed % len(SHAPES)](rng))
    return table, int(table[:, 2].max()) + rng.choice([0, 5, 2 * TILE])


def masks(seed: int, tile: int, window: int = 0, chunk: int = 0) -> tuple[BlockMask, BlockMask, Tensor]:
    """Ours, torch's of the same function, and the visible pairs, of a random tree."""
    table, tokens = random_row(seed)
    ours = tree_block_mask(table, *row_tensors(table, tokens), window, chunk, tile)
    theirs = create_block_mask(ours.mask_mod, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=tile)
    return ours, theirs, visible_pairs(table, tokens, window, chunk)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (90, 0), (0, 70), (150, 200)])
def test_mask_function_is_the_definition(seed: int, window: int, chunk: int) -> None:
    ours, _, visible = masks(seed, TILE, window, chunk)
    rows = torch.arange(len(visible))
    assert torch.equal(ours.mask_mod(rows, rows, rows[:, None], rows[None, :]), visible)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_tiles_are_exactly_those_of_create_block_mask(first: int, tile: int) -> None:
    for seed in range(first, first + 20):
        ours, theirs, _ = masks(seed, tile)
        for kind in KINDS:
            assert torch.equal(tiles(ours, kind), tiles(theirs, kind))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("window", "chunk"), [(1, 0), (90, 0), (400, 0), (0, 70), (150, 200), (0, 5000)])
def test_windowed_tiles_leave_out_nothing_and_fill_nothing(seed: int, window: int, chunk: int, tile: int) -> None:
    ours, theirs, _ = masks(seed, tile, window, chunk)
    for partial, full in (("kv", "full_kv"), ("q", "full_q")):
        needed = tiles(theirs, partial) | tiles(theirs, full)
        assert not (needed & ~(tiles(ours, partial) | tiles(ours, full))).any()
        assert not (tiles(ours, full) & ~tiles(theirs, full)).any()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("seed", range(20))
def test_counted_tiles_are_as_many_as_the_mask_lists(seed: int, tile: int) -> None:
    table, tokens = random_row(seed)
    mask = tree_block_mask(table, *row_tensors(table, tokens), 0, 0, tile)
    listed = tuple(int(getattr(mask, f"{kind}_num_blocks").sum()) for kind in ("kv", "full_kv"))
    assert count_tiles(table.numpy(), tokens, tile) == listed


def test_tiles_are_listed_in_ascending_order() -> None:
    ours, theirs, _ = masks(3, NARROW_TILE)
    for kind in KINDS:
        counts = getattr(ours, f"{kind}_num_blocks")[0, 0].tolist()
        for place, count in enumerate(counts):
            listed, expected = (getattr(mask, f"{kind}_indices")[0, 0, place, :count] for mask in (ours, theirs))
            assert torch.equal(listed, expected)


def test_wide_heads_have_narrow_tiles() -> None:
    assert [tile_of(width) for width in (16, 64, 128, 192, 256, 576)] == [TILE] * 4 + [NARROW_TILE] * 2


def test_window_bounds_the_tiles_of_a_long_row() -> None:
    table = segment_table([(40 * TILE, [])])
    mask = tree_block_mask(table, *row_tensors(table, 40 * TILE), TILE, 0)
    assert (tiles(mask, "kv") | tiles(mask, "full_kv")).sum() == 40 + 39


def test_long_window_keeps_full_tiles() -> None:
    table = segment_table([(8 * TILE, [])])
    mask = tree_block_mask(table, *row_tensors(table, 8 * TILE), 4 * TILE, 0)
    assert tiles(mask, "full_kv").sum() == 7 + 6 + 5


def test_tables_are_new_tensors_each_time() -> None:
    table = segment_table([(300, [(20, [])])])
    rows = row_tensors(table, 320)
    first, second = (tree_block_mask(table, *rows, 0, 0) for _ in range(2))
    first.kv_indices.fill_(7)
    assert not torch.equal(first.kv_indices, second.kv_indices)
    assert torch.equal(second.kv_indices, tree_block_mask(table, *rows, 0, 0).kv_indices)


def test_tables_op_passes_the_library_checks() -> None:
    table = segment_table([(300, [(20, [])])])
    _, subtree_end = row_tensors(table, 320)
    torch.library.opcheck(torch.ops.tree_compile.block_tables.default, (table, subtree_end, 5, 0, TILE))
