"""Packings in one go."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM, batches, limit, row_sizes, tree_of
from tree_compile.runtime import constructions as constructing
from tree_compile.runtime.constructions import constructions
from tree_compile.runtime.leaves import depth_first, leaves_of


@given(batches(most=14), ROOM, st.integers(1, 3))
def test_every_construction_fits(sequences, room, min_shared_tokens):
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences, min_shared_tokens)
    leaves = leaves_of(tree)
    for leaf_row in constructions(tree, leaves, row_tokens):
        assert max(row_sizes(tree, leaf_row)) <= row_tokens


@given(batches(most=14), ROOM, st.integers(1, 3))
def test_best_fit_in_depth_first_order_fits(sequences, room, min_shared_tokens):
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences, min_shared_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constructing, "_MOST_EXACT", 0)  # as for more leaves
        for leaf_row in constructions(tree, leaves_of(tree), row_tokens):
            assert max(row_sizes(tree, leaf_row)) <= row_tokens


@given(batches(most=14), ROOM, st.booleans(), st.integers(1, 3))
def test_few_open_rows_fit(sequences, room, fullest, most_open):
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    order, shared = depth_first(tree, tree.tokens_below)
    leaf_row = constructing._place(order, shared, leaves.tokens, leaves.least_added, row_tokens, fullest, most_open)
    assert max(row_sizes(tree, leaf_row)) <= row_tokens


@given(batches(most=14), ROOM, st.integers(1, 3), st.sampled_from([0, 40, 200, 10**8]))
def test_few_open_bins_and_little_work_fit(sequences, room, most_open, most_work):
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences)
    leaves = tree.leaves
    leaf_row = constructing._bottom_up(tree.parent, tree.end, leaves, row_tokens, most_open, most_work)
    assert max(row_sizes(tree, leaf_row)) <= row_tokens


def depth_first_sizes(sequences, row_tokens):
    """Tokens of the rows of the first construction: each leaf into the row where it adds the fewest tokens."""
    tree = tree_of(sequences)
    return row_sizes(tree, next(constructions(tree, leaves_of(tree), row_tokens)))


def test_equal_additions_go_to_the_fullest_row():
    assert depth_first_sizes([[size] * size for size in (6, 5, 4, 3, 2)], 10) == [10, 10]


def test_least_marginal_cost_keeps_siblings_together():
    # Interleaved prompts: the tightest fit would put two prompts and one answer of each into every row.
    prompts = [[1] * 30, [2] * 30, [3] * 29]
    sequences = [[*prompt, 10 + answer] for answer in range(30) for prompt in prompts]
    assert len(depth_first_sizes(sequences, 60)) == 3


def chain_of_full_rows(depth):
    """Parents, ends and leaves of a chain of one-token segments, each with a leaf whose path has depth + 1 tokens."""
    segment = np.arange(2 * depth - 1)
    leaves = np.append(segment[1::2], segment[-1])
    end = segment // 2 + 1
    end[leaves] = depth + 1
    return np.maximum(segment - 2 + segment % 2, -1), end, leaves


def test_bins_of_a_deep_chain_go_up_in_one_step():
    constructing._bottom_up(*chain_of_full_rows(3), 4, 8_192, 10**8)  # compiles
    parent, end, leaves = chain_of_full_rows(40_000)
    began = time.perf_counter()
    leaf_row = constructing._bottom_up(parent, end, leaves, 40_001, 8_192, constructing._MOST_WORK)
    assert time.perf_counter() - began < 3
    assert sorted(leaf_row.tolist()) == list(range(40_000))
