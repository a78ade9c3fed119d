"""Rules of the token-axis proof: each accepts what works token by token, and refuses the same where it mixes tokens."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.passes.model import WIDTH, Model, is_exact, refusal
from tree_compile.errors import UnknownOpError
from tree_compile.passes.token_rules import RULES, elementwise, register_token_rule

EXPERTS = 4


class Routed(Model):
    """With a router and the weights of experts."""

    def __init__(self, middle):
        super().__init__(middle)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))


# Rows that a mask chooses


def route(model, rows):
    return model.router(rows).softmax(-1).topk(2, dim=-1)


def loop_with_where(model, hidden):
    rows = hidden.reshape(-1, WIDTH)
    weights, chosen = route(model, rows)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    result = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        slot, token = torch.where(mask[expert])
        result.index_add_(0, token, F.linear(rows[token], model.experts[expert]) * weights[token, slot, None])
    return result.view_as(hidden)


def loop_with_mask(model, hidden):
    rows = hidden.reshape(-1, WIDTH)
    _, chosen = route(model, rows)
    result = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        mask = (chosen == expert).any(-1)
        result[mask] = result[mask] + F.linear(rows[mask], model.experts[expert])
    return result.view_as(hidden)


def loop_with_nonzero(model, hidden):
    rows = hidden.reshape(-1, WIDTH)
    _, chosen = route(model, rows)
    result = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        token = (chosen[:, 0] == expert).nonzero().squeeze(-1)
        result = result.index_add(0, token, F.linear(rows.index_select(0, token), model.experts[expert]))
    return result.view_as(hidden)


def loop_that_writes_rows(model, hidden):
    rows = hidden.reshape(-1, WIDTH)
    _, chosen = route(model, rows)
    result = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        (token,) = torch.where(chosen[:, 0] == expert)
        result[token] = F.linear(rows[token], model.experts[expert])
    return result.view_as(hidden)


@pytest.mark.parametrize("loop", [loop_with_where, loop_with_mask, loop_with_nonzero, loop_that_writes_rows])
def test_loop_over_experts_is_exact(loop):
    assert is_exact(Routed(loop))


def test_chosen_rows_put_back_by_another_mask_are_refused():
    def middle(_model, hidden):
        rows = hidden[0]
        first, second = rows[:, 0] > 0, rows[:, 1] > 0
        torch._check(first.sum().item() == second.sum().item())
        result = rows.clone()
        result[second] = rows[first]
        return result[None]

    assert "may belong to other tokens" in refusal(Routed(middle))


def test_rows_added_by_numbers_of_another_choice_are_refused():
    def middle(_model, hidden):
        rows = hidden[0]
        (first,), (second,) = torch.where(rows[:, 0] > 0), torch.where(rows[:, 1] > 0)
        torch._check(first.shape[0] == second.shape[0])
        return torch.zeros_like(rows).index_add(0, second, rows[first])[None]

    assert "may belong to other tokens" in refusal(Routed(middle))


def test_rows_that_are_written_several_times_are_refused():
    def middle(model, hidden):
        rows = hidden[0]
        _, chosen = route(model, rows)
        token, _slot = torch.where(chosen > 1)
        result = torch.zeros_like(rows)
        result[token] = rows[token]
        return result[None]

    assert "may belong to other tokens" in refusal(Routed(middle))


def test_softmax_over_chosen_rows_is_refused():
    def middle(_model, hidden):
        rows = hidden[0]
        mask = rows[:, 0] > 0
        result = rows.clone()
        result[mask] = rows[mask].softmax(0)
        return result[None]

    assert "takes a softmax along the tokens" in refusal(Routed(middle))


def test_sum_over_chosen_rows_is_refused():
    def middle(_model, hidden):
        return hidden + hidden[0][hidden[0, :, 0] > 0].sum(0)

    assert "reduces along the tokens" in refusal(Routed(middle))


def test_chosen_row_numbers_are_not_a_permutation():
    def middle(_model, hidden):
        rows = hidden[0]
        (token,) = torch.where(rows[:, 0] > 0)
        return torch.zeros_like(rows).index_add(0, token.argsort(), rows[token])[None]

    assert "numbers of rows" in refusal(Routed(middle))


def test_numbers_of_chosen_rows_are_not_values():
    def middle(_model, hidden):
        rows = hidden[0]
        (token,) = torch.where(rows[:, 0] > 0)
        return torch.zeros_like(rows).index_add(0, token, rows[token] * token[:, None])[None]

    assert "numbers of rows" in refusal(Routed(middle))


def test_chosen_rows_cannot_be_returned():
    def middle(_model, hidden):
        return hidden[0][hidden[0, :, 0] > 0]

    assert "not one value for every token" in refusal(Routed(middle))


def test_one_value_written_where_a_mask_says_is_exact():
    def middle(_model, hidden):
        result = hidden.clone()
        result[hidden > 0.5] = 0.25
        return result

    assert is_exact(Routed(middle))


def test_a_mean_of_all_tokens_written_where_a_mask_says_is_refused():
    def middle(_model, hidden):
        result = hidden.clone()
        result[hidden > 0.5] = hidden.mean()
        return result

    assert "reduces along the tokens" in refusal(Routed(middle))


# Rows sorted by expert


def grouped(sort, offsets):
    """Every token by the expert that `sort` puts it to, where `offsets(sorted)` says the entries of each expert end."""

    def middle(model, hidden):
        rows = hidden[0]
        keys, numbers = sort(model.router(rows).argmax(-1))
        ends = offsets(keys.float()).cumsum(0, dtype=torch.int32)
        computed = torch._grouped_mm(rows[numbers].bfloat16(), model.experts.bfloat16(), offs=ends).to(rows.dtype)
        return torch.zeros_like(rows).index_add(0, numbers, computed)[None]

    return middle


def counts(keys):
    return torch.histc(keys, bins=EXPERTS, min=0, max=EXPERTS - 1)


def test_rows_sorted_by_expert_are_exact():
    assert is_exact(Routed(grouped(torch.sort, counts)), tolerance=1e-2)


OTHER_COUNTS = {
    "sorted downwards": (lambda keys: torch.sort(keys, descending=True), counts, "counts over the tokens"),
    "keys below 0": (lambda keys: torch.sort(keys - 1), counts, "keys below 0"),
    "cut": (torch.sort, lambda keys: torch.histc(keys, bins=5, min=0, max=4)[1:], "parts of counts"),
    "in another order": (torch.sort, lambda keys: counts(keys).index_select(0, torch.arange(3, -1, -1)), "parts of"),
    "turned": (torch.sort, lambda keys: counts(keys).view(2, 2).t().reshape(-1), "parts of counts"),
    "repeated keys": (torch.sort, lambda keys: counts(keys[None].expand(2, -1)), "counts over the tokens"),
}


@pytest.mark.parametrize("name", OTHER_COUNTS)
def test_rows_sorted_by_expert_are_refused_with_other_counts(name):
    sort, offsets, why = OTHER_COUNTS[name]
    assert why in refusal(Routed(grouped(sort, offsets)))


def test_place_of_a_token_in_the_order_of_all_is_refused_as_a_number():
    def middle(_model, hidden):
        rank = hidden[0, :, 0].argsort().argsort()
        return hidden * (rank.view(1, -1).index_select(0, torch.zeros(1, dtype=torch.long))[0] > 3)[:, None]

    assert "takes parts of row numbers" in refusal(Routed(middle))


# Products and functions of rows


def counted(hidden):
    """A number for every feature, which depends on all tokens of the row."""
    keys = hidden[0].argmax(-1).sort()[0]
    return torch.histc(keys.float(), bins=WIDTH, min=0, max=WIDTH - 1).to(hidden.dtype)


def exact_operations():
    vector = torch.arange(WIDTH, dtype=torch.float64)
    return {
        "multiply": lambda _m, x: torch.multiply(x, x),
        "divide": lambda _m, x: torch.divide(x, 3),
        "prelu": lambda _m, x: F.prelu(x, torch.full((), 0.1, dtype=x.dtype)),
        "glu": lambda _m, x: F.glu(torch.cat([x, x * 2], -1)),
        "outer": lambda _m, x: torch.outer(x[0, :, 0], vector)[None],
        "matrix times vector": lambda _m, x: x + torch.mv(x[0], vector)[None, :, None],
        "cosine": lambda _m, x: x * F.cosine_similarity(x, x.flip(-1), dim=-1)[..., None],
        "buckets": lambda m, x: x * torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype)),
        "tile": lambda _m, x: x.tile(2)[..., :WIDTH] + x.tile(2, 1, 1)[:1] + x.tile(1, 1, 1, 1)[0],
        "view_as": lambda _m, x: (x[0] * 2).view_as(x),
        "quantile": lambda _m, x: x - x.quantile(0.5, dim=-1, keepdim=True),
        "differences": lambda _m, x: torch.diff(x, dim=-1, prepend=x[..., -1:]),
        "one of three results": lambda _m, x: torch.native_layer_norm(x, [WIDTH], None, None, 1e-5)[0],
        "convolution without a batch": lambda _m, x: F.conv1d(x[0].t(), torch.ones(WIDTH, WIDTH, 1).double()).t()[None],
    }


@pytest.mark.parametrize("name", exact_operations())
def test_operation_on_every_row_is_exact(name):
    assert is_exact(Routed(exact_operations()[name]))


def unsorted_beside_sorted(hidden, unsorted):
    numbers = hidden[0].argmax(-1).sort()[1]
    return torch.zeros_like(hidden[0]).index_add(0, numbers, hidden[0][numbers] + unsorted)[None]


MIXING = {
    "outer": (lambda _m, x: x * torch.outer(x[0, :, 0], x[0, :, 0]).sum(), "every token to every other"),
    "matrix times vector": (lambda _m, x: x + torch.mv(x[0].t(), x[0, :, 0]), "sums over the tokens"),
    "dot": (lambda _m, x: x * torch.dot(x[0, :, 0], x[0, :, 1]), "sums over the tokens"),
    "cosine": (lambda _m, x: x * F.cosine_similarity(x, x * x, dim=1)[:, None], "reduces along the tokens"),
    "buckets": (lambda _m, x: x * torch.bucketize(x, x[0, :, 0]), "its boundaries depends on the tokens"),
    "quantile": (lambda _m, x: x - x.quantile(0.5, dim=1, keepdim=True), "reduces along the tokens"),
    "special softmax": (lambda _m, x: torch.special.softmax(x, 1), "takes a softmax along the tokens"),
    "differences": (lambda _m, x: x + torch.diff(x, dim=1, prepend=x[:, :1]), "neighbours along the tokens"),
    "what stands before differences": (
        lambda _m, x: unsorted_beside_sorted(x, torch.diff(torch.zeros_like(x[..., :1]), dim=-1, prepend=x)[0]),
        "combines rows in the order",
    ),
    "weights of a batch norm": (
        lambda _m, x: F.batch_norm(x[0], x.new_zeros(WIDTH), x.new_ones(WIDTH), counted(x))[None],
        "its weight depends on the tokens",
    ),
    "means of a batch norm": (
        lambda _m, x: F.batch_norm(x[0], counted(x), x.new_ones(WIDTH))[None],
        "its running_mean depends on the tokens",
    ),
    "weights of a group norm": (
        lambda _m, x: F.group_norm(x[0], 2, bias=counted(x))[None],
        "its bias depends on the tokens",
    ),
    "convolution without a batch": (
        lambda _m, x: x + F.conv1d(x[0].t(), torch.ones(WIDTH, WIDTH, 3).double(), padding=1).t()[None],
        "mixes neighbouring tokens",
    ),
    "moveaxis": (lambda _m, x: x + torch.moveaxis(x, 1, 0).sum(0), "reduces along the tokens"),
}


@pytest.mark.parametrize("name", MIXING)
def test_same_operation_over_rows_is_refused(name):
    middle, why = MIXING[name]
    assert why in refusal(Routed(middle))


def test_operation_without_a_rule_is_refused():
    assert "renorm" in refusal(Model(lambda _m, x: torch.renorm(x, 2, 0, 1.0)), UnknownOpError)


def test_rule_that_does_not_ask_for_a_tensor_is_not_trusted_with_it(monkeypatch):
    monkeypatch.setitem(RULES, torch.ops.aten.mul.Tensor, lambda step: step.value("self"))
    assert "its other depends on the tokens" in refusal(Routed(lambda _m, x: x * counted(x)))


# Operators of other libraries


@torch.library.custom_op("tree_compile_tests::scale", mutates_args=())
def scale(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values * factor


scale.register_fake(lambda values, factor: torch.empty_like(values))
scale.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


def test_operator_of_another_library_is_exact_once_it_has_a_rule():
    operator, model = torch.ops.tree_compile_tests.scale.default, Model(lambda _model, hidden: scale(hidden, 3.0))
    unknown = "The operation tree_compile_tests::scale is not known"
    assert unknown in refusal(model, UnknownOpError)
    register_token_rule(operator, elementwise)
    try:
        assert is_exact(model)
    finally:
        del RULES[operator]
    assert unknown in refusal(model, UnknownOpError)
