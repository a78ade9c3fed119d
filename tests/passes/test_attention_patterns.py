"""Forms of attention: each is read for what it computes, and refused where it computes something else."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.passes.model import TREE, is_exact, refusal
from tree_compile import treecompile
from tree_compile.errors import BidirectionalAttentionError, TokenMixingError
from tree_compile.passes.static_values import GREATEST_PAIR
from tree_compile.pipeline import rewrite_model
from tree_compile.unpacked import PlainModel

HEADS, WIDTH = 4, 8
LOWEST = torch.finfo(torch.float64).min


class Attention(nn.Module):
    """One layer of attention, which `attend(model, query, key, value)` computes on [1, HEADS, T, WIDTH]."""

    def __init__(self, attend):
        super().__init__()
        self.embed = nn.Embedding(32, HEADS * WIDTH)
        self.project = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.head = nn.Linear(HEADS * WIDTH, 32)
        self.attend = attend
        self.register_buffer("triangle", torch.ones(64, 64).tril().view(1, 1, 64, 64))

    def forward(self, input_ids):
        parts = self.project(self.embed(input_ids)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in parts)
        return self.head(self.attend(self, query, key, value).transpose(1, 2).flatten(2))


def scores_of(query, key):
    return query @ key.transpose(-1, -2) / math.sqrt(WIDTH)


def causal(query):
    tokens = query.shape[-2]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def slopes():
    return torch.tensor([0.5, 0.3, 0.25, 0.1], dtype=torch.float64)[:, None, None]


def from_the_end(query):
    return slopes() * torch.arange(1 - query.shape[-2], 1)


# A softmax without overflow

MAXIMA = {
    "amax": lambda scores: scores.amax(-1, keepdim=True),
    "detached": lambda scores: scores.amax(-1, keepdim=True).detach(),
    "of detached scores": lambda scores: scores.detach().amax(-1, keepdim=True),
    "max": lambda scores: scores.max(-1, keepdim=True).values.detach(),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_maximum_that_is_taken_off_the_scores_is_exact(name):
    def attend(_model, query, key, value):
        scores = scores_of(query, key).masked_fill(~causal(query), LOWEST)
        return (scores - MAXIMA[name](scores)).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_maximum_that_is_taken_off_detached_scores_is_refused():
    def attend(_model, query, key, value):
        scores = scores_of(query, key).masked_fill(~causal(query), LOWEST)
        return (scores.detach() - scores.amax(-1, keepdim=True)).softmax(-1) @ value

    assert "step aten::sub" in refusal(Attention(attend))


# Biases per key


def test_bias_that_is_counted_from_the_end_is_exact():
    def attend(_model, query, key, value):
        scores = scores_of(query, key) + from_the_end(query)
        return scores.masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_bias_that_is_counted_from_the_end_is_refused_beside_a_sink():
    def attend(model, query, key, value):
        scores = (scores_of(query, key) + from_the_end(query)).masked_fill(~causal(query), LOWEST)
        sinks = model.sinks.view(1, -1, 1, 1).expand(1, -1, query.shape[-2], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value

    assert "sink does not" in refusal(Attention(attend))


def test_bias_that_is_counted_from_the_end_in_half_precision_is_refused():
    def attend(_model, query, key, value):
        bias = from_the_end(query).to(query.dtype)
        return (scores_of(query, key) + bias).masked_fill(~causal(query), -math.inf).softmax(-1) @ value

    with pytest.raises(TokenMixingError, match="counted from the last token in half precision"):
        treecompile(Attention(attend).bfloat16(), backend="eager")([list(range(8))])


def test_bias_by_distance_of_keys_in_half_precision_is_as_near_as_the_models_own():
    def attend(_model, query, key, value):
        at, steep = torch.arange(query.shape[-2]), torch.tensor([1.0, 0.5, 0.25, 0.125])[:, None, None]
        bias = ((at - at[:, None]) * steep).masked_fill(at > at[:, None], -math.inf)
        return (scores_of(query, key).float() + bias).softmax(-1).to(value.dtype) @ value

    torch.manual_seed(0)
    model, tokens = Attention(attend).bfloat16(), torch.randint(0, 32, (1_200,))
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens[None])[0]
        alone = model(tokens[None])[0].double() - exact
        tree = treecompile(model, backend="eager")([tokens]).logits[0].double() - exact
    assert tree.abs().mean() < 1.5 * alone.abs().mean()
    assert tree.abs().max() < 1.5 * alone.abs().max()


def test_sinks_that_are_cut_to_whole_numbers_are_exact():
    def attend(model, query, key, value):
        scores = scores_of(query, key).masked_fill(~causal(query), LOWEST)
        sinks = model.sinks.int().to(query.dtype).view(1, -1, 1, 1).expand(1, -1, query.shape[-2], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value

    assert is_exact(Attention(attend))


def test_scores_over_zero_are_refused():
    def attend(_model, query, key, value):
        return (scores_of(query, key) / 0.0).masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert "step aten::div" in refusal(Attention(attend))


def test_weights_of_eight_bits_are_refused():
    def attend(_model, query, key, value):
        weights = scores_of(query, key).masked_fill(~causal(query), LOWEST).softmax(-1)
        return weights.to(torch.float8_e4m3fn).to(query.dtype) @ value

    assert "go into aten::to" in refusal(Attention(attend))


def test_number_of_tokens_that_is_added_to_all_scores_is_exact():
    def attend(_model, query, key, value):
        scores = scores_of(query, key) + query.shape[-2]
        return scores.masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert is_exact(Attention(attend))


# Masks


def test_scores_times_a_mask_plus_a_fill_are_exact():
    def attend(model, query, key, value):
        tokens = query.shape[-2]
        mask = model.triangle[:, :, :tokens, :tokens]
        return (scores_of(query, key) * mask + -1e4 * (1 - mask)).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_scores_times_a_table_that_changes_visible_ones_are_refused():
    def attend(model, query, key, value):
        tokens = query.shape[-2]
        mask = model.triangle[:, :, :tokens, :tokens]
        return (scores_of(query, key) * (mask * 2) + -1e4 * (1 - mask)).softmax(-1) @ value

    assert "changes what is visible" in refusal(Attention(attend))


def test_fill_value_from_a_tensor_is_exact():
    def attend(_model, query, key, value):
        lowest = torch.full((), LOWEST, dtype=query.dtype)
        return torch.where(causal(query), scores_of(query, key), lowest).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_fill_value_that_comes_first_is_exact():
    def attend(_model, query, key, value):
        return torch.where(~causal(query), -torch.inf, scores_of(query, key)).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_floor_of_scores_below_all_of_them_is_exact():
    def attend(_model, query, key, value):
        scores = scores_of(query, key) + torch.where(causal(query), 0.0, -torch.inf)
        return torch.max(scores, torch.tensor(LOWEST)).softmax(-1) @ value

    assert is_exact(Attention(attend))


@pytest.mark.parametrize("fill", [-torch.inf, LOWEST, -1e9])
def test_scores_that_are_scaled_after_some_were_hidden_are_exact(fill):
    def attend(_model, query, key, value):
        scores = (query @ key.mT).masked_fill(~causal(query), fill)
        return (scores / WIDTH**0.5).softmax(-1) @ value

    assert is_exact(Attention(attend))


@pytest.mark.parametrize(("fill", "factor"), [(-2e4, 0.1), (-1e9, -1.0), (-1e9, 1e-9)])
def test_factor_that_lifts_hidden_scores_is_refused(fill, factor):
    def attend(_model, query, key, value):
        scores = (query @ key.mT).masked_fill(~causal(query), fill)
        return (scores * factor).softmax(-1) @ value

    assert "hidden" in refusal(Attention(attend))


# Masks in the shape of another tensor


def square(query):
    return query.shape[-2], query.shape[-2]


OF_A_TENSOR = {
    "full_like": lambda query, scores: torch.where(causal(query), scores, torch.full_like(scores, -1e9)),
    "new_ones": lambda query, scores: scores.masked_fill(query.new_ones(square(query)).tril() == 0, -torch.inf),
    "new_full": lambda query, scores: scores + query.new_full(square(query), -torch.inf).triu(1),
    "ones_like": lambda query, scores: scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), -1e9),
    "zeros_like": lambda query, scores: scores + torch.zeros_like(scores[0, 0]).masked_fill(~causal(query), -torch.inf),
}


@pytest.mark.parametrize("name", OF_A_TENSOR)
def test_mask_in_the_shape_of_a_tensor_is_exact(name):
    assert is_exact(Attention(lambda _model, q, k, v: OF_A_TENSOR[name](q, scores_of(q, k)).softmax(-1) @ v))


def test_mask_in_the_shape_of_a_tensor_that_shows_later_tokens_is_refused():
    def attend(_model, query, key, value):
        hidden = query.new_ones(square(query)).triu(2).bool()
        return scores_of(query, key).masked_fill(hidden, LOWEST).softmax(-1) @ value

    assert "what comes after it" in refusal(Attention(attend), BidirectionalAttentionError)


# Einsums


def of_weights(equation, query, scores, value):
    weights = (scores / math.sqrt(WIDTH)).masked_fill(~causal(query), LOWEST).softmax(-1)
    return torch.einsum(equation, weights, value)


EINSUMS = {
    "one key and value for all heads": lambda query, key, value: of_weights(
        "bhij,bjd->bhid", query, torch.einsum("bhid,bjd->bhij", query, key[:, 0]), value[:, 0]
    ),
    "dots": lambda query, key, value: of_weights(
        "...ij,...jd->...id", query, torch.einsum("...id,...jd->...ij", query, key), value
    ),
    "dots of one key": lambda query, key, value: of_weights(
        "...ij,...jd->...id", query, torch.einsum("...id,...jd->...ij", query, key[0, :1]), value[0, :1]
    ),
    "keys first": lambda query, key, value: of_weights(
        "bhij,bhjd->bhid", query, torch.einsum("bhjd,bhid->bhij", key, query), value
    ),
    "tokens before heads": lambda query, key, value: of_weights(
        "bhij,bjhd->bhid", query, torch.einsum("bihd,bjhd->bhij", query.transpose(1, 2), key.transpose(1, 2)),
        value.transpose(1, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum_is_exact(name):
    assert is_exact(Attention(lambda _model, *heads: EINSUMS[name](*heads)))


# Leading dimensions that differ


def masked_weights(query, key):
    return scores_of(query, key).masked_fill(~causal(query), LOWEST).softmax(-1)


SHARED_WEIGHTS = {
    "one head": lambda query, key, value: masked_weights(query[:, :1], key[:, :1]) @ value,
    "a matrix": lambda query, key, value: masked_weights(query[0, 0], key[0, 0]) @ value,
    "one head of fewer dimensions": lambda query, key, value: (
        masked_weights(query[0, :1], key[:, :1]).squeeze(0) @ value
    ),
    "two heads for two groups": lambda query, key, value: (
        masked_weights(query[:, :2], key[:, :2])[:, :, None] @ value.unflatten(1, (2, 2))
    ).flatten(1, 2),
    "two heads in turns": lambda query, key, value: (
        masked_weights(query[:, :2], key[:, :1])[:, None] @ value.unflatten(1, (2, 2))
    ).flatten(1, 2),
    "one key for all, heads in groups": lambda query, key, value: (
        masked_weights(query, key[:, :1]).view(2, 2, *[query.shape[2]] * 2) @ value[:, :1]
    ).flatten(0, 1)[None],
}


@pytest.mark.parametrize("name", SHARED_WEIGHTS)
def test_weights_that_several_values_share_are_exact(name):
    assert is_exact(Attention(lambda _model, *heads: SHARED_WEIGHTS[name](*heads)))


def test_groups_of_keys_and_of_values_of_different_sizes_are_exact():
    def attend(_model, query, key, value):
        return F.scaled_dot_product_attention(query, key[:, :2], value[:, :1], is_causal=True, enable_gqa=True)

    assert is_exact(Attention(attend))


def test_sink_beside_weights_that_several_values_share_is_refused():
    def attend(model, query, key, value):
        scores = scores_of(query[:, :1], key[:, :1]).masked_fill(~causal(query), LOWEST)
        sinks = model.sinks[:1].view(1, 1, 1, 1).expand(1, 1, query.shape[2], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value

    assert "sink" in refusal(Attention(attend))


def test_weights_times_one_vector_are_refused():
    def attend(_model, query, key, value):
        mixed = masked_weights(query[0, 0], key[0, 0]) @ value[0, 0, :, 0]
        return value * mixed[:, None]

    assert "one number for every token" in refusal(Attention(attend))


# Hidden scores that something is added to


def rising(query, slope):
    """Zero where a token is visible, and the more the farther it is ahead."""
    position = torch.arange(query.shape[-2], dtype=query.dtype)
    return slope * (position - position[:, None]).relu()


def hidden_by(query, fill):
    return torch.where(causal(query), 0.0, fill)


def proved_length(attend):
    plain = PlainModel(Attention(attend).double(), ("input_ids",), {})
    return rewrite_model(plain, GREATEST_PAIR).proved


RAISED = {
    "bias after a fill": lambda query, scores: scores.masked_fill(~causal(query), -1e4) + rising(query, 10.0),
    "bias in two steps": lambda query, scores: (
        scores.masked_fill(~causal(query), -1e4) + rising(query, 5.0) + rising(query, 5.0)
    ),
    "bias beside a fill that is added": lambda query, scores: (
        scores.masked_fill(~causal(query), -1e9) + hidden_by(query, -1e9) + rising(query, 1e6)
    ),
    "bias that lifts the fill off": lambda query, scores: (
        scores.masked_fill(~causal(query), -1e9) + torch.where(causal(query), 0.0, 1e9)
    ),
    "bias beyond all fills": lambda query, scores: (
        scores.masked_fill(~causal(query), -torch.inf) + torch.where(causal(query), 0.0, torch.inf)
    ),
    "bias after a floor": lambda query, scores: (
        scores.masked_fill(~causal(query), -1e9).clamp_min(-1e4) + torch.where(causal(query), 0.0, 1e4)
    ),
    "bias after a floor of what was added": lambda query, scores: (
        (scores + hidden_by(query, -1e9)).clamp_min(-1e4) + rising(query, 10.0)
    ),
    "fill above an infinite one": lambda query, scores: (
        scores.masked_fill(~causal(query), -torch.inf).masked_fill(~causal(query), -1e4) + rising(query, 10.0)
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_bias_that_lifts_hidden_scores_is_refused(name):
    def attend(_model, query, key, value):
        return RAISED[name](query, scores_of(query, key)).softmax(-1) @ value

    assert "hidden tokens get weight" in refusal(Attention(attend))


def test_bias_that_lifts_hidden_scores_at_the_lengths_of_a_call_is_refused():
    def attend(_model, query, key, value):
        scores = scores_of(query, key).masked_fill(~causal(query), -1e4) + rising(query, 2.0)
        return scores.softmax(-1) @ value

    model = treecompile(Attention(attend).double(), backend="eager", self_check=False)
    assert model.check(TREE).greatest_output_difference < 1e-9
    with pytest.raises(TokenMixingError, match="hidden tokens get weight"):
        model([[1] * 3000, [1] * 2999 + [2]])


def test_bias_that_may_lift_hidden_scores_beyond_all_lengths_is_a_limit():
    def attend(_model, query, key, value):
        position = torch.arange(query.shape[-2])
        ahead = (position - position[:, None]).to(query.dtype)
        return (scores_of(query, key).masked_fill(~causal(query), -1e9) + ahead).softmax(-1) @ value

    assert proved_length(attend) == GREATEST_PAIR


def test_fill_alone_is_no_limit():
    def attend(_model, query, key, value):
        return scores_of(query, key).masked_fill(~causal(query), -1e9).softmax(-1) @ value

    assert proved_length(attend) is None


def test_bias_below_a_fill_is_exact():
    def attend(_model, query, key, value):
        scores = scores_of(query, key).masked_fill(~causal(query), -1e9) + rising(query, 10.0)
        return scores.softmax(-1) @ value

    assert is_exact(Attention(attend))


@pytest.mark.parametrize("limits", [{"min": -1.0}, {"min": LOWEST, "max": 1.0}])
def test_scores_that_are_clamped_are_refused(limits):
    def attend(_model, query, key, value):
        scores = scores_of(query, key).clamp(**limits)
        return scores.masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert "clamp" in refusal(Attention(attend))


def test_mask_that_hides_nothing_is_exact_beside_a_causal_one():
    def attend(_model, query, key, value):
        tokens = query.shape[-2]
        scores = scores_of(query, key) + torch.zeros(1, 1, 1, tokens, dtype=query.dtype)
        return scores.masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_mask_that_hides_nothing_is_not_causal():
    def attend(_model, query, key, value):
        tokens = query.shape[-2]
        return F.scaled_dot_product_attention(query, key, value, torch.ones(1, 1, tokens, tokens, dtype=torch.bool))

    assert "no mask" in refusal(Attention(attend), BidirectionalAttentionError)


def test_mask_that_hides_everything_is_refused():
    def attend(_model, query, key, value):
        tokens = query.shape[-2]
        return F.scaled_dot_product_attention(query, key, value, torch.full((1, 1, tokens, tokens), -torch.inf))

    assert "the same for all tokens" in refusal(Attention(attend))


def test_scores_that_are_read_by_something_else_are_refused():
    def attend(_model, query, key, value):
        scores = scores_of(query, key).masked_fill(~causal(query), LOWEST)
        return scores.softmax(-1) @ value * scores.logsumexp(-1, keepdim=True).sigmoid()

    assert "used by aten::logsumexp" in refusal(Attention(attend))


# Layouts and dtypes


def test_heads_folded_for_the_scores_alone_are_exact():
    def attend(_model, query, key, value):
        tokens = query.shape[-2]
        zeros = torch.zeros(HEADS, tokens, tokens, dtype=query.dtype)
        scores = torch.baddbmm(zeros, query[0], key[0].transpose(1, 2), beta=1.0, alpha=0.25)
        return scores.view(1, HEADS, tokens, tokens).masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_heads_in_groups_of_two_dimensions_are_exact():
    def attend(_model, query, key, value):
        query = query.reshape(1, 2, HEADS // 2, -1, WIDTH)
        key, value = key[:, :2, None], value[:, :2, None]
        return (scores_of(query, key).masked_fill(~causal(query), LOWEST).softmax(-1) @ value).flatten(1, 2)

    assert is_exact(Attention(attend))


def test_one_query_head_for_many_key_heads_is_exact():
    def attend(_model, query, key, value):
        return scores_of(query[:, :1], key).masked_fill(~causal(query), LOWEST).softmax(-1) @ value

    assert is_exact(Attention(attend))


def test_scores_of_another_dtype_than_the_values_are_exact_up_to_it():
    def attend(_model, query, key, value):
        scores = scores_of(query.float(), key.float()).masked_fill(~causal(query), torch.finfo(torch.float32).min)
        return scores.softmax(-1).to(value.dtype) @ value

    assert is_exact(Attention(attend), tolerance=1e-5)
