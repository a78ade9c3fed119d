"""What no packing goes below."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM, batches, fewest, limit, tree_of, tree_segments
from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.bounds import packing_bounds
from tree_compile.runtime.rows import pack_rows


def test_bound_counts_documents_that_do_not_fit_beside_each_other():
    # By tokens, five rows of 10 would do.
    tree = tree_of([[document] * 7 for document in range(6)] + [[20 + i] for i in range(3)])
    assert packing_bounds(tree, 10) == (6, 45)


@given(batches(most=7), ROOM)
def test_bounds_are_those_of_a_solver_or_below(exact_rows, sequences, room):
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences)
    bound, _ = packing_bounds(tree, row_tokens)
    if bound == 1:
        return
    model = exact_rows.rows_model(tree, row_tokens, bound - 1)
    assert cp_model.CpSolver().solve(model) == cp_model.INFEASIBLE


@given(batches(most=6), ROOM, st.integers(1, 4))
def test_bounds_are_not_above_the_best_packing(sequences, room, min_shared_tokens):
    row_tokens = limit(sequences, room)
    best_rows, best_tokens = fewest(tree_segments([*map(tuple, sequences)], min_shared_tokens), row_tokens)
    rows, tokens = packing_bounds(tree_of(sequences, min_shared_tokens), row_tokens)
    assert rows <= best_rows
    assert tokens <= best_tokens


def test_bounds_count_the_copies_of_a_shared_segment():
    # 3 tokens, then 5 leaves of 2: a row of 7 holds the shared tokens and two leaves.
    tree = tree_of([[0, 0, 0, leaf, leaf] for leaf in range(1, 6)])
    assert packing_bounds(tree, 7) == (3, 3 * 3 + 5 * 2)
    assert pack_rows(tree, 7)[0].max() + 1 == 3


def test_bounds_reach_through_the_tree():
    # Each prompt alone needs two rows, since its three answers do not fit beside it.
    tree = tree_of([[prompt] * 4 + [answer] * 2 for prompt in (1, 2) for answer in (3, 4, 5)])
    assert packing_bounds(tree, 8) == (4, 2 * (2 * 4 + 3 * 2))


def test_bound_refuses_a_sequence_that_is_longer_than_a_row():
    # With room 0 below the shared token, and with less than none.
    for row_tokens in (1, 2, 3):
        with pytest.raises(SequenceTooLongError, match="Sequence 0 has 4 tokens"):
            packing_bounds(tree_of([[0, 1, 2, 2], [0, 3, 4, 4], [0, 1, 5, 5]]), row_tokens)
