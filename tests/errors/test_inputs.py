"""Sequences that cannot be used are refused, by their number in the list."""

import numpy as np
import pytest
import torch

from tests.errors.refusal import VOCABULARY, Tiny
from tree_compile import treecompile
from tree_compile.errors import (
    EmptySequenceError,
    PayloadError,
    SequenceTooLongError,
    TokenRangeError,
    TokenTypeError,
)
from tree_compile.failures import of_tables
from tree_compile.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return treecompile(Tiny(lambda model, x, ids: model.project[0](x)), row_tokens=16, backend="eager")


PADDED = torch.tensor([[1, 2, 3], [1, 2, 0]])
REFUSED = [
    ("no sequences", [], EmptySequenceError, "input_ids has no sequences"),
    ("an empty sequence", [[1], []], EmptySequenceError, "Sequence 1 of input_ids is empty"),
    ("an empty tensor", [torch.tensor([], dtype=torch.int64)], EmptySequenceError, "Sequence 0 of input_ids is empty"),
    ("longer than a row", [[1], [1] * 17], SequenceTooLongError, "Sequence 1 has 17 tokens, and row_tokens is 16"),
    ("a negative token", [[1], [2, -1]], TokenRangeError, "Sequence 1 holds the token id -1 at position 1"),
    ("the ignored label", [[1, -100]], TokenRangeError, "Sequence 0 holds the token id -100"),
    ("a token above the vocabulary", [[1], [2, VOCABULARY]], TokenRangeError, f"id {VOCABULARY} in sequence 1 is"),
    ("fractions", [[1.5, 2.0]], TokenTypeError, "Sequence 0 of input_ids is of type float64"),
    ("floats in a tensor", [torch.tensor([1.0, 2.0])], TokenTypeError, "is of type torch.float32"),
    ("floats in an array", [np.array([1.0])], TokenTypeError, "is of type float64"),
    ("booleans", [torch.tensor([True, False])], TokenTypeError, "is of type bool"),
    ("words", [["a", "b"]], TokenTypeError, "is of type <U1, not of integers"),
    ("a padded batch", PADDED, TokenTypeError, "input_ids is one 2-D Tensor"),
    ("a padded array", PADDED.numpy(), TokenTypeError, "input_ids is one 2-D ndarray"),
    ("a two-dimensional sequence", [PADDED], TokenTypeError, "Sequence 0 of input_ids has 2 dimensions"),
    ("a padded batch in a dict", {"input_ids": PADDED}, TokenTypeError, "input_ids is one 2-D Tensor"),
    ("a tensor without values", [PADDED[0].to("meta")], TokenTypeError, "on the meta device"),
    ("a sparse tensor", [PADDED[0].to_sparse()], TokenTypeError, "layout torch.sparse_coo"),
    ("a masked array", [np.ma.array([1, 2], mask=[0, 1])], TokenTypeError, "some values are masked"),
    ("texts", ["a text"], TokenTypeError, "tokenizer(text)['input_ids']"),
    ("lists of words", [["a", "b"]], TokenTypeError, "tokenizer(text)['input_ids']"),
    ("dicts in a list", [{"input_ids": [1]}], TokenTypeError, "{'input_ids': [sequence, …]"),
    ("more than 64 bits", [[1, 1 << 70]], TokenRangeError, f"holds {1 << 70}, which does not fit"),
    ("lists that are too deep", [[1, [2, 3]]], TokenTypeError, "there is a list at position 1"),
    ("one number", 5, TokenTypeError, "input_ids is an int, not a list"),
    ("payloads that are too short", {"input_ids": [[1, 2]], "kind": [[0]]}, PayloadError, "has 1 value in kind and 2"),
]  # fmt: skip


@pytest.mark.parametrize(("sequences", "error", "text"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_sequences_are_refused(model, sequences, error, text):
    with pytest.raises(error) as raised:
        model(sequences)
    assert text in str(raised.value)
    assert isinstance(raised.value, ValueError)
    assert raised.value.hint


@pytest.mark.parametrize("one", [[1, 2, 3], torch.tensor([1, 2]), np.array([1, 2]), list(torch.tensor([1, 2]))])
def test_sequence_that_is_no_list_of_sequences_is_refused_with_the_way_to_pass_a_single_one(model, one):
    with pytest.raises(TokenTypeError) as raised:
        model(one)
    assert "[ids] for a single one" in raised.value.hint


def test_masked_array_in_which_nothing_is_masked_is_taken(model):
    assert torch.equal(model([np.ma.array([1, 2])])[0], model([[1, 2]])[0])


def after_the_last_id(model, x, ids):
    return x + model.embed(ids + 1)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_number_that_a_table_has_no_entry_for_is_refused_with_its_row(backend):
    tree = treecompile(Tiny(after_the_last_id), backend=backend, row_tokens=4, self_check=False)
    with pytest.raises(TokenRangeError, match="in the row of sequences 1"):
        tree([[1, 2, 3], [1, 2, VOCABULARY - 1]])


@pytest.mark.parametrize(
    "error", [IndexError("list index out of range"), RuntimeError("select(): index 5 out of range")]
)
def test_error_that_is_not_of_a_table_stays_as_it_is(error, model):
    (row,) = model.plan([[1, 2]]).rows
    with pytest.raises(type(error)) as raised, of_tables(row):
        raise error
    assert raised.value is error


def test_sequence_longer_than_the_models_positions_is_refused():
    model = treecompile(tiny_model("gpt2", max_position_embeddings=16), backend="eager", self_check=False)
    assert model([[1] * 16]).logits[0].shape == (16, 128)
    with pytest.raises(SequenceTooLongError) as raised:
        model([[1, 2], [1] * 17])
    assert "Sequence 1 has 17 tokens" in raised.value.what
    assert "modeling_gpt2.py" in raised.value.where.file
    assert "self.wpe(position_ids)" in raised.value.where.code
