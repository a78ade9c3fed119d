"""Packing leaves into rows, and the bounds."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import batches, fewest, leaves_by_row, row_sizes, tree_of, tree_segments
from tests.runtime.pages import run_page
from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.bounds import row_bounds
from tree_compile.runtime.rows import pack_rows

OBJECTIVES = st.sampled_from(["rows", "tokens"])


def rows_of(tree, row_tokens):
    return int(pack_rows(tree, row_tokens)[0].max()) + 1


@given(batches(), st.integers(0, 8), st.integers(1, 4), OBJECTIVES)
def test_every_leaf_is_in_one_row_that_fits(sequences, room, min_shared_tokens, objective):
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences, min_shared_tokens)
    leaf_row = pack_rows(tree, row_tokens, objective)[0]
    assert len(leaf_row) == len(tree.leaves)
    assert max(row_sizes(tree, leaf_row)) <= row_tokens


@given(batches(), st.integers(0, 8), OBJECTIVES)
def test_rows_are_numbered_by_their_first_leaves(sequences, room, objective):
    leaf_row = pack_rows(tree_of(sequences), max(map(len, sequences)) + room, objective)[0].tolist()
    assert list(dict.fromkeys(leaf_row)) == list(range(max(leaf_row) + 1))


@given(batches(most=6), st.integers(0, 8), st.integers(1, 4))
def test_bounds_are_not_above_the_best_packing(sequences, room, min_shared_tokens):
    row_tokens = max(map(len, sequences)) + room
    best_rows, best_tokens = fewest(tree_segments([*map(tuple, sequences)], min_shared_tokens), row_tokens)
    rows, tokens = row_bounds(tree_of(sequences, min_shared_tokens), row_tokens)
    assert rows <= best_rows
    assert tokens <= best_tokens


def test_bounds_count_the_copies_of_a_shared_segment():
    # 3 tokens, then 5 leaves of 2: a row of 7 holds the shared tokens and two leaves.
    tree = tree_of([[0, 0, 0, leaf, leaf] for leaf in range(1, 6)])
    assert row_bounds(tree, 7) == (3, 3 * 3 + 5 * 2)
    assert rows_of(tree, 7) == 3


def test_bounds_reach_through_the_tree():
    # Each prompt alone needs two rows, since its three answers do not fit beside it.
    tree = tree_of([[prompt] * 4 + [answer] * 2 for prompt in (1, 2) for answer in (3, 4, 5)])
    assert row_bounds(tree, 8) == (4, 2 * (2 * 4 + 3 * 2))


def test_one_row_without_a_limit():
    tree = tree_of([[1, 2], [1, 3], [4]])
    assert leaves_by_row(tree, pack_rows(tree, None)[0]) == [tree.leaves.tolist()]
    assert row_bounds(tree, None) == (1, 4)


def test_sequence_as_long_as_a_row_fits():
    assert rows_of(tree_of([[1] * 9, [2]]), 9) == 2


def test_too_long_sequence_is_named():
    with pytest.raises(SequenceTooLongError, match="Sequence 1 has 9 tokens, and row_tokens is 8"):
        pack_rows(tree_of([[1] * 8, [2] * 9, [3] * 10]), 8)


def test_bound_refuses_a_sequence_that_is_longer_than_a_row():
    # With room 0 below the shared token, and with less than none.
    for row_tokens in (1, 2, 3):
        with pytest.raises(SequenceTooLongError, match="Sequence 0 has 4 tokens"):
            row_bounds(tree_of([[0, 1, 2, 2], [0, 3, 4, 4], [0, 1, 5, 5]]), row_tokens)


def test_too_long_sequence_error_says_what_would_do():
    with pytest.raises(SequenceTooLongError, match="raise row_tokens to 10"):
        pack_rows(tree_of([[1] * 8, [2] * 9, [3] * 10]), 8)


def test_equal_additions_go_to_the_fullest_row():
    tree = tree_of([[size] * size for size in (6, 5, 4, 3, 2)])
    assert row_sizes(tree, pack_rows(tree, 10)[0]) == [10, 10]


def test_least_marginal_cost_keeps_siblings_together():
    # Interleaved prompts: the tightest fit would put two prompts and one answer of each into every row.
    prompts = [[1] * 30, [2] * 30, [3] * 29]
    sequences = [[*prompt, 10 + answer] for answer in range(30) for prompt in prompts]
    assert rows_of(tree_of(sequences), 60) == 3


def test_published_example_takes_two_rows(workloads):
    sequences, row_tokens = workloads.seed_example()
    assert rows_of(tree_of(sequences, 64), row_tokens) == 2


@pytest.mark.parametrize(
    ("family", "over"),
    [
        ("groups_32k", 1.04),
        ("groups_131k", 1.03),
        ("agent_trees", 1.05),
        ("long_documents", 1.08),
        ("preference_pairs", 1.02),
    ],
)
def test_rows_are_near_the_bound(workloads, family, over):
    sequences, row_tokens = workloads.FAMILIES[family]()
    tree = tree_of(sequences, 64)
    bound, _ = row_bounds(tree, row_tokens)
    assert bound <= rows_of(tree, row_tokens) <= over * bound


@pytest.mark.parametrize(("objective", "sizes"), [("rows", [6, 6]), ("tokens", [3, 4, 4])])
def test_objective_weighs_rows_against_tokens(objective, sizes):
    # Two rows only hold all if the token that [2, 2, 2] and [2, 1] share is in both.
    tree = tree_of([[0, 0, 1], [2, 2, 2], [2, 1], [1, 1, 1, 1]])
    assert sorted(row_sizes(tree, pack_rows(tree, 6, objective)[0])) == sizes


def test_10000_leaves_are_packed_in_seconds():
    rng = np.random.default_rng(0)
    sequences = [
        np.append(np.full(100, group), rng.integers(0, 1 << 30, 20)) for group in range(1_000) for _ in range(10)
    ]
    tree = tree_of(sequences, 64)
    begin = time.perf_counter()
    rows = rows_of(tree, 1_200)
    assert time.perf_counter() - begin < 10
    # A group has 100 + 10 x 20 tokens, so that four fill a row.
    assert rows == row_bounds(tree, 1_200)[0] == 250


def test_page_is_right():
    assert run_page("rows.md")
