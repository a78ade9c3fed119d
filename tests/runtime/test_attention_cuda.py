"""The flex_attention path, whose forward runs on the CPU too; its kernels need a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.attention.flex_attention
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.runtime.attention_reference import tree_attention_reference
from tests.runtime.trees import random_forest, row_tensors, segment_table
from tree_compile.runtime import attention_cuda
from tree_compile.runtime.attention_cuda import flex_tree_attention
from tree_compile.runtime.attention_score import Score

OPTIONS = {
    "plain": {},
    "sinks": {"sinks": "each"},
    "window": {"window": 20},
    "chunk": {"chunk": 30},
    "softcap": {"softcap": 1.5, "window": 200},
    "key_bias": {"key_bias": "each"},
    "shared_key_bias": {"key_bias": "one"},
    "pair_bias": {"pair_bias": "each", "sinks": "each"},
    "shared_pair_bias": {"pair_bias": "one"},
    "all": {
        "sinks": "each", "window": 100, "chunk": 130, "softcap": 1.5, "key_bias": "each", "pair_bias": "each",
    },
}  # fmt: skip


def inputs(seed: int, widths: tuple[int, int] = (16, 16), **options: object) -> tuple[list[Tensor], dict[str, object]]:
    """query, key, value, segments, position, subtree_end of a random tree with padding; and the options as tensors."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    table = segment_table(random_forest(rng, rng.choice([150, 400]), rng.choice([3, 40, 200])))
    tokens = int(table[:, 2].max()) + 5
    shapes = [(1, 6, tokens, widths[0]), (1, 2, tokens, widths[0]), (1, 2, tokens, widths[1])]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    sizes = {"sinks": (), "key_bias": (tokens,), "pair_bias": (tokens, tokens)}
    for name, value in options.items():
        if name in sizes:
            bias = torch.randn(6 if value == "each" else 1, *sizes[name], generator=generator)
            options[name] = bias.masked_fill(bias > 1.5, float("-inf")) if name == "pair_bias" else bias
    return [*made, table, *row_tensors(table, tokens)], options


def flex(tensors: list[Tensor], options: dict[str, object]) -> Tensor:
    rest = dict(options)
    sinks = rest.pop("sinks", None)
    return flex_tree_attention(*tensors, sinks, Score(0.4, **rest))


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention with dense scores: its kernels for the CPU take a minute to build."""
    monkeypatch.setattr(attention_cuda, "_compiled_attend", lambda: attention_cuda._attend)
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_flex_attention_equals_the_definition(options: dict[str, object], seed: int) -> None:
    tensors, made = inputs(seed, **options)
    expected = tree_attention_reference(*tensors[:4], scale=0.4, **made)
    assert (flex(tensors, made) - expected).abs().max() < 5e-6


@pytest.mark.parametrize("widths", [(3, 5), (16, 48), (40, 8)])
def test_flex_attention_takes_any_width(widths: tuple[int, int]) -> None:
    tensors, made = inputs(0, widths)
    out = flex(tensors, made)
    assert out.shape[3] == widths[1]
    assert (out - tree_attention_reference(*tensors[:4], scale=0.4, **made)).abs().max() < 5e-6


def test_models_of_a_process_may_have_many_forms_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(attention_cuda._attend, backend="eager", dynamic=True, fullgraph=True)
    monkeypatch.setattr(attention_cuda, "_compiled_attend", lambda: compiled)
    tensors, _ = inputs(0)
    for scale in torch.linspace(0.1, 1, torch._dynamo.config.recompile_limit + 2).tolist():
        out = flex_tree_attention(*tensors, None, Score(scale))
        assert (out - tree_attention_reference(*tensors[:4], scale=scale)).abs().max() < 5e-6


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["plain", "all"])
def test_padding_rows_give_zero(options: dict[str, object]) -> None:
    tensors, made = inputs(1, **options)
    out = flex(tensors, made)
    assert out[:, :, -5:].abs().max() == 0
    assert out[:, :, :-5].abs().max() > 0


# Literals: inside of a compiled graph, numbers that are not become symbols, and flex_attention takes no symbolic float.
def _plain(*tensors: Tensor) -> Tensor:
    return flex_tree_attention(*tensors, None, Score(0.4))


def _with_options(*tensors: Tensor) -> Tensor:
    return flex_tree_attention(*tensors, None, Score(0.4, window=20, chunk=50, softcap=2.0))


MODELS = [(_plain, {}), (_with_options, {"window": 20, "chunk": 50, "softcap": 2.0})]


def _compilations_after_two_rows(
    model: Callable[..., Tensor], options: dict[str, object], counter: CompileCounterWithBackend
) -> int:
    """Compilations for the third row and later ones; all rows have several tiles, since one tile is its own case."""
    before = 0
    for seed in range(5):
        tensors, _ = inputs(seed)
        expected = tree_attention_reference(*tensors[:4], scale=0.4, **options)
        assert (model(*tensors) - expected).abs().max() < 5e-6
        before = int(counter.frame_count) if seed < 2 else before
    return int(counter.frame_count) - before


@pytest.mark.parametrize(("model", "options"), MODELS)
def test_traced_flex_attention_serves_new_trees_and_lengths(
    model: Callable[..., Tensor], options: dict[str, object]
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    assert _compilations_after_two_rows(compiled, options, counter) == 0


def test_untraced_flex_attention_is_compiled_once_for_all_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_cuda._attend, backend=counter, fullgraph=True, dynamic=True)
    monkeypatch.setattr(attention_cuda, "_compiled_attend", lambda: compiled)
    for model, options in MODELS:
        assert _compilations_after_two_rows(model, options, counter) == 0
    assert counter.frame_count > 0
