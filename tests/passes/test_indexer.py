"""Forms in which models choose keys by the scores of an indexer: rewritten and exact, or refused with a reason."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.differential.comparison import gradient_difference, output_difference, packed, require_exact, unpacked
from tests.differential.trees import random_sequences
from tree_compile import plan_rows, treecompile
from tree_compile.errors import BidirectionalAttentionError, TokenMixingError

VOCABULARY, WIDTH, HEADS, CHOSEN = 32, 16, 32, 4
SEQUENCES = random_sequences(1, VOCABULARY)


def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# Index scores of query [1, T, H, D], key [1, T, D] and weights [1, T, H]


def by_matmul(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    scores = F.relu(torch.matmul(query, key.mT.unsqueeze(1)) * 0.25)
    return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)


def by_einsum(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("bqhk,bqh->bqk", torch.einsum("bqhd,bkd->bqhk", query, key).clamp(min=0), weights)


def by_sum(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return (torch.matmul(query, key.mT.unsqueeze(1)).relu() * 0.5 * weights.unsqueeze(-1)).sum(dim=2)


def heads_first(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    scores = torch.matmul(query.transpose(1, 2), key.unsqueeze(1).transpose(-1, -2)).relu() / 4.0
    return (scores * weights.transpose(1, 2).unsqueeze(-1)).sum(1)


def keys_first_in_einsum(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("bqh,bqhk->bqk", weights, torch.einsum("bkd,bqhd->bqhk", key, query).relu())


def added_up_in_more_bits(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    pairs = torch.matmul(query.bfloat16(), key.bfloat16().mT.unsqueeze(1))
    return (pairs.to(weights.dtype).relu() * weights.unsqueeze(-1)).sum(dim=2)


def weighed_in_more_bits_by_matmul(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    pairs = torch.matmul(query.bfloat16(), key.bfloat16().mT.unsqueeze(1)).relu()
    return torch.matmul(weights.unsqueeze(-2), pairs.to(weights.dtype)).squeeze(-2)


SCORES = [
    by_matmul,
    by_einsum,
    by_sum,
    heads_first,
    keys_first_in_einsum,
    added_up_in_more_bits,
    weighed_in_more_bits_by_matmul,
]


# Masks before the selection


def filled(scores: Tensor) -> Tensor:
    return scores.masked_fill(later(scores.shape[-1]), -torch.inf)


def added(scores: Tensor) -> Tensor:
    return scores + torch.zeros(scores.shape[-2:]).masked_fill(later(scores.shape[-1]), -torch.inf)


def chosen_where(scores: Tensor) -> Tensor:
    return torch.where(~later(scores.shape[-1]), scores, torch.finfo(scores.dtype).min)


def filled_with_a_tensor(scores: Tensor) -> Tensor:
    return scores.masked_fill(later(scores.shape[-1]), torch.tensor(-torch.inf))


def hidden_where(scores: Tensor) -> Tensor:
    return torch.where(later(scores.shape[-1]), -torch.inf, scores)


MASKS = [filled, added, chosen_where, filled_with_a_tensor, hidden_where]


# Attention of query [1, H, T, D], key and value [1, H, T, D] over the rows `chosen` [1, T, k]


def mask_of_list(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.ones(1, length, length, dtype=torch.bool).scatter(-1, chosen, False) | later(length)
    return F.scaled_dot_product_attention(query, key, value, ~hidden.unsqueeze(1))


def mask_that_shows(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    shown = torch.zeros(1, 1, length, length).scatter(-1, chosen.unsqueeze(1), 1.0).bool()
    return F.scaled_dot_product_attention(query, key, value, shown & ~later(length))


def bias_of_list(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    bias = query.new_full((1, 1, length, length), -torch.inf).scatter(-1, chosen.unsqueeze(1), 0.0)
    scores = query @ key.mT * 0.3 + bias
    return scores.masked_fill(later(length), -torch.inf).softmax(-1) @ value


def filled_by_list(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).scatter(-1, chosen.unsqueeze(1), False)
    bias = torch.zeros(1, 1, length, length).masked_fill(later(length), torch.finfo(query.dtype).min)
    return (query @ key.mT + bias.masked_fill(hidden, torch.finfo(query.dtype).min)).softmax(-1) @ value


def gathered_keys(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length, width = query.shape[2:]
    both = torch.cat([key[:, 0], value[:, 0]], -1)
    index = chosen[..., None].expand(-1, -1, -1, 2 * width)
    both = both[:, None].expand(-1, length, -1, -1).gather(2, index)
    keys, values = both.split([width, width], -1)
    scores = torch.matmul(query.transpose(1, 2), keys.mT)
    seen = chosen <= torch.arange(length)[:, None]
    weights = torch.where(seen[:, :, None], scores, -torch.inf).softmax(-1)
    return torch.matmul(weights, values).transpose(1, 2)


def same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Indexed:
    """Over keys that are indexed, with steps between those that are always there."""

    queries: Callable[[Tensor], Tensor] = same
    keys: Callable[[Tensor], Tensor] = same
    scores: Callable[[Tensor], Tensor] = same
    hidden: Callable[[Tensor], Tensor] = same
    weights: Callable[[Tensor], Tensor] = same
    fill: float = -torch.inf

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
        keys, values = (tensor[0, 0][chosen[0]] for tensor in (key, value))
        scores = self.scores(torch.einsum("hqd,qkd->hqk", self.queries(query[0]), self.keys(keys)))
        hidden = self.hidden(chosen[0] > torch.arange(query.shape[2])[:, None])
        weights = self.weights(scores.masked_fill(hidden, self.fill).softmax(-1))
        return torch.einsum("hqk,qkd->hqd", weights, values)[None]


indexed_keys = Indexed(scores=lambda scores: scores * 0.3)
ATTENTIONS = [mask_of_list, mask_that_shows, bias_of_list, filled_by_list, gathered_keys]


@dataclass(frozen=True)
class Form:
    scores: Callable[..., Tensor] = by_matmul
    mask: Callable[[Tensor], Tensor] = filled
    choose: Callable[[Tensor], Tensor] = field(
        default=lambda scores: scores.topk(min(CHOSEN, scores.shape[-1]), dim=-1).indices
    )
    attention: Callable[..., Tensor] = mask_of_list


class Model(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.index_query, self.index_key = nn.Linear(WIDTH, HEADS * 8), nn.Linear(WIDTH, 8)
        self.index_weights = nn.Linear(WIDTH, HEADS)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        position = torch.arange(ids.shape[1])[:, None] * torch.linspace(0.1, 1.0, WIDTH)
        x = self.embedding(ids) + torch.sin(position)
        query = self.index_query(x).unflatten(-1, (HEADS, -1))
        scores = self.form.mask(self.form.scores(query, self.index_key(x), self.index_weights(x)))
        heads = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key, value = heads
        mixed = self.form.attention(query, key, value, self.form.choose(scores))
        return self.head(x + mixed.transpose(1, 2).flatten(-2))


def model_of(form: Form) -> nn.Module:
    torch.manual_seed(0)
    model = Model(form).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


FORMS = {
    **{f"scores {scores.__name__}": Form(scores=scores) for scores in SCORES},
    **{f"mask {mask.__name__}": Form(mask=mask) for mask in MASKS},
    **{f"attention {attention.__name__}": Form(attention=attention) for attention in ATTENTIONS},
    "attention indexed_keys": Form(attention=indexed_keys),
    "features from far before the first": Form(
        attention=Indexed(queries=lambda query: query[..., :4], keys=lambda keys: keys[..., -100:4])
    ),
    "scores of a region without gradients": Form(mask=torch.no_grad()(filled)),
    "choice of a region without gradients": Form(
        choose=torch.no_grad()(lambda scores: scores.topk(min(CHOSEN, scores.shape[-1])).indices)
    ),
    "indices in int32": Form(
        choose=lambda scores: scores.topk(min(CHOSEN, scores.shape[-1])).indices.to(torch.int32).long()
    ),
}


@pytest.fixture(autouse=True)
def in_double():
    """Masks are made in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", FORMS)
def test_form_is_computed_over_the_tree(name: str) -> None:
    tree_model = treecompile(model_of(FORMS[name]), backend="eager")
    plan = plan_rows(SEQUENCES, min_shared_tokens=1)
    tree_model(SEQUENCES[:1])
    assert "tree_topk_index, 4 of every token's ancestors" in str(tree_model.explain())
    require_exact(tree_model, plan, SEQUENCES, 1e-9)


# What is refused


def smallest(scores: Tensor) -> Tensor:
    return scores.topk(min(CHOSEN, scores.shape[-1]), largest=False).indices


def by_sorting(scores: Tensor) -> Tensor:
    return scores.argsort(dim=-1, descending=True)[..., :CHOSEN]


def without_cut_off(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return by_matmul(query, key, weights.abs()) + torch.einsum("bqhd,bkd->bqk", query, key)


def without_relu(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("bqhk,bqh->bqk", torch.einsum("bqhd,bkd->bqhk", query, key), weights)


def turned_round(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return by_matmul(query, key, weights) * -1.0


def window_before_selection(scores: Tensor) -> Tensor:
    return filled(scores).masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-3), -torch.inf)


def list_without_causal_mask(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.ones(1, length, length, dtype=torch.bool).scatter(-1, chosen, False)
    return F.scaled_dot_product_attention(query, key, value, ~hidden.unsqueeze(1))


def indexed_keys_without_causal_mask(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    keys, values = (tensor[0, 0][chosen[0]] for tensor in (key, value))
    weights = torch.einsum("hqd,qkd->hqk", query[0], keys).softmax(-1)
    return torch.einsum("hqk,qkd->hqd", weights, values)[None]


def list_hides(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.zeros(1, length, length, dtype=torch.bool).scatter(-1, chosen, True)
    hidden = (hidden & ~torch.eye(length, dtype=torch.bool)) | later(length)
    return F.scaled_dot_product_attention(query, key, value, ~hidden.unsqueeze(1))


def list_and_window(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.ones(1, length, length, dtype=torch.bool).scatter(-1, chosen, False)
    hidden = hidden | later(length) | torch.ones(length, length, dtype=torch.bool).tril(-3)
    return F.scaled_dot_product_attention(query, key, value, ~hidden.unsqueeze(1))


def unweighed(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return (torch.matmul(query, key.mT.unsqueeze(1)).relu() * 0.5).sum(2)


def truths_of_pairs(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    scores = torch.matmul(query, key.mT.unsqueeze(1)).bool().to(query.dtype).relu()
    return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)


def whole_pairs(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    scores = torch.matmul(query, key.mT.unsqueeze(1)).int().to(query.dtype).relu()
    return torch.matmul(weights.unsqueeze(-2), scores).squeeze(-2)


def truths_of_scores(scores: Tensor) -> Tensor:
    return filled(scores.bool().to(scores.dtype))


def wrapped_indices(scores: Tensor) -> Tensor:
    return scores.topk(min(CHOSEN, scores.shape[-1])).indices.to(torch.uint8).long()


def rounded_indices(scores: Tensor) -> Tensor:
    return scores.topk(min(CHOSEN, scores.shape[-1])).indices.to(torch.bfloat16).long()


def barely_hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(later(scores.shape[-1]), -1e4)


def hidden_then_scaled(scores: Tensor) -> Tensor:
    return scores.masked_fill(later(scores.shape[-1]), -1e38) * 1e-10


def hidden_by_nan(scores: Tensor) -> Tensor:
    """Which topk takes for the highest."""
    return scores.masked_fill(later(scores.shape[-1]), torch.nan)


def barely_lowered_by_a_mask_like_the_scores(scores: Tensor) -> Tensor:
    return scores + torch.zeros_like(scores).masked_fill(later(scores.shape[-1]), -1e5)


def masked_as_key_by_query(scores: Tensor) -> Tensor:
    """Hides what comes before the query."""
    return scores.mT.masked_fill(later(scores.shape[-1]), -torch.inf).mT


def all_made_zero(scores: Tensor) -> Tensor:
    return filled(scores * 1e-200 * 1e-200)


def all_made_infinite(scores: Tensor) -> Tensor:
    return filled(scores * torch.inf)


def rounded_down(scores: Tensor) -> Tensor:
    return filled(torch.div(scores, 0.5, rounding_mode="floor"))


def number_over_scores(scores: Tensor) -> Tensor:
    return filled(2.0 / scores)


def mask_added_in_part(scores: Tensor) -> Tensor:
    return torch.add(scores, torch.zeros(scores.shape[-2:]).masked_fill(later(scores.shape[-1]), -1e30), alpha=1e-20)


def in_half_precision(scores: Tensor) -> Tensor:
    """Where all are infinite."""
    return filled((scores * 1e6).half())


def small_in_half_precision(scores: Tensor) -> Tensor:
    """Where all are 0."""
    return filled((scores * 1e-9).half())


def made_zero_step_by_step(scores: Tensor) -> Tensor:
    return filled((scores * 1e-12 * 1e-12 * 1e-12 * 1e-12).float())


def rounded(scores: Tensor) -> Tensor:
    return scores.bfloat16().masked_fill(later(scores.shape[-1]), -torch.inf)


def rounded_and_back(scores: Tensor) -> Tensor:
    return scores.bfloat16().to(scores.dtype).masked_fill(later(scores.shape[-1]), -torch.inf)


def rounded_pairs(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    pairs = torch.matmul(query, key.mT.unsqueeze(1)).relu().bfloat16().to(weights.dtype)
    return (pairs * weights.unsqueeze(-1)).sum(dim=2)


def rounded_before_the_sum(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    weighed = torch.matmul(query, key.mT.unsqueeze(1)).relu() * weights.unsqueeze(-1)
    return weighed.sum(dim=2, dtype=torch.bfloat16).to(weights.dtype)


def pairs_in_half_precision(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    pairs = (torch.matmul(query, key.mT.unsqueeze(1)) * 1e-9).half().relu()
    return (pairs.to(weights.dtype) * weights.unsqueeze(-1)).sum(dim=2)


def more_and_more(scores: Tensor) -> Tensor:
    """2 of 4 keys, 3 of 5, and 5 of 6."""
    length = scores.shape[-1]
    return scores.topk(torch.sym_min(8, torch.sym_max(torch.sym_min(length, 2), 2 * length - 7))).indices


def none_at_all(scores: Tensor) -> Tensor:
    return scores.topk(0).indices


def wrapped_truths(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Where 2^32 becomes 0."""
    length = query.shape[2]
    hidden = torch.full((1, 1, length, length), 1 << 32).scatter(-1, chosen.unsqueeze(1), 0).to(torch.int32).bool()
    return F.scaled_dot_product_attention(query, key, value, ~(hidden | later(length)))


def tiny_truths(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Which float16 takes for 0."""
    length = query.shape[2]
    hidden = torch.full((1, 1, length, length), 1e-10).scatter(-1, chosen.unsqueeze(1), 0.0).half().bool()
    return F.scaled_dot_product_attention(query, key, value, ~(hidden | later(length)))


def as_many_as_a_tenth(scores: Tensor) -> Tensor:
    return scores.topk(min(CHOSEN, (scores.shape[-1] + 9) // 10)).indices


def barely_lowered(scores: Tensor) -> Tensor:
    return scores + torch.zeros(scores.shape[-2:]).masked_fill(later(scores.shape[-1]), -1e5)


def mask_as_bias(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    bias = query.new_full((1, 1, length, length), -torch.inf).scatter(-1, chosen.unsqueeze(1), 0.0)
    return F.scaled_dot_product_attention(query, key, value, bias + ~later(length))


def list_as_bias(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    shown = torch.zeros(1, 1, length, length, dtype=torch.bool).scatter(-1, chosen.unsqueeze(1), True)
    bias = torch.zeros(length, length).masked_fill(later(length), -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, shown.to(query.dtype) + bias)


def numbers_inverted(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.ones(1, 1, length, length, dtype=torch.int64).scatter(-1, chosen.unsqueeze(1), 0)
    return F.scaled_dot_product_attention(query, key, value, (~hidden).bool() & ~later(length))


def list_for_one_head(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    hidden = torch.ones(1, 2, length, length, dtype=torch.bool).scatter(-1, chosen.unsqueeze(1), False)
    return F.scaled_dot_product_attention(query, key, value, ~(hidden | later(length)))


def scaled_after_hiding(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    keys, values = (tensor[0, 0][chosen[0]] for tensor in (key, value))
    hidden = chosen[0] > torch.arange(query.shape[2])[:, None]
    scores = torch.einsum("hqd,qkd->hqk", query[0], keys).masked_fill(hidden, -1e5) * 1e-5
    return torch.einsum("hqk,qkd->hqd", scores.softmax(-1), values)[None]


def halves_as_truth(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Which whole numbers cut to 0."""
    length = query.shape[2]
    shown = torch.zeros(1, 1, length, length).scatter(-1, chosen.unsqueeze(1), 0.5).long().bool()
    return F.scaled_dot_product_attention(query, key, value, shown & ~later(length))


def bias_in_eight_bits(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Where -100000 becomes 96."""
    length = query.shape[2]
    bias = query.new_full((1, 1, length, length), -1e5).scatter(-1, chosen.unsqueeze(1), 0.0)
    bias = bias.to(torch.int8).to(query.dtype).masked_fill(later(length), -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, bias)


def truth_as_bias(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    bias = torch.zeros(1, 1, length, length).scatter(-1, chosen.unsqueeze(1), 1.0).bool().to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, bias.masked_fill(later(length), -torch.inf))


def truth_as_fill(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """What would be -100000 is 1."""
    length = query.shape[2]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).scatter(-1, chosen.unsqueeze(1), False)
    bias = torch.where(hidden, query.new_full((1, 1, length, length), -1e5).bool(), torch.zeros(length, length))
    return F.scaled_dot_product_attention(query, key, value, bias.masked_fill(later(length), -torch.inf))


def bias_as_truth(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    length = query.shape[2]
    bias = query.new_full((1, 1, length, length), -torch.inf).scatter(-1, chosen.unsqueeze(1), 0.0)
    return F.scaled_dot_product_attention(query, key, value, torch.logical_and(bias, ~later(length)))


def first_feature_alone(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Sums each of queries and keys on its own."""
    keys, values = (tensor[0, 0][chosen[0]] for tensor in (key, value))
    scores = torch.einsum("hqd,qk->hqk", query[0], keys[..., 0])
    hidden = chosen[0] > torch.arange(query.shape[2])[:, None]
    return torch.einsum("hqk,qkd->hqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)[None]


def in_eight_bits(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)


def numbers_as_values(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    return mask_of_list(query, key, value, chosen) + chosen[:, None, :, :1].to(value.dtype)


def half_products(query: Tensor, key: Tensor) -> Tensor:
    return (query.bfloat16() @ key.bfloat16().mT[:, None]).relu()


def rounded_by_a_factor(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    pairs = half_products(query, key) * 0.088
    return torch.einsum("bqhk,bqh->bqk", pairs.to(weights.dtype), weights)


def weighed_in_half(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return (half_products(query, key) * weights.bfloat16()[..., None]).sum(2, dtype=weights.dtype)


def all_in_half(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    return (half_products(query, key) * weights.bfloat16()[..., None]).sum(2)


def as_many_as_the_length_says(scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    return scores.topk(min(6, length) + (length // 60) % 3).indices


REFUSED: dict[str, tuple[Form, str]] = {
    "a factor that rounds in half precision": (Form(scores=rounded_by_a_factor), "rounded to half precision"),
    "weighed in half precision and added up in more": (Form(scores=weighed_in_half), "rounded to half precision"),
    "scores in half precision of a model that is not": (Form(scores=all_in_half), "are in half precision"),
    "a number of keys that rises and falls": (Form(choose=as_many_as_the_length_says), "its indexer chooses"),
    "truths_of_pairs": (Form(scores=truths_of_pairs), "index scores"),
    "whole_pairs": (Form(scores=whole_pairs), "index scores"),
    "truths_of_scores": (Form(mask=truths_of_scores), "index scores"),
    "wrapped_indices": (Form(choose=wrapped_indices), "chosen by aten::to"),
    "rounded_indices": (Form(choose=rounded_indices), "chosen by aten::to"),
    "wrapped_indices_of_a_gather": (Form(choose=wrapped_indices, attention=indexed_keys), "chosen by aten::to"),
    "unweighed": (Form(scores=unweighed), "not over heads that are weighed"),
    "barely_hidden": (Form(mask=barely_hidden), "still may be chosen"),
    "hidden_then_scaled": (Form(mask=hidden_then_scaled), "still may be chosen"),
    "barely_lowered": (Form(mask=barely_lowered), "still may be chosen"),
    "mask_as_bias": (Form(attention=mask_as_bias), "used as a number"),
    "list_as_bias": (Form(attention=list_as_bias), "used as a number"),
    "numbers_inverted": (Form(attention=numbers_inverted), "combined as numbers"),
    "list_for_one_head": (Form(attention=list_for_one_head), "has rows that the list"),
    "scaled_after_hiding": (Form(attention=scaled_after_hiding), "changed after some were hidden"),
    "hidden_by_nan": (Form(mask=hidden_by_nan), "still may be chosen"),
    "barely_lowered_by_a_mask_like_the_scores": (
        Form(mask=barely_lowered_by_a_mask_like_the_scores),
        "still may be chosen",
    ),
    "masked_as_key_by_query": (Form(mask=masked_as_key_by_query), "not those of queries and keys"),
    "all_made_zero": (Form(mask=all_made_zero), "come from aten::mul"),
    "all_made_infinite": (Form(mask=all_made_infinite), "come from aten::mul"),
    "rounded_down": (Form(mask=rounded_down), "come from aten::div"),
    "number_over_scores": (Form(mask=number_over_scores), "come from aten::reciprocal"),
    "mask_added_in_part": (Form(mask=mask_added_in_part), "come from aten::add"),
    "as_many_as_a_tenth": (Form(choose=as_many_as_a_tenth), "its indexer chooses Min"),
    "in_half_precision": (Form(mask=in_half_precision), "cast from float64 to float16"),
    "small_in_half_precision": (Form(mask=small_in_half_precision), "cast from float64 to float16"),
    "rounded": (Form(mask=rounded), "cast from float64 to bfloat16"),
    "rounded_and_back": (Form(mask=rounded_and_back), "cast from float64 to bfloat16"),
    "rounded_pairs": (Form(scores=rounded_pairs), "cast from float64 to bfloat16"),
    "rounded_before_the_sum": (Form(scores=rounded_before_the_sum), "cast from float64 to bfloat16"),
    "pairs_in_half_precision": (Form(scores=pairs_in_half_precision), "cast from float64 to float16"),
    "made_zero_step_by_step": (Form(mask=made_zero_step_by_step), "make them all 0"),
    "more_and_more": (Form(choose=more_and_more), "its indexer chooses Min"),
    "none_at_all": (Form(choose=none_at_all), "its indexer chooses 0 keys"),
    "wrapped_truths": (Form(attention=wrapped_truths), "hides the keys of a list"),
    "tiny_truths": (Form(attention=tiny_truths), "hides the keys of a list"),
    "halves_as_truth": (Form(attention=halves_as_truth), "numbers that are not the same"),
    "bias_in_eight_bits": (Form(attention=bias_in_eight_bits), "numbers that are not the same"),
    "truth_as_bias": (Form(attention=truth_as_bias), "used as a number"),
    "truth_as_fill": (Form(attention=truth_as_fill), "still gets weight"),
    "bias_as_truth": (Form(attention=bias_as_truth), "hides the keys of a list"),
    "weights in whole numbers": (
        Form(attention=Indexed(weights=lambda weights: weights.int().to(weights.dtype))),
        "its weights go into aten::to",
    ),
    "weights as truths": (
        Form(attention=Indexed(weights=lambda weights: weights.bool().to(weights.dtype))),
        "its weights go into aten::to",
    ),
    "weights in eight bits": (Form(attention=Indexed(weights=in_eight_bits)), "its weights go into aten::to"),
    "keys in eight bits": (Form(attention=Indexed(keys=in_eight_bits)), "its keys come from aten::to"),
    "keys without gradients": (Form(attention=Indexed(keys=Tensor.detach)), "its keys come from aten::detach"),
    "scores without gradients": (Form(attention=Indexed(scores=Tensor.detach)), "changed after some were hidden"),
    "scores over zero": (Form(attention=Indexed(scores=lambda scores: scores / 0.0)), "changed after some were hidden"),
    "one feature of the keys for all": (
        Form(attention=Indexed(keys=lambda keys: keys[..., :1])),
        "the same at all places that a product sums over",
    ),
    "one head of the queries for all": (
        Form(attention=Indexed(queries=lambda query: query[:1], hidden=lambda hidden: hidden.expand(2, -1, -1))),
        "the same for all queries, heads or keys",
    ),
    "hidden by nan": (Form(attention=Indexed(fill=torch.nan)), "still gets weight"),
    "first_feature_alone": (Form(attention=first_feature_alone), "einsum hqd,qk->hqk"),
    "smallest": (Form(choose=smallest), "does not choose the keys with the highest scores"),
    "by_sorting": (Form(choose=by_sorting), "chosen by aten::slice"),
    "without_cut_off": (Form(scores=without_cut_off), "depends on the tokens"),
    "without_relu": (Form(scores=without_relu), "not cut off at 0"),
    "turned_round": (Form(scores=turned_round), "not positive"),
    "window_before_selection": (Form(mask=window_before_selection), "chooses among other tokens"),
    "no mask before the selection": (Form(mask=lambda scores: scores), "chooses among other tokens"),
    "list_hides": (
        Form(attention=list_hides),
        "shows what another hides",
    ),
    "list_and_window": (Form(attention=list_and_window), "beside a window"),
    "indexed_keys_without_causal_mask": (Form(attention=indexed_keys_without_causal_mask), "lie after the query"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_form_is_refused_with_its_line(name: str) -> None:
    form, why = REFUSED[name]
    with pytest.raises(TokenMixingError, match=why) as caught:
        treecompile(model_of(form), backend="eager")(SEQUENCES)
    found = caught.value.where
    assert found is not None
    assert found.file == __file__
    assert found.code == linecache.getline(__file__, found.line).strip()
    assert re.search(r"scaled_dot_product_attention|softmax", found.code)


def test_list_without_a_causal_mask_is_refused() -> None:
    with pytest.raises(BidirectionalAttentionError, match="it has no mask"):
        treecompile(model_of(Form(attention=list_without_causal_mask)), backend="eager")(SEQUENCES)


def test_numbers_of_chosen_keys_are_no_values() -> None:
    with pytest.raises(TokenMixingError, match="relates every token to every other"):
        treecompile(model_of(Form(attention=numbers_as_values)), backend="eager")(SEQUENCES)


def test_later_calls_with_other_trees_are_exact() -> None:
    tree_model = treecompile(model_of(Form()), min_shared_tokens=1, backend="eager")
    for seed in range(2, 5):
        sequences = random_sequences(seed, VOCABULARY)
        reference, result = unpacked(tree_model.unpacked, sequences), packed(tree_model, sequences)
        assert output_difference(reference, result) < 1e-9
        assert gradient_difference(reference, result) < 1e-9
