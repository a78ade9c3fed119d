"""Rows as they are computed: tokens, positions, parents, and where each sequence lies."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM, ROOM_OR_NONE, ancestors, batches, chain, limit, ranges_touch
from tests.runtime.pages import run_page
from tree_compile.errors import PlanError, TokenTypeError
from tree_compile.runtime.layout import END, PARENT
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.samples import Sample

MIN_SHARED = st.integers(1, 4)


def plan_of(sequences, room, min_shared_tokens, objective="rows", **options):
    """A plan that does not depend on the clock. Of a dict, the first entry is as long as the others."""
    tokens = next(iter(sequences.values())) if isinstance(sequences, dict) else sequences
    return plan_rows(sequences, limit(tokens, room), min_shared_tokens, objective, plan_attempts=50, **options)


@given(batches(), ROOM_OR_NONE, MIN_SHARED, st.sampled_from(["rows", "tokens"]))
def test_path_reads_back_every_sequence(sequences, room, min_shared_tokens, objective):
    plan = plan_of(sequences, room, min_shared_tokens, objective)
    for i, sequence in enumerate(sequences):
        row = plan.rows[plan.row_of(i)]
        path = row.path(i)
        assert row.tokens[path].tolist() == sequence
        assert row.position[path].tolist() == list(range(len(sequence)))
        assert row.parent[path].tolist() == [-1, *path[:-1].tolist()]


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_payloads_follow_their_tokens(sequences, room, min_shared_tokens):
    kinds = [[i % 2] * len(tokens) for i, tokens in enumerate(sequences)]
    labels = [[token - 100 for token in tokens] for tokens in sequences]
    inputs = {"input_ids": sequences, "kind": kinds, "label": labels}
    plan = plan_of(inputs, room, min_shared_tokens)
    for i in range(len(sequences)):
        row = plan.rows[plan.row_of(i)]
        assert {name: values[row.path(i)].tolist() for name, values in row.inputs.items()} == {
            name: values[i] for name, values in inputs.items()
        }


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_subtree_end_tells_ancestors(sequences, room, min_shared_tokens):
    for row in plan_of(sequences, room, min_shared_tokens).rows:
        parent, tokens = row.parent.tolist(), range(row.length)
        for query in tokens:
            visible = {key for key in tokens if key <= query < row.subtree_end[key]}
            assert visible == ancestors(parent, query)


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_every_sequence_is_in_one_row(sequences, room, min_shared_tokens):
    plan = plan_of(sequences, room, min_shared_tokens)
    assert sorted(i for row in plan.rows for i in row.sequence_ids) == list(range(len(sequences)))
    assert all(list(row.sequence_ids) == sorted(row.sequence_ids) for row in plan.rows)
    assert all(i in plan.rows[plan.row_of(i)].sequence_ids for i in range(len(sequences)))


@given(batches(), ROOM, MIN_SHARED)
def test_counts_and_bounds_hold(sequences, room, min_shared_tokens):
    plan = plan_of(sequences, room, min_shared_tokens)
    assert all(row.length <= plan.row_tokens for row in plan.rows)
    assert plan.sequences == len(sequences)
    assert plan.input_tokens == sum(map(len, sequences))
    assert plan.row_bound <= len(plan.rows)
    assert plan.token_bound <= plan.packed_tokens == sum(row.length for row in plan.rows) <= plan.input_tokens


@given(batches(), ROOM_OR_NONE)
def test_row_computes_each_prefix_once(sequences, room):
    for row in plan_of(sequences, room, 1).rows:
        prefixes = {tuple(sequences[i][: end + 1]) for i in row.sequence_ids for end in range(len(sequences[i]))}
        assert row.length == len(prefixes)


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_segment_table_agrees_with_the_tokens(sequences, room, min_shared_tokens):
    for row in plan_of(sequences, room, min_shared_tokens).rows:
        end_before = 0
        for start, end, subtree_end, parent, position in row.segments.tolist():
            assert start == end_before < end
            assert set(row.subtree_end[start:end].tolist()) == {subtree_end}
            assert row.position[start:end].tolist() == list(range(position, position + end - start))
            assert row.parent[start] == (row.segments[parent, END] - 1 if parent >= 0 else -1)
            end_before = end
        assert end_before == row.length


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_no_segment_has_a_single_child(sequences, room, min_shared_tokens):
    for row in plan_of(sequences, room, min_shared_tokens).rows:
        parents = row.segments[:, PARENT]
        assert 1 not in np.bincount(parents[parents >= 0])


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_path_ranges_are_the_path_with_neighbours_merged(sequences, room, min_shared_tokens):
    plan = plan_of(sequences, room, min_shared_tokens)
    for i in range(len(sequences)):
        row = plan.rows[plan.row_of(i)]
        ranges = row.path_ranges(i)
        assert not ranges_touch(ranges)
        assert [k for start, end in ranges for k in range(start, end)] == row.path(i).tolist()


@given(batches(), ROOM, MIN_SHARED)
def test_padding_is_roots_that_nobody_reads(sequences, room, min_shared_tokens):
    row_tokens = limit(sequences, room)
    padded = plan_of(sequences, room, min_shared_tokens, pad_rows=True)
    plain = plan_of(sequences, room, min_shared_tokens)
    for row, same in zip(padded.rows, plain.rows, strict=True):
        used, padding = row.length, np.arange(row.length, row_tokens)
        assert used == same.length
        assert len(row.tokens) == len(row.position) == len(row.parent) == len(row.subtree_end) == row_tokens
        assert not row.tokens[used:].any()
        assert not row.position[used:].any()
        assert set(row.parent[used:].tolist()) <= {-1}
        assert row.subtree_end[used:].tolist() == (padding + 1).tolist()
        assert row.segments.tolist() == same.segments.tolist()
        assert row.subtree_end[:used].tolist() == same.subtree_end.tolist()
        assert all(row.path(i).max() < used for i in row.sequence_ids)


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_plan_is_the_same_each_time_and_through_pickle(sequences, room, min_shared_tokens):
    options = {"row_tokens": limit(sequences, room), "min_shared_tokens": min_shared_tokens, "plan_attempts": 300}
    plan = plan_rows(sequences, **options)
    again, received = plan_rows(sequences, **options), pickle.loads(pickle.dumps(plan)).with_sequences(sequences)
    for other in (again, received):
        assert [row.sequence_ids for row in other.rows] == [row.sequence_ids for row in plan.rows]
        assert [row.tokens.tolist() for row in other.rows] == [row.tokens.tolist() for row in plan.rows]
        assert [row.segments.tolist() for row in other.rows] == [row.segments.tolist() for row in plan.rows]
        assert [row.subtree_end.tolist() for row in other.rows] == [row.subtree_end.tolist() for row in plan.rows]


def test_arrays_are_int64():
    plan = plan_rows([np.array([1, 2, 3], np.uint16), np.array([1, 2], np.int8)], row_tokens=8, pad_rows=True)
    (row,) = plan.rows
    arrays = (row.tokens, row.position, row.parent, row.subtree_end, row.segments, row.path(0))
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}


def test_segment_table_of_a_small_tree():
    (row,) = plan_rows([[1, 2, 3], [1, 2, 4, 5], [7]], min_shared_tokens=1).rows
    assert row.segments.tolist() == [[0, 2, 5, -1, 0], [2, 3, 3, 0, 2], [3, 5, 5, 0, 2], [5, 6, 6, -1, 0]]


def test_row_keeps_the_tree_it_was_packed_with():
    # The two shared tokens are too few to be a branch of their own, in any row.
    plan = plan_rows([[1, 1, 5, 5], [1, 1, 6, 6], [1, 1, 7, 7]], row_tokens=8, min_shared_tokens=3)
    assert sorted(row.length for row in plan.rows) == [4, 8]


def test_strict_prefix_in_two_rows_is_read_from_one():
    plan = plan_rows([[1, 1, 1, 2, 2, 2], [1, 1, 1, 3, 3, 3], [1, 1]], row_tokens=6, min_shared_tokens=1)
    assert len(plan.rows) == 2
    assert sum(2 in row.sequence_ids for row in plan.rows) == 1


def test_plan_and_row_print_as_their_numbers():
    plan = plan_rows([[1, 2], [1, 3]], min_shared_tokens=1)
    assert repr(plan) == "Plan(2 sequences, 4 tokens in, 3 computed, 1 row, bound 1)"
    assert repr(plan.rows[0]) == "Row(3 tokens, 2 sequences, 3 segments)"


def test_unknown_sequence_is_refused():
    plan = plan_rows([[1, 2], [3, 4]], row_tokens=2)
    other = plan.rows[1 - plan.row_of(0)]
    with pytest.raises(KeyError, match="sequence 0 is not in this row"):
        other.path(0)
    with pytest.raises(KeyError, match="sequence 9 is not in this row"):
        other.path_ranges(9)


@pytest.mark.parametrize("sequence", [-1, 2])
def test_row_of_an_unknown_sequence_is_refused(sequence):
    with pytest.raises(IndexError, match="the batch has 2"):
        plan_rows([[1, 2], [3, 4]]).row_of(sequence)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"pad_rows": True}, "row_tokens is None; it must be the length to pad to"),
        ({"row_tokens": 0}, "row_tokens is 0"),
        ({"row_tokens": 1.5}, "row_tokens is 1.5"),
        ({"min_shared_tokens": 0}, "min_shared_tokens is 0"),
        ({"row_tokens": -1}, "row_tokens is -1; it must be a whole number of at least 1"),
        ({"row_tokens": True}, "row_tokens is True; it must be a whole number of at least 1"),
        ({"plan_seconds": -1}, "plan_seconds is -1; it must be a number of 0 or more"),
        ({"plan_seconds": float("nan")}, "plan_seconds is nan"),
        ({"plan_seconds": "soon"}, "plan_seconds is 'soon'"),
        ({"plan_seconds": np.array([0.1, 0.2])}, "plan_seconds is array"),
        ({"plan_seconds": 10**400}, "plan_seconds is 1000"),
        ({"pad_rows": np.array([1, 0])}, "pad_rows is array"),
        ({"plan_attempts": 0.5}, "plan_attempts is 0.5"),
        ({"objective": "speed"}, "'speed'; it must be one of 'rows', 'tokens'"),
    ],
)
def test_option_without_meaning_is_refused(options, error):
    with pytest.raises(ValueError, match=error):
        plan_rows([[1]], **options)


@pytest.mark.parametrize("row_tokens", [None, 5_001])
def test_chain_of_5000_segments_is_planned(row_tokens):
    sequences = chain(5_000)
    plan = plan_rows(sequences, row_tokens, min_shared_tokens=1, plan_attempts=50)
    assert plan.packed_tokens >= 5_000 + 4_999
    assert plan.row_bound <= len(plan.rows)
    assert row_tokens is None or max(row.length for row in plan.rows) <= row_tokens
    for i in range(0, 5_000, 499):
        row = plan.rows[plan.row_of(i)]
        assert row.tokens[row.path(i)].tolist() == sequences[i].tolist()


def test_chain_is_read_in_few_ranges():
    (row,) = plan_rows(chain(500), min_shared_tokens=1).rows
    assert max(len(row.path_ranges(i)) for i in row.sequence_ids) == 2


def test_10000_sequences_are_planned():
    rng = np.random.default_rng(0)
    sequences = [
        np.append(np.full(100, group), rng.integers(0, 1 << 30, 20)) for group in range(1_000) for _ in range(10)
    ]
    plan = plan_rows(sequences, 1_200, plan_attempts=1_000)
    # A group has 100 + 10 x 20 tokens, so that four fill a row.
    assert len(plan.rows) == plan.row_bound == 250
    for i in range(0, 10_000, 997):
        row = plan.rows[plan.row_of(i)]
        assert row.tokens[row.path(i)].tolist() == sequences[i].tolist()


def test_10000_duplicates_are_computed_once():
    plan = plan_rows([np.arange(50)] * 10_000, 64)
    assert plan.packed_tokens == 50
    assert plan.rows[0].path_ranges(9_999) == [(0, 50)]


def test_airline_rollouts_are_planned(airline_rollouts):
    plan = plan_rows(airline_rollouts, 32_768, plan_attempts=500)
    for i, sequence in enumerate(airline_rollouts):
        row = plan.rows[plan.row_of(i)]
        assert np.array_equal(row.tokens[row.path(i)], sequence)


def test_page_is_right():
    assert run_page("plan.md")


# Without its sequences


@given(batches(), ROOM_OR_NONE, MIN_SHARED)
def test_saved_plan_is_the_same(tmp_path_factory, sequences, room, min_shared_tokens):
    file = tmp_path_factory.mktemp("plan") / "plan.npz"
    plan = plan_of(sequences, room, min_shared_tokens)
    plan.save(file)
    loaded = Plan.load(file)
    numbers = ("row_tokens", "padded", "row_bound", "token_bound", "packed_tokens", "input_tokens")
    assert all(getattr(loaded, name) == getattr(plan, name) for name in numbers)
    with pytest.raises(PlanError, match="without its sequences"):
        loaded.rows[0].tokens  # noqa: B018
    with pytest.raises(PlanError, match="without its sequences"):
        loaded.rows[0].samples  # noqa: B018
    for one, other in zip(plan.rows, loaded.with_sequences(sequences).rows, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.segments.tolist() == other.segments.tolist()
        assert one.sequence_ids == other.sequence_ids


def test_plan_refuses_other_sequences():
    plan = pickle.loads(pickle.dumps(plan_rows([[1, 2, 3], [1, 2, 4]], min_shared_tokens=1)))
    with pytest.raises(PlanError, match="other lengths"):
        plan.with_sequences([[1, 2, 3], [1, 2]])
    with pytest.raises(PlanError, match="1 sequence was given, and the plan is for 2"):
        plan.with_sequences([[1, 2, 3]])
    with pytest.raises(PlanError, match="3 sequences were given, and the plan is for 2"):
        plan.with_sequences([[1, 2, 3], [1, 2], [1]])
    with pytest.raises(PlanError, match="does not share the tokens"):
        plan.with_sequences([[1, 2, 3], [1, 9, 4]])
    assert plan.with_sequences([[5, 6, 7], [5, 6, 8]]).rows[0].tokens.tolist() == [5, 6, 7, 8]


def test_file_that_is_no_plan_is_refused(tmp_path):
    for name, text in (("text.npz", b"no"), ("empty.npz", b"")):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(PlanError, match="is not a plan"):
            Plan.load(tmp_path / name)
    np.savez(tmp_path / "other.npz", tokens=np.arange(3))
    with pytest.raises(PlanError, match="is not a plan"):
        Plan.load(tmp_path / "other.npz")


@given(st.data())
def test_file_with_a_wrong_number_is_refused_or_is_a_plan(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("plans") / "plan.npz"
    sequences = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4], [6, 7], [6], [1, 2, 3, 9]]
    plan_rows(sequences, row_tokens=6, min_shared_tokens=1).save(file)
    arrays = dict(np.load(file))
    name = data.draw(st.sampled_from(sorted(arrays)))
    at = data.draw(st.integers(0, len(arrays[name]) - 1))
    arrays[name][at] = data.draw(st.sampled_from([-(2**63), -2, -1, 0, 1, 2, 3, 5, 7, 100, 2**62, 2**63 - 1]))
    np.savez(file, **arrays)
    try:
        plan = Plan.load(file)
    except PlanError:
        return
    held = sorted(i for row in plan.rows for i in row.sequence_ids)
    assert held == list(range(len(sequences)))
    for row in plan.rows:
        assert plan.row_tokens is None or row.length <= plan.row_tokens
        for i in row.sequence_ids:
            assert row.position[row.path(i)].tolist() == list(range(plan.tree.sequence_length[i]))


@pytest.mark.parametrize(
    "name", ["length", "parent", "source", "sequence_segment", "sequence_length", "leaf_row", "numbers"]
)
@pytest.mark.parametrize("change", [lambda a: a[:-1], lambda a: a.astype(float), lambda a: a[None], lambda a: a[:0]])
def test_file_with_an_array_of_another_form_is_refused(tmp_path, name, change):
    plan_rows([[1, 2, 3], [1, 2, 4], [9]], row_tokens=4, min_shared_tokens=1).save(tmp_path / "plan.npz")
    arrays = dict(np.load(tmp_path / "plan.npz"))
    np.savez(tmp_path / "plan.npz", **arrays | {name: change(arrays[name])})
    with pytest.raises(PlanError, match="is not a plan"):
        Plan.load(tmp_path / "plan.npz")


def test_row_is_pickled_with_its_own_tokens_alone():
    plan = plan_rows([[1, 2, 3], [1, 2, 4], [9] * 1_000], row_tokens=1_000, min_shared_tokens=1)
    row = plan.rows[plan.row_of(0)]
    sent = pickle.dumps(row)
    received = pickle.loads(sent)
    assert received.tokens.tolist() == row.tokens.tolist()
    assert len(sent) < 4_000
    for again in (pickle.loads(pickle.dumps(received)), copy.copy(received), copy.deepcopy(received)):
        assert again.tokens.tolist() == row.tokens.tolist()


def test_row_of_a_plan_without_sequences_is_pickled_without_tokens():
    row = pickle.loads(pickle.dumps(plan_rows([[1, 2, 3], [1, 2, 4]]))).rows[0]
    with pytest.raises(PlanError, match="without its sequences"):
        pickle.loads(pickle.dumps(row)).tokens  # noqa: B018


@given(batches(), ROOM, MIN_SHARED)
def test_plan_of_one_row_is_that_row(sequences, room, min_shared_tokens):
    plan = plan_of(sequences, room, min_shared_tokens)
    for index, row in enumerate(plan.rows):
        alone = plan.of_row(index)
        (again,) = alone.rows
        assert again.segments.tolist() == row.segments.tolist()
        assert again.tokens.tolist() == row.tokens.tolist()
        assert alone.tree.subtree_end.max() == len(row.segments)
        for place, i in enumerate(row.sequence_ids):
            assert again.tokens[again.path(place)].tolist() == sequences[i]
        assert pickle.loads(pickle.dumps(alone)).with_sequences([sequences[i] for i in row.sequence_ids])


# Sharing of contexts only


def test_context_is_shared_without_the_token_before_the_first_trainable_one():
    sequences, trainable = [[1, 2, 3, 8, 8], [1, 2, 3, 8, 9]], [[0, 0, 0, 1, 1]] * 2
    plan = plan_rows(sequences, min_shared_tokens=1, share="context", trainable=trainable)
    assert plan.rows[0].tokens.tolist() == [1, 2, 3, 8, 8, 3, 8, 9]


def test_first_token_shares_no_less_where_it_is_trainable():
    sequences, trainable = [[1, 2, 3, 8], [1, 2, 3, 9]], [[1, 0, 0, 1]] * 2
    plan = plan_rows(sequences, min_shared_tokens=1, share="context", trainable=trainable)
    assert plan.rows[0].tokens.tolist() == [1, 2, 3, 8, 3, 9]
    in_samples = [Sample(*both) for both in zip(sequences, trainable, strict=True)]
    same = plan_rows(in_samples, min_shared_tokens=1, share="context")
    assert same.rows[0].tokens.tolist() == plan.rows[0].tokens.tolist()


def test_context_of_a_sequence_without_trainable_tokens_is_all_of_it():
    plan = plan_rows([[1, 2, 3], [1, 2, 3]], share="context", trainable=[[0] * 3] * 2)
    assert plan.packed_tokens == 3


def test_duplicates_have_trainable_tokens_of_their_own():
    plan = plan_rows([[1, 2, 3]] * 3, min_shared_tokens=1, share="context", trainable=[[0, 0, 1]] * 3)
    assert plan.rows[0].tokens.tolist() == [1, 2, 3, 2, 3, 2, 3]


MARKS = {
    "bools": [False, True],
    "bool_array": np.array([False, True]),
    "weights": np.array([0.0, 0.5]),
    "tensor": torch.tensor([0, 1]),
    "bool_tensor": torch.tensor([False, True]),
    "half_tensor": torch.tensor([0, 0.5], dtype=torch.bfloat16),
    "tensor_with_a_gradient": torch.tensor([0, 0.5], requires_grad=True),
}


@pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
def test_trainable_may_be_any_kind_of_numbers(marks):
    plan = plan_rows([[1, 2], [1, 2]], min_shared_tokens=1, share="context", trainable=[marks, marks])
    assert plan.packed_tokens == 4


class OnADevice(torch.Tensor):
    """A tensor whose numbers NumPy cannot reach before it is on the CPU."""

    def __array__(self, *_):
        raise TypeError("can't convert device tensor to numpy")


@pytest.mark.parametrize("mask", [None, [0, [1, 1]], ["a", "b"]], ids=str)
def test_trainable_that_is_no_list_of_marks_is_told_what_marks_are(mask):
    with pytest.raises(TokenTypeError) as raised:
        plan_rows([[1, 2], [3, 4]], share="context", trainable=[[0, 1], mask])
    assert "whether it is trained on" in raised.value.why
    assert "one 0 or 1 for every token" in raised.value.hint


WITHOUT_VALUES = {
    "meta": (torch.zeros(2, device="meta"), "on the meta device, not a list of bools or numbers"),
    "sparse": (torch.tensor([0, 1]).to_sparse(), "not a list of bools or numbers"),
    "masked": (np.ma.masked_array([0, 1], [True, False]), "some values are masked"),
}


@pytest.mark.parametrize("name", WITHOUT_VALUES)
def test_trainable_that_lacks_values_is_told_what_marks_are(name):
    mask, what = WITHOUT_VALUES[name]
    with pytest.raises(TokenTypeError, match=what) as raised:
        plan_rows([[1, 2], [3, 4]], share="context", trainable=[[0, 1], mask])
    assert "whether it is trained on" in raised.value.why


@pytest.mark.parametrize("mask", [[0, float("nan")], torch.tensor([float("inf"), 0])])
def test_trainable_that_is_not_finite_is_refused(mask):
    with pytest.raises(TokenTypeError, match="trainable of sequence 1 has entries that are not finite"):
        plan_rows([[1, 2], [3, 4]], share="context", trainable=[[0, 1], mask])


def test_trainable_may_be_a_tensor_on_a_device():
    marks = torch.tensor([0, 1]).as_subclass(OnADevice)
    plan = plan_rows([[1, 2], [1, 2]], min_shared_tokens=1, share="context", trainable=[marks, marks])
    assert plan.packed_tokens == 4


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"share": "some"}, "share is 'some'"),
        ({"share": "context"}, "trainable is None; it must be"),
        ({"trainable": [[0, 1]]}, 'share is "all"; it must be "context"'),
        ({"share": "context", "trainable": [[1]]}, r"trainable of sequence 0 has shape \(1,\) for 2 tokens"),
        ({"share": "context", "trainable": [[0, 1]] * 2}, "trainable is for 2 sequences, and the batch has 1"),
        ({"share": "context", "trainable": 1}, "trainable is an int, not a list"),
        ({"share": "context", "trainable": [None]}, "trainable of sequence 0 is a NoneType, not a list of bools"),
        ({"share": "context", "trainable": [[0, [1, 1]]]}, "trainable of sequence 0 is not a flat list of bools"),
        ({"share": "context", "trainable": [["a", "b"]]}, "trainable of sequence 0 is of type <U1"),
    ],
)
def test_sharing_without_meaning_is_refused(options, error):
    with pytest.raises(ValueError, match=error):
        plan_rows([[1, 2]], **options)


def test_published_table_is_reproduced(workloads):
    sequences, row_tokens = workloads.seed_example()
    own = [2_000] * 16 + [12_000] * 8 + [7_000] * 8
    trainable = [np.arange(len(s)) >= len(s) - count for s, count in zip(sequences, own, strict=True)]
    plan = plan_rows(sequences, row_tokens, share="context", trainable=trainable)
    # The root in both rows, four prompts without their last token, and every completion with it.
    assert plan.packed_tokens == plan.token_bound == 2 * 4_096 + 4 * 11_999 + sum(own) + len(own)
    assert len(plan.rows) == 2
