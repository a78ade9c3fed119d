"""Packings that are improved."""

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM, batches, limit, row_sizes, tree_of
from tree_compile.runtime.constructions import constructions
from tree_compile.runtime.leaves import leaves_of
from tree_compile.runtime.options import Budget
from tree_compile.runtime.reopening import reopen_rows

NO_BOUNDS = (0, 0)


@given(batches(most=14), ROOM, st.booleans(), st.integers(0, 400))
def test_reopened_rows_fit_and_are_no_worse(sequences, room, few_tokens, attempts):
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    for start in constructions(tree, leaves, row_tokens):
        before = start.copy()
        leaf_row = reopen_rows(leaves, start, row_tokens, Budget(attempts=attempts), few_tokens, NO_BOUNDS)
        old, new = row_sizes(tree, start), row_sizes(tree, leaf_row)
        assert max(new) <= row_tokens
        assert sum(new) <= sum(old) if few_tokens else len(new) <= len(old)
        assert start.tolist() == before.tolist()


def test_reopening_joins_what_fits_together():
    leaves = leaves_of(tree_of([[group] * 5 + [leaf] for group in range(4) for leaf in range(10, 14)]))
    leaf_row = reopen_rows(leaves, np.arange(16), 9, Budget(attempts=2_000), False, NO_BOUNDS)
    assert len(set(leaf_row.tolist())) == 4


def test_budget_of_seconds_is_kept_with_thousands_of_leaves_in_a_row():
    sequences = [[group] * 9 + [leaf, leaf + 1] for group in range(8) for leaf in range(10, 2_510)]
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    start = next(iter(constructions(tree, leaves, 8_000)))
    began = time.perf_counter()
    reopen_rows(leaves, start, 8_000, Budget(0.05), False, NO_BOUNDS)
    assert time.perf_counter() - began < 1
