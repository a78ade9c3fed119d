"""Rows -> better rows: a few rows are emptied at a time, and their leaves are packed anew."""

from __future__ import annotations

import math
import time

import numba
import numpy as np

from tree_compile.runtime.leaves import Leaves, collect, place_of, row_lists, shared_tokens, shared_with_row
from tree_compile.runtime.options import Budget
from tree_compile.runtime.sequences import IntArray

__all__ = ["reopen_rows"]

_MOST_REOPENED = 4
_NEAR = 16
"""How far in depth-first order a leaf may be for its row to be reopened together with another's."""
_SAME = 1e-9
"""What two scores may differ by and count as equal: in rows of 131,072 tokens, less even by a few tokens is equal."""
_MANY = 20
"""Of so many rows the emptiest is taken where a nearly empty one is wanted."""
_MOST_PER_LOOK = 200
_LOOK_SECONDS = 0.005
"""Between two looks at the clock, about."""
_PATIENCE = 20
"""So many attempts per leaf without a gain are the end, and `_LEAST_PATIENCE` at least."""
_LEAST_PATIENCE = 5_000


def reopen_rows(
    leaves: Leaves, leaf_row: IntArray, row_tokens: int, budget: Budget, few_tokens: bool, bounds: tuple[int, int]
) -> IntArray:
    """Improves a packing until the budget is spent or nothing is left to gain: a new packing, int64 [L].

    An attempt takes two to four rows, some of them neighbours in the tree or nearly empty ones. Their leaves are cut
    into subtrees at a random depth. One by one, in random order or the greatest first, a subtree goes into one of the
    rows; one that fits into none is cut in two. The attempt is kept where the rows are no worse by the score.

    Args:
        leaves: the leaves of the tree.
        leaf_row: the row of every leaf, int64 [L].
        row_tokens: the greatest number of tokens in a row, at least the longest sequence.
        budget: when to stop.
        few_tokens: score by the tokens of all rows, then by the sum of their squares, which is least in even rows; else
            by the room that is left in each to the power of 1.5, which favours few tokens, and a row that is nearly
            empty and can go.
        bounds: rows and tokens that no packing goes below.
    """
    state = _Rows(leaves, leaf_row, row_tokens)
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
    return state.leaf_row


class _Rows:
    """A packing while it is improved: the leaves of each row as an ascending linked list."""

    def __init__(self, leaves: Leaves, leaf_row: IntArray, row_tokens: int) -> None:
        self.leaves = leaves
        self.row_tokens = row_tokens
        self.leaf_row = leaf_row.copy()
        self.rows = int(leaf_row.max()) + 1
        self.lists = row_lists(self.leaf_row, leaves.tokens, leaves.minima)

    def is_best(self, bounds: tuple[int, int]) -> bool:
        """Whether neither rows nor tokens can get fewer."""
        used = self.lists[1][: self.rows]
        return self.rows == 1 or (self.rows <= bounds[0] and int(used.sum()) <= bounds[1])

    def attempt(self, count: int, random: np.ndarray, few_tokens: bool) -> bool:
        """Makes `count` attempts; whether the score rose."""
        self.rows, gained = _attempts(
            self.leaves.tokens, self.leaves.minima, self.row_tokens, self.leaf_row, self.lists, self.rows,
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
def _attempts(tokens, minima, row_tokens, leaf_row, lists, rows, count, random, few_tokens):
    """Makes `count` attempts; how many rows there are then, and by how much the score rose in all."""
    leaves = len(tokens)
    chosen, room = np.empty(_MOST_REOPENED, np.int64), np.empty(_MOST_REOPENED, np.int64)
    sizes, members = np.empty(_MOST_REOPENED, np.int64), np.empty((_MOST_REOPENED, leaves), np.int64)
    taken, pieces = np.empty((3, leaves), np.int64), np.empty((2, 2 * leaves + 2), np.int64)
    packed, gained = (members, sizes, room), 0.0
    for _ in range(count):
        if rows < 2:
            break
        reopened, spare = _choose(chosen, leaf_row, lists, rows, random, few_tokens)
        lot, before = _lot(chosen[:reopened], lists, tokens, minima, taken), 0.0
        for row in chosen[:reopened]:
            before += _score(lists[1][row], row_tokens, few_tokens)
        room[:reopened], sizes[:reopened] = row_tokens, 0
        if not _pack(lot, tokens, minima, packed, reopened, pieces, random):
            continue
        after = 0.0
        for left in room[:reopened]:
            after += _score(row_tokens - left, row_tokens, few_tokens)
        if after >= before - _SAME:
            gained += max(0.0, after - before - _SAME)
            for at in range(reopened):
                _write(chosen[at], lot[0], members[at, : sizes[at]], row_tokens - room[at], leaf_row, lists)
            rows = _without_empty(lists, leaf_row, rows + spare)
    return rows, gained


@numba.njit(cache=True)
def _lot(chosen, lists, tokens, minima, taken):
    """The leaves of the chosen rows, ascending; what each shares with the one before it; the tokens of all up to it.

    Those are the tokens as a tree. All three are written into the rows of `taken`.
    """
    first, _, following = lists
    found = 0
    for row in chosen:
        found = collect(first[row], following, taken[0], found)
    leaves, shared, sums = taken[0, :found], taken[1, :found], taken[2, :found]
    leaves.sort()
    shared[0], sums[0] = 0, tokens[leaves[0]]
    for at in range(1, found):
        shared[at] = shared_tokens(minima, leaves[at - 1], leaves[at])
        sums[at] = sums[at - 1] + tokens[leaves[at]] - shared[at]
    return leaves, shared, sums


@numba.njit(cache=True)
def _score(used, row_tokens, few_tokens):
    share = used / row_tokens
    if few_tokens:
        # A token weighs more than all that evenness can change in the rows of an attempt.
        return -_MOST_REOPENED * float(used) - share * share
    free = 1.0 - share
    return free * math.sqrt(free)  # not `** 1.5`, which may round differently from one machine to another


@numba.njit(cache=True)
def _choose(chosen, leaf_row, lists, rows, random, few_tokens):
    """A random row, and one to three others: neighbours in the tree, nearly empty ones, or any.

    How many there are, and whether one more is among them that is empty, row `rows`.
    """
    first, used, _ = lists
    wanted = min(rows, 2 + _below(random, len(chosen) - 1))
    leaf = _below(random, len(leaf_row))
    chosen[0] = leaf_row[leaf]
    found, may_be_near = 1, _below(random, 3) > 0
    for _ in range(50):
        if found == wanted:
            break
        kind = _below(random, 4)
        row = _below(random, rows)
        if kind < 2 and may_be_near:
            row = leaf_row[min(max(0, leaf + _below(random, 2 * _NEAR + 1) - _NEAR), len(leaf_row) - 1)]
        elif kind == 2:
            for _ in range(_MANY):
                other = _below(random, rows)
                row = other if used[other] < used[row] else row
        if not np.any(chosen[:found] == row):
            chosen[found] = row
            found += 1
    # One more row may save copies of what is shared.
    spare = few_tokens and rows < len(leaf_row) and found < len(chosen) and _below(random, 4) == 0
    if spare:
        chosen[found], first[rows], used[rows] = rows, -1, 0
    return found + spare, spare


@numba.njit(cache=True)
def _weight(leaves, begin, end, sums, tokens):
    """Tokens of leaves[begin:end] as a tree of their own."""
    return tokens[leaves[begin]] + sums[end - 1] - sums[begin]


@numba.njit(cache=True)
def _pack(lot, tokens, minima, packed, rows, pieces, random):
    """Packs the leaves of a lot into `rows` rows, `packed`; False where they do not fit in this way."""
    leaves, shared, sums = lot
    begins, ends, keys = _cut(leaves, shared, sums, tokens, random)
    fit = _below(random, 4)
    for block in np.argsort(keys):
        pieces[0, 0], pieces[1, 0], waiting = begins[block], ends[block], 1
        while waiting:
            waiting -= 1
            begin, end = pieces[0, waiting], pieces[1, waiting]
            weight = _weight(leaves, begin, end, sums, tokens)
            if _insert(leaves, begin, end, weight, minima, packed, rows, fit):
                continue
            if end - begin == 1:
                return False
            middle, swapped = _branch(shared, begin, end, random), _below(random, 2)
            pieces[0, waiting + swapped], pieces[1, waiting + swapped] = begin, middle
            pieces[0, waiting + 1 - swapped], pieces[1, waiting + 1 - swapped] = middle, end
            waiting += 2
    return True


@numba.njit(cache=True)
def _cut(leaves, shared, sums, tokens, random):
    """The leaves as subtrees: cut wherever neighbours share no more than a random pair of them does.

    Each with a key to order them by: random, or the greatest first, strictly or about.
    """
    count, style = len(leaves), _below(random, 3)
    limit = shared[1 + _below(random, count - 1)] if count > 1 else 0
    begins, ends, keys = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    blocks, begin = 0, 0
    for at in range(1, count + 1):
        if at == count or shared[at] <= limit:
            begins[blocks], ends[blocks] = begin, at
            weight = _weight(leaves, begin, at, sums, tokens) if style else 1
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
def _insert(leaves, begin, end, weight, minima, packed, rows, fit):
    """Puts the subtree of leaves[begin:end] into a row; False where there is no room.

    `fit` 0: into the fullest row; 1: into the first; else where it adds the fewest tokens, then into the fullest.
    """
    members, sizes, room = packed
    best, best_added, best_left, best_place = -1, 0, 0, 0
    for row in range(rows):
        place = place_of(members[row], sizes[row], begin)
        before = leaves[members[row, place - 1]] if place > 0 else -1
        after = leaves[members[row, place]] if place < sizes[row] else -1
        added = weight - shared_with_row(minima, before, leaves[begin], leaves[end - 1], after)
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
    _put(members[best], sizes[best], best_place, begin, end)
    sizes[best] += end - begin
    room[best] = best_left
    return True


@numba.njit(cache=True)
def _put(members, size, place, begin, end):
    """Moves members from `place` on up, and writes the numbers from `begin` to `end` there."""
    more = end - begin
    for at in range(size - 1, place - 1, -1):
        members[at + more] = members[at]
    for at in range(more):
        members[place + at] = begin + at


@numba.njit(cache=True)
def _write(row, leaves, members, tokens, leaf_row, lists):
    """Gives a row leaves[members], which have `tokens` tokens."""
    first, used, following = lists
    first[row], used[row], before = -1, tokens, -1
    for member in members:
        leaf = leaves[member]
        leaf_row[leaf], following[leaf] = row, -1
        if before < 0:
            first[row] = leaf
        else:
            following[before] = leaf
        before = leaf


@numba.njit(cache=True)
def _without_empty(lists, leaf_row, rows):
    """Moves the last rows into the place of those without leaves; how many rows are left."""
    first, used, following = lists
    row = 0
    while row < rows:
        if first[row] >= 0:
            row += 1
            continue
        rows -= 1
        first[row], used[row], leaf = first[rows], used[rows], first[rows]
        while leaf >= 0 and row < rows:
            leaf_row[leaf], leaf = row, following[leaf]
    return rows
