"""Which rows of a row's attention are computed together: integers only, from the table of segments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Block", "Segment", "query_blocks", "read_segments", "row_tables"]

Range = tuple[int, int]


class Segment(NamedTuple):
    """One entry of the segment table; rows are half-open intervals."""

    start: int
    end: int
    subtree_end: int
    parent: int
    position: int


class Block(NamedTuple):
    """Consecutive query rows and all key rows that any of them sees, as ascending ranges."""

    start: int
    end: int
    keys: tuple[Range, ...]


def read_segments(table: list[list[int]]) -> list[Segment]:
    """The table as named tuples; empty entries stay, since `parent` counts them."""
    return [Segment(*entry) for entry in table]


def row_tables(segments: list[Segment], tokens: int) -> tuple[list[int], list[int]]:
    """Position and subtree_end of each row; 0 for rows that no segment covers."""
    position, subtree_end = [0] * tokens, [0] * tokens
    for start, end, last, _, first in segments:
        position[start:end] = range(first, first + end - start)
        subtree_end[start:end] = [last] * (end - start)
    return position, subtree_end


def query_blocks(segments: list[Segment], window: int, chunk: int, size: int) -> Iterator[Block]:
    """Cut the covered rows into blocks of at most `size` query rows, with the keys each block needs.

    The keys above a block's first row are ancestors of that row: a key k < start that is visible to a query q >= start
    satisfies k < start < subtree_end[k]. So one path serves all queries of the block, whatever branches they are on.
    """
    for index, start, end, lowest in _cuts(segments, size):
        first = segments[index].position + start - segments[index].start
        oldest = _oldest_visible(min(lowest, first), window, chunk)
        above = _path_above(segments, index, start, first - oldest)
        yield Block(start, end, _merge([*reversed(above), (start, end)]))


def _cuts(segments: list[Segment], size: int) -> Iterator[tuple[int, int, int, int]]:
    """(segment of the first row, first row, end, lowest position in the block) of each block."""
    index, start, end, lowest = -1, 0, 0, 0
    for current, segment in enumerate(segments):
        row = segment.start
        while row < segment.end:
            if index < 0 or row != end or row - start == size:
                if index >= 0:
                    yield index, start, end, lowest
                index, start, lowest = current, row, segment.position + row - segment.start
            end = min(segment.end, start + size)
            lowest = min(lowest, segment.position + row - segment.start)
            row = end
    if index >= 0:
        yield index, start, end, lowest


def _oldest_visible(position: int, window: int, chunk: int) -> int:
    """Position of the first token that a query at `position` sees."""
    oldest = max(0, position - window + 1) if window else 0
    return max(oldest, position // chunk * chunk) if chunk else oldest


def _path_above(segments: list[Segment], index: int, row: int, count: int) -> list[Range]:
    """The `count` rows above `row` on its path, nearest range first."""
    ranges = []
    end = row
    while count > 0 and index >= 0:
        start = max(segments[index].start, end - count)
        if start < end:
            ranges.append((start, end))
            count -= end - start
        index = segments[index].parent
        end = segments[index].end
    return ranges


def _merge(ranges: list[Range]) -> tuple[Range, ...]:
    """The same rows with adjacent ranges joined."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)
