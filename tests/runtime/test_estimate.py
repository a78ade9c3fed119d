"""What batches would take."""

import numpy as np
import pytest

from tests.runtime.batches import groups
from tree_compile.errors import SequenceTooLongError
from tree_compile.runtime.estimate import estimate
from tree_compile.runtime.planning import plan_rows


def test_estimate_of_a_whole_pool_is_its_plan():
    pool = groups(12)
    plan = plan_rows(pool, 700, plan_attempts=2_000)
    (found,) = estimate(pool, [700])
    assert (found.rows, found.packed_tokens) == ((len(plan.rows),), (plan.packed_tokens,))
    assert found.fill == plan.packed_tokens / (700 * len(plan.rows))


def test_estimate_draws_whole_groups_for_every_row_length():
    pool = groups(12)
    names = [number // 8 for number in range(len(pool))]
    found = estimate(pool, [500, 1_000], groups=names, group_counts=[3, 6], samples=4)
    assert [(e.row_tokens, e.groups) for e in found] == [(500, 3), (1_000, 3), (500, 6), (1_000, 6)]
    assert all(e.sequences == (8 * e.groups,) * 4 for e in found)
    assert found[0].input_tokens == found[1].input_tokens
    assert all(bound <= rows for e in found for bound, rows in zip(e.row_bounds, e.rows, strict=True))
    assert estimate(pool, [500, 1_000], groups=names, group_counts=[3, 6], samples=4) == found


def test_estimates_print_as_a_table():
    lines = str(estimate(groups(4), [500, 1_000], group_counts=[8, 16])).splitlines()
    assert len(lines) == 5
    assert len(set(map(len, lines))) == 1
    assert lines[0].split()[:2] == ["row", "tokens"]


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0},
        {"row_tokens": 0},
        {"row_tokens": np.int64(-1)},
        {"row_tokens": []},
        {"row_tokens": [None]},
        {"group_counts": 2},
        {"group_counts": []},
        {"group_counts": [1.5]},
        {"group_counts": [0]},
        {"group_counts": [2]},
        {"groups": [1, 2]},
        {"groups": [[1]]},
        {"groups": [(1, [2])]},
        {"groups": {"a": 0}},
        {"groups": (name for name in "a")},
        {"seed": "a"},
        {"seed": -1},
    ],
)
def test_estimate_without_meaning_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} (is|has) .*; (it|they) must (be|have)"):
        estimate(**{"pool": [[1, 2]], "row_tokens": [500], **options})


@pytest.mark.parametrize("number", [500, np.int64(500)])
def test_one_number_is_a_list_of_one(number):
    pool = [[1, 2, 3], [1, 2, 4]]
    one = estimate(pool, number, group_counts=number.__class__(1))
    assert str(one) == str(estimate(pool, [500], group_counts=[1]))


def test_groups_of_another_number_are_counted():
    with pytest.raises(ValueError, match="groups has 1 entry; it must have one for each of the 2 sequences"):
        estimate([[1], [2]], 500, groups=["a"])


def test_sequence_that_is_longer_than_a_row_is_named_whether_it_is_drawn_or_not():
    pool = [[number] * 5 for number in range(40)] + [[40] * 9]
    for seed in range(3):
        with pytest.raises(SequenceTooLongError, match="Sequence 40 has 9 tokens, and row_tokens is 8"):
            estimate(pool, [16, 8], group_counts=[1], samples=1, seed=seed)
