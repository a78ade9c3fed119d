"""Packing leaves into rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.batches import ROOM, batches, leaves_by_row, limit, row_sizes, tree_of
from tests.runtime.pages import run_page
from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.bounds import packing_bounds
from tree_compile.runtime.constructions import constructions
from tree_compile.runtime.leaves import leaves_of
from tree_compile.runtime.options import Budget
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.rows import pack_rows

# Not a time: examples and figures would not come back.
BUDGET = Budget(attempts=1_000)
OBJECTIVES = st.sampled_from(["rows", "tokens"])


def rows_of(tree, row_tokens):
    return int(pack_rows(tree, row_tokens, budget=BUDGET)[0].max()) + 1


@given(batches(), ROOM, st.integers(1, 4), OBJECTIVES)
def test_every_leaf_is_in_one_row_that_fits(sequences, room, min_shared_tokens, objective):
    row_tokens = limit(sequences, room)
    tree = tree_of(sequences, min_shared_tokens)
    leaf_row = pack_rows(tree, row_tokens, objective, BUDGET)[0]
    assert len(leaf_row) == len(tree.leaves)
    assert max(row_sizes(tree, leaf_row)) <= row_tokens


@given(batches(), ROOM, OBJECTIVES)
def test_rows_are_numbered_by_their_first_leaves(sequences, room, objective):
    leaf_row = pack_rows(tree_of(sequences), limit(sequences, room), objective, BUDGET)[0].tolist()
    assert list(dict.fromkeys(leaf_row)) == list(range(max(leaf_row) + 1))


def test_one_row_without_a_limit():
    tree = tree_of([[1, 2], [1, 3], [4]])
    assert leaves_by_row(tree, pack_rows(tree, None)[0]) == [tree.leaves.tolist()]
    assert packing_bounds(tree, None) == (1, 4)


def test_sequence_as_long_as_a_row_fits():
    assert rows_of(tree_of([[1] * 9, [2]]), 9) == 2


def test_too_long_sequence_is_named_with_what_would_do():
    with pytest.raises(SequenceTooLongError, match="Sequence 1 has 9 tokens, and row_tokens is 8") as raised:
        pack_rows(tree_of([[1] * 8, [2] * 9, [3] * 10]), 8)
    assert "raise row_tokens to 10" in raised.value.hint


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
    bound, _ = packing_bounds(tree, row_tokens)
    assert bound <= rows_of(tree, row_tokens) <= over * bound


@pytest.mark.parametrize(("objective", "sizes"), [("rows", [6, 6]), ("tokens", [3, 4, 4])])
def test_objective_weighs_rows_against_tokens(objective, sizes):
    # Two rows only hold all if the token that [2, 2, 2] and [2, 1] share is in both.
    tree = tree_of([[0, 0, 1], [2, 2, 2], [2, 1], [1, 1, 1, 1]])
    assert sorted(row_sizes(tree, pack_rows(tree, 6, objective, BUDGET)[0])) == sizes


def test_budget_of_attempts_gives_the_same_rows_each_time():
    random = np.random.default_rng(0)
    sequences = [
        np.append(np.full(40, group), random.integers(0, 99, random.integers(1, 60)))
        for group in range(9)
        for _ in range(9)
    ]
    packed = [pack_rows(tree_of(sequences), 150, budget=Budget(attempts=500))[0] for _ in range(2)]
    assert packed[0].tolist() == packed[1].tolist()


def test_no_budget_takes_the_best_construction_and_a_budget_improves_it():
    random = np.random.default_rng(0)
    sequences = [
        np.append(np.full(30, group), random.integers(0, 99, random.integers(1, 90)))
        for group in range(9)
        for _ in range(9)
    ]
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    found = [row_sizes(tree, leaf_row) for leaf_row in constructions(tree, leaves, 170)]
    best = min((len(used), sum(used)) for used in found)

    def result(attempts):
        used = row_sizes(tree, pack_rows(tree, 170, budget=Budget(attempts=attempts))[0])
        return len(used), sum(used)

    assert result(0) == best
    assert result(3_000) < best


@given(batches(most=8), ROOM)
def test_row_without_one_of_its_sequences_still_fits(sequences, room):
    row_tokens = limit(sequences, room)
    plan = plan_rows(sequences, row_tokens, 1, plan_attempts=50)
    for row in plan.rows:
        for left_out in row.sequence_ids:
            rest = [sequences[i] for i in row.sequence_ids if i != left_out]
            if rest:
                alone = plan_rows(rest, None, 1)
                assert alone.packed_tokens <= row.length <= row_tokens


def test_100000_duplicates_are_one_row():
    plan = plan_rows([np.arange(50)] * 100_000, 64)
    assert (len(plan.rows), plan.packed_tokens) == (1, 50)
    assert len(plan.rows[0].sequence_ids) == 100_000


def test_one_token_sequences_fill_rows():
    plan = plan_rows([[token] for token in range(1_000)], 64)
    assert len(plan.rows) == plan.row_bound == 16


def test_sequences_as_long_as_a_row_have_rows_of_their_own():
    plan = plan_rows([[token] * 32 for token in range(50)], 32)
    assert [row.length for row in plan.rows] == [32] * 50


@settings(max_examples=300)
@given(batches(most=14), ROOM)
def test_rows_are_never_more_than_those_of_the_published_rule(published_rule, sequences, room):
    row_tokens = limit(sequences, room)
    distinct = [list(sequence) for sequence in dict.fromkeys(map(tuple, sequences))]
    alone = [s for s in distinct if not any(s != other and s == other[: len(s)] for other in distinct)]
    paths = published_rule.walk(alone, [len(s) for s in alone], 1)
    rows = published_rule.place(paths, published_rule.groups_of(paths), row_tokens)
    plan = plan_rows(alone, row_tokens, 1, plan_seconds=0)
    assert (len(plan.rows), plan.packed_tokens) <= (len(rows), sum(row.tokens for row in rows))


def test_page_is_right():
    assert run_page("rows.md")
