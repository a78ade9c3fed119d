"""Leaves -> rows, in one go: depth-first and bottom-up constructions."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from tree_compile.runtime.leaves import Leaves, depth_first, shared_tokens
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


def constructions(tree: PrefixTree, leaves: Leaves, row_tokens: int) -> Iterator[IntArray]:
    """Packings of a tree: for every leaf its row, counted from 0, int64 [L].

    Depth-first, the longest sequences or the largest subtrees first, each leaf into the row where it adds the fewest
    tokens; best fit decreasing by whole sequences, one subtree of the trunk after the other; bottom-up, where a
    segment packs what its children have packed into rows of `row_tokens` less its own path.
    """
    longest = _longest_below(tree.parent, tree.end)
    for size in (longest, tree.tokens_below):
        yield _place(*depth_first(tree, size), leaves.tokens, leaves.own, row_tokens, False, _MOST_OPEN)
    if len(leaves) <= _MOST_EXACT:
        order = _published_order(tree, leaves, longest)
        yield _best_fit_decreasing(order, leaves.tokens, leaves.minima, row_tokens)
    else:
        by_group = np.where(tree.parent == _trunk(tree), longest, np.arange(len(tree), 0, -1) - len(tree))
        yield _place(*depth_first(tree, by_group), leaves.tokens, leaves.own, row_tokens, True, _MOST_OPEN)
    yield _bottom_up(tree.parent, tree.end, tree.length, row_tokens, _MOST_BINS)


def _trunk(tree: PrefixTree) -> int:
    """The segment that all sequences go through; -1 where there is none."""
    return 0 if tree.subtree[0] == len(tree) else -1


def _published_order(tree: PrefixTree, leaves: Leaves, longest: IntArray) -> IntArray:
    """Group by group, the one with the longest sequence first; ties, and the leaves of a group, as in the batch."""
    top = _tops(tree.parent, _trunk(tree))[leaves.segment]
    arrival = tree.source[leaves.segment]
    first = np.full(len(tree), np.iinfo(np.int64).max)
    np.minimum.at(first, top, arrival)
    return np.lexsort((arrival, first[top], -longest[top]))


@numba.njit(cache=True)
def _tops(parent, trunk):
    """For each segment the one above it, or itself, that is a child of the trunk or a root."""
    top = np.arange(len(parent))
    for segment in range(len(parent)):
        above = parent[segment]
        if above >= 0 and above != trunk:
            top[segment] = top[above]
    return top


@numba.njit(cache=True)
def _best_fit_decreasing(order, tokens, minima, row_tokens):
    """Puts leaves in any order into the row that they leave the least room in: the published rule."""
    count = len(order)
    row_of, used, sizes, rows = np.empty(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64), 0
    members = np.empty((count, count), np.int64)
    for leaf in order:
        best, best_used, best_place = rows, -1, 0
        for row in range(rows):
            place = np.searchsorted(members[row, : sizes[row]], leaf)
            held = 0
            if place > 0:
                held = shared_tokens(minima, members[row, place - 1], leaf)
            if place < sizes[row]:
                held = max(held, shared_tokens(minima, leaf, members[row, place]))
            after = used[row] + tokens[leaf] - held
            if after <= row_tokens and after > best_used:
                best, best_used, best_place = row, after, place
        if best == rows:
            rows, best_used = rows + 1, tokens[leaf]
        for at in range(sizes[best], best_place, -1):
            members[best, at] = members[best, at - 1]
        members[best, best_place] = leaf
        sizes[best] += 1
        used[best], row_of[leaf] = best_used, best
    return row_of


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
def _place(order, shared, tokens, own, row_tokens, fullest, most_open):
    """Puts leaves into rows one by one, in a depth-first order.

    A leaf goes where it adds the fewest tokens, of those rows into the fullest; or, with `fullest`, into the fullest
    of all in which it fits. In depth-first order the leaf placed last in a row has more in common with the next leaf
    than any before it, so one number per row, `held`, says how much of a path the row has already.
    """
    row_of = np.empty(len(order), np.int64)
    rows, used, held = np.empty((3, most_open + 1), np.int64)
    opened, total = 0, 0
    for visit in range(len(order)):
        leaf, best, best_added, best_left, at = order[visit], -1, 0, 0, 0
        while at < opened:
            held[at] = min(held[at], shared[visit])
            if row_tokens - used[at] < own:
                opened -= 1
                rows[at], used[at], held[at] = rows[opened], used[opened], held[opened]
                continue
            added = tokens[leaf] - held[at]
            left = row_tokens - used[at] - added
            wins = best < 0 or left < best_left if fullest else (best < 0 or (added, left) < (best_added, best_left))
            if left >= 0 and wins:
                best, best_added, best_left = at, added, left
            at += 1
        if best < 0:
            if opened == most_open:
                closed = np.argmax(used[:opened])
                opened -= 1
                rows[closed], used[closed], held[closed] = rows[opened], used[opened], held[opened]
            best, best_added = opened, tokens[leaf]
            rows[best], used[best] = total, 0
            opened, total = opened + 1, total + 1
        row_of[leaf] = rows[best]
        used[best] += best_added
        held[best] = tokens[leaf]
    return row_of


@numba.njit(cache=True)
def _bottom_up(parent, end, length, row_tokens, most_open):
    """Packs the bins of all children of a segment by best fit decreasing, from the leaves to above the roots.

    A bin is a part of a row: its load counts tokens below the segment that packs it, its leaves are a linked list.
    """
    count = len(parent)
    leaf, leaves = np.full(count, -1, np.int64), 0
    for segment in range(count):
        if segment + 1 == count or parent[segment + 1] != segment:
            leaf[segment] = leaves
            leaves += 1
    load, first, last = np.zeros(leaves, np.int64), np.arange(leaves), np.arange(leaves)
    following, beside = np.full(leaves, -1, np.int64), np.full(leaves, -1, np.int64)
    bins = np.full(count + 1, -1, np.int64)  # of each segment the first of a linked list, `beside`
    items, work = np.empty(leaves, np.int64), np.zeros(1, np.int64)
    for segment in range(count - 1, -2, -1):
        if segment >= 0 and leaf[segment] >= 0:
            packed = leaf[segment]
        else:
            found, item = 0, bins[segment]
            while item >= 0:
                items[found] = item
                found, item = found + 1, beside[item]
            capacity = row_tokens - (end[segment] if segment >= 0 else 0)
            packed = _best_fit(items[:found], load, first, last, following, beside, capacity, most_open, work)
        if segment >= 0:
            while packed >= 0:
                after = beside[packed]
                load[packed] += length[segment]
                beside[packed], bins[parent[segment]] = bins[parent[segment]], packed
                packed = after
    return _numbered(packed, first, following, beside)


@numba.njit(cache=True)
def _best_fit(items, load, first, last, following, beside, capacity, most_open, work):
    """Joins bins, the fullest first, each into the fullest that it fits into; the first of those that are left."""
    opened, done = 0, -1
    open_bins = np.empty(most_open, np.int64)
    for place in np.argsort(-load[items], kind="mergesort"):
        item, best = items[place], -1
        work[0] += opened
        for at in range(opened if work[0] < _MOST_WORK else 0):
            candidate = open_bins[at]
            fits = load[candidate] + load[item] <= capacity
            if fits and (best < 0 or load[candidate] > load[best]):
                best = candidate
        if best >= 0:
            load[best] += load[item]
            following[last[best]], last[best] = first[item], last[item]
            continue
        if opened == most_open:  # items get smaller, so the fullest bin is the least likely to be used
            opened -= 1
            fullest = np.argmax(load[open_bins])
            open_bins[fullest] = open_bins[opened]
        open_bins[opened] = item
        opened += 1
        beside[item], done = done, item
    return done


@numba.njit(cache=True)
def _numbered(bins, first, following, beside):
    row_of, row = np.empty(len(first), np.int64), 0
    while bins >= 0:
        leaf = first[bins]
        while leaf >= 0:
            row_of[leaf] = row
            leaf = following[leaf]
        bins, row = beside[bins], row + 1
    return row_of
