"""Rows that are given out while sequences arrive, and what batches would take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import batches
from tree_compile.errors import PayloadError, SequenceTooLongError
from tree_compile.runtime.estimate import estimate
from tree_compile.runtime.plan import plan_rows
from tree_compile.runtime.planner import Planner


def added(planner, sequences):
    return [row for sequence in sequences for row in planner.add(sequence)]


@given(batches(most=20), st.integers(0, 8), st.integers(2, 4), st.integers(1, 4))
def test_every_sequence_is_given_out_once_and_fits(sequences, room, waiting, min_shared_tokens):
    row_tokens = max(map(len, sequences)) + room
    planner = Planner(row_tokens, min_shared_tokens, rows_waiting=waiting, plan_seconds=0)
    rows = added(planner, sequences) + planner.flush()
    assert sorted(i for row in rows for i in row.numbers) == list(range(len(sequences)))
    assert planner.waiting == ()
    for ready in rows:
        (row,) = ready.plan.rows
        assert row.length <= row_tokens
        for place, i in enumerate(ready.numbers):
            assert row.tokens[row.path(place)].tolist() == sequences[i]


def groups(count, rng):
    return [np.append(np.full(70, group), rng.integers(0, 9, 30)) for group in range(count) for _ in range(8)]


def test_full_rows_are_given_out_early_and_cost_little():
    sequences = groups(60, np.random.default_rng(0))
    planner = Planner(1_000, rows_waiting=6)
    early = added(planner, sequences)
    late = planner.flush()
    at_once = plan_rows(sequences, 1_000)
    assert len(early) > len(late)
    assert len(early) + len(late) <= 1.1 * len(at_once.rows)


def test_no_sequence_waits_longer_than_it_may():
    planner = Planner(1_000, rows_waiting=50, longest_wait=7)
    for number, sequence in enumerate(groups(10, np.random.default_rng(0))):
        planner.add(sequence)
        assert all(number - waiting < 7 for waiting in planner.waiting)


def test_payloads_are_given_out_with_their_tokens():
    planner = Planner(8, 1)
    planner.add({"input_ids": [1, 2, 3], "kind": [0, 0, 1]})
    planner.add({"input_ids": [1, 2, 3], "kind": [0, 0, 2]})
    (ready,) = planner.flush()
    assert ready.plan.rows[0].inputs["kind"].tolist() == [0, 0, 1, 2]


def test_sequence_that_is_too_long_is_refused_when_it_is_added():
    planner = Planner(4)
    with pytest.raises(SequenceTooLongError, match="5 tokens"):
        planner.add([1] * 5)
    assert planner.waiting == ()


@pytest.mark.parametrize("options", [{"rows_waiting": 1}, {"full": 0}, {"full": 1.1}, {"longest_wait": -1}])
def test_option_without_meaning_is_refused(options):
    with pytest.raises(ValueError, match="must be"):
        Planner(8, **options)


# Estimates


def test_estimate_of_a_whole_pool_is_its_plan():
    pool = groups(12, np.random.default_rng(0))
    plan = plan_rows(pool, 700, plan_attempts=2_000)
    (found,) = estimate(pool, [700])
    assert (found.rows, found.packed_tokens) == ((len(plan.rows),), (plan.packed_tokens,))
    assert found.fill == plan.packed_tokens / (700 * len(plan.rows))


def test_estimate_draws_whole_groups_for_every_row_length():
    pool = groups(12, np.random.default_rng(0))
    names = [number // 8 for number in range(len(pool))]
    found = estimate(pool, [500, 1_000], groups=names, group_counts=[3, 6], samples=4)
    assert [(e.row_tokens, e.groups) for e in found] == [(500, 3), (1_000, 3), (500, 6), (1_000, 6)]
    assert all(e.sequences == (8 * e.groups,) * 4 for e in found)
    assert found[0].input_tokens == found[1].input_tokens
    assert all(bound <= rows for e in found for bound, rows in zip(e.row_bounds, e.rows, strict=True))
    assert estimate(pool, [500, 1_000], groups=names, group_counts=[3, 6], samples=4) == found


def test_estimates_print_as_a_table():
    lines = str(estimate(groups(4, np.random.default_rng(0)), [500, 1_000], group_counts=[8, 16])).splitlines()
    assert len(lines) == 5
    assert len(set(map(len, lines))) == 1
    assert lines[0].split()[:2] == ["row", "tokens"]


@pytest.mark.parametrize("options", [{"group_counts": [0]}, {"group_counts": [33]}, {"groups": [1]}])
def test_size_without_meaning_is_refused(options):
    with pytest.raises(ValueError, match="group"):
        estimate(groups(4, np.random.default_rng(0)), [500], **options)


def test_sequence_of_other_inputs_is_refused_when_it_is_added():
    planner = Planner(8, 1)
    planner.add({"input_ids": [1, 2], "kind": [0, 0]})
    for other in ([1, 2], {"input_ids": [1, 2]}, {"input_ids": [1, 2], "kind": [0, 0], "more": [0, 0]}):
        with pytest.raises(PayloadError, match="has the inputs"):
            planner.add(other)
    assert len(planner.flush()) == 1


def test_array_may_be_filled_again_after_it_was_added():
    planner, tokens = Planner(8, 1), np.array([1, 2, 3])
    planner.add(tokens)
    tokens[:] = 7
    assert planner.flush()[0].plan.rows[0].tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("options", [{"samples": 0}, {"row_tokens": 500}, {"row_tokens": [None]}])
def test_estimate_without_meaning_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        estimate(**{"pool": [[1, 2]], "row_tokens": [500], **options})
