"""Rows -> their windows: every m tokens of a path are pooled into one entry, which its last token closes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tree_compile.runtime.layout import END, PARENT, START
from tree_compile.runtime.row import Row
from tree_compile.runtime.sequences import IntArray

__all__ = ["WindowTables", "windows_of_row"]


@dataclass(frozen=True, eq=False)
class WindowTables:
    """The entries of a row for windows of `size` tokens, in row order of the tokens that close them.

    Window w of a sequence holds its tokens w * size up to (w + 1) * size. A window that several sequences share is one
    entry; one that straddles a branch is an entry in each branch. An entry is visible to the token that closes it and
    to that token's descendants, so entries are a tree in pre-order as well. There are at least `least` of them: entries
    at the end that no token sees make up for missing ones.

    Attributes:
        tokens: row index of every token of every entry, in the order of the sequence, int64 [E, size].
        previous: the entry of the window before on the same path, -1 at the first, int64 [E].
        number: which window of its sequence an entry is, int64 [E].
        last: the last entry that is visible to each token, -1 for none, int64 [T].
        ranges: the entries [first, past) that the tokens of each segment close, int64 [S, 2].
    """

    tokens: IntArray
    previous: IntArray
    number: IntArray
    last: IntArray
    ranges: IntArray

    @cached_property
    def path(self) -> IntArray:
        """The entries visible to each token that closes one, itself last, -1 behind them: int64 [E, n >= 2]."""
        depth = max(2, int(self.number.max()) + 1)
        table = np.full((len(self.number), depth), -1, np.int64)
        row = current = np.arange(len(self.number))
        while len(row):
            table[row, self.number[current]] = current
            follows = self.previous[current] >= 0
            row, current = row[follows], self.previous[current[follows]]
        return table


def windows_of_row(row: Row, size: int, least: int = 1) -> WindowTables:
    """The windows of `size` tokens of a row.

    Args:
        row: the row.
        size: tokens of a window.
        least: smallest number of entries, of tokens and of segments; code is compiled for 2 and more.
    """
    closing = np.flatnonzero((row.position[: row.length] + 1) % size == 0)
    entries = max(least, len(closing))
    tokens = np.zeros((entries, size), np.int64)
    current = closing
    for place in range(size - 1, -1, -1):
        tokens[: len(closing), place] = current
        current = row.parent[current]
    number = np.zeros(entries, np.int64)
    number[: len(closing)] = row.position[closing] // size
    entry_at = np.full(len(row.parent) + 1, -1)  # the entry behind the last token is that of no token
    entry_at[closing] = np.arange(len(closing))
    previous = np.full(entries, -1)
    previous[: len(closing)] = entry_at[current]
    ranges = np.searchsorted(closing, row.segments[:, [START, END]])
    last = np.pad(_last_visible(row, closing, ranges), (0, max(0, least - len(row.parent))), constant_values=-1)
    return WindowTables(tokens, previous, number, last, np.pad(ranges, ((0, max(0, least - len(ranges))), (0, 0))))


def _last_visible(row: Row, closing: IntArray, ranges: IntArray) -> IntArray:
    """The last entry visible to each token, int64 [T]: one that its own segment closed, or else the last one above."""
    above, at_end = [-1] * len(ranges), [-1] * len(ranges)
    for segment, (parent, (first, past)) in enumerate(
        zip(row.segments[:, PARENT].tolist(), ranges.tolist(), strict=True)
    ):
        above[segment] = at_end[parent] if parent >= 0 else -1
        at_end[segment] = past - 1 if past > first else above[segment]
    lengths = row.segments[:, END] - row.segments[:, START]
    inherited, first = np.repeat(above, lengths), np.repeat(ranges[:, 0], lengths)
    latest = np.searchsorted(closing, np.arange(row.length), side="right") - 1
    last = np.full(len(row.parent), -1)
    last[: row.length] = np.where(latest >= first, latest, inherited)
    return last
