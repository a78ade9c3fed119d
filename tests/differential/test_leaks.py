"""Changing a token changes only what follows it on its own paths."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.differential.double import InDouble
from tests.differential.test_compressed import compressed
from tests.differential.trees import random_sequences
from tree_compile import Row, TreeModel, plan_rows, treecompile
from tree_compile.tiny import tiny_model

VOCABULARY = 128
FAMILIES = ("llama", "mistral", "gpt_oss", "llama4_text", "bloom", "deepseek_v32", "compressed")
WITH_EXPERTS = ("gpt_oss", "deepseek_v32")


@cache
def tree_model_of(name: str) -> TreeModel:
    options = {"experts_implementation": "batched_mm"} if name in WITH_EXPERTS else {}
    model = compressed() if name == "compressed" else tiny_model(name, **options)
    with InDouble():
        tree_model = treecompile(model.double().eval(), backend="eager", self_check=False)
        tree_model([[1, 2, 3]])
    return tree_model


def row_of(seed: int) -> Row:
    return plan_rows(random_sequences(seed, VOCABULARY), min_shared_tokens=1).rows[0]


def logits_in_row(tree_model: TreeModel, row: Row) -> Tensor:
    """Logits of every token of the row, `[T, vocabulary]`."""
    out = tree_model(row)
    logits = torch.zeros(len(row.tokens), VOCABULARY, dtype=torch.float64)
    for sequence in row.sequence_ids:
        logits[row.path(sequence)] = out.logits[sequence]
    return logits


def with_tokens(row: Row, tokens: np.ndarray) -> Row:
    """The row with other tokens in it, in the order of the row."""
    changed = replace(row)
    vars(changed)["inputs"] = {"input_ids": tokens}
    return changed


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 40), data=st.data())
def test_a_changed_token_changes_nothing_outside_its_own_subtree(name: str, seed: int, data: st.DataObject) -> None:
    row = row_of(seed)
    token = data.draw(st.integers(0, len(row.tokens) - 1))
    tokens = row.tokens.copy()
    tokens[token] = (tokens[token] + 1) % VOCABULARY
    with torch.no_grad():
        before = logits_in_row(tree_model_of(name), row)
        after = logits_in_row(tree_model_of(name), with_tokens(row, tokens))

    below = torch.zeros(len(tokens), dtype=torch.bool)
    below[token : row.subtree_end[token]] = True
    assert torch.allclose(before[~below], after[~below], rtol=0, atol=1e-12)
    assert not torch.allclose(before[token], after[token], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_order_of_sequences_changes_nothing(name: str) -> None:
    sequences = random_sequences(50, VOCABULARY)
    with torch.no_grad(), InDouble():
        forwards = tree_model_of(name)(plan_rows(sequences, min_shared_tokens=1))
        backwards = tree_model_of(name)(plan_rows(sequences[::-1], min_shared_tokens=1))
    for one, other in zip(forwards.logits, reversed(list(backwards.logits)), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
