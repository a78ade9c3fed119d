"""Leaves -> rows, in one go: depth-first, by best fit decreasing, and bottom-up."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from tree_compile.runtime.leaves import Leaves, collect, depth_first, place_of, shared_with_row
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["constructions"]

_MOST_OPEN = 1_024
"""Rows that a leaf is tried in; with more, the fullest are closed, so that the work stays linear."""
_MOST_BINS = 8_192
"""The same for the bins of one segment: the greatest come first, and most of them stay open for small ones."""
_MOST_EXACT = 1_024
"""With more leaves, those of a group are placed in depth-first order and not in that of the batch: that is faster."""
_MOST_WORK = 100_000_000
"""Pairs of bins that are looked at; then bins go up as they are, as in deep trees whose bins never join."""
_SORTING_WORK = 16
"""Collecting and sorting a bin takes about as long as looking at so many pairs."""


def constructions(tree: PrefixTree, leaves: Leaves, row_tokens: int) -> Iterator[IntArray]:
    """Packings of a tree: for every leaf its row, counted from 0, int64 [L].

    Depth-first, the longest sequences or the largest subtrees first, each leaf into the row where it adds the fewest
    tokens; best fit decreasing by whole sequences, one group after the other; bottom-up, where a
    segment packs what its children have packed into rows of `row_tokens` less its own path.

    Args:
        tree: the tree.
        leaves: its leaves.
        row_tokens: the greatest number of tokens in a row, at least the longest sequence.
    """
    longest = _longest_below(tree.parent, tree.end)
    for size in (longest, tree.tokens_below):
        yield _place(*depth_first(tree, size), leaves.tokens, leaves.least_added, row_tokens, False, _MOST_OPEN)
    if len(leaves) <= _MOST_EXACT:
        order = _published_order(tree, leaves, longest)
        yield _best_fit_decreasing(order, leaves.tokens, leaves.minima, row_tokens)
    else:
        by_group = np.where(tree.parent == _common_root(tree), longest, np.arange(len(tree), 0, -1) - len(tree))
        yield _place(*depth_first(tree, by_group), leaves.tokens, leaves.least_added, row_tokens, True, _MOST_OPEN)
    yield _bottom_up(tree.parent, tree.end, leaves.segment, row_tokens, _MOST_BINS, _MOST_WORK)


def _common_root(tree: PrefixTree) -> int:
    """The segment that all sequences go through; -1 where there is none."""
    return 0 if tree.subtree_end[0] == len(tree) else -1


def _published_order(tree: PrefixTree, leaves: Leaves, longest: IntArray) -> IntArray:
    """Group by group, the one with the longest sequence first; ties, and the leaves of a group, as in the batch.

    A group is a subtree below the segment that all sequences go through, or below nothing where there is none.
    """
    top = _tops(tree.parent, _common_root(tree))[leaves.segment]
    arrival = tree.source[leaves.segment]
    first = np.full(len(tree), np.iinfo(np.int64).max)
    np.minimum.at(first, top, arrival)
    return np.lexsort((arrival, first[top], -longest[top]))


@numba.njit(cache=True)
def _tops(parent, common_root):
    """For each segment the one above it, or itself, that is a child of the common root or a root."""
    top = np.arange(len(parent))
    for segment in range(len(parent)):
        above = parent[segment]
        if above >= 0 and above != common_root:
            top[segment] = top[above]
    return top


@numba.njit(cache=True)
def _best_fit_decreasing(order, tokens, minima, row_tokens):
    """Puts leaves in any order into the row that they leave the least room in: the published rule."""
    count = len(order)
    leaf_row, used, sizes, rows = np.empty(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64), 0
    members = np.empty((count, count), np.int64)
    for leaf in order:
        best, best_used, best_place = rows, -1, 0
        for row in range(rows):
            place = place_of(members[row], sizes[row], leaf)
            before = members[row, place - 1] if place > 0 else -1
            following = members[row, place] if place < sizes[row] else -1
            after = used[row] + tokens[leaf] - shared_with_row(minima, before, leaf, leaf, following)
            if after <= row_tokens and after > best_used:
                best, best_used, best_place = row, after, place
        if best == rows:
            rows, best_used = rows + 1, tokens[leaf]
        for at in range(sizes[best], best_place, -1):
            members[best, at] = members[best, at - 1]
        members[best, best_place] = leaf
        sizes[best] += 1
        used[best], leaf_row[leaf] = best_used, best
    return leaf_row


@numba.njit(cache=True)
def _longest_below(parent, end):
    """For each segment the longest path through it."""
    longest = end.copy()
    for segment in range(len(parent) - 1, -1, -1):
        above = parent[segment]
        if above >= 0:
            longest[above] = max(longest[above], longest[segment])
    return longest


@numba.njit(cache=True)
def _place(order, shared, tokens, least_added, row_tokens, fullest, most_open):
    """Puts leaves into rows one by one, in a depth-first order.

    A leaf goes where it adds the fewest tokens, of those rows into the fullest; or, with `fullest`, into the fullest
    of all in which it fits. In depth-first order the leaf placed last in a row has more in common with the next leaf
    than any before it, so one number per row, `common`, says how much of a path the row has already.
    """
    leaf_row = np.empty(len(order), np.int64)
    open_rows = np.empty((3, most_open), np.int64)
    rows, used, common = open_rows
    opened, total = 0, 0
    for visit in range(len(order)):
        leaf, best, best_added, best_left, at = order[visit], -1, 0, 0, 0
        while at < opened:
            common[at] = min(common[at], shared[visit])
            if row_tokens - used[at] < least_added:
                opened = _close(open_rows, opened, at)
                continue
            added = tokens[leaf] - common[at]
            left = row_tokens - used[at] - added
            wins = best < 0 or left < best_left if fullest else (best < 0 or (added, left) < (best_added, best_left))
            if left >= 0 and wins:
                best, best_added, best_left = at, added, left
            at += 1
        if best < 0:
            if opened == most_open:
                opened = _close(open_rows, opened, np.argmax(used[:opened]))
            best, best_added = opened, tokens[leaf]
            rows[best], used[best] = total, 0
            opened, total = opened + 1, total + 1
        leaf_row[leaf] = rows[best]
        used[best] += best_added
        common[best] = tokens[leaf]
    return leaf_row


@numba.njit(cache=True)
def _close(open_rows, opened, at):
    """Takes an open row out, in whose place the last one comes; how many are left."""
    open_rows[:, at] = open_rows[:, opened - 1]
    return opened - 1


@numba.njit(cache=True)
def _bottom_up(parent, end, leaf_segments, row_tokens, most_open, most_work):
    """Packs the bins of all children of a segment by best fit decreasing, from the leaves to above the roots.

    A bin is a part of a row: its load counts the tokens on the paths to its leaves, which are a linked list. The bins
    of a segment are one too, `beside` each other, so that they go up in one step where nothing joins them.
    """
    count, leaves = len(parent), len(leaf_segments)
    bins = np.full((5, leaves), -1, np.int64)
    load, first, last, following, beside = bins
    load[:], first[:], last[:] = end[leaf_segments], np.arange(leaves), np.arange(leaves)
    head, tail = np.full(count + 1, -1, np.int64), np.full(count + 1, -1, np.int64)
    head[leaf_segments] = tail[leaf_segments] = first
    items, work = np.empty(leaves, np.int64), np.zeros(1, np.int64)
    for segment in range(count - 1, -2, -1):
        if head[segment] != tail[segment] and work[0] < most_work:
            found = items[: collect(head[segment], beside, items, 0)]
            common = end[segment] if segment >= 0 else 0
            head[segment], tail[segment] = _best_fit(found, bins, common, row_tokens, most_open, most_work, work)
        if segment >= 0:
            above = parent[segment]
            beside[tail[segment]] = head[above]
            tail[above] = tail[above] if head[above] >= 0 else tail[segment]
            head[above] = head[segment]
    return _numbered(head[-1], first, following, beside)


@numba.njit(cache=True)
def _best_fit(items, bins, common, row_tokens, most_open, most_work, work):
    """Joins bins that have `common` tokens in common, the fullest first, each with the fullest that it fits into.

    Returns the first and the last bin of a linked list of those that are left.
    """
    load, first, last, following, beside = bins
    opened, head, tail = 0, -1, -1
    open_bins = np.empty(most_open, np.int64)
    work[0] += _SORTING_WORK * len(items)
    for place in np.argsort(-load[items], kind="mergesort"):
        item, best = items[place], -1
        work[0] += opened
        for at in range(opened if work[0] < most_work else 0):
            candidate = open_bins[at]
            fits = load[candidate] + load[item] - common <= row_tokens
            if fits and (best < 0 or load[candidate] > load[best]):
                best = candidate
        if best >= 0:
            load[best] += load[item] - common
            following[last[best]], last[best] = first[item], last[item]
            continue
        if opened == most_open:  # items get smaller, so the fullest bin is the least likely to be used
            opened -= 1
            fullest = np.argmax(load[open_bins])
            open_bins[fullest] = open_bins[opened]
        open_bins[opened] = item
        opened += 1
        if tail >= 0:
            beside[tail] = item
        head, tail, beside[item] = head if head >= 0 else item, item, -1
    return head, tail


@numba.njit(cache=True)
def _numbered(bins, first, following, beside):
    """For every leaf its row, counted in the order of the bins: [L]."""
    leaf_row, row = np.empty(len(first), np.int64), 0
    while bins >= 0:
        leaf = first[bins]
        while leaf >= 0:
            leaf_row[leaf] = row
            leaf = following[leaf]
        bins, row = beside[bins], row + 1
    return leaf_row
