"""Constructions, their improvement, and the bound."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from tests.runtime.batches import batches, chain, row_sizes, segment_path, tree_of
from tree_compile.runtime import bounds, layout, reopening, trie
from tree_compile.runtime import constructions as constructing
from tree_compile.runtime import leaves as leaves_module
from tree_compile.runtime.bounds import row_bounds
from tree_compile.runtime.constructions import constructions
from tree_compile.runtime.leaves import depth_first, leaves_of, shared_tokens
from tree_compile.runtime.options import Budget
from tree_compile.runtime.planning import plan_rows, warm_up
from tree_compile.runtime.reopening import reopen_rows
from tree_compile.runtime.rows import pack_rows

ROOM = st.integers(0, 8)
NO_BOUNDS = (0, 0)


@given(batches())
def test_any_two_leaves_share_the_least_between_them(sequences):
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    for left, right in itertools.combinations(range(len(leaves)), 2):
        common = set(segment_path(tree, leaves.segment[left])) & set(segment_path(tree, leaves.segment[right]))
        expected = sum(int(tree.length[segment]) for segment in common)
        assert shared_tokens(leaves.minima, left, right) == expected


@given(batches(), st.randoms())
def test_depth_first_order_keeps_subtrees_together(sequences, random):
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    order, shared = depth_first(tree, np.array([random.random() for _ in range(len(tree))]))
    assert sorted(order.tolist()) == list(range(len(leaves)))
    for segment in range(len(tree)):
        inside = [segment in segment_path(tree, leaves.segment[leaf]) for leaf in order]
        assert sum(a != b for a, b in itertools.pairwise([False, *inside, False])) == 2
    for (one, other), tokens in zip(itertools.pairwise(order), shared[1:], strict=True):
        assert shared_tokens(leaves.minima, min(one, other), max(one, other)) == tokens


@given(batches(most=14), ROOM, st.integers(1, 3))
def test_every_construction_fits(sequences, room, min_shared_tokens):
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences, min_shared_tokens)
    leaves = leaves_of(tree)
    for row_of in constructions(tree, leaves, row_tokens):
        assert max(row_sizes(tree, row_of)) <= row_tokens


@given(batches(most=14), ROOM, st.integers(1, 3))
def test_best_fit_in_depth_first_order_fits(sequences, room, min_shared_tokens):
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences, min_shared_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constructing, "_MOST_EXACT", 0)  # as for more leaves
        for row_of in constructions(tree, leaves_of(tree), row_tokens):
            assert max(row_sizes(tree, row_of)) <= row_tokens


@given(batches(most=14), ROOM, st.booleans(), st.integers(1, 3))
def test_few_open_rows_fit(sequences, room, fullest, most_open):
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    order, shared = depth_first(tree, tree.tokens_below)
    row_of = constructing._place(order, shared, leaves.tokens, leaves.least_added, row_tokens, fullest, most_open)
    assert max(row_sizes(tree, row_of)) <= row_tokens


@given(batches(most=14), ROOM, st.integers(1, 3), st.sampled_from([0, 40, 200, 10**8]))
def test_few_open_bins_and_little_work_fit(sequences, room, most_open, most_work):
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences)
    leaves = tree.leaves
    row_of = constructing._bottom_up(tree.parent, tree.end, leaves, row_tokens, most_open, most_work)
    assert max(row_sizes(tree, row_of)) <= row_tokens


def test_bins_of_a_deep_chain_go_up_in_one_step():
    # Every second segment is a leaf of one token, and no two leaves fit into a row but the last ones.
    depth = 40_000
    trunk_end = np.arange(1, depth + 1)
    end = np.stack([trunk_end, trunk_end + 1], axis=1).ravel()[:-1]
    parent = np.empty(2 * depth - 1, np.int64)
    parent[0::2] = np.arange(-2, 2 * depth - 2, 2)
    parent[0] = -1
    parent[1::2] = np.arange(0, 2 * depth - 2, 2)
    leaves = np.append(np.arange(1, 2 * depth - 1, 2), 2 * depth - 2)
    began = time.perf_counter()
    row_of = constructing._bottom_up(parent, end, leaves, depth + 1, 8_192, 10**8)
    assert time.perf_counter() - began < 5
    assert len(row_of) == depth


@given(batches(most=14), ROOM, st.booleans(), st.integers(0, 400))
def test_reopened_rows_fit_and_are_no_worse(sequences, room, few_tokens, attempts):
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    for start in constructions(tree, leaves, row_tokens):
        before = start.copy()
        row_of = reopen_rows(leaves, start, row_tokens, Budget(attempts=attempts), few_tokens, NO_BOUNDS)
        old, new = row_sizes(tree, start), row_sizes(tree, row_of)
        assert max(new) <= row_tokens
        assert sum(new) <= sum(old) if few_tokens else len(new) <= len(old)
        assert start.tolist() == before.tolist()


def test_reopening_joins_what_fits_together():
    leaves = leaves_of(tree_of([[group] * 5 + [leaf] for group in range(4) for leaf in range(10, 14)]))
    row_of = reopen_rows(leaves, np.arange(16), 9, Budget(attempts=2_000), False, NO_BOUNDS)
    assert len(set(row_of.tolist())) == 4


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
    found = [row_sizes(tree, row_of) for row_of in constructions(tree, leaves, 170)]
    best = min((len(used), sum(used)) for used in found)

    def result(attempts):
        used = row_sizes(tree, pack_rows(tree, 170, budget=Budget(attempts=attempts))[0])
        return len(used), sum(used)

    assert result(0) == best
    assert result(3_000) < best


@given(batches(most=8), ROOM)
def test_row_without_one_of_its_sequences_still_fits(sequences, room):
    row_tokens = max(map(len, sequences)) + room
    plan = plan_rows(sequences, row_tokens, 1, plan_attempts=50)
    for row in plan.rows:
        for left_out in row.sequence_ids:
            rest = [sequences[i] for i in row.sequence_ids if i != left_out]
            if rest:
                alone = plan_rows(rest, None, 1)
                assert alone.packed_tokens <= row.length <= row_tokens


def test_bound_counts_documents_that_do_not_fit_beside_each_other():
    # By tokens, five rows of 10 would do.
    tree = tree_of([[document] * 7 for document in range(6)] + [[20 + i] for i in range(3)])
    assert row_bounds(tree, 10) == (6, 45)


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


@pytest.mark.parametrize("row_tokens", [5_001, 6_000])
def test_deep_chain_is_packed(row_tokens):
    plan = plan_rows([np.array(sequence, np.int16) for sequence in chain(5_000)], row_tokens, 1, plan_seconds=0)
    assert plan.row_bound <= len(plan.rows)
    assert max(row.length for row in plan.rows) <= row_tokens


@settings(max_examples=300)
@given(batches(most=14), ROOM)
def test_rows_are_never_more_than_those_of_the_published_rule(seed_rule, sequences, room):
    row_tokens = max(map(len, sequences)) + room
    distinct = [list(sequence) for sequence in dict.fromkeys(map(tuple, sequences))]
    alone = [s for s in distinct if not any(s != other and s == other[: len(s)] for other in distinct)]
    paths = seed_rule.walk(alone, [len(s) for s in alone], 1)
    rows = seed_rule.place(paths, seed_rule.groups_of(paths), row_tokens)
    plan = plan_rows(alone, row_tokens, 1, plan_seconds=0)
    assert (len(plan.rows), plan.packed_tokens) <= (len(rows), sum(row.tokens for row in rows))


@given(batches(most=7), ROOM)
def test_bounds_are_those_of_a_solver_or_below(exact_rows, sequences, room):
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    row_tokens = max(map(len, sequences)) + room
    tree = tree_of(sequences)
    bound, _ = row_bounds(tree, row_tokens)
    if bound == 1:
        return
    model = exact_rows.rows_model(tree, row_tokens, bound - 1)
    assert cp_model.CpSolver().solve(model) == cp_model.INFEASIBLE


def test_fewest_tokens_may_take_more_rows():
    sequences = [[1, 1, 2, 2], [1, 1, 3, 3], [4] * 6, [5] * 6]
    plan = plan_rows(sequences, 10, 1, "tokens", plan_attempts=500)
    assert plan.packed_tokens == plan.token_bound == 18
    assert len(plan_rows(sequences, 10, 1, plan_attempts=500).rows) == 2


def unaligned(tokens):
    room = np.empty(tokens.nbytes + 1, np.uint8)
    found = room[1:].view(tokens.dtype)
    found[:] = tokens
    return found


KINDS = {
    "int64": lambda tokens: tokens,
    "int32": lambda tokens: tokens.astype(np.int32),
    "uint16": lambda tokens: tokens.astype(np.uint16),
    "big_endian": lambda tokens: tokens.astype(">i4"),
    "read_only": lambda tokens: np.frombuffer(tokens.tobytes(), tokens.dtype),
    "unaligned": unaligned,
    "every_second": lambda tokens: np.repeat(tokens, 2)[::2],
}


@pytest.fixture(scope="module")
def kernels():
    """Everything that numba has compiled, each with the number of types that it was compiled for."""
    warm_up()
    modules = (bounds, constructing, layout, leaves_module, reopening, trie)
    found = {k for module in modules for k in vars(module).values() if isinstance(k, Dispatcher)}
    assert len(trie._order.signatures) == len(trie._first_difference.signatures) == 2
    return {kernel: len(kernel.signatures) for kernel in found}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("row_tokens", [170, np.int32(170), np.uint64(170), 2**63, 2**70])
def test_warm_up_leaves_nothing_to_compile(kernels, kind, row_tokens):
    random = np.random.default_rng(0)
    plain = [np.append(np.full(30, g), random.integers(0, 99, 20 + g)) for g in range(9) for _ in range(9)]
    sequences = [kind(tokens) for tokens in plain]
    plan = plan_rows(sequences, row_tokens).with_sequences(sequences)
    assert type(plan.row_tokens) is int
    alone = plan.of_row(0)
    alone.with_sequences([sequences[i] for i in plan.rows[0].sequence_ids])
    assert {kernel: len(kernel.signatures) for kernel in kernels} == kernels


def test_budget_of_seconds_is_kept_with_thousands_of_leaves_in_a_row():
    sequences = [[group] * 9 + [leaf, leaf + 1] for group in range(8) for leaf in range(10, 2_510)]
    tree = tree_of(sequences)
    leaves = leaves_of(tree)
    start = next(iter(constructions(tree, leaves, 8_000)))
    began = time.perf_counter()
    reopen_rows(leaves, start, 8_000, Budget(0.05), False, NO_BOUNDS)
    assert time.perf_counter() - began < 1
