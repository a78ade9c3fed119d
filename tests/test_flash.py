"""`treecompile(…, attention=…)` on whole models, with kernels of flash attention computed by their definition."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.differential.trees import random_sequences
from tests.passes.model import TREE, Model
from tests.runtime.varlen_reference import reference_kernels
from tree_compile import treecompile
from tree_compile.errors import KernelError
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.passes import flash
from tree_compile.passes.static_values import FIRST_REACH
from tree_compile.runtime import attention, flash_attention, flash_forms
from tree_compile.runtime.flash_forms import Reason

VOCABULARY = 31


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device with kernels, which take float64, and nothing but what they take on any device."""

    def why_not(form: flash_forms.AttentionForm) -> Reason | None:
        return flash_forms.why_not_flash(form._replace(dtype=torch.bfloat16))

    for module in (attention, flash):
        monkeypatch.setattr(module, "is_cuda", lambda _: True)
        monkeypatch.setattr(module, "why_not_flash", why_not)
    monkeypatch.setattr(flash_forms, "has_kernels", lambda _: True)
    monkeypatch.setattr(flash_forms, "widest_head", lambda _: 256)
    monkeypatch.setattr(flash_attention, "kernels_for", reference_kernels)
    # What would be flex_attention on a GPU.
    monkeypatch.setattr(attention, "flex_tree_attention", by_the_cpu_op)


def by_the_cpu_op(query, key, value, segments, _position, _subtree_end, sinks, score):
    options = (score.key_bias, score.pair_bias, score.scale, score.window, score.chunk, score.softcap)
    return attention.attention_op(query, key, value, segments, sinks, *options)[0]


def model() -> Dense:
    torch.manual_seed(0)
    return Dense(DenseConfig(vocab_size=VOCABULARY, width=32, layers=2, hidden=16)).double()


def windowed(model, x):
    """Attention over the last 5 tokens."""
    places = torch.arange(x.shape[1])
    near = (places <= places[:, None]) & (places[:, None] - places < 5)
    return F.scaled_dot_product_attention(model.inner(x)[:, None], x[:, None], x[:, None], attn_mask=near)[:, 0]


def capped(model, x):
    """Attention with scores of up to 3."""
    scores = 3 * torch.tanh(model.inner(x) @ x.mT / 3)
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf")).softmax(-1) @ x


def causal(_model, x):
    """Attention over all ancestors."""
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def causal_outside_of_autocast(model, x):
    """The same, with autocast off."""
    with torch.autocast("cpu", enabled=False):
        return causal(model, x)


def windowed_and_causal(model, x):
    """Two attentions, of which flash attention can compute the second."""
    return causal(model, windowed(model, x))


def chunked(shift: int) -> Callable[..., Tensor]:
    """Attention in chunks of positions, of which the proof learns where sequences are as long."""

    def middle(_model, x):
        places = torch.arange(x.shape[1])
        visible = (places <= places[:, None]) & (places >> shift == places[:, None] >> shift)
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=visible)[:, 0]

    return middle


def calls_of(monkeypatch: pytest.MonkeyPatch, what: Callable[[Tensor], Any] = len) -> list[Any]:
    """Grows by the number of queries, or something else of theirs, with each causal call of a flash kernel."""
    found: list[Any] = []

    def kernels(softcap: float) -> flash_attention.FlashKernels:
        exact = reference_kernels(softcap)

        def forward(query, key, value, call, *rest):
            if call.causal:
                found.append(what(query))
            return exact.forward(query, key, value, call, *rest)

        return exact._replace(forward=forward)

    monkeypatch.setattr(flash_attention, "kernels_for", kernels)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_model_by_flash_attention_equals_the_unpacked_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    tree_model = treecompile(model(), backend="eager", attention="flash", min_shared_tokens=1)
    sequences = random_sequences(seed, VOCABULARY)
    report = tree_model.check(sequences)
    assert max(report.greatest_output_difference, report.greatest_gradient_difference) < 1e-9
    assert calls[-1] == tree_model.plan(sequences).packed_tokens


def test_compiled_model_by_flash_attention_equals_the_unpacked_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    tree_model = treecompile(model(), attention="flash", min_shared_tokens=1)
    sequences = random_sequences(0, VOCABULARY)
    assert tree_model.check(sequences).ok
    tree_model(sequences)
    assert calls[-2:] == [tree_model.plan(sequences).packed_tokens] * 2


def test_each_row_takes_the_kernels_that_are_estimated_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    monkeypatch.setattr(flash.FlashGraph, "is_faster", lambda _, row: row.length > 100)
    tree_model = treecompile(model(), backend="eager", min_shared_tokens=1)
    rng = random.Random(0)
    long, short = ([[rng.randrange(VOCABULARY) for _ in range(n)] for _ in range(3)] for n in (200, 20))
    tree_model(short)
    for sequences in (short, long, short):
        before = len(calls)
        tree_model(sequences)
        assert (len(calls) > before) is (sequences is long)
    assert tree_model.check(long).ok


def test_self_check_compares_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    treecompile(model(), backend="eager", min_shared_tokens=1).explain()
    assert calls
    calls.clear()
    treecompile(model(), backend="eager", min_shared_tokens=1, attention="flex").explain()
    assert not calls


def test_explanation_says_what_may_be_computed_by_flash_attention() -> None:
    text = str(treecompile(model(), backend="eager", min_shared_tokens=1).explain())
    assert "\n2 attentions by flex_attention or flash attention, whichever is faster\n" in text
    for way, by in (("flex", "flex_attention"), ("flash", "flash attention")):
        assert f"\n2 attentions by {by}\n" in str(treecompile(model(), backend="eager", attention=way).explain())


def test_explanation_says_why_attention_is_not_by_flash_attention() -> None:
    text = str(treecompile(Model(windowed).double(), backend="eager").explain())
    assert "\n1 attention by flex_attention: it has a sliding window, which goes along a path" in text


def test_explanation_says_how_many_rows_take_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash.FlashGraph, "is_faster", lambda _, row: row.length > 100)
    tree_model = treecompile(model(), backend="eager", row_tokens=150)
    text = str(tree_model.explain([[1] * 90, [2] * 140]))
    assert "\nflash attention for 1 of 2 rows\n" in text


def test_explanation_off_cuda_says_that_a_way_which_was_asked_for_is_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "is_cuda", lambda _: False)
    monkeypatch.setattr(attention, "is_cuda", lambda _: False)
    text = str(treecompile(model(), backend="eager", attention="flash").explain())
    assert '\nattention="flash" is for CUDA, and says nothing here\n' in text
    assert "CUDA" not in str(treecompile(model(), backend="eager").explain())


@pytest.mark.parametrize(("middle", "why"), [(windowed, "sliding window"), (capped, "soft cap")])
def test_attention_that_flash_cannot_compute_is_refused_with_its_line(middle: Callable[..., Tensor], why: str) -> None:
    tree_model = treecompile(Model(middle).double(), backend="eager", attention="flash")
    with pytest.raises(KernelError, match=why) as caught:
        tree_model(TREE)
    assert caught.value.where is not None
    assert caught.value.where.file == __file__
    assert 'attention="auto"' in caught.value.hint


@pytest.mark.parametrize("middle", [windowed, capped])
def test_attention_that_flash_cannot_compute_is_left_to_flex_attention(
    middle: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch)
    tree_model = treecompile(Model(middle).double(), backend="eager", min_shared_tokens=1)
    assert tree_model.check(TREE).ok
    assert not calls


def test_model_with_one_attention_that_flash_cannot_compute_equals_the_unpacked_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = calls_of(monkeypatch)
    monkeypatch.setattr(flash.FlashGraph, "is_faster", lambda *_: True)
    tree_model = treecompile(Model(windowed_and_causal).double(), backend="eager", min_shared_tokens=1)
    text = str(tree_model.explain())
    assert "\n1 attention by flex_attention or flash attention, whichever is faster\n" in text
    assert "\n1 attention by flex_attention: it has a sliding window, which goes along a path" in text
    report = tree_model.check(TREE)
    assert max(report.greatest_output_difference, report.greatest_gradient_difference) < 1e-9
    assert calls[-1] == tree_model.plan(TREE).packed_tokens


def test_one_attention_that_flash_cannot_compute_is_refused_beside_one_that_it_can() -> None:
    with pytest.raises(KernelError, match="sliding window"):
        treecompile(Model(windowed_and_causal).double(), backend="eager", attention="flash").explain()


@pytest.mark.parametrize(
    ("dtype", "autocast", "middle", "why"),
    [
        (torch.float32, False, causal, "not float32"),
        (torch.float32, True, causal, None),
        (torch.float32, True, causal_outside_of_autocast, "not float32"),
        (torch.float64, True, causal, "not float64"),
        (torch.bfloat16, False, causal, None),
    ],
)
def test_flash_takes_half_precision_also_by_autocast(
    dtype: torch.dtype, autocast: bool, middle: Callable[..., Tensor], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, flash):
        monkeypatch.setattr(module, "why_not_flash", flash_forms.why_not_flash)
    calls = calls_of(monkeypatch, lambda query: query.dtype)
    tree_model = treecompile(Model(middle).to(dtype), backend="eager", attention="flash", self_check=False)
    expected = contextlib.nullcontext() if why is None else pytest.raises(KernelError, match=why)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), expected:
        tree_model(TREE)
    assert calls == ([] if why else [torch.bfloat16])


def beyond_the_proof() -> list[list[int]]:
    """Sequences longer than those that a mask is first evaluated for, and one of a single token."""
    rng = random.Random(0)
    trunk = [rng.randrange(VOCABULARY) for _ in range(FIRST_REACH)]
    return [[*trunk, 1, 2, 3], [*trunk, 4], [5]]


def test_sequences_beyond_the_proof_are_checked_and_computed_by_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = calls_of(monkeypatch)
    tree_model = treecompile(Model(chunked(14)).double(), backend="eager", attention="flash", self_check=False)
    tree_model(TREE)
    calls.clear()
    sequences = beyond_the_proof()
    out = tree_model(sequences)
    # A sequence of one token makes up for the check that was left out: one small row, and then these.
    assert calls[-1] == tree_model.plan(sequences).packed_tokens
    assert len(calls) == 2
    for tokens, logits in zip(sequences, out, strict=True):
        expected = tree_model.unpacked(torch.tensor([tokens]))[0]
        assert (logits - expected).abs().max() < 1e-9 * expected.abs().max()


def test_attention_that_flash_cannot_compute_for_longer_sequences_is_refused_with_them() -> None:
    tree_model = treecompile(Model(chunked(10)).double(), backend="eager", attention="flash")
    tree_model(TREE)
    with pytest.raises(KernelError, match="chunks of positions"):
        tree_model(beyond_the_proof())


def test_attention_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="attention is 'fast'; it must be one of 'auto', 'flex', 'flash'"):
        treecompile(model(), attention="fast")


def test_tree_attention_refuses_kernels_that_cannot_compute_it() -> None:
    query = torch.zeros(1, 1, 4, 8)
    table, rows = torch.tensor([[0, 4, 4, -1, 0], [0] * 5]), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="flash attention cannot compute this: it has a sliding window"):
        attention.tree_attention(query, query, query, table, rows, rows, scale=1.0, window=3, kernels="flash")
