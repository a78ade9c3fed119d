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
from tree_compile.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return treecompile(Tiny(lambda model, x, ids: model.project[0](x)), row_tokens=16, backend="eager")


PADDED = torch.tensor([[1, 2, 3], [1, 2, 0]])
REFUSED = [
    ("no sequences", [], EmptySequenceError, "no sequences"),
    ("an empty sequence", [[1], []], EmptySequenceError, "sequence 1"),
    ("an empty tensor", [torch.tensor([], dtype=torch.int64)], EmptySequenceError, "sequence 0"),
    ("longer than a row", [[1], [1] * 17], SequenceTooLongError, "equence 1 has 17 tokens"),
    ("a negative token", [[1], [2, -1]], TokenRangeError, "sequence 1 holds the token id -1 at position 1"),
    ("the ignored label", [[1, -100]], TokenRangeError, "sequence 0 holds the token id -100"),
    ("a token above the vocabulary", [[1], [2, VOCABULARY]], TokenRangeError, f"{VOCABULARY} in sequence 1"),
    ("fractions", [[1.5, 2.0]], TokenTypeError, "0"),
    ("floats in a tensor", [torch.tensor([1.0, 2.0])], TokenTypeError, "float32"),
    ("floats in an array", [np.array([1.0])], TokenTypeError, "float64"),
    ("booleans", [torch.tensor([True, False])], TokenTypeError, "bool"),
    ("words", [["a", "b"]], TokenTypeError, "0"),
    ("a padded batch", PADDED, TokenTypeError, "2-D"),
    ("a padded array", PADDED.numpy(), TokenTypeError, "2-D"),
    ("a two-dimensional sequence", [PADDED], TokenTypeError, "0"),
    ("a padded batch in a dict", {"input_ids": PADDED}, TokenTypeError, "list of sequences"),
    ("one number", 5, TokenTypeError, "int"),
    ("payloads that are too short", {"input_ids": [[1, 2]], "kind": [[0]]}, PayloadError, "kind"),
]  # fmt: skip


@pytest.mark.parametrize(("sequences", "error", "text"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_sequences_are_refused(model, sequences, error, text):
    with pytest.raises(error) as raised:
        model(sequences)
    assert text in str(raised.value)
    assert isinstance(raised.value, ValueError)
    assert raised.value.hint


def test_sequence_longer_than_the_models_positions_is_refused():
    model = treecompile(tiny_model("gpt2", max_position_embeddings=16), backend="eager", self_check=False)
    assert model([[1] * 16]).logits[0].shape == (16, 128)
    with pytest.raises(SequenceTooLongError) as raised:
        model([[1, 2], [1] * 17])
    assert "Sequence 1 has 17 tokens" in raised.value.what
    assert "modeling_gpt2.py" in raised.value.where.file
    assert "self.wpe(position_ids)" in raised.value.where.code
