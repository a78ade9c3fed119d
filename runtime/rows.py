"""Prefix tree -> rows: which leaves share a row."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.bounds import row_bounds
from tree_compile.runtime.constructions import constructions
from tree_compile.runtime.leaves import Leaves, leaves_of, shared_tokens
from tree_compile.runtime.reopening import Budget, reopen_rows
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["OBJECTIVES", "Budget", "pack_rows"]

OBJECTIVES = ("rows", "tokens")
_DEFAULT = Budget()


def pack_rows(
    tree: PrefixTree, row_tokens: int | None, objective: str = "rows", budget: Budget = _DEFAULT
) -> tuple[list[IntArray], tuple[int, int]]:
    """Chooses the leaves of every row.

    Several constructions are tried, and the best is improved by packing a few rows at a time anew.

    Args:
        tree: the prefix tree.
        row_tokens: the greatest number of tokens in a row; None puts everything in one row.
        objective: "rows" for the fewest rows, then the fewest tokens; "tokens" for the fewest tokens, then even rows.
        budget: how long to improve.

    Returns:
        The leaf segments of every row, in pre-order; and rows and tokens that no packing goes below.

    Raises:
        SequenceTooLongError: a sequence has more than `row_tokens` tokens.
    """
    if row_tokens is None:
        return [tree.leaves], row_bounds(tree, None)
    _check_fits(tree, row_tokens)
    leaves, few_tokens = leaves_of(tree), objective == "tokens"
    tried = list(constructions(tree, leaves, row_tokens))
    best, bounds = min(tried, key=_cost(leaves, few_tokens)), row_bounds(tree, row_tokens)
    tried.append(reopen_rows(leaves, best, row_tokens, budget, few_tokens, bounds))
    return _members(leaves, min(tried, key=_cost(leaves, few_tokens))), bounds


def _cost(leaves: Leaves, few_tokens: bool) -> Callable[[IntArray], tuple[int, int]]:
    def cost(row_of: IntArray) -> tuple[int, int]:
        used = _used(leaves.tokens, leaves.minima, row_of, int(row_of.max()) + 1)
        tokens, fullest = int(used.sum()), int(used.max())
        return (tokens, fullest) if few_tokens else (len(used), tokens)

    return cost


@numba.njit(cache=True)
def _used(tokens, minima, row_of, rows):
    """Tokens of every row."""
    used, last = np.zeros(rows, np.int64), np.full(rows, -1, np.int64)
    for leaf in range(len(tokens)):
        row = row_of[leaf]
        used[row] += tokens[leaf] - (shared_tokens(minima, last[row], leaf) if last[row] >= 0 else 0)
        last[row] = leaf
    return used


def _members(leaves: Leaves, row_of: IntArray) -> list[IntArray]:
    """The leaf segments of every row; rows in the order of their first leaves."""
    _, first = np.unique(row_of, return_index=True)
    rank = np.argsort(np.argsort(first))
    order = np.argsort(rank[row_of], kind="stable")
    cuts = np.searchsorted(rank[row_of][order], np.arange(1, len(first)))
    return np.split(leaves.segment[order], cuts)


def _check_fits(tree: PrefixTree, row_tokens: int) -> None:
    too_long = np.flatnonzero(tree.sequence_length > row_tokens)
    if len(too_long):
        first, longest = int(too_long[0]), int(tree.sequence_length.max())
        raise SequenceTooLongError(
            f"sequence {first} has {tree.sequence_length[first]} tokens, more than row_tokens={row_tokens}",
            why=f"a sequence is never split over rows; {len(too_long)} of {len(tree.sequence_length)} are too long",
            hint=f"raise row_tokens to {longest}, or shorten or leave out these sequences",
        )
