"""Checking the sequences of a call."""

import subprocess
import sys
from collections import UserDict

import numpy as np
import pytest
import torch

from tests.runtime.pages import run_page
from tree_compile.errors import EmptySequenceError, PayloadError, TokenRangeError, TokenTypeError
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.sequences import as_batch


@pytest.mark.parametrize(
    "sequence",
    [
        [5, 0, 7],
        (5, 0, 7),
        np.array([5, 0, 7]),
        np.array([5, 0, 7], np.uint16),
        np.array([5, 0, 7], np.uint64),
        torch.tensor([5, 0, 7]),
        torch.tensor([5, 0, 7], dtype=torch.int32),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_sequence_may_be_any_kind_of_integers(sequence):
    batch = as_batch([sequence, [1]])
    assert [tokens.tolist() for tokens in batch.tokens] == [[5, 0, 7], [1]]
    assert batch.lengths.tolist() == [3, 1]
    assert len(batch) == 2


def test_arrays_and_tensors_are_not_copied():
    array, tensor = np.arange(4, dtype=np.int32), torch.arange(4)
    batch = as_batch([array, tensor])
    assert np.shares_memory(batch.tokens[0], array)
    assert np.shares_memory(batch.tokens[1], tensor.numpy())


def test_plain_list_is_named():
    assert list(as_batch([[1]]).inputs) == ["input_ids"]


def test_batch_is_returned_as_it_is():
    batch = as_batch([[1]])
    assert as_batch(batch) is batch


def test_tokens_come_first_in_a_dict():
    batch = as_batch({"kind": [[0, 1]], "input_ids": [[7, 8]]})
    assert list(batch.inputs) == ["input_ids", "kind"]
    assert batch.tokens[0].tolist() == [7, 8]


def test_first_entry_is_the_tokens_where_their_name_is_missing():
    assert as_batch({"ids": [[7]], "kind": [[0]]}).tokens[0].tolist() == [7]


def test_payload_may_be_negative():
    assert as_batch({"input_ids": [[7]], "label": [[-100]]}).inputs["label"][0].tolist() == [-100]


EMPTY = {"no_sequence": [], "no_input": {}, "empty_list": [[1], []], "empty_tensor": [torch.tensor([])]}


@pytest.mark.parametrize("inputs", EMPTY.values(), ids=EMPTY)
def test_empty_input_is_refused(inputs):
    with pytest.raises(EmptySequenceError):
        as_batch(inputs)


def test_empty_sequence_is_named():
    with pytest.raises(EmptySequenceError, match="Sequence 1 of input_ids is empty"):
        as_batch([[1], [], [2]])


NOT_TOKENS = {
    "floats": [[1.0, 2.0]],
    "float_tensor": [torch.tensor([1.0])],
    "bfloat16_tensor": [torch.tensor([1.0], dtype=torch.bfloat16)],
    "bools": [[True, False]],
    "bool_tensor": [torch.tensor([True])],
    "text": ["one two"],
    "words": [["one", "two"]],
    "nested": [[[1, 2], [3, 4]]],
    "ragged": [[[1, 2], [3]]],
    "none": [[None]],
    "number": [1, 2, 3],
    "matrix_in_a_list": [torch.zeros(2, 3, dtype=torch.int64)],
    "scalar_tensor": [torch.tensor(3)],
    "set": [{1, 2}],
    "one_text": "one two",
    "generator": (tokens for tokens in [[1]]),
    "none_at_all": None,
}


@pytest.mark.parametrize("inputs", NOT_TOKENS.values(), ids=NOT_TOKENS)
def test_what_is_not_tokens_is_refused(inputs):
    with pytest.raises(TokenTypeError):
        as_batch(inputs)


def test_wrong_type_names_the_sequence():
    with pytest.raises(TokenTypeError, match="Sequence 1 of input_ids is of type float64"):
        as_batch([[1], [1.5]])


PADDED = {
    "tensor": torch.zeros(2, 3, dtype=torch.int64),
    "array": np.zeros((2, 3), np.int64),
    "tensor_in_a_dict": {"input_ids": torch.zeros(2, 3, dtype=torch.int64)},
    "with_mask": {"input_ids": torch.zeros(2, 3), "attention_mask": torch.ones(2, 3)},
    "tokenizer_output": UserDict(input_ids=[[1, 2], [3]], attention_mask=[[1, 1], [1]]),
}


@pytest.mark.parametrize("inputs", PADDED.values(), ids=PADDED)
def test_padded_batch_is_refused_with_the_way_out(inputs):
    with pytest.raises(TokenTypeError, match="pass a list of sequences"):
        as_batch(inputs)


def test_single_tensor_is_refused_with_the_way_out():
    with pytest.raises(TokenTypeError, match=r"\[ids\] for a single one"):
        as_batch(torch.tensor([1, 2, 3]))


OUT_OF_RANGE = {
    "negative": [3, -1],
    "unsigned_array": np.array([2**63], np.uint64),
    "beyond_64_bits": [2**63],
    "beyond_64_bits_beside_less": [2**63, 1],
    "beyond_64_bits_beside_numbers_of_numpy": [np.int64(1), np.uint64(2**63)],
    "far_beyond_64_bits": [2**70, 1],
    "far_below": [1, -(2**70)],
    "objects": np.array([2**63, 1], object),
}


@pytest.mark.parametrize("tokens", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_token_out_of_range_is_refused(tokens):
    with pytest.raises(TokenRangeError, match="Sequence 1"):
        as_batch([[1], tokens])


@pytest.mark.parametrize("tokens", [[np.uint64(5), np.int64(1)], np.array([5, 1], object)], ids=["mixed", "objects"])
def test_whole_numbers_for_which_numpy_has_no_integer_type_are_taken_as_int64(tokens):
    (taken,) = as_batch([tokens]).tokens
    assert (taken.tolist(), taken.dtype) == ([5, 1], np.dtype(np.int64))


def test_negative_token_is_placed():
    with pytest.raises(TokenRangeError, match="token id -100 at position 2"):
        as_batch([[3, 4, -100]])


def test_payload_of_another_length_is_refused():
    with pytest.raises(PayloadError, match="Sequence 1 has 1 value in kind and 2 in input_ids"):
        as_batch({"input_ids": [[1], [2, 3]], "kind": [[0], [0]]})


def test_payload_with_a_missing_sequence_is_refused():
    with pytest.raises(PayloadError, match="kind has 1 sequence, input_ids has 2"):
        as_batch({"input_ids": [[1], [2]], "kind": [[0]]})


def test_some_sequences_of_a_batch_keep_their_arrays():
    batch = as_batch({"input_ids": [[1], [2, 3], [4]], "kind": [[5], [6, 7], [8]]})
    some = batch.of(iter([2, 0]))
    assert {name: [values.tolist() for values in own] for name, own in some.inputs.items()} == {
        "input_ids": [[4], [1]],
        "kind": [[8], [5]],
    }
    assert some.tokens[0] is batch.tokens[2]


def test_planning_does_not_import_torch():
    code = (
        "import sys, tree_compile.runtime.planning as p; p.plan_rows([[1, 2], [1, 3]]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_bare_package_name_is_refused():
    with pytest.raises(ImportError, match="import this package as"):
        __import__("runtime")


def test_page_is_right():
    assert run_page("sequences.md")


def test_tensors_that_torch_moves_are_read_where_they_are():
    prompt = list(range(100, 140))
    tensors = [torch.tensor([*prompt, end]) for end in (7, 8)]
    batch, (row,) = as_batch(tensors), plan_rows(tensors, min_shared_tokens=1).rows
    for tensor in tensors:
        tensor.share_memory_()
    others = [torch.full((41,), -1) for _ in range(64)]  # takes the memory that was freed
    assert row.tokens.tolist() == [*prompt, 7, 8]
    assert plan_rows(batch, min_shared_tokens=1).rows[0].tokens.tolist() == [*prompt, 7, 8]
    assert len(others) == 64
