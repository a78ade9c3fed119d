"""How the kernels of sparse index attention divide their work, chosen from the shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["SMALLEST_GROUP", "SparseShape", "backward_shape", "fits", "forward_shape", "gradient_part"]

SMALLEST_GROUP = 16
"""Query heads that one multiplication takes at least; with far fewer, most of it would be padding."""

# Widths are multiples of this, for the layouts of shared memory that Hopper's multiplications read.
_COLUMNS = 32
# What one block can have on Hopper, less what TileLang takes to reduce and to align.
_SHARED_BYTES = 227 * 1024 - 4096


@dataclass(frozen=True)
class SparseShape:
    """One kernel: what it computes, and in which pieces."""

    heads: int
    """Query heads with padding, a multiple of `rows`."""
    width: int
    """D of queries and keys."""
    value_width: int
    """E of values and outputs."""
    dtype: str
    rows: int
    """Heads of one block of threads."""
    block: int
    """Indices of one step."""
    threads: int


def forward_shape(heads: int, width: int, value_width: int, dtype: str) -> SparseShape:
    """For queries, keys and values, weights."""
    rows, block = _pieces(_padded(heads), lambda rows, block: (rows + block) * width + block * (value_width + rows))
    return SparseShape(_padded(heads), width, value_width, dtype, rows, block, _threads(rows, value_width))


def backward_shape(heads: int, width: int, value_width: int, dtype: str) -> SparseShape:
    """For queries and gradients, keys and values, weights and gradients of scores."""
    rows, block = _pieces(_padded(heads), lambda rows, block: (rows + block) * (width + value_width) + 2 * rows * block)
    return SparseShape(_padded(heads), width, value_width, dtype, rows, block, _threads(rows, width))


def fits(width: int, value_width: int) -> bool:
    """Whether the kernels have place for keys and values of these widths: up to those of latent attention."""
    return width % _COLUMNS == 0 and value_width % _COLUMNS == 0 and width <= 576 and value_width <= 512


def gradient_part(width: int) -> int:
    """Columns of the gradients of keys or values that are made at once: with more than 128, registers spill."""
    return next(part for part in (128, 64, 32) if width % part == 0)


def _padded(heads: int) -> int:
    return -(-heads // SMALLEST_GROUP) * SMALLEST_GROUP


def _pieces(heads: int, numbers: Callable[[int, int], int]) -> tuple[int, int]:
    """Rows and block of which `numbers`, of 2 bytes each, fit into shared memory.

    As many heads as there are, up to the 64 of one Hopper instruction, since every group of heads gathers all keys
    again; then as many indices.
    """
    fitting = (
        (rows, block)
        for rows in (64, 32, 16)
        for block in (64, 32)
        if heads % rows == 0 and 2 * numbers(rows, block) <= _SHARED_BYTES
    )
    return next(fitting)


def _threads(rows: int, columns: int) -> int:
    """Two groups of warps where one would hold more than 64 sums in the registers of a thread."""
    return 256 if rows * columns > 64 * 128 else 128
