"""How many rows and tokens no packing of a prefix tree can go below."""

from __future__ import annotations

import numba
import numpy as np

from tree_compile.runtime.sequences import check_fits
from tree_compile.runtime.tree import PrefixTree

__all__ = ["packing_bounds"]

_MOST_THRESHOLDS = 64


def packing_bounds(tree: PrefixTree, row_tokens: int | None) -> tuple[int, int]:
    """Numbers of rows and of tokens that no packing of this tree goes below.

    Bottom-up, with for each segment: the fewest rows that hold it, and the fewest tokens below it in all rows. A child
    that is in b rows costs at least b times its own tokens, and what is below it. All children of a segment have
    to fit into rows of `row_tokens` less the segment's path. Two bounds say how many rows that takes:

    - their tokens, over the room of a row;
    - for a threshold e, the same with every copy of a child that leaves less than e of the room counted as a whole
      row, and children below e not counted: nothing that is counted fits beside it. (The dual feasible function
      behind the bound L2 of Martello and Toth, Discrete Applied Mathematics 28, 1990; here the size of an item is not
      fixed, so that of each child the cheapest way to spread over rows is taken.) The threshold is half the room at
      the most: above that, two copies that count as whole rows could share one.

    Args:
        tree: the tree.
        row_tokens: the greatest number of tokens in a row; None for one row.

    Raises:
        SequenceTooLongError: a sequence has more than `row_tokens` tokens.
    """
    if row_tokens is None:
        return 1, int(tree.length.sum())
    check_fits(tree.sequence_length, row_tokens)
    rows, tokens = _bounds(tree.parent, tree.end, tree.length, row_tokens)
    return int(rows), int(tokens)


@numba.njit(cache=True)
def _bounds(parent, end, length, row_tokens):
    """Rows that no packing goes below, and tokens: two numbers, those of above the roots."""
    count = len(parent)
    child, sibling = np.full(count + 1, -1, np.int64), np.full(count, -1, np.int64)
    rows, below = np.ones(count + 1, np.int64), np.zeros(count + 1, np.int64)
    children = np.empty(count, np.int64)
    for segment in range(count - 1, -2, -1):
        found, at = 0, child[segment]
        while at >= 0:
            children[found] = at
            below[segment] += length[at] * rows[at] + below[at]
            rows[segment] = max(rows[segment], rows[at])
            found, at = found + 1, sibling[at]
        if found:
            room, below_this = row_tokens - (end[segment] if segment >= 0 else 0), children[:found]
            least = _fewest_rows(length[below_this], below[below_this], rows[below_this], below[segment], room)
            rows[segment] = max(rows[segment], least)
        if segment >= 0:
            sibling[segment], child[parent[segment]] = child[parent[segment]], segment
    return rows[-1], below[-1]


@numba.njit(cache=True)
def _fewest_rows(length, below, rows, tokens, room):
    """Rows that some children take: each with its own tokens, the tokens below it, and the fewest rows that hold it."""
    least = -(-tokens // room)
    above_half = room + 1 - length[2 * length > room]  # from these on such a child is a whole row
    thresholds = np.unique(np.append(length[length <= room // 2], above_half[above_half <= room // 2]))
    for threshold in thresholds[:: 1 + len(thresholds) // _MOST_THRESHOLDS]:
        total = 0
        for child in range(len(length)):
            if length[child] >= threshold:
                total += _cheapest(length[child], below[child], rows[child], room, threshold)
        least = max(least, -(-total // room))
    return least


@numba.njit(cache=True)
def _cheapest(length, below, rows, room, threshold):
    """The least that a child counts for in `rows` copies or more: some as whole rows, the others by their tokens.

    A whole row takes at least as many tokens from below the child as any other copy does, and so saves a copy: the
    best is as many whole rows as can be filled, or one more.
    """
    most_below = room - threshold - length  # in a copy that does not count as a whole row
    if most_below < 0:
        return room * max(rows, -(-below // (room - length)) if below else 1)
    whole = below // (room - length)
    rest = below - whole * (room - length)
    if rest == 0:
        return below + length * max(rows, whole)
    one_more = room * (whole + 1) + length * max(0, rows - whole - 1)
    if most_below == 0:
        return one_more
    return min(one_more, below + length * max(rows, whole - (-rest // most_below)))
