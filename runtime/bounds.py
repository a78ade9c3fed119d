"""How many rows and tokens no packing of a prefix tree can go below."""

from __future__ import annotations

import numba
import numpy as np

from tree_compile.runtime.tree import PrefixTree

__all__ = ["row_bounds"]

_MOST_THRESHOLDS = 64


def row_bounds(tree: PrefixTree, row_tokens: int | None) -> tuple[int, int]:
    """Numbers of rows and of tokens that no packing of this tree goes below.

    Bottom-up, with for each segment: the fewest rows that hold it, and the fewest tokens below it in all rows. A child
    that is in b rows costs at least b times its own tokens, and what is below it. All children of a segment have
    to fit into rows of `row_tokens` less the segment's path. Two bounds say how many rows that takes:

    - their tokens, over the room of a row;
    - for a threshold e, the same with every copy of a child that leaves less than e of the room counted as a whole
      row, and children below e not counted: nothing that is counted fits beside it. (The dual feasible function
      behind the bound L2 of Martello and Toth, Discrete Applied Mathematics 28, 1990; here the size of an item is not
      fixed, so that of each child the cheapest way to spread over rows is taken.)

    Args:
        tree: the tree.
        row_tokens: the greatest number of tokens in a row; None for one row.
    """
    if row_tokens is None:
        return 1, int(tree.length.sum())
    rows, tokens = _bounds(tree.parent, tree.end, tree.length, row_tokens, _MOST_THRESHOLDS)
    return int(rows), int(tokens)


@numba.njit(cache=True)
def _bounds(parent, end, length, row_tokens, most):
    count = len(parent)
    child, sibling = np.full(count + 1, -1, np.int64), np.full(count, -1, np.int64)
    rows, below = np.ones(count + 1, np.int64), np.zeros(count + 1, np.int64)
    own, deeper = np.empty(count, np.int64), np.empty(count, np.int64)
    for segment in range(count - 1, -2, -1):
        room = row_tokens - (end[segment] if segment >= 0 else 0)
        children, at = 0, child[segment]
        while at >= 0:
            own[children], deeper[children] = length[at], below[at]
            below[segment] += length[at] * rows[at] + below[at]
            rows[segment] = max(rows[segment], rows[at])
            children, at = children + 1, sibling[at]
        if children:
            least = _fewest_rows(own[:children], deeper[:children], below[segment], room, most)
            rows[segment] = max(rows[segment], least)
        if segment >= 0:
            sibling[segment], child[parent[segment]] = child[parent[segment]], segment
    return rows[-1], below[-1]


@numba.njit(cache=True)
def _fewest_rows(own, deeper, tokens, room, most):
    least = -(-tokens // room)
    above_half = room + 1 - own[2 * own > room]  # from these on such a child is a whole row
    thresholds = np.unique(np.append(own[own <= room // 2], above_half[above_half <= room // 2]))
    for threshold in thresholds[:: 1 + len(thresholds) // most]:
        total = 0
        for i in range(len(own)):
            if own[i] >= threshold:
                total += _cheapest(own[i], deeper[i], room, threshold)
        least = max(least, -(-total // room))
    return least


@numba.njit(cache=True)
def _cheapest(own, deeper, room, threshold):
    """The least that a child counts for: some copies as whole rows, the others by their tokens."""
    most_beside = room - threshold - own  # below a child in a copy that is not a whole row
    if deeper == 0:
        return room if most_beside < 0 else own
    best, whole = -1, 0
    while True:
        rest = max(0, deeper - whole * (room - own))
        if rest == 0 or most_beside > 0:
            copies = -(-rest // most_beside) if rest else 0
            cost = whole * room + copies * own + rest
            best = cost if best < 0 else min(best, cost)
        if rest == 0:
            return best
        whole += 1
