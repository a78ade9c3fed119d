"""Writes into tensors that something else still reads are refused, unless the graph can say the same."""

import pytest
import torch
import torch.nn.functional as F

from tests.errors.refusal import Tiny, named, require_refusal, tree_model
from tree_compile.errors import LengthDependentError, TokenMixingError

# Refused


def through_a_transposed_view(model, x, ids):
    x = x + 0
    x.mT.mul_(2)
    return x


def through_a_flat_view(model, x, ids):
    x = x + 0
    x.view(-1)[::2] = 0
    return x


def through_a_detached_view(model, x, ids):
    x = x + 0
    x.detach().mul_(2)
    return x


def through_a_reshape_that_copies_nothing(model, x, ids):
    x = x + 0
    x.reshape(1, -1, 2, 4).mul_(2)
    return x


def through_an_einsum_that_copies_nothing(model, x, ids):
    x = x + 0
    torch.einsum("btd->btd", x.mT).mul_(2)
    return x


def through_one_of_two_chunks(model, x, ids):
    pairs = torch.stack([ids, ids], -1)
    first, _ = pairs.chunk(2, -1)
    first.mul_(0)
    return x * pairs[..., :1]


def below_a_strided_view(model, x, ids):
    x = x + 0
    half = torch.as_strided(x, (1, x.shape[1], 4), x.stride())
    x.mul_(2)
    return x + torch.cat([half, half], -1)


def into_a_buffer(model, x, ids):
    model.table.add_(1)
    return x * model.table[0]


def into_a_parameter_of_the_embedding(model, x, ids):
    return x + F.embedding(ids, model.rows, max_norm=1.0)


def into_the_tokens(model, x, ids):
    ids.add_(1)
    return x


def into_one_token(model, x, ids):
    x = x + 0
    x[:, 0] = 0
    return x


def into_several_tensors(model, x, ids):
    x = x + 0
    torch._foreach_add_([x], 1.0)
    return x


@torch.library.custom_op("tree_compile_tests::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


def by_a_custom_operator(model, x, ids):
    x = x + 0
    torch.ops.tree_compile_tests.double(x)
    return x


WRITES = [
    (through_a_transposed_view, "x.mT.mul_(2)", "a part of a tensor"),
    (through_a_flat_view, "x.view(-1)[::2] = 0", "a part of a tensor"),
    (through_a_detached_view, "x.detach().mul_(2)", ""),
    (through_a_reshape_that_copies_nothing, "mul_(2)", "a part of a tensor"),
    (through_an_einsum_that_copies_nothing, "mul_(2)", "a part of a tensor"),
    (through_one_of_two_chunks, "first.mul_(0)", "a part of a tensor"),
    (below_a_strided_view, "x.mul_(2)", "another view"),
    (into_a_buffer, "model.table.add_(1)", "into a parameter, a buffer or an input"),
    (into_a_parameter_of_the_embedding, "max_norm=1.0", "into a parameter, a buffer or an input"),
    (into_the_tokens, "ids.add_(1)", "into a parameter, a buffer or an input"),
    (into_one_token, "x[:, 0] = 0", "one token out of all"),
    (into_several_tensors, "torch._foreach_add_", "more than one tensor"),
    (by_a_custom_operator, "tree_compile_tests.double", "no form that does not"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(WRITES))
def test_write_that_cannot_be_followed_is_refused(step, code, why):
    require_refusal(Tiny(step), TokenMixingError, code, why, __file__)


def frequencies_by_length(model, x, ids):
    model.table.copy_(torch.where(torch.tensor(x.shape[1]) > 16, model.table * 2, model.table))
    return x * model.table[0]


def test_buffer_rewritten_by_the_length_is_refused():
    require_refusal(Tiny(frequencies_by_length), LengthDependentError, "copy_", "for a prefix alone", __file__)


# Exact


def comparison_keeps_its_dtype(model, x, ids):
    marks = ids.clone()
    marks.eq_(1)
    return x / (marks + marks + 2)[..., None]


def wide_number_into_a_narrow_tensor(model, x, ids):
    narrow = (x * 3).to(torch.float32).clone()
    narrow.add_(x)
    return torch.cat([narrow, narrow], -1)[..., : x.shape[-1]].to(x.dtype)


def small_integers_that_overflow(model, x, ids):
    small = ids.to(torch.int8)
    small.mul_(torch.full((), 100))
    return x * small[..., None]


def either_of_two_masks(model, x, ids):
    mask = ids > 3
    mask |= ids < 1
    return x * mask[..., None]


def fill_and_zero(model, x, ids):
    ones, zeros = x.clone(), x.clone()
    ones.fill_(1)
    zeros.zero_()
    return x + ones + zeros


def overlapping_features(model, x, ids):
    x = x + 0
    x[..., :4] *= 2
    x[..., 2:6] += 1
    return x


def below_an_inactive_dropout(model, x, ids):
    x = x + 0
    same = F.dropout(x, 0.5, training=False).mT
    x.mul_(2)
    return same.mT


def below_a_view_that_is_read_later(model, x, ids):
    x = x + 0
    half = x[..., :4]
    x.mul_(2)
    return x + torch.cat([half, half], -1)


def below_a_reshape_that_is_read_later(model, x, ids):
    x = x + 0
    pairs = x.reshape(1, -1, 2, 4)
    x.mul_(2)
    return pairs.flatten(-2)


def below_an_expanded_view(model, x, ids):
    row = torch.zeros(1, 1, x.shape[-1], dtype=x.dtype)
    rows = row.expand_as(x)
    row.add_(1)
    return x + rows


def views_of_several_places(model, x, ids):
    """Rotary tables of several axes are put together like this."""
    tables = torch.stack([x, 2 * x, 3 * x])
    first = tables[0]
    first[..., 1:6:3] = tables[1][..., 1:6:3]
    first[..., 2:6:3] = tables[2][..., 2:6:3]
    return torch.cat([first[..., 4:], first[..., :4]], -1)


EXACT = [
    below_an_inactive_dropout,
    below_a_view_that_is_read_later,
    below_a_reshape_that_is_read_later,
    below_an_expanded_view,
    views_of_several_places,
    comparison_keeps_its_dtype,
    wide_number_into_a_narrow_tensor,
    small_integers_that_overflow,
    either_of_two_masks,
    fill_and_zero,
    overlapping_features,
]


@pytest.mark.parametrize("step", EXACT)
def test_write_that_can_be_followed_is_exact(step):
    report = tree_model(Tiny(step)).check()
    assert report.greatest_output_difference < 1e-12
    assert report.greatest_gradient_difference < 1e-6
