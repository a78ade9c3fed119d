"""Windows of tokens that are pooled into entries: outputs and all gradients equal those of the unpacked model."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from tests.differential.comparison import (
    require_exact,
)
from tests.differential.double import InDouble
from tests.differential.trees import Sequences, deep_sequences, long_sequences, random_sequences
from tree_compile import TreeModel, plan_rows, treecompile
from tree_compile.models.compressed import Compressed, CompressedConfig
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-4
VOCABULARY = 128
LARGE_WINDOW = 12


def compressed(entries_per_token: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = Compressed(
        CompressedConfig(
            vocab_size=VOCABULARY, width=32, head_width=8, index_width=6, hidden=24, sliding_window=6,
            large_window=LARGE_WINDOW, entries_per_token=entries_per_token,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def deepseek_v4() -> nn.Module:
    return tiny_model("deepseek_v4", experts_implementation="batched_mm", hc_sinkhorn_iters=2)


FAMILIES: dict[str, Callable[[], nn.Module]] = {"compressed": compressed, "deepseek_v4": deepseek_v4}


def branches_at_every_remainder(seed: int) -> Sequences:
    """A trunk with a branch behind each of its first tokens, so that all windows of all sizes straddle a branch."""
    rng = random.Random(seed)
    trunk = [rng.randrange(VOCABULARY) for _ in range(2 * LARGE_WINDOW + 1)]
    tails = [[(trunk[at] + 1) % VOCABULARY, *(rng.randrange(VOCABULARY) for _ in range(at % 5))] for at in range(25)]
    return [trunk + [3] * 14, *(trunk[:at] + tail for at, tail in enumerate(tails)), trunk[:7]]


TREES: dict[str, tuple[Sequences, int | None]] = {
    "a random tree": (random_sequences(1, VOCABULARY), None),
    "another random tree in several rows": (random_sequences(2, VOCABULARY), 80),
    "a trunk with leaves at depth 8": (deep_sequences(3, VOCABULARY), None),
    "a branch behind every token of a window": (branches_at_every_remainder(4), None),
    "several rows of branches": (branches_at_every_remainder(5), 60),
}


@cache
def tree_model_of(name: str) -> TreeModel:
    """Captured once for all trees; rows are planned by the tests."""
    with InDouble():
        tree_model = treecompile(FAMILIES[name]().double(), backend="eager")
        tree_model([[1, 2, 3]])
    return tree_model


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tree", TREES)
def test_outputs_and_gradients_equal_the_unpacked_model_in_float64(name: str, tree: str) -> None:
    sequences, row_tokens = TREES[tree]
    tree_model, plan = tree_model_of(name), plan_rows(sequences, row_tokens, min_shared_tokens=1)
    assert plan.packed_tokens < plan.input_tokens
    assert len(plan.rows) > 1 or row_tokens is None
    with InDouble():
        require_exact(tree_model, plan, sequences, TOLERANCE)


def test_long_segments_equal_the_unpacked_model_in_float64() -> None:
    sequences = long_sequences(1, VOCABULARY)
    with InDouble():
        plan = plan_rows(sequences, min_shared_tokens=1)
        require_exact(tree_model_of("compressed"), plan, sequences, TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_sequences_of_every_short_length_and_padding_equal_the_unpacked_model(name: str) -> None:
    tree_model = tree_model_of(name)
    tokens = [at % 7 for at in range(2 * LARGE_WINDOW + 2)]
    lengths = range(1, len(tokens)) if name == "compressed" else (1, 2, 3, 4, 7, 8, 11, 12, 13, 24)
    for length in lengths:
        padded = plan_rows([tokens[:length]], 30, min_shared_tokens=1, pad_rows=True)
        with InDouble(), torch.no_grad():
            expected = tree_model.unpacked(torch.tensor([tokens[:length]]))
            expected = expected if isinstance(expected, torch.Tensor) else expected.logits
            for plan in (plan_rows([tokens[:length]], min_shared_tokens=1), padded):
                torch.testing.assert_close(tree_model(plan).logits[0], expected[0], rtol=0, atol=1e-9)


def test_a_model_that_was_captured_without_a_window_takes_longer_sequences() -> None:
    model = Compressed(
        CompressedConfig(
            vocab_size=VOCABULARY, width=32, head_width=8, index_width=6, hidden=24, sliding_window=6,
            large_window=150, layers=3,
        )
    )  # fmt: skip
    tree_model = treecompile(model.double(), backend="eager", min_shared_tokens=1)
    sequences = [[1] * 310, [1] * 299 + [2] * 3, [1] * 149 + [2], [3]]
    with torch.no_grad():
        for sequence, logits in zip(sequences, tree_model(sequences).logits, strict=True):
            torch.testing.assert_close(logits, model(torch.tensor([sequence]))[0], rtol=1e-7, atol=1e-9)


def test_compiled_blocks_equal_the_unpacked_model() -> None:
    sequences = random_sequences(5, VOCABULARY)
    model = compressed()
    tree_model = treecompile(model, 80, min_shared_tokens=1, backend="inductor")
    require_exact(tree_model, tree_model.plan(sequences), sequences, FLOAT32_TOLERANCE)


def test_half_precision_and_autocast_are_within_their_rounding() -> None:
    """With all entries seen: which of them score best is a matter of rounding."""
    sequences = random_sequences(8, VOCABULARY)
    half = treecompile(compressed(64).bfloat16().eval(), min_shared_tokens=1, backend="eager")
    assert half.check(sequences).ok
    tree_model = treecompile(compressed(64).eval(), min_shared_tokens=1, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert tree_model.check(sequences).ok
