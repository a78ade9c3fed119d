"""The leaves of a prefix tree in depth-first order, and how many tokens any two of them share.

Everything that packing asks of a tree follows from two numbers per leaf: the tokens of its path, and how many of them
it shares with the leaf before it. Two leaves share the least of the numbers between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["Leaves", "collect", "depth_first", "leaves_of", "place_of", "row_lists", "shared_tokens", "shared_with_row"]


@dataclass(frozen=True, eq=False)
class Leaves:
    """The L leaves of a tree, in pre-order.

    Attributes:
        segment: the leaf's segment, int64 [L].
        tokens: tokens of its path, int64 [L].
        shared: how many of them the leaf before it has too, int64 [L]; 0 for the first.
        least_added: the fewest tokens that a leaf adds to any row, one number.
        minima: a sparse table: `minima[j, i]` is the least of `shared[i : i + 2**j]`.
    """

    segment: IntArray
    tokens: IntArray
    shared: IntArray
    least_added: int
    minima: IntArray

    def __len__(self) -> int:
        return len(self.segment)


def leaves_of(tree: PrefixTree) -> Leaves:
    """The leaves of `tree`."""
    segment = tree.leaves
    # The segment after a leaf hangs on the last segment that the leaf shares with the next one.
    shared = np.append(0, tree.start[segment[:-1] + 1])
    return Leaves(segment, tree.end[segment], shared, int(tree.length[segment].min()), _minima(shared))


@numba.njit(cache=True)
def _minima(shared):
    """The sparse table of `Leaves`, [levels, L]."""
    levels = 1
    while 1 << levels <= len(shared):
        levels += 1
    table = np.zeros((levels, len(shared)), np.int64)
    table[0] = shared
    for level in range(1, levels):
        half = 1 << (level - 1)
        for i in range(len(shared) - 2 * half + 1):
            table[level, i] = min(table[level - 1, i], table[level - 1, i + half])
    return table


@numba.njit(cache=True)
def shared_tokens(minima: IntArray, left: int, right: int) -> int:
    """Tokens that the leaves `left` < `right` share."""
    level, span = 0, right - left
    while span > 1:
        span >>= 1
        level += 1
    return min(minima[level, left + 1], minima[level, right - (1 << level) + 1])


@numba.njit(cache=True)
def place_of(members: IntArray, size: int, member: int) -> int:
    """Where a number comes among the first `size` of ascending ones; np.searchsorted takes 1.7 times as long."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if members[middle] < member:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True)
def shared_with_row(minima: IntArray, before: int, first: int, last: int, after: int) -> int:
    """Tokens of the neighbouring leaves `first` to `last` that a row has already.

    They are those that the leaves share with the one before or after them in the row; -1 where there is none.
    """
    shared = shared_tokens(minima, before, first) if before >= 0 else 0
    return max(shared, shared_tokens(minima, last, after)) if after >= 0 else shared


@numba.njit(cache=True)
def collect(item: int, following: IntArray, items: IntArray, found: int) -> int:
    """Writes a linked list into `items` from place `found` on; one past the last place."""
    while item >= 0:
        items[found] = item
        found, item = found + 1, following[item]
    return found


@numba.njit(cache=True)
def row_lists(leaf_row: IntArray, tokens: IntArray, minima: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """First leaf and tokens of every row, and the next leaf after each in its row; -1 and 0 where there is none.

    All are int64 [L], since there can be as many rows as leaves.
    """
    count = len(leaf_row)
    first, last, used = np.full(count, -1, np.int64), np.full(count, -1, np.int64), np.zeros(count, np.int64)
    following = np.full(count, -1, np.int64)
    for leaf in range(count):
        row = leaf_row[leaf]
        used[row] += tokens[leaf]
        if last[row] < 0:
            first[row] = leaf
        else:
            following[last[row]] = leaf
            used[row] -= shared_tokens(minima, last[row], leaf)
        last[row] = leaf
    return first, used, following


def depth_first(tree: PrefixTree, size: IntArray) -> tuple[IntArray, IntArray]:
    """The leaves in a depth-first order in which siblings of greater size come first.

    Args:
        tree: the tree.
        size: a number for every segment, int64 [S].

    Returns:
        Places among the leaves, and the tokens that each shares with the one before it; int64 [L] both.
    """
    return _ordered_leaves(tree.start, tree.end, tree.parent, np.argsort(size, kind="stable"))


@numba.njit(cache=True)
def _ordered_leaves(start, end, parent, by_size):
    """As `depth_first`: places among the leaves [L], and the tokens that each shares with the one before it [L]."""
    count = len(start)
    child, sibling = np.full(count + 1, -1, np.int64), np.full(count, -1, np.int64)
    for segment in by_size[::-1]:  # the last one put on the stack, which is the greatest, is taken first
        sibling[segment], child[parent[segment]] = child[parent[segment]], segment
    rank, leaves = np.zeros(count, np.int64), 0
    for segment in range(count):
        rank[segment] = leaves
        leaves += child[segment] < 0
    order, shared, stack = np.empty(leaves, np.int64), np.empty(leaves, np.int64), np.empty(count, np.int64)
    depth, found, common, node = 0, 0, 0, child[-1]
    while True:
        while node >= 0:
            stack[depth] = node
            depth, node = depth + 1, sibling[node]
        if depth == 0:
            return order, shared
        depth -= 1
        segment = stack[depth]
        common, node = min(common, start[segment]), child[segment]
        if node < 0:
            order[found], shared[found] = rank[segment], common
            found, common = found + 1, end[segment]
