"""Prefix tree -> rows: which leaves share a row, and how many rows and tokens no packing can go below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["pack_rows", "row_bounds"]

_OBJECTIVES = ("rows", "tokens")


def pack_rows(tree: PrefixTree, row_tokens: int | None, objective: str = "rows") -> list[list[int]]:
    """Chooses the leaves of every row.

    Leaves are placed in depth-first order, each into the row where it adds the fewest tokens. This is done twice,
    with the longest sequences first and with the largest subtrees first, and the better result is taken.

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
    longest, tokens = _longest_and_tokens_below(tree)
    placements = [_place(_depth_first(tree, size), row_tokens) for size in (longest, tokens)]
    best = min(placements, key=_Placement.rows_first if objective == "rows" else _Placement.tokens_first)
    return [sorted(row) for row in best.rows]


def row_bounds(tree: PrefixTree, row_tokens: int | None) -> tuple[int, int]:
    """Numbers of rows and of tokens that no packing of this tree can go below.

    The tokens below a segment need at least `tokens below / (row_tokens - tokens down to it)` rows, and each of
    them holds the segment again. Bottom-up this gives the fewest copies of every segment, and so the tokens.
    """
    if row_tokens is None:
        return 1, int(tree.length.sum())
    parent, length, end = tree.parent.tolist(), tree.length.tolist(), tree.end.tolist()
    # The last entry is for a root above all roots: parent -1 is its index.
    below = [0] * (len(tree) + 1)
    for segment in range(len(tree) - 1, -1, -1):
        # A leaf has nothing below it, and may fill its row.
        copies = -(-below[segment] // (row_tokens - end[segment])) if below[segment] else 1
        below[parent[segment]] += length[segment] * copies + below[segment]
    return -(-below[-1] // row_tokens), below[-1]


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


@dataclass(frozen=True)
class _Visit:
    """A leaf in depth-first order: its path has `tokens` tokens, of which the leaf before it has the first `shared`."""

    leaf: int
    tokens: int
    shared: int


def _longest_and_tokens_below(tree: PrefixTree) -> tuple[list[int], list[int]]:
    """For each segment the longest path through it, and the tokens of its subtree."""
    longest, tokens = tree.end.tolist(), tree.length.tolist()
    for segment, above in reversed(list(enumerate(tree.parent.tolist()))):
        if above >= 0:
            longest[above] = max(longest[above], longest[segment])
            tokens[above] += tokens[segment]
    return longest, tokens


def _depth_first(tree: PrefixTree, size: list[int]) -> list[_Visit]:
    """The leaves in a depth-first order in which siblings of greater size come first."""
    children: dict[int, list[int]] = {}
    for segment, above in enumerate(tree.parent.tolist()):
        children.setdefault(above, []).append(segment)
    start, end = tree.start.tolist(), tree.end.tolist()
    visits: list[_Visit] = []
    # A leaf shares with the leaf before it what lies above the first segment after that one.
    stack, shared = sorted(children[-1], key=size.__getitem__), 0
    while stack:
        segment = stack.pop()
        shared = min(shared, start[segment])
        if segment in children:
            stack += sorted(children[segment], key=size.__getitem__)
        else:
            visits.append(_Visit(segment, end[segment], shared))
            shared = end[segment]
    return visits


def _place(visits: list[_Visit], row_tokens: int) -> _Placement:
    placement = _Placement(len(visits), row_tokens)
    for visit in visits:
        placement.add(visit)
    return placement


class _Placement:
    """Rows while leaves are placed in them, one after the other in depth-first order."""

    def __init__(self, leaves: int, row_tokens: int) -> None:
        self.rows: list[list[int]] = []
        self.row_tokens = row_tokens
        self._used = np.zeros(leaves, np.int64)
        # Tokens of the path at hand that each row holds. In depth-first order the leaf placed last in a row has
        # more in common with the next leaf than any before it.
        self._held = np.zeros(leaves, np.int64)

    def add(self, visit: _Visit) -> None:
        """Puts a leaf where it adds the fewest tokens, of those rows into the fullest; into a new row if none fits."""
        held = self._held[: len(self.rows)]
        np.minimum(held, visit.shared, out=held)
        row = self._choose(visit.tokens - held)
        if row == len(self.rows):
            self.rows.append([])
        self.rows[row].append(visit.leaf)
        self._used[row] += visit.tokens - self._held[row]
        self._held[row] = visit.tokens

    def _choose(self, added: IntArray) -> int:
        left = self.row_tokens - self._used[: len(self.rows)] - added
        fits = np.flatnonzero(left >= 0)
        if not len(fits):
            return len(self.rows)
        return int(fits[np.lexsort((left[fits], added[fits]))[0]])

    def rows_first(self) -> tuple[int, int]:
        """Rows, then tokens."""
        return len(self.rows), int(self._used.sum())

    def tokens_first(self) -> tuple[int, int]:
        """Tokens, then rows."""
        return int(self._used.sum()), len(self.rows)
