"""Rows -> better rows: a few rows are emptied at a time, and their leaves are packed anew."""

from __future__ import annotations

import math
import time

import numba
import numpy as np

from tree_compile.runtime.leaves import Leaves, row_lists, shared_tokens
from tree_compile.runtime.options import Budget
from tree_compile.runtime.sequences import IntArray

__all__ = ["reopen_rows"]

_MOST_REOPENED = 4
_NEAR = 16
"""How far in depth-first order a leaf may be for its row to be reopened together with another's."""
_SAME = 1e-9
_MANY = 20
"""Of so many rows the emptiest is taken where a nearly empty one is wanted."""
_MOST_PER_LOOK = 200
_LOOK_SECONDS = 0.005
"""Between two looks at the clock, about."""
_PATIENCE = 20
"""So many attempts per leaf without a gain are the end, and `_LEAST_PATIENCE` at least."""
_LEAST_PATIENCE = 5_000


def reopen_rows(
    leaves: Leaves, row_of: IntArray, row_tokens: int, budget: Budget, few_tokens: bool, bounds: tuple[int, int]
) -> IntArray:
    """Improves a packing until the budget is spent or nothing is left to gain: a new packing, int64 [L].

    An attempt takes two to four rows, some of them neighbours in the tree or nearly empty ones. Their leaves are cut
    into subtrees at a random depth. One by one, in random order or the greatest first, a subtree goes into one of the
    rows; one that fits into none is cut in two. The attempt is kept where the rows are no worse by the score.

    Args:
        leaves: the leaves of the tree.
        row_of: the row of every leaf, int64 [L].
        row_tokens: the greatest number of tokens in a row, at least the longest sequence.
        budget: when to stop.
        few_tokens: score by the tokens of all rows, then by the sum of their squares, which is least in even rows; else
            by the room that is left in each to the power of 1.5, which favours few tokens, and a row that is nearly
            empty and can go.
        bounds: rows and tokens that no packing goes below.
    """
    state = _Rows(leaves, row_of, row_tokens)
    random = np.array([0x9E3779B97F4A7C15], np.uint64)
    attempts, until = budget.attempts, time.perf_counter() + budget.seconds
    done, last_gain, patience = 0, 0, _LEAST_PATIENCE + _PATIENCE * len(leaves)
    count = 1
    while not state.is_best(bounds) and done - last_gain < patience:
        if done >= attempts if attempts is not None else time.perf_counter() >= until:
            break
        if attempts is not None:
            count = min(_MOST_PER_LOOK, attempts - done)  # whatever the clock says
        began = time.perf_counter()
        done += count
        last_gain = done if state.attempt(count, random, few_tokens) else last_gain
        is_quick = time.perf_counter() - began < _LOOK_SECONDS
        count = min(2 * count, _MOST_PER_LOOK) if is_quick else max(1, count // 2)
    return state.row_of


class _Rows:
    """A packing while it is improved: the leaves of each row as an ascending linked list."""

    def __init__(self, leaves: Leaves, row_of: IntArray, row_tokens: int) -> None:
        self.leaves = leaves
        self.row_tokens = row_tokens
        self.row_of = row_of.copy()
        self.rows = int(row_of.max()) + 1
        self.lists = row_lists(self.row_of, leaves.tokens, leaves.minima)

    def is_best(self, bounds: tuple[int, int]) -> bool:
        """Whether neither rows nor tokens can get fewer."""
        used = self.lists[1][: self.rows]
        return self.rows == 1 or (self.rows <= bounds[0] and int(used.sum()) <= bounds[1])

    def attempt(self, count: int, random: np.ndarray, few_tokens: bool) -> bool:
        """Makes `count` attempts; whether the score rose."""
        first, used, following = self.lists
        self.rows, gained = _attempts(
            self.leaves.tokens, self.leaves.minima, self.row_tokens, self.row_of, first, used, following, self.rows,
            count, random, few_tokens,
        )  # fmt: skip
        return bool(gained > 0)


@numba.njit(cache=True)
def _below(random, limit):
    """A random number below `limit`: xorshift64 (Marsaglia, 2003)."""
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return np.int64(x >> np.uint64(33)) % limit


@numba.njit(cache=True)
def _attempts(tokens, minima, row_tokens, row_of, first, used, following, rows, count, random, few_tokens):
    leaves = len(tokens)
    chosen, sizes = np.empty(_MOST_REOPENED, np.int64), np.empty(_MOST_REOPENED, np.int64)
    room, members = np.empty(_MOST_REOPENED, np.int64), np.empty((_MOST_REOPENED, leaves), np.int64)
    taken, pieces = np.empty(leaves, np.int64), np.empty((2, 2 * leaves + 2), np.int64)
    shared, sums = np.empty(leaves, np.int64), np.empty(leaves, np.int64)
    gained = 0.0
    for _ in range(count):
        if rows < 2:
            break
        reopened = _choose(chosen, row_of, used, rows, random)
        # One more row may save copies of what is shared.
        spare = few_tokens and rows < leaves and reopened < len(chosen) and _below(random, 4) == 0
        if spare:
            chosen[reopened], first[rows], used[rows] = rows, -1, 0
            reopened += 1
        before = 0.0
        for row in chosen[:reopened]:
            before += _score(used[row], row_tokens, few_tokens)
        lot = taken[: _take(chosen[:reopened], first, following, taken)]
        lot.sort()
        _measure(lot, tokens, minima, shared, sums)
        room[:reopened], sizes[:reopened] = row_tokens, 0
        if not _pack(lot, shared[: len(lot)], sums, tokens, minima, members, sizes, room, reopened, pieces, random):
            continue
        after = 0.0
        for left in room[:reopened]:
            after += _score(row_tokens - left, row_tokens, few_tokens)
        if after >= before - _SAME:
            gained += max(0.0, after - before - _SAME)
            for at in range(reopened):
                _write(chosen[at], lot, members[at, : sizes[at]], row_of, first, following)
                used[chosen[at]] = row_tokens - room[at]
            rows = _without_empty(first, used, following, row_of, rows + spare)
    return rows, gained


@numba.njit(cache=True)
def _take(chosen, first, following, taken):
    """Writes the leaves of the chosen rows into `taken`; how many there are."""
    found = 0
    for row in chosen:
        leaf = first[row]
        while leaf >= 0:
            taken[found] = leaf
            found, leaf = found + 1, following[leaf]
    return found


@numba.njit(cache=True)
def _score(used, row_tokens, few_tokens):
    share = used / row_tokens
    if few_tokens:
        # A token weighs more than all that evenness can change in the rows of an attempt.
        return -_MOST_REOPENED * float(used) - share * share
    free = 1.0 - share
    return free * math.sqrt(free)  # not `** 1.5`, which may round differently from one machine to another


@numba.njit(cache=True)
def _choose(chosen, row_of, used, rows, random):
    """A random row, and one to three others: neighbours in the tree, nearly empty ones, or any."""
    wanted = min(rows, 2 + _below(random, len(chosen) - 1))
    leaf = _below(random, len(row_of))
    chosen[0] = row_of[leaf]
    found, may_be_near = 1, _below(random, 3) > 0
    for _ in range(50):
        if found == wanted:
            break
        kind = _below(random, 4)
        row = _below(random, rows)
        if kind < 2 and may_be_near:
            row = row_of[min(max(0, leaf + _below(random, 2 * _NEAR + 1) - _NEAR), len(row_of) - 1)]
        elif kind == 2:
            for _ in range(_MANY):
                other = _below(random, rows)
                row = other if used[other] < used[row] else row
        if not np.any(chosen[:found] == row):
            chosen[found] = row
            found += 1
    return found


@numba.njit(cache=True)
def _measure(lot, tokens, minima, shared, sums):
    """For each of the leaves `lot` what it shares with the one before, and the tokens of all up to it as a tree."""
    shared[0], sums[0] = 0, tokens[lot[0]]
    for at in range(1, len(lot)):
        shared[at] = shared_tokens(minima, lot[at - 1], lot[at])
        sums[at] = sums[at - 1] + tokens[lot[at]] - shared[at]


@numba.njit(cache=True)
def _weight(lot, begin, end, sums, tokens):
    """Tokens of the leaves lot[begin:end] as a tree of their own."""
    return tokens[lot[begin]] + sums[end - 1] - sums[begin]


@numba.njit(cache=True)
def _pack(lot, shared, sums, tokens, minima, members, sizes, room, rows, pieces, random):
    """Packs the leaves `lot` into `rows` rows; False where they do not fit in this way."""
    begins, ends, keys = _cut(lot, shared, sums, tokens, random)
    fit = _below(random, 4)
    for block in np.argsort(keys):
        pieces[0, 0], pieces[1, 0], waiting = begins[block], ends[block], 1
        while waiting:
            waiting -= 1
            begin, end = pieces[0, waiting], pieces[1, waiting]
            weight = _weight(lot, begin, end, sums, tokens)
            if _insert(lot, begin, end, weight, minima, members, sizes, room, rows, fit):
                continue
            if end - begin == 1:
                return False
            middle, swapped = _branch(shared, begin, end, random), _below(random, 2)
            pieces[0, waiting + swapped], pieces[1, waiting + swapped] = begin, middle
            pieces[0, waiting + 1 - swapped], pieces[1, waiting + 1 - swapped] = middle, end
            waiting += 2
    return True


@numba.njit(cache=True)
def _cut(lot, shared, sums, tokens, random):
    """The leaves as subtrees: cut wherever neighbours share no more than a random pair of them does.

    Each with a key to order them by: random, or the greatest first, strictly or about.
    """
    count, style = len(lot), _below(random, 3)
    limit = shared[1 + _below(random, count - 1)] if count > 1 else 0
    begins, ends, keys = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    blocks, begin = 0, 0
    for at in range(1, count + 1):
        if at == count or shared[at] <= limit:
            begins[blocks], ends[blocks] = begin, at
            weight = _weight(lot, begin, at, sums, tokens) if style else 1
            keys[blocks] = -weight * (7_000 + _below(random, 6_001) if style < 2 else 1)
            blocks, begin = blocks + 1, at
    return begins[:blocks], ends[:blocks], keys[:blocks]


@numba.njit(cache=True)
def _branch(shared, begin, end, random):
    """A place to cut a subtree in two between children of its topmost branch."""
    least = shared[begin + 1 : end].min()
    ties = 0
    for at in range(begin + 1, end):
        ties += shared[at] == least
    skipped = _below(random, ties)
    at = begin
    while skipped >= 0:
        at += 1
        skipped -= shared[at] == least
    return at


@numba.njit(cache=True)
def _insert(lot, begin, end, weight, minima, members, sizes, room, rows, fit):
    """Puts a subtree into a row; False where there is no room.

    `fit` 0: into the fullest row; 1: into the first; else where it adds the fewest tokens, then into the fullest.
    """
    best, best_added, best_left, best_place = -1, 0, 0, 0
    for row in range(rows):
        place = _place_of(members[row], sizes[row], begin)
        shared = 0
        if place > 0:
            shared = shared_tokens(minima, lot[members[row, place - 1]], lot[begin])
        if place < sizes[row]:
            shared = max(shared, shared_tokens(minima, lot[end - 1], lot[members[row, place]]))
        added = weight - shared
        left = room[row] - added
        if left < 0:
            continue
        wins = best < 0
        if not wins and fit == 0:
            wins = left < best_left
        elif not wins and fit > 1:
            wins = added < best_added or (added == best_added and left < best_left)
        if wins:
            best, best_added, best_left, best_place = row, added, left, place
    if best < 0:
        return False
    more = end - begin
    for at in range(sizes[best] - 1, best_place - 1, -1):
        members[best, at + more] = members[best, at]
    for at in range(more):
        members[best, best_place + at] = begin + at
    sizes[best] += more
    room[best] = best_left
    return True


@numba.njit(cache=True)
def _place_of(members, size, member):
    """Where a leaf of the lot comes among ascending ones."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if members[middle] < member:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True)
def _write(row, lot, members, row_of, first, following):
    """Gives a row the leaves lot[members]."""
    first[row], before = -1, -1
    for member in members:
        leaf = lot[member]
        row_of[leaf], following[leaf] = row, -1
        if before < 0:
            first[row] = leaf
        else:
            following[before] = leaf
        before = leaf


@numba.njit(cache=True)
def _without_empty(first, used, following, row_of, rows):
    """Moves the last rows into the place of those without leaves; how many rows are left."""
    row = 0
    while row < rows:
        if first[row] >= 0:
            row += 1
            continue
        rows -= 1
        first[row], used[row], leaf = first[rows], used[rows], first[rows]
        while leaf >= 0 and row < rows:
            row_of[leaf], leaf = row, following[leaf]
    return rows
