"""Batches that workers of a DataLoader plan are those that the process plans itself, and so are their gradients."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.differential.double import InDouble
from tests.differential.test_losses import gradients, require_equal, samples, tree_model
from tree_compile import Plan, Sample, losses, plan_rows, treecompile_collate
from tree_compile.collate import PlannedBatch
from tree_compile.errors import EmptySequenceError, InputError, PayloadError, TokenTypeError

COLLATE: dict[str, Any] = {"row_tokens": 45, "min_shared_tokens": 1, "plan_attempts": 20}


def require_same_rows(found: Plan, expected: Plan) -> None:
    assert (found.input_tokens, found.packed_tokens) == (expected.input_tokens, expected.packed_tokens)
    assert (found.row_tokens, found.row_bound) == (expected.row_tokens, expected.row_bound)
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row.sequence_ids == other.sequence_ids
        assert row.counts == other.counts
        assert np.array_equal(row.segments, other.segments)
        assert np.array_equal(row.tokens, other.tokens)
        assert row.samples.keys() == other.samples.keys()


@pytest.mark.parametrize(("start", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_plan_what_the_process_plans(start: str, workers: int) -> None:
    batch = samples()
    halves = [plan_rows(half, **COLLATE) for half in (batch[:6], batch[6:12])]
    loader = DataLoader(
        batch[:12], 6, num_workers=workers, persistent_workers=True, multiprocessing_context=start,
        collate_fn=treecompile_collate(**COLLATE),
    )  # fmt: skip
    for _ in range(2):
        for planned, expected in zip(loader, halves, strict=True):
            require_same_rows(planned, expected)
            assert planned.rows[0].samples[planned.rows[0].sequence_ids[0]].payloads.keys() == batch[0].payloads.keys()


@pytest.mark.parametrize("row_tokens", [None, 45])
def test_gradients_of_a_sent_batch_are_those_of_the_whole(row_tokens: int | None) -> None:
    options = {**COLLATE, "row_tokens": row_tokens}
    loader = DataLoader(samples(), len(samples()), num_workers=1, collate_fn=treecompile_collate(**options))
    (planned,) = loader
    assert (len(planned.rows) >= 5) is (row_tokens is not None)
    model = tree_model().unpacked
    normaliser = {"normaliser": "per_group"}

    def by_rows(plan: Plan) -> Callable[[], Iterator[Tensor]]:
        return lambda: (losses.grpo(out, **normaliser) for out in tree_model().rows(plan))

    with InDouble():
        expected = gradients(model, lambda: iter([losses.grpo(tree_model()(samples()), **normaliser)]))
        require_equal(expected, gradients(model, by_rows(planned)))
        require_equal(expected, gradients(model, lambda: iter([losses.grpo(tree_model()(planned), **normaliser)])))
        # Sent on by the process that it came to.
        require_equal(expected, gradients(model, by_rows(pickle.loads(pickle.dumps(planned)))))


IDS = [[1, 2, 3], [1, 2, 4, 5]]
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "sample": Sample,
    "list": list,
    "array": np.array,
    "tensor": torch.tensor,
    "dict": lambda ids: {"input_ids": ids},
    "tokenizer": lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)},
    "dict of tensors": lambda ids: {"input_ids": torch.tensor(ids), "position_ids": torch.arange(len(ids))},
}


def test_element_may_have_any_form() -> None:
    elements = [form(ids) for form in FORMS.values() for ids in IDS]
    loader = DataLoader(elements, len(IDS), num_workers=1, collate_fn=treecompile_collate(min_shared_tokens=1))
    for name, planned in zip(FORMS, loader, strict=True):
        (row,) = planned.rows
        assert (row.tokens.tolist(), row.counts.tokens, row.samples[0].payloads) == ([1, 2, 3, 4, 5], 5, {}), name


def trained(column: dict[str, Any], **options: Any) -> list[bool]:
    (row,) = treecompile_collate(**options)([{"input_ids": [7, 8, 9], **column}]).rows
    return row.samples[0].is_trained.tolist()


def test_column_says_what_is_trained_on() -> None:
    assert trained({}) == [False, True, True]
    assert trained({"trainable": [1, 0, 1]}) == [False, False, True]
    assert trained({"labels": [-100, -100, 9]}) == [False, False, True]
    assert trained({"labels": torch.tensor([-100, 8, -100])}) == [False, True, False]
    assert trained({"labels": [-100, 8, -100], "loss_mask": [1, 1, 0]}) == [False, True, False]
    named = {"completion_mask": [0, 1, 0], "labels": [7, 8, 9]}
    assert trained(named, trainable="completion_mask") == [False, True, False]


def test_other_columns_are_payloads() -> None:
    columns = {"group": "a", "reward": 0.5, "tokens": "three", "trainable": [0, 1, 1], "self": 3}
    (row,) = treecompile_collate()([{"input_ids": [7, 8, 9], **columns}]).rows
    assert row.samples[0].payloads == {name: value for name, value in columns.items() if name != "trainable"}


def test_element_that_is_a_list_of_samples_stays_together() -> None:
    pairs = [(Sample([1, 2, 3], side=0), Sample([1, 2, 4], side=1)), [Sample([5], side=0)], Sample([6, 7], side=1)]
    planned = treecompile_collate(min_shared_tokens=1)(pairs)
    assert planned.input_tokens == 9
    assert [row.samples[i].payloads["side"] for row in planned.rows for i in row.sequence_ids] == [0, 1, 0, 1]
    assert treecompile_collate()([({"input_ids": [1, 2]}, {"input_ids": [3]})]).sequences == 2


def test_row_of_a_batch_that_was_sent_is_a_plan_of_its_own() -> None:
    planned = treecompile_collate(**COLLATE)(samples())
    sent = pickle.loads(pickle.dumps(planned))
    for index in range(len(planned.rows)):
        expected, found = planned.of_row(index), sent.of_row(index)
        require_same_rows(found, expected)
        one, other = (losses.sft(tree_model()(plan), normaliser="per_token") for plan in (expected, found))
        assert torch.equal(one, other)


BAD: dict[str, tuple[list[Any], type[InputError], str]] = {
    "empty": ([[1, 2], []], EmptySequenceError, "Sequence 1 of input_ids is empty"),
    "text": ([{"input_ids": "abc"}], TokenTypeError, "Sequence 0 of input_ids is a str"),
    "no tokens": ([{"input_ids": [1]}, {"text": "a"}], PayloadError, "Element 1 is a dict without 'input_ids'"),
    "padding": ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], PayloadError, "'attention_mask' of element 0"),
    "a mask that is too short": ([{"input_ids": [1, 2], "attention_mask": [1]}], PayloadError, "'attention_mask' of"),
    "a number as a mask": ([{"input_ids": [1, 2], "attention_mask": np.array(1)}], PayloadError, "attention_mask' of"),
    "positions": ([{"input_ids": [1, 2], "position_ids": [1, 2]}], PayloadError, "'position_ids' of element 0"),
    "other labels": ([[1], {"input_ids": [1, 2], "labels": [2, 3]}], PayloadError, "'labels' of element 1 are not"),
    "few labels": ([{"input_ids": [1, 2], "labels": [1]}], PayloadError, "'labels' of element 0 are not"),
    "few marks": ([Sample([1]), {"input_ids": [1, 2], "trainable": [1]}], PayloadError, "Sample 1: `trainable`"),
    "few with labels": ([{"input_ids": [1, 2], "labels": [-100, 2]}, [3, 4]], PayloadError, "Element 1 does not say"),
    "a null": ([{"input_ids": [1], "trainable": None}, {"input_ids": [1], "trainable": [1]}], PayloadError, "nt 0"),
    "unnamed marks": ([{"input_ids": [1, 2], "loss_mask": [0, 1]}], PayloadError, "0 has a column 'loss_mask'"),
    "other marks": ([{"input_ids": [1, 2], "response_mask": [0, 1]}], PayloadError, "0 has a column 'response_mask'"),
    "two marks": ([{"input_ids": [1, 2, 3], "labels": [1, 2, 3], "loss_mask": [0, 0, 1]}], PayloadError, "'loss_mask'"),
    "misspelt": ([{"input_ids": [1, 2], "trainible": [0, 1]}], PayloadError, "has a column 'trainible'"),
    "payloads": ([Sample([1], a=1), Sample([1])], PayloadError, "Sample 1 has no payload 'a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_element_is_named(name: str) -> None:
    elements, error, message = BAD[name]
    with pytest.raises(error, match=message):
        treecompile_collate()(elements)


@pytest.mark.parametrize("columns", [{"completion_mask": [0, 1]}, {"labels": [1, 2]}, {"completion_maks": None}, {}])
def test_column_that_was_named_and_is_not_there_is_refused(columns: dict[str, Any]) -> None:
    collate = treecompile_collate(trainable="completion_maks")
    with pytest.raises(PayloadError, match="Element 1 has nothing in the column 'completion_maks'"):
        collate([{"input_ids": [1, 2], "completion_maks": [0, 1]}, {"input_ids": [1, 2], **columns}])


def test_bad_element_is_named_in_a_worker() -> None:
    loader = DataLoader([[1, 2], [3, 4], [5, 6], []], 2, num_workers=1, collate_fn=treecompile_collate())
    with pytest.raises(EmptySequenceError, match="Sequence 1 of input_ids is empty"):
        list(loader)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"row_tokens": 0}, "row_tokens"), ({"share": "some"}, "share"), ({"objective": "time"}, "objective"),
     ({"pad_rows": True}, "row_tokens"), ({"plan_attempts": -1}, "plan_attempts")],
)  # fmt: skip
def test_options_without_meaning_are_refused_before_there_is_a_worker(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        treecompile_collate(**options)


def test_rows_of_a_batch_are_computed_as_they_are() -> None:
    """A model that was made with other options takes them, padding included."""
    planned = treecompile_collate(row_tokens=8, min_shared_tokens=1, pad_rows=True)(IDS)
    assert isinstance(planned, PlannedBatch)
    out = tree_model()(planned)
    assert [row.length + row.padding for row in planned.rows] == [8]
    torch.testing.assert_close(out.logprobs[1], tree_model()(IDS).logprobs[1])


def test_context_alone_is_shared_where_it_says_so() -> None:
    batch = [Sample([1, 2, 3, 4], [0, 0, 1, 1]), Sample([1, 2, 3, 5], [0, 0, 1, 1])]
    assert treecompile_collate(min_shared_tokens=1)(batch).packed_tokens == 5
    assert treecompile_collate(min_shared_tokens=1, share="context")(batch).packed_tokens == 7


def test_collate_is_made_without_torch() -> None:
    code = "import sys, tree_compile as t; t.treecompile_collate()([[1, 2]]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
