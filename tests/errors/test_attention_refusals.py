"""Attention that is not causal, that changes with the length, or that cannot be read, is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.errors.refusal import HEADS, Tiny, causal, merged, named, require_refusal, tree_model
from tree_compile.errors import (
    BidirectionalAttentionError,
    ControlFlowError,
    DropoutError,
    LengthDependentError,
    TokenMixingError,
    UnknownOpError,
)

LOWEST = -1.0e9


def attend(query, key, value, **keywords):
    return merged(F.scaled_dot_product_attention(query, key, value, **keywords))


def scores_and_value(model, x):
    query, key, value = model.heads(x)
    return query @ key.mT, value


# Not causal


def no_mask(model, x, ids):
    query, key, value = model.heads(x)
    return merged(F.scaled_dot_product_attention(query, key, value))


def no_mask_by_hand(model, x, ids):
    scores, value = scores_and_value(model, x)
    return merged(scores.softmax(-1) @ value)


def transposed_mask(model, x, ids):
    scores, value = scores_and_value(model, x)
    hidden = ~causal(x.shape[1]).mT
    return merged(scores.masked_fill(hidden, LOWEST).softmax(-1) @ value)


def prefix_seen_by_all(model, x, ids):
    scores, value = scores_and_value(model, x)
    seen = causal(x.shape[1]) | (torch.arange(x.shape[1]) < 3)
    return merged(scores.masked_fill(~seen, LOWEST).softmax(-1) @ value)


def next_token_seen(model, x, ids):
    query, key, value = model.heads(x)
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(1)
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=seen))


def added_mask_that_hides_a_little(model, x, ids):
    scores, value = scores_and_value(model, x)
    mask = torch.where(causal(x.shape[1]), 0.0, -5.0)
    return merged((scores + mask).softmax(-1) @ value)


NOT_CAUSAL = [
    (no_mask, "F.scaled_dot_product_attention", "no mask"),
    (no_mask_by_hand, "scores.softmax(-1) @ value", "no mask"),
    (transposed_mask, "softmax(-1) @ value", "what comes after it"),
    (prefix_seen_by_all, "softmax(-1) @ value", "what comes after it"),
    (next_token_seen, "F.scaled_dot_product_attention", "what comes after it"),
    (added_mask_that_hides_a_little, "softmax(-1) @ value", "what comes after it"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(NOT_CAUSAL))
def test_attention_to_later_tokens_is_refused(step, code, why):
    require_refusal(Tiny(step), BidirectionalAttentionError, code, why, __file__)


# Not between tokens


def heads_beside_heads(model, x, ids):
    query, key, value = (heads.transpose(1, 2) for heads in model.heads(x))
    return F.scaled_dot_product_attention(query, key, value).flatten(-2)


def learned_memory(model, x, ids):
    query = model.heads(x)[0]
    memory = model.rows.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None]
    return merged(F.scaled_dot_product_attention(query, memory, memory))


@pytest.mark.parametrize(
    ("step", "why"), named([(heads_beside_heads, f"are {HEADS} of"), (learned_memory, "are 64 of")])
)
def test_attention_to_something_else_than_tokens_is_refused(step, why):
    require_refusal(Tiny(step), TokenMixingError, "F.scaled_dot_product_attention", why, __file__)


def memory_by_hand(model, x, ids):
    query = model.heads(x)[0]
    memory = model.rows.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None]
    return merged((query @ memory.mT).softmax(-1) @ memory)


def heads_by_hand(model, x, ids):
    query, key, value = (heads.transpose(1, 2) for heads in model.heads(x))
    return ((query @ key.mT).softmax(-1) @ value).flatten(-2)


@pytest.mark.parametrize("step", [memory_by_hand, heads_by_hand])
def test_attention_to_something_else_than_tokens_is_exact_by_hand(step):
    assert tree_model(Tiny(step)).check().ok


# Changes with the number of tokens


def bias_of_one_over_length(model, x, ids):
    scores, value = scores_and_value(model, x)
    mask = torch.where(causal(x.shape[1]), 1 / x.shape[1], LOWEST)
    return merged((scores + mask).softmax(-1) @ value)


def bias_per_key_over_length(model, x, ids):
    scores, value = scores_and_value(model, x)
    bias = torch.arange(x.shape[1]) / x.shape[1]
    return merged((scores + bias).masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


def bias_that_one_great_value_covers(model, x, ids):
    scores, value = scores_and_value(model, x)
    position = torch.arange(x.shape[1])
    bias = torch.where(position == 1, LOWEST, position / x.shape[1])
    least = torch.finfo(scores.dtype).min
    return merged((scores + bias).masked_fill(~causal(x.shape[1]), least).softmax(-1) @ value)


def window_of_half_the_length(model, x, ids):
    query, key, value = model.heads(x)
    position = torch.arange(x.shape[1])
    near = position[:, None] - position < x.shape[1] // 2 + 1
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=causal(x.shape[1]) & near))


def window_at_one_length(model, x, ids):
    query, key, value = model.heads(x)
    position = torch.arange(x.shape[1])
    near = (position[:, None] - position < 4) | (torch.tensor(x.shape[1]) * 3 != 300)
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=causal(x.shape[1]) & near))


CHANGES = [
    (window_at_one_length, "F.scaled_dot_product_attention"),
    (bias_of_one_over_length, "softmax(-1)"),
    (bias_per_key_over_length, "softmax(-1)"),
    (bias_that_one_great_value_covers, "softmax(-1)"),
    (window_of_half_the_length, "F.scaled_dot_product_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code"), named(CHANGES))
def test_mask_that_changes_with_the_length_is_refused(step, code):
    require_refusal(Tiny(step), LengthDependentError, code, "changes with the number of tokens", __file__)


def scale_of_one_over_length(model, x, ids):
    query, key, value = model.heads(x)
    return merged(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1 / x.shape[1]))


def scale_of_log_length(model, x, ids):
    scores, value = scores_and_value(model, x)
    scores = scores * math.log(x.shape[1])
    return merged(scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


ONE_LENGTH = [
    (scale_of_one_over_length, "scale=1 / x.shape[1]", "no one T"),
    (scale_of_log_length, "math.log(x.shape[1])", "one way through the code"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(ONE_LENGTH))
def test_scale_made_from_the_length_is_refused(step, code, why):
    require_refusal(Tiny(step), ControlFlowError, code, why, __file__)


# Of a form that cannot be read


def softmax_over_queries(model, x, ids):
    query, key, value = model.heads(x)
    scores = query @ key.mT
    return merged(scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-2) @ value)


def token_does_not_see_itself(model, x, ids):
    scores, value = scores_and_value(model, x)
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()
    return merged(scores.masked_fill(hidden, LOWEST).softmax(-1) @ value)


def weak_fill(model, x, ids):
    scores, value = scores_and_value(model, x)
    return merged(scores.masked_fill(~causal(x.shape[1]), -5.0).softmax(-1) @ value)


def mask_barely_above_its_fill(model, x, ids):
    scores, value = scores_and_value(model, x)
    mask = torch.where(causal(x.shape[1]), -9998.0, -1.0e4)
    return merged((scores + mask).softmax(-1) @ value)


def bias_as_low_as_the_fill(model, x, ids):
    scores, value = scores_and_value(model, x)
    bias = torch.where(torch.arange(x.shape[1]) == 0, LOWEST, 0.0)
    return merged((scores.masked_fill(~causal(x.shape[1]), LOWEST) + bias).softmax(-1) @ value)


def mask_from_tokens(model, x, ids):
    scores, value = scores_and_value(model, x)
    hidden = ~(causal(x.shape[1]) & (ids[0] > 1))
    return merged(scores.masked_fill(hidden, LOWEST).softmax(-1) @ value)


def learned_bias_per_distance(model, x, ids):
    scores, value = scores_and_value(model, x)
    position = torch.arange(x.shape[1])
    bias = model.gain[(position[:, None] - position).clamp(0, 3)]
    return merged((scores + bias).masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


def scale_by_length_tensor(model, x, ids):
    scores, value = scores_and_value(model, x)
    scores = scores / torch.tensor(x.shape[1])
    return merged(scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


def number_inside_of_a_softcap(model, x, ids):
    scores, value = scores_and_value(model, x)
    scores = 5 * torch.tanh(scores / 5 + 1)
    return merged(scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


def maximum_over_queries(model, x, ids):
    scores, value = scores_and_value(model, x)
    scores = scores.masked_fill(~causal(x.shape[1]), LOWEST)
    return merged((scores - scores.amax(-2, keepdim=True)).softmax(-1) @ value)


def rounded_scores(model, x, ids):
    scores, value = scores_and_value(model, x)
    scores = scores.long().to(x.dtype)
    return merged(scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


def rounded_weights(model, x, ids):
    scores, value = scores_and_value(model, x)
    weights = scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1)
    return merged(weights.long().to(x.dtype) @ value)


def weights_used_twice(model, x, ids):
    scores, value = scores_and_value(model, x)
    weights = scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1)
    return merged(weights @ value + weights.sum(-1, keepdim=True))


def transposed_weights(model, x, ids):
    scores, value = scores_and_value(model, x)
    weights = scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1)
    return merged(weights.mT @ value)


def sigmoid_attention(model, x, ids):
    query, key, value = model.heads(x)
    scores = query @ key.mT
    return merged((scores.sigmoid() * causal(x.shape[1])) @ value)


def softmax_by_hand(model, x, ids):
    query, key, value = model.heads(x)
    scores = (query @ key.mT).masked_fill(~causal(x.shape[1]), LOWEST).exp()
    return merged(scores / scores.sum(-1, keepdim=True) @ value)


def shifted_keys(model, x, ids):
    query, key, value = model.heads(x)
    return attend(query, key.roll(1, 2), value, is_causal=True)


def reversed_keys(model, x, ids):
    query, key, value = model.heads(x)
    return attend(query, key.flip(2), value, is_causal=True)


def shifted_queries(model, x, ids):
    query, key, value = model.heads(x)
    before = (torch.arange(x.shape[1]) - 1).clamp(min=0)
    return attend(query[:, :, before], key, value, is_causal=True)


def sorted_keys(model, x, ids):
    query, key, value = (x[0] for _ in range(3))
    key = key[ids[0].argsort()]
    return attend(query[None, None], key[None, None], value[None, None], is_causal=True)


def memory_before_the_keys(model, x, ids):
    query, key, value = model.heads(x)
    key, value = (torch.cat([heads[:, :, :1] * 0 + 1, heads], 2) for heads in (key, value))
    return attend(query, key, value, attn_mask=causal(x.shape[1] + 1)[1:])


def factor_after_the_mask(model, x, ids):
    scores, value = scores_and_value(model, x)
    seen = causal(x.shape[1])
    return merged((scores.masked_fill(~seen, LOWEST) * seen).softmax(-1) @ value)


def bias_above_a_floor(model, x, ids):
    scores, value = scores_and_value(model, x)
    raised = scores.masked_fill(~causal(x.shape[1]), -torch.inf).clamp(-1.0e4)
    return merged((raised + 2.0e4 * torch.arange(x.shape[1])).softmax(-1) @ value)


def floor_of_scores_that_are_scaled(model, x, ids):
    scores, value = scores_and_value(model, x)
    scores = scores.clamp(-1.0e4) * 1.0e-3
    return merged(scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1) @ value)


def great_factor_where_hidden(model, x, ids):
    scores, value = scores_and_value(model, x)
    seen = causal(x.shape[1])
    return merged((scores * torch.where(seen, 1.0, -1.0e6) + torch.where(seen, 0.0, -1.0e4)).softmax(-1) @ value)


UNREADABLE = [
    (bias_above_a_floor, "softmax(-1) @ value", "hidden tokens get weight"),
    (floor_of_scores_that_are_scaled, "softmax(-1) @ value", "scaled after they were raised"),
    (great_factor_where_hidden, "softmax(-1) @ value", "changes what is visible"),
    (factor_after_the_mask, "softmax(-1) @ value", "after some were hidden"),
    (softmax_over_queries, "query @ key.mT", "relates every token to every other"),
    (token_does_not_see_itself, "softmax(-1) @ value", "softmax over nothing"),
    (weak_fill, "scores.masked_fill", "still gets weight"),
    (mask_barely_above_its_fill, "softmax(-1) @ value", "hidden tokens get weight"),
    (bias_as_low_as_the_fill, "softmax(-1) @ value", "hidden tokens get weight"),
    (mask_from_tokens, "softmax(-1)", "depends on the tokens or on parameters"),
    (learned_bias_per_distance, "softmax(-1)", "depends on the tokens or on parameters"),
    (scale_by_length_tensor, "softmax(-1)", "the step aten::div between"),
    (number_inside_of_a_softcap, "softmax(-1)", "before a softcap or beside a sink"),
    (maximum_over_queries, "softmax(-1)", "the step aten::sub between"),
    (rounded_scores, "softmax(-1)", "the step aten::to between"),
    (rounded_weights, "softmax(-1)", "its weights go into aten::to"),
    (weights_used_twice, "softmax(-1)", "something else than the values"),
    (transposed_weights, "softmax(-1)", "not into a product with values"),
    (sigmoid_attention, "query @ key.mT", "relates every token to every other"),
    (softmax_by_hand, "query @ key.mT", "relates every token to every other"),
    (shifted_keys, "key.roll(1, 2)", "shifts along the tokens"),
    (reversed_keys, "key.flip(2)", "reverses the order along the tokens"),
    (shifted_queries, "torch.arange(x.shape[1]) - 1", "computes with numbers of rows"),
    (sorted_keys, "return merged(F.scaled_dot", "keys of its attention"),
    (memory_before_the_keys, "F.scaled_dot_product_attention", "other dimensions than one of T queries"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(UNREADABLE))
def test_attention_of_another_form_is_refused(step, code, why):
    require_refusal(Tiny(step), TokenMixingError, code, why, __file__)


def reversed_queries(model, x, ids):
    query, key, value = model.heads(x)
    backwards = torch.arange(x.shape[1] - 1, -1, -1)
    return attend(query[:, :, backwards], key, value, is_causal=True)


def test_queries_at_other_places_are_refused():
    require_refusal(Tiny(reversed_queries), UnknownOpError, "torch.arange(x.shape[1] - 1", "no rule", __file__)


class Sinks(Tiny):
    """One more logit per head, beside scores to which `change` was done."""

    def __init__(self, change, heads=HEADS):
        super().__init__(Sinks.attend)
        self.change = change
        self.sinks = nn.Parameter(torch.randn(heads))

    def attend(self, x, ids):
        scores, value = scores_and_value(self, x)
        scores = self.change(scores.masked_fill(~causal(x.shape[1]), LOWEST))
        sinks = self.sinks[None, :, None, None].expand(1, HEADS, x.shape[1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return merged(weights @ value)


def test_number_that_moves_scores_but_not_sinks_is_refused():
    for change in (lambda scores: scores + 1, lambda scores: scores - scores.amax(-1, keepdim=True)):
        require_refusal(Sinks(change), TokenMixingError, "softmax(-1)", "beside a sink", __file__)


def test_sink_that_heads_share_is_refused():
    require_refusal(Sinks(lambda scores: scores, 1), TokenMixingError, "softmax(-1)", "one sink per head", __file__)


# Dropout


def dropped_weights(model, x, ids):
    query, key, value = model.heads(x)
    return merged(F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1))


def dropped_weights_by_hand(model, x, ids):
    scores, value = scores_and_value(model, x)
    weights = scores.masked_fill(~causal(x.shape[1]), LOWEST).softmax(-1)
    return merged(F.dropout(weights, 0.1) @ value)


DROPPED = [(dropped_weights, "F.scaled_dot_product_attention"), (dropped_weights_by_hand, "softmax(-1)")]


@pytest.mark.parametrize(("step", "code"), named(DROPPED))
def test_dropout_of_attention_weights_is_refused(step, code):
    require_refusal(Tiny(step), DropoutError, code, "has no dropout", __file__)
