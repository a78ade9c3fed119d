"""Selection among ancestors and attention over what was selected, against their definitions over all pairs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.differential.trees import long_sequences, random_sequences
from tests.runtime.attention_reference import visible_pairs
from tree_compile import Row, plan_rows
from tree_compile.runtime import topk_index
from tree_compile.runtime.sparse_attention import sparse_attention, sparse_attention_op
from tree_compile.runtime.topk_index import highest, recorded_choices, topk_index_op, tree_topk_index


def row_of(seed: int) -> Row:
    return plan_rows(random_sequences(seed, 8), min_shared_tokens=1).rows[0]


def segments_of(row: Row) -> Tensor:
    return torch.from_numpy(row.segments)


def index_inputs(row: Row, heads: int, width: int, seed: int, *, few_values: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of which few differ give many equal scores."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, len(row.tokens), heads, width), (1, len(row.tokens), width), (1, len(row.tokens), heads)
    if few_values:
        query, key, weights = (torch.randint(-2, 3, shape, generator=generator).double() for shape in shapes)
    else:
        query, key, weights = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, weights


def chosen_by_definition(query: Tensor, key: Tensor, weights: Tensor, segments: Tensor, k: int) -> Iterator[list[int]]:
    yield from chosen_from(query @ key.mT[:, None], weights, segments, k)


def chosen_from(products: Tensor, weights: Tensor, segments: Tensor, k: int) -> Iterator[list[int]]:
    """By products [1, T, H, T] of any dtype."""
    scores = torch.einsum("qhk,qh->qk", products[0].to(weights.dtype).relu(), weights[0])
    for row, visible in enumerate(visible_pairs(segments, len(scores))):
        ancestors = visible.nonzero()[:, 0].tolist()
        ancestors.sort(key=lambda other: (-round(float(scores[row, other]), 9), other))
        yield sorted(ancestors[:k]) + [-1] * (k - len(ancestors))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1_000),
    heads=st.sampled_from([1, 3, 32]),
    width=st.sampled_from([1, 4]),
    k=st.sampled_from([1, 2, 7, 17, 500]),
    few_values=st.booleans(),
)
def test_index_has_the_highest_scores_and_the_earlier_of_equals(
    seed: int, heads: int, width: int, k: int, few_values: bool
) -> None:
    row = row_of(seed)
    inputs = index_inputs(row, heads, width, seed, few_values=few_values)
    index = tree_topk_index(*inputs, segments_of(row), k)
    assert index.dtype == torch.int32
    assert index[0].tolist() == list(chosen_by_definition(*inputs, segments_of(row), k))


def test_index_of_long_segments_has_the_highest_scores() -> None:
    row = plan_rows(long_sequences(1, 8), min_shared_tokens=1).rows[0]
    inputs = index_inputs(row, 4, 8, 0, few_values=False)
    index = tree_topk_index(*inputs, segments_of(row), 20)
    assert index[0].tolist() == list(chosen_by_definition(*inputs, segments_of(row), 20))


@pytest.mark.parametrize("k", [1, 9])
def test_just_the_pairs_of_the_tree_are_scored(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    row = plan_rows(long_sequences(2, 8), min_shared_tokens=1).rows[0]
    scored = 0

    def counted(scores: Tensor, weights: Tensor) -> Tensor:
        nonlocal scored
        scored += scores.shape[0] * scores.shape[2]
        return weighed(scores, weights)

    weighed = topk_index._weighed
    monkeypatch.setattr(topk_index, "_weighed", counted)
    tree_topk_index(*index_inputs(row, 2, 3, 0, few_values=False), segments_of(row), k)
    visible = visible_pairs(segments_of(row), len(row.tokens))
    in_scored_blocks = torch.zeros(len(row.tokens), dtype=torch.bool)
    for start, end, above in topk_index._blocks(segments_of(row)):
        in_scored_blocks[start:end] = above + end - start > k
    assert scored == int(visible[in_scored_blocks].sum())


def test_scores_that_do_not_fit_at_once_give_the_same_index(monkeypatch: pytest.MonkeyPatch) -> None:
    row = plan_rows(long_sequences(3, 8), min_shared_tokens=1).rows[0]
    inputs = index_inputs(row, 2, 3, 0, few_values=True)
    index = tree_topk_index(*inputs, segments_of(row), 5)
    monkeypatch.setattr(topk_index, "BUDGET", 7)
    assert torch.equal(index, tree_topk_index(*inputs, segments_of(row), 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 4, 32])
@pytest.mark.parametrize("width", [8, 64])
def test_of_equal_keys_the_earliest_are_kept_however_their_products_are_rounded(
    heads: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are above the block of a query and some within; some are in the first part of the budget, some behind."""
    monkeypatch.setattr(topk_index, "BUDGET", 1 << 11)
    row = plan_rows(long_sequences(1, 8), min_shared_tokens=1).rows[0]
    query, key, weights = (part.abs().to(dtype) for part in index_inputs(row, heads, width, 0, few_values=False))
    key = key[:, :1].expand_as(key).contiguous()
    index = tree_topk_index(query, key, weights, segments_of(row), 20)
    path = [ancestors.nonzero()[:20, 0].tolist() for ancestors in visible_pairs(segments_of(row), len(row.tokens))]
    assert index[0].tolist() == [own + [-1] * (20 - len(own)) for own in path]


def test_recorded_choices_are_places_on_the_path_of_each_query() -> None:
    row = plan_rows(long_sequences(1, 8), min_shared_tokens=1).rows[0]
    inputs = index_inputs(row, 4, 8, 0, few_values=False)
    with recorded_choices() as found:
        index = tree_topk_index(*inputs, segments_of(row), 20)
    tree_topk_index(*inputs, segments_of(row), 20)
    (places,) = found
    for token, visible in enumerate(visible_pairs(segments_of(row), len(row.tokens))):
        path = [*visible.nonzero()[:, 0].tolist(), -1]
        assert [path[place] for place in places[token].tolist()] == index[0, token].tolist()


def test_one_great_score_does_not_make_others_equal() -> None:
    scores = torch.arange(100.0).repeat(3, 1)
    scores[1, 0], scores[2, 0] = 1e9, torch.nan
    chosen = highest(scores, 5)
    assert chosen[0].nonzero()[:, 0].tolist() == [95, 96, 97, 98, 99]
    for row in (1, 2):
        assert chosen[row].nonzero()[:, 0].tolist() == [0, 96, 97, 98, 99]


def test_scores_that_nearly_cancel_are_compared_at_the_size_of_the_others() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 0.1 + 2e-6, 0.1 - 1e-6, 0.1 + 3e-6, -1.0]])
    assert highest(scores, 4).nonzero()[:, 1].tolist() == [0, 1, 2, 3]


def test_scores_far_below_the_others_are_compared_at_their_own_size() -> None:
    scores = torch.tensor([[1e6, 1e6, 1e6, 0.1, 0.1, 0.1, 0.1, 0.1, 1.5, 0.1]])
    assert highest(scores, 5).nonzero()[:, 1].tolist() == [0, 1, 2, 3, 8]


def test_scores_that_are_not_numbers_are_kept() -> None:
    row = plan_rows([list(range(60))]).rows[0]
    query, key, weights = index_inputs(row, 2, 3, 0, few_values=False)
    key[0, 13] = torch.nan
    index = tree_topk_index(query, key, weights, segments_of(row), 4)
    assert bool((index[0, 13:] == 13).any(-1).all())


def test_padding_keeps_nothing() -> None:
    row = plan_rows([[1, 2, 3]], 5, pad_rows=True).rows[0]
    index = tree_topk_index(*index_inputs(row, 2, 3, 0, few_values=False), segments_of(row), 2)
    assert index[0, 3:].tolist() == [[-1, -1], [-1, -1]]


def test_index_inputs_that_do_not_fit_are_refused() -> None:
    row = row_of(0)
    query, key, weights = index_inputs(row, 2, 3, 0, few_values=False)
    with pytest.raises(ValueError, match="query, key and weights must be"):
        tree_topk_index(query, key[:, :-1], weights, segments_of(row), 2)
    with pytest.raises(ValueError, match="query, key and weights must be"):
        tree_topk_index(query.expand(2, -1, -1, -1), key, weights.expand(2, -1, -1), segments_of(row), 2)


def test_index_of_other_dtypes_or_of_no_keys_is_refused() -> None:
    row = row_of(0)
    query, key, weights = index_inputs(row, 2, 3, 0, few_values=False)
    for inputs in ((query.long(), key.long(), weights), (query.float(), key, weights), (query, key, weights.long())):
        with pytest.raises(ValueError, match="must be of one floating dtype"):
            tree_topk_index(*inputs, segments_of(row), 2)
    for k in (0, -1):
        with pytest.raises(ValueError, match="k must be 1 or more"):
            tree_topk_index(query, key, weights, segments_of(row), k)


def test_attention_refuses_what_does_not_fit() -> None:
    query, key, value, sinks = attention_inputs(4, 6, 2, 1, 0)
    indices = torch.zeros(1, 4, 2, dtype=torch.int32)
    cases = [
        (query, key.expand(2, -1, -1, -1), value.expand(2, -1, -1, -1), indices, None, "must be .1, heads"),
        (query, key[0], value[0], indices, None, "must be .1, heads"),
        (query, key[:, :0], value[:, :0], indices, None, "do not fit"),
        (query, key, value, indices[0], None, "query, key and indices"),
        (query, key, value, indices.float(), None, "int32 or int64"),
        (query, key, value, indices, sinks[:1], "one for each of 2 heads"),
    ]
    for *inputs, of_heads, why in cases:
        with pytest.raises(ValueError, match=why):
            sparse_attention(*inputs, scale=1.0, sinks=of_heads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_index_is_added_up_in_the_dtype_of_the_weights_also_under_autocast(dtype: torch.dtype) -> None:
    row = plan_rows([list(range(200))]).rows[0]
    query, key, weights = index_inputs(row, 4, 8, 0, few_values=False)
    query, key = query.to(dtype), key.to(dtype)
    expected = list(chosen_from(query @ key.mT[:, None], weights, segments_of(row), 5))
    assert tree_topk_index(query, key, weights, segments_of(row), 5)[0].tolist() == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert tree_topk_index(query, key, weights, segments_of(row), 5)[0].tolist() == expected


# Attention


def attention_inputs(tokens: int, rows: int, heads: int, group: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, heads * group, tokens, 5), (1, heads, rows, 5), (1, heads, rows, 3), (heads * group,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def attention_by_definition(
    query: Tensor, key: Tensor, value: Tensor, indices: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    group = query.shape[1] // key.shape[1]
    seen = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool)
    for row, some in enumerate(indices[0].tolist()):
        seen[row, [number for number in some if number >= 0]] = True
    scores = (scale * query @ key.repeat_interleave(group, 1).mT).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value.repeat_interleave(group, 1)


def some_rows(tokens: int, rows: int, k: int, seed: int) -> Tensor:
    """From 1 to k different rows for each of `tokens` queries, then -1."""
    rng = random.Random(seed)
    lists = [sorted(rng.sample(range(rows), rng.randint(1, min(k, rows)))) for _ in range(tokens)]
    return torch.tensor([[some + [-1] * (k - len(some)) for some in lists]], dtype=torch.int32)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 50),
    rows=st.integers(1, 60),
    k=st.integers(1, 20),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    has_sinks=st.booleans(),
    seed=st.integers(0, 1_000),
)
def test_attention_and_its_gradients_are_those_over_the_given_rows(
    tokens: int, rows: int, k: int, heads: int, group: int, has_sinks: bool, seed: int
) -> None:
    indices = some_rows(tokens, rows, k, seed)
    query, key, value, sinks = attention_inputs(tokens, rows, heads, group, seed)
    given_sinks = sinks if has_sinks else None
    inputs = [query, key, value, *([sinks] if has_sinks else [])]
    out = sparse_attention(query, key, value, indices, scale=0.3, sinks=given_sinks)
    expected = attention_by_definition(query, key, value, indices, 0.3, given_sinks)
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    for one, other in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_query_without_rows_gives_zero_and_no_gradient(has_sinks: bool) -> None:
    query, key, value, sinks = attention_inputs(2, 4, 1, 2, 0)
    indices = torch.tensor([[[0, 2], [-1, -1]]])
    out = sparse_attention(query, key, value, indices, scale=1.0, sinks=sinks if has_sinks else None)
    assert bool((out[:, :, 1] == 0).all())
    out.sum().backward()
    assert bool((query.grad[:, :, 1] == 0).all())
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (query, key, value))


def test_rows_that_no_query_names_are_not_read() -> None:
    query, key, value, _ = attention_inputs(3, 4, 1, 1, 0)
    indices = torch.tensor([[[1, -1], [-1, 2], [-1, -1]]])
    with torch.no_grad():
        key[:, :, [0, 3]], value[:, :, [0, 3]] = torch.nan, torch.nan
    out = sparse_attention(query, key, value, indices, scale=1.0)
    out.sum().backward()
    assert bool(out.isfinite().all())
    assert bool((key.grad[:, :, [0, 3]] == 0).all())


def test_half_precision_is_within_its_rounding() -> None:
    query, key, value, _ = attention_inputs(20, 20, 2, 2, 0)
    indices = some_rows(20, 20, 6, 0)
    exact = sparse_attention(query, key, value, indices, scale=0.3)
    rough = sparse_attention(*(tensor.bfloat16() for tensor in (query, key, value)), indices, scale=0.3)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.double(), exact, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("change", [lambda t: t[:, :, :-1], lambda t: t[..., :-1]])
def test_attention_inputs_that_do_not_fit_are_refused(change) -> None:
    query, key, value, _ = attention_inputs(5, 5, 2, 2, 0)
    with pytest.raises(ValueError, match="do not fit"):
        sparse_attention(query, change(key), value, some_rows(5, 5, 2, 0), scale=1.0)


def test_ops_keep_what_torch_asks_of_them() -> None:
    row = row_of(3)
    query, key, value, sinks = attention_inputs(len(row.tokens), len(row.tokens), 2, 2, 0)
    index_args = (*index_inputs(row, 2, 3, 0, few_values=False), segments_of(row), 4)
    torch.library.opcheck(topk_index_op, index_args)
    index = topk_index_op(*index_args)
    torch.library.opcheck(sparse_attention_op, (query, key, value, index, sinks, 0.5))
    torch.library.opcheck(sparse_attention_op, (query, key, value, index, None, 0.5))


def test_queries_that_read_nothing_give_zero() -> None:
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    for indices in (torch.full((1, 4, 3), -1), torch.empty(1, 4, 0, dtype=torch.int64)):
        out = sparse_attention(query, key, value, indices, scale=1.0)
        assert out.abs().max() == 0
        assert all(part.abs().max() == 0 for part in torch.autograd.grad(out.sum(), (query, key, value)))


def test_keys_of_another_dtype_are_refused() -> None:
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="must be of one floating dtype"):
        sparse_attention(query, key, key, torch.zeros(1, 4, 1, dtype=torch.int64), scale=1.0)


def test_gathered_keys_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_index, "BUDGET", 1024)
    query, key, weights = torch.randn(1, 512, 1, 8), torch.randn(1, 512, 8), torch.randn(1, 512, 1)
    segments = torch.tensor([[0, 512, 512, -1, 0], [0, 0, 0, 0, 0]])
    gathered, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda one, other: gathered.append(other.numel()) or bmm(one, other))
    tree_topk_index(query, key, weights, segments, 4)
    assert 0 < max(gathered) <= 1024
