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


def through_a_part_of_a_detached_view(model, x, ids):
    x = x + 0
    x.detach()[..., 1:].mul_(2)
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
    (through_a_detached_view, "x.detach().mul_(2)", "it changes a detached tensor"),
    (through_a_part_of_a_detached_view, "x.detach()[..., 1:].mul_(2)", "it changes a detached tensor"),
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


def view_that_was_written_is_read_after_the_whole_is(model, x, ids):
    x = x.clone()
    part = x[..., :1]
    part.mul_(2)
    x.add_(1)
    return x + part


def view_of_a_view_that_was_written(model, x, ids):
    x = x.clone()
    part = x[..., :4]
    part.mul_(2)
    inner = part[..., 1:3]
    x.add_(1)
    return x + torch.cat([inner, inner, inner, inner], -1)


def two_overlapping_views_that_were_written(model, x, ids):
    x = x.clone()
    first, second = x[..., :5], x[..., 3:]
    first.mul_(2)
    second.add_(1)
    first.copy_(first * 3)
    return torch.cat([second, first[..., :3]], -1)


def one_part_is_written_from_another(model, x, ids):
    x = x * 1
    first, last = x[..., :4], x[..., 4:]
    first.add_((ids == 3)[..., None].to(x.dtype))
    last.add_(first)
    return torch.cat([first, last], -1)


def rotation_in_place(model, x, ids):
    x = x * 1
    first, last = x[..., :4], x[..., 4:]
    new = first * 0.6 - last * 0.8, last * 0.6 + first * 0.8
    first.copy_(new[0])
    last.copy_(new[1])
    return torch.cat([first, last], -1)


def two_parts_are_scaled(model, x, ids):
    x = x * 1
    first, last = x[..., :4], x[..., 4:]
    first *= 0.5
    last *= 0.25
    return torch.cat([first * last, first], -1)


def two_parts_are_swapped(model, x, ids):
    x = x * 1
    first, last = x[..., :4], x[..., 4:]
    kept = first.clone()
    first.copy_(last)
    last.copy_(kept)
    return x


def part_is_copied_and_its_source_changed(model, x, ids):
    x = x * 1
    first, last = x[..., :4], x[..., 4:]
    first[:] = last
    last[:] = 0
    return torch.cat([first, x[..., 4:]], -1)


def view_of_a_view_is_written_first(model, x, ids):
    x = x * 1
    outer = x[..., :4]
    inner = outer[..., :2]
    inner.add_(1)
    outer.mul_(2)
    return torch.cat([inner] * 4, -1)


def columns_are_summed_up(model, x, ids):
    x = x * 1
    columns = [x[..., at] for at in range(8)]
    for at in range(1, 8):
        columns[at].add_(columns[at - 1])
    return x


def the_same_view_is_written_twice(model, x, ids):
    x = x * 1
    x[..., :4].mul_(2).add_(1)
    return x


def powers_in_place(model, x, ids):
    x = x.abs() + 1
    x **= 2
    x **= torch.full((), 0.5, dtype=x.dtype)
    return x


EXACT = [
    one_part_is_written_from_another,
    rotation_in_place,
    two_parts_are_scaled,
    two_parts_are_swapped,
    part_is_copied_and_its_source_changed,
    view_of_a_view_is_written_first,
    columns_are_summed_up,
    the_same_view_is_written_twice,
    powers_in_place,
    view_that_was_written_is_read_after_the_whole_is,
    view_of_a_view_that_was_written,
    two_overlapping_views_that_were_written,
    below_an_inactive_dropout,
    below_a_view_that_is_read_later,
    below_a_reshape_that_is_read_later,
    below_an_expanded_view,
    views_of_several_places,
    comparison_keeps_its_dtype,
    small_integers_that_overflow,
    either_of_two_masks,
    fill_and_zero,
    overlapping_features,
]


@pytest.mark.parametrize("step", EXACT)
def test_write_that_can_be_followed_is_exact(step):
    report = tree_model(Tiny(step)).check()
    assert report.greatest_output_difference < 1e-12
    assert report.greatest_gradient_difference < 1e-12


def test_write_of_a_wide_number_into_a_narrow_tensor_is_exact_up_to_its_rounding():
    report = tree_model(Tiny(wide_number_into_a_narrow_tensor)).check()
    assert report.greatest_output_difference < 1e-12
    assert report.greatest_gradient_difference < 1e-6
