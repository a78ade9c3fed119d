"""tree_attention on the CPU against its dense definition."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.runtime.attention_reference import tree_attention_reference
from tests.runtime.pages import run_page
from tests.runtime.trees import Spec, random_forest, row_tensors, segment_table
from tree_compile.runtime.attention import tree_attention

FORESTS: dict[str, list[Spec]] = {
    "one_token": [(1, [])],
    "one_segment": [(40, [])],
    "longer_than_a_block": [(300, [])],
    "several_roots": [(5, []), (1, [(3, []), (4, [])]), (7, [])],
    "siblings": [(30, [(3, [])] * 200)],
    "long_siblings": [(150, [(140, []), (130, [(20, []), (150, [])])])],
    "short_under_and_beside_long": [(50, [(300, [(1, [])] * 300), (7, [])]), (9, [])],
    "one_token_segments": [(1, [(1, [(1, [(1, [])] * 2), (1, [])]), (1, [])])],
    "random_short": random_forest(random.Random(1), 300, 3),
    "random_long": random_forest(random.Random(2), 500, 90),
}


@dataclass
class Problem:
    """Inputs of tree_attention on one tree."""

    query: Tensor
    key: Tensor
    value: Tensor
    segments: Tensor
    options: dict[str, object] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Tensor]:
        sinks = self.options.get("sinks")
        return [self.query, self.key, self.value, *([sinks] if isinstance(sinks, Tensor) else [])]

    def tree(self) -> Tensor:
        rows = row_tensors(self.segments, self.query.shape[2])
        return tree_attention(self.query, self.key, self.value, self.segments, *rows, scale=0.4, **self.options)

    def reference(self) -> Tensor:
        return tree_attention_reference(self.query, self.key, self.value, self.segments, scale=0.4, **self.options)


def problem(
    forest: list[Spec],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: object,
) -> Problem:
    """Random inputs; biases and sinks are made where `options` says "one" or "each" (head)."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    segments = segment_table(forest)
    tokens = int(segments[:, 2].max()) + padding
    (query_heads, key_heads), (width, value_width) = heads, widths
    shapes = [(query_heads, width), (key_heads, width), (key_heads, value_width)]
    inputs = [made(1, count, tokens, wide).requires_grad_() for count, wide in shapes]
    count = {"one": 1, "each": query_heads}
    if options.get("sinks"):
        options["sinks"] = made(query_heads).requires_grad_()
    if "key_bias" in options:
        options["key_bias"] = made(count[str(options["key_bias"])], tokens)
    if "pair_bias" in options:
        bias = made(count[str(options["pair_bias"])], tokens, tokens)
        options["pair_bias"] = bias.masked_fill(bias > 1, float("-inf"))
    return Problem(*inputs, segments, options)


def largest_error(problem: Problem, grad: Tensor | None = None) -> float:
    """Greatest difference from the reference, of the output and of all gradients."""
    out, expected = problem.tree(), problem.reference()
    if grad is None:
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    found = torch.autograd.grad(out, problem.leaves, grad)
    wanted = torch.autograd.grad(expected, problem.leaves, grad)
    pairs = [(out, expected), *zip(found, wanted, strict=True)]
    return max((left - right).abs().max().item() for left, right in pairs)


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 1.5, "sinks": True}], ids=str)
def test_attention_equals_its_definition_on_every_tree(forest: list[Spec], options: dict[str, object]) -> None:
    assert largest_error(problem(forest, **options)) < 1e-12


CHOICES: dict[str, list[object]] = {
    "window": [0, 5],
    "chunk": [0, 16],
    "softcap": [0.0, 1.5],
    "sinks": [None, True],
    "key_bias": [None, "one", "each"],
    "pair_bias": [None, "one", "each"],
}


@pytest.mark.parametrize("number", range(144))
def test_attention_equals_its_definition_for_every_combination_of_features(number: int) -> None:
    chosen = list(itertools.product(*CHOICES.values()))[number]
    options = {name: value for name, value in zip(CHOICES, chosen, strict=True) if value}
    forest = random_forest(random.Random(number), 120, 30)
    assert largest_error(problem(forest, padding=number % 3, seed=number, **options)) < 1e-12


@pytest.mark.parametrize("seed", range(30))
def test_attention_equals_its_definition_on_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    forest = random_forest(rng, rng.choice([10, 200, 400]), rng.choice([1, 4, 60, 200]))
    options = {"window": rng.choice([0, 0, 1, 30, 10_000]), "chunk": rng.choice([0, 0, 1, 25, 10_000])}
    assert largest_error(problem(forest, seed=seed, **options)) < 1e-12


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("widths", [(1, 1), (7, 7), (24, 16), (3, 10)])
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}], ids=str)
def test_attention_takes_any_number_of_heads_and_any_width(
    heads: tuple[int, int], widths: tuple[int, int], options: dict[str, object]
) -> None:
    assert largest_error(problem(FORESTS["long_siblings"], heads=heads, widths=widths, **options)) < 1e-12


def test_soft_cap_is_exact_when_heads_are_computed_one_by_one() -> None:
    long = [(1500, [(40, [(1, [])]), (30, [])])]
    assert largest_error(problem(long, heads=(4, 2), softcap=2.0, key_bias="each")) < 1e-12


def test_first_key_tiles_that_nothing_sees_do_no_harm() -> None:
    hidden = problem([(1300, [(20, []), (90, [])])], pair_bias="each")
    bias = hidden.options["pair_bias"]
    assert isinstance(bias, Tensor)
    bias[:, 700:, :600] = float("-inf")
    assert largest_error(hidden) < 1e-12


def test_query_whose_bias_hides_every_key_gives_zero() -> None:
    hidden = problem([(10, [(4, []), (5, [])])], pair_bias="one", sinks=True)
    bias = hidden.options["pair_bias"]
    assert isinstance(bias, Tensor)
    bias[:, 12] = float("-inf")
    assert hidden.tree()[0, :, 12].abs().max() == 0
    assert largest_error(hidden) < 1e-12


@pytest.mark.parametrize("options", [{}, {"window": 4, "sinks": True}, {"softcap": 1.0}], ids=str)
def test_padding_rows_give_zero_and_receive_zero(options: dict[str, object]) -> None:
    padded = problem([(9, [(3, []), (2, [])])], padding=6, **options)
    out = padded.tree()
    gradients = torch.autograd.grad(out, padded.leaves[:3], torch.ones_like(out))
    for tensor in (out, *gradients):
        assert tensor[:, :, -6:].abs().max() == 0
        assert tensor[:, :, :-6].abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 1.0}], ids=str)
def test_backward_takes_gradients_of_any_layout(options: dict[str, object]) -> None:
    inputs = problem(FORESTS["long_siblings"], **options)
    shape = inputs.tree().shape
    row = torch.randn(shape[2], dtype=torch.float64)
    assert largest_error(inputs, row[None, None, :, None].expand(shape)) < 1e-12
    turned = torch.randn(shape[3], shape[2], shape[1], 1, dtype=torch.float64).permute(3, 2, 1, 0)
    assert largest_error(inputs, turned) < 1e-12


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 1.0}], ids=str)
def test_inputs_may_have_any_layout(options: dict[str, object]) -> None:
    inputs = problem(FORESTS["long_siblings"], heads=(4, 4), **options)
    tokens = inputs.query.shape[2]
    inputs.query = torch.randn(1, tokens, 4, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
    inputs.key = torch.randn(1, 8, tokens, dtype=torch.float64)[:, :, None].permute(0, 2, 3, 1).expand(1, 4, tokens, 8)
    inputs.key.requires_grad_()
    inputs.value = torch.randn(8, tokens, 4, 1, dtype=torch.float64).permute(3, 2, 1, 0).requires_grad_()
    assert largest_error(inputs) < 1e-12


def test_chain_of_thousands_of_segments_is_exact() -> None:
    chain: Spec = (1, [])
    for _ in range(1500):
        chain = (1, [chain, (1, [])])
    leaves_first: Spec = (1, [])
    for _ in range(400):
        leaves_first = (1, [(1, []), leaves_first])
    for forest in ([chain], [leaves_first]):
        assert largest_error(problem(forest, heads=(1, 1), widths=(4, 4))) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 20, "sinks": True}, {"softcap": 2.0}, {"key_bias": "each", "chunk": 50}], ids=str
)
def test_lower_precision_is_within_its_rounding(
    dtype: torch.dtype, tolerance: float, options: dict[str, object]
) -> None:
    low = problem(FORESTS["random_long"], dtype=dtype, **dict(options))
    exact = problem(FORESTS["random_long"], dtype=torch.float64, **dict(options))
    with torch.no_grad():
        for left, right in zip(exact.leaves, low.leaves, strict=True):
            left.copy_(right)
    if "key_bias" in options:
        exact.options["key_bias"] = low.options["key_bias"].double()
    out, expected = low.tree(), exact.reference()
    assert out.dtype == dtype
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, low.leaves, grad)
    wanted = torch.autograd.grad(expected, exact.leaves, grad.double())
    for left, right in [(out, expected), *zip(found, wanted, strict=True)]:
        assert (left - right).abs().max() < tolerance * max(1, right.abs().max())


def test_bfloat16_accumulates_over_segments_in_float32() -> None:
    chain: Spec = (40, [])
    for _ in range(60):
        chain = (40, [chain, (33, [])])
    low = problem([chain], heads=(1, 1), widths=(16, 16), dtype=torch.bfloat16)
    exact = tree_attention_reference(low.query.double(), low.key.double(), low.value.double(), low.segments, scale=0.4)
    # One rounding of the output to bfloat16, and the kernel's own; sixty roundings would be several times this.
    assert (low.tree() - exact).abs().max() < 2**-7 * exact.abs().max()


def test_causal_attention_over_the_same_row_is_far_off() -> None:
    inputs = problem(FORESTS["random_long"], heads=(2, 2))
    causal = torch.nn.functional.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, is_causal=True, scale=0.4
    )
    assert (causal - inputs.reference()).abs().max() > 1e10 * 1e-12


def test_autocast_casts_as_the_stock_attention_does() -> None:
    inputs = problem([(20, [])], heads=(2, 2), dtype=torch.float32)
    inputs.value = inputs.value.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = inputs.tree()
        stock = torch.nn.functional.scaled_dot_product_attention(
            inputs.query, inputs.key, inputs.value, is_causal=True, scale=0.4
        )
    assert out.dtype == stock.dtype == torch.bfloat16
    assert (out - stock).abs().max() < 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 20, 8)}, r"\[1, heads, tokens, width\]"),
        ({"key": torch.zeros(1, 3, 20, 8)}, "do not fit"),
        ({"value": torch.zeros(1, 2, 19, 8)}, "do not fit"),
        ({"key": torch.zeros(1, 2, 20, 9)}, "9 wide"),
        ({"value": torch.zeros(1, 2, 20, 8, dtype=torch.float64)}, "dtype"),
        ({"segments": torch.zeros(2, 4, dtype=torch.int64)}, "segments must be"),
        ({"segments": torch.zeros(2, 5, dtype=torch.int32)}, "segments must be"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    inputs = problem([(20, [])], dtype=torch.float32)
    rows = row_tensors(inputs.segments, 20)
    for name, tensor in change.items():
        setattr(inputs, name, tensor)
    with pytest.raises(ValueError, match=message):
        tree_attention(inputs.query, inputs.key, inputs.value, inputs.segments, *rows, scale=1.0)


@pytest.mark.parametrize("name", ["key_bias", "pair_bias"])
def test_bias_that_would_need_a_gradient_is_refused(name: str) -> None:
    inputs = problem([(20, [])], **{name: "each"})
    bias = inputs.options[name]
    assert isinstance(bias, Tensor)
    bias.requires_grad_()
    with pytest.raises(ValueError, match="no gradient"):
        inputs.tree()
    with torch.no_grad():
        assert torch.allclose(inputs.tree(), inputs.reference())


def test_segments_on_another_device_are_refused() -> None:
    inputs = problem([(20, [])])
    inputs.segments = inputs.segments.to("meta")
    rows = (torch.empty(0), torch.empty(0))
    with pytest.raises(ValueError, match="segments must be on the CPU"):
        tree_attention(inputs.query, inputs.key, inputs.value, inputs.segments, *rows, scale=1.0)


def test_attention_page_examples_are_right() -> None:
    assert run_page("attention.md") > 0
