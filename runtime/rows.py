"""Prefix tree -> rows: which leaves share a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tree_compile.runtime.bounds import packing_bounds
from tree_compile.runtime.constructions import constructions
from tree_compile.runtime.leaves import Leaves, leaves_of, row_lists
from tree_compile.runtime.options import Budget
from tree_compile.runtime.reopening import reopen_rows
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.tree import PrefixTree

__all__ = ["pack_rows"]


def pack_rows(
    tree: PrefixTree, row_tokens: int | None, objective: str = "rows", budget: Budget | None = None
) -> tuple[IntArray, tuple[int, int]]:
    """Chooses the row of every leaf.

    Several constructions are tried, and the best is improved by packing a few rows at a time anew.

    Args:
        tree: the prefix tree.
        row_tokens: the greatest number of tokens in a row; None puts everything in one row.
        objective: "rows" for the fewest rows, then the fewest tokens; "tokens" for the fewest tokens, then even rows:
            the least sum of squares of their tokens.
        budget: how long to improve; None for the time that plans take where nothing is said.

    Returns:
        For each leaf of the tree its row, int64 [leaves], rows numbered in the order of their first leaves; and rows
        and tokens that no packing goes below.

    Raises:
        SequenceTooLongError: a sequence has more than `row_tokens` tokens.
    """
    bounds = packing_bounds(tree, row_tokens)  # first: it refuses what the constructions would not end on
    leaves, few_tokens = leaves_of(tree), objective == "tokens"
    if row_tokens is None:
        return np.zeros(len(leaves), np.int64), bounds
    cost = _cost(leaves, few_tokens)
    best = min(constructions(tree, leaves, row_tokens), key=cost)
    # The score of reopened rows is another one than the cost, by which they may be worse.
    best = min(best, reopen_rows(leaves, best, row_tokens, budget or Budget(), few_tokens, bounds), key=cost)
    return _by_first_leaf(best), bounds


def _cost(leaves: Leaves, few_tokens: bool) -> Callable[[IntArray], tuple[int, int]]:
    def cost(leaf_row: IntArray) -> tuple[int, int]:
        used = row_lists(leaf_row, leaves.tokens, leaves.minima)[1]
        rows, tokens = int(leaf_row.max()) + 1, int(used.sum())
        return (tokens, int((used * used).sum())) if few_tokens else (rows, tokens)

    return cost


def _by_first_leaf(leaf_row: IntArray) -> IntArray:
    _, first = np.unique(leaf_row, return_index=True)
    return np.argsort(np.argsort(first))[leaf_row]
