"""Rows that are given out while sequences arrive."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM, batches, groups, limit
from tree_compile.errors import InputError, PayloadError, SequenceTooLongError
from tree_compile.runtime.planner import Planner
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.samples import Sample


def added(planner, sequences):
    return [row for sequence in sequences for row in planner.add(sequence)]


@given(batches(most=20), ROOM, st.integers(2, 4), st.integers(1, 4))
def test_every_sequence_is_given_out_once_and_fits(sequences, room, waiting, min_shared_tokens):
    row_tokens = limit(sequences, room)
    planner = Planner(row_tokens, min_shared_tokens, rows_waiting=waiting, plan_seconds=0)
    rows = added(planner, sequences) + planner.flush()
    assert sorted(i for row in rows for i in row.sequence_ids) == list(range(len(sequences)))
    assert planner.waiting == ()
    for ready in rows:
        (row,) = ready.plan.rows
        assert row.length <= row_tokens
        for place, i in enumerate(ready.sequence_ids):
            assert row.tokens[row.path(place)].tolist() == sequences[i]


def test_full_rows_are_given_out_early_and_cost_little():
    sequences = groups(60)
    planner = Planner(1_000, rows_waiting=6)
    early = added(planner, sequences)
    late = planner.flush()
    at_once = plan_rows(sequences, 1_000)
    assert len(early) > len(late)
    assert len(early) + len(late) <= 1.1 * len(at_once.rows)


def test_no_sequence_waits_longer_than_it_may():
    planner = Planner(1_000, rows_waiting=50, longest_wait=7)
    for number, sequence in enumerate(groups(10)):
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
    with pytest.raises(SequenceTooLongError, match="Sequence 0 has 5 tokens"):
        planner.add([1] * 5)
    assert planner.waiting == ()


@pytest.mark.parametrize(
    "options",
    [
        {"row_tokens": None},
        {"row_tokens": 0},
        {"min_shared_tokens": 0},
        {"rows_waiting": 1},
        {"rows_waiting": 2.5},
        {"longest_wait": -1},
        {"plan_seconds": -1},
        {"plan_seconds": None},
    ],
)
def test_option_without_meaning_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is .*; it must be"):
        Planner(**{"row_tokens": 8, **options})


@pytest.mark.parametrize("rows_waiting", [2, 4])
@pytest.mark.parametrize("length", [60, 34, 51, 100])
def test_no_more_waits_than_it_may_where_no_row_gets_full(rows_waiting, length):
    planner = Planner(100, 1, rows_waiting=rows_waiting, plan_seconds=0)
    for number in range(200):
        planner.add([number] * length)
        assert len(planner.waiting) * length <= rows_waiting * 100


def test_refused_sequence_is_named_by_its_number_and_may_be_left_out():
    planner = Planner(4, 1)
    planner.add([1])
    for wrong, what in [([], "is empty"), ([1, -1], "token id -1"), ([1.5], "is of type"), ([2] * 5, "has 5 tokens")]:
        with pytest.raises(InputError, match=f"Sequence 1 .*{what}"):
            planner.add(wrong)
    planner.add([2])
    assert [row.sequence_ids for row in planner.flush()] == [(0, 1)]


def test_inputs_of_a_refused_sequence_are_not_those_of_the_next():
    planner = Planner(4, 1)
    with pytest.raises(InputError, match="has 5 tokens"):
        planner.add({"input_ids": [1] * 5, "kind": [0] * 5})
    planner.add([1, 2])
    assert len(planner.flush()) == 1


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


def test_list_of_a_sample_may_be_filled_again_after_it_was_added():
    planner, tokens = Planner(10, min_shared_tokens=1), [1, 2, 3]
    planner.add(Sample(tokens))
    tokens[:] = [4]
    (ready,) = planner.flush()
    assert ready.plan.rows[0].samples[0].is_trained.tolist() == [False, True, True]


def test_samples_are_given_out_with_their_rows():
    planner, tokens, marks = Planner(8, 1), np.array([1, 2, 3]), np.array([0, 0, 1])
    planner.add(Sample(tokens, marks, reward=1.0))
    tokens[:], marks[:] = 7, 1
    planner.add(Sample([1, 2, 4], reward=0.0))
    (ready,) = planner.flush()
    (row,) = ready.plan.rows
    assert row.tokens.tolist() == [1, 2, 3, 4]
    assert [sample.payloads["reward"] for sample in row.samples.values()] == [1.0, 0.0]
    assert [sample.is_trained.tolist() for sample in row.samples.values()] == [
        [False, False, True],
        [False, True, True],
    ]


def test_samples_of_other_payloads_are_refused_when_they_are_added():
    planner = Planner(8, 1)
    planner.add(Sample([1, 2], reward=1.0))
    for other in ([1, 2], {"input_ids": [1, 2]}, Sample([1, 2]), Sample([1, 2], reward=1.0, group=1)):
        with pytest.raises(
            PayloadError, match=r"Sequence 1 .*and the one before it is a sample with the payloads reward"
        ):
            planner.add(other)
    assert len(planner.flush()) == 1
