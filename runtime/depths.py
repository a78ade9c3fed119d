"""Rows -> segments by depth: for kernels that take all segments of one depth in one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_compile.runtime.layout import END, PARENT, START
from tree_compile.runtime.sequences import IntArray

__all__ = ["Depth", "depth_of_each", "depths_of", "offsets_of", "rows_of"]


@dataclass(frozen=True, eq=False)
class Depth:
    """The segments of a row that have as many segments above them.

    Attributes:
        segments: their places among those of the row, ascending, int64 [m].
        ranges: row indices of the first and past the last token of each, int64 [m, 2].
        parents: for each the place of its parent among the segments of the depth above, int64 [m]; -1 at depth 0.
    """

    segments: IntArray
    ranges: IntArray
    parents: IntArray


def offsets_of(ranges: IntArray) -> IntArray:
    """Where ranges int64 [m, 2] start when they lie one after the other, and where the last one ends: int64 [m + 1]."""
    return np.append(0, np.cumsum(ranges[:, 1] - ranges[:, 0]))


def rows_of(ranges: IntArray) -> IntArray:
    """All row indices of ranges int64 [m, 2], one range after the other."""
    return np.concatenate([np.arange(start, end) for start, end in ranges.tolist()])


def depth_of_each(parents: IntArray) -> list[int]:
    """How many are above each, from the places of their parents, int64 [n]: before them, or -1."""
    found = [0] * len(parents)
    for place, parent in enumerate(parents.tolist()):
        if parent >= 0:
            found[place] = found[parent] + 1
    return found


def depths_of(segments: IntArray) -> list[Depth]:
    """The segments of a row by depth, roots first.

    Args:
        segments: int64 [S, 5], columns as in `Layout`.
    """
    depth = depth_of_each(segments[:, PARENT])
    order = np.argsort(depth, kind="stable")
    cuts = np.cumsum(np.bincount(depth))[:-1]
    found, place = [], np.full(len(segments), -1, np.int64)
    for own in np.split(order, cuts):
        parents = segments[own, PARENT]
        found.append(Depth(own, segments[own][:, [START, END]], np.where(parents < 0, -1, place[parents])))
        place[own] = np.arange(len(own))
    return found
