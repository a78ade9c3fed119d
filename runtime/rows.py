"""Prefix tree -> rows: which leaves share a row, and how many rows and tokens no packing can go below."""

from __future__ import annotations

import numpy as np

from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.tree import PrefixTree

__all__ = ["pack_rows", "row_bounds"]

_OBJECTIVES = ("rows", "tokens")


def pack_rows(tree: PrefixTree, row_tokens: int | None, objective: str = "rows") -> list[list[int]]:
    """Chooses the leaves of every row.

    Leaves are placed in depth-first order, once into the row where they add the fewest tokens and once into the
    row that they leave the fullest. The better of both results is taken.

    Args:
        tree: the prefix tree.
        row_tokens: the greatest number of tokens in a row; None puts everything in one row.
        objective: "rows" for the fewest rows, then the fewest tokens; "tokens" for the fewest tokens, then rows.

    Returns:
        The leaf segments of every row, in pre-order.

    Raises:
        SequenceTooLongError: a sequence has more than `row_tokens` tokens.
        ValueError: `row_tokens` is below 1, or the objective is unknown.
    """
    if objective not in _OBJECTIVES:
        raise ValueError(f"the objective is {objective!r}; it must be one of {', '.join(map(repr, _OBJECTIVES))}")
    if row_tokens is None:
        return [tree.leaves.tolist()]
    _check_fits(tree, row_tokens)
    by_added = _place(tree, row_tokens, fullest=False)
    by_filled = _place(tree, row_tokens, fullest=True)
    return min(by_added, by_filled, key=_Placement.rows_first if objective == "rows" else _Placement.tokens_first).rows


def row_bounds(tree: PrefixTree, row_tokens: int | None) -> tuple[int, int]:
    """Numbers of rows and of tokens that no packing of this tree can go below.

    The tokens below a segment need at least `tokens below / (row_tokens - tokens down to it)` rows, and each of
    them holds the segment again. Bottom-up this gives the fewest copies of every segment, and so the tokens.
    """
    if row_tokens is None:
        return 1, int(tree.length.sum())
    parent, length, end = tree.parent.tolist(), tree.length.tolist(), tree.end.tolist()
    # The last entries stand for a root above all roots: parent -1 is their index.
    copies, below = [1] * (len(tree) + 1), [0] * (len(tree) + 1)
    for segment in range(len(tree) - 1, -1, -1):
        above = parent[segment]
        if below[segment]:
            copies[segment] = max(copies[segment], -(-below[segment] // (row_tokens - end[segment])))
        below[above] += length[segment] * copies[segment] + below[segment]
        copies[above] = max(copies[above], copies[segment])
    return max(copies[-1], -(-below[-1] // row_tokens)), below[-1]


def _check_fits(tree: PrefixTree, row_tokens: int) -> None:
    if row_tokens < 1:
        raise ValueError(f"row_tokens is {row_tokens}; it must be at least 1")
    too_long = np.flatnonzero(tree.sequence_length > row_tokens)
    if len(too_long):
        first, longest = int(too_long[0]), int(tree.sequence_length.max())
        raise SequenceTooLongError(
            f"sequence {first} has {tree.sequence_length[first]} tokens, more than row_tokens={row_tokens}",
            why=f"a sequence is never split over rows; {len(too_long)} of {len(tree.sequence_length)} are too long",
            hint=f"raise row_tokens to {longest}, or shorten or leave out these sequences",
        )


class _Placement:
    """Rows while leaves are placed in them, one after the other in depth-first order."""

    def __init__(self, leaves: int, row_tokens: int) -> None:
        self.rows: list[list[int]] = []
        self.row_tokens = row_tokens
        self._used = np.zeros(leaves, np.int64)
        # Tokens of the next leaf's path that each row holds already. In depth-first order no leaf of a row shares
        # more with the next leaf than the one placed last.
        self._held = np.zeros(leaves, np.int64)

    def add(self, leaf: int, tokens: int, *, fullest: bool) -> None:
        row = self._choose(tokens, fullest)
        if row == len(self.rows):
            self.rows.append([])
        self.rows[row].append(leaf)
        self._used[row] += tokens - self._held[row]
        self._held[row] = tokens

    def branch(self, shared: int) -> None:
        """Moves on to a leaf whose path shares this many tokens with the path before."""
        held = self._held[: len(self.rows)]
        np.minimum(held, shared, out=held)

    def _choose(self, tokens: int, fullest: bool) -> int:
        added = tokens - self._held[: len(self.rows)]
        left = self.row_tokens - self._used[: len(self.rows)] - added
        # Added tokens and tokens left are below row_tokens + 1: one number orders by the first, then by the second.
        rank = left if fullest else added * (self.row_tokens + 1) + left
        rank = np.where(left >= 0, rank, np.iinfo(np.int64).max)
        if not len(rank) or left[row := int(rank.argmin())] < 0:
            return len(self.rows)
        return row

    def rows_first(self) -> tuple[int, int]:
        return len(self.rows), int(self._used.sum())

    def tokens_first(self) -> tuple[int, int]:
        return self.rows_first()[::-1]


def _place(tree: PrefixTree, row_tokens: int, *, fullest: bool) -> _Placement:
    leaves = tree.leaves
    # What a leaf shares with the leaf before it lies above the first segment between them.
    shared = np.append(0, tree.start[leaves[:-1] + 1])
    placement = _Placement(len(leaves), row_tokens)
    for leaf, tokens, above in zip(leaves.tolist(), tree.end[leaves].tolist(), shared.tolist(), strict=True):
        placement.branch(above)
        placement.add(leaf, tokens, fullest=fullest)
    return placement
