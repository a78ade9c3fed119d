"""Causal convolutions and token shifts in the forms in which models write them."""

import pytest
import torch
import torch.nn.functional as F

from tests.errors.refusal import Tiny, tree_model

SEQUENCES = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9], [1, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def kernel(x, width=4):
    channels = x.shape[-1]
    return torch.linspace(-1, 1, channels * width, dtype=x.dtype).view(channels, 1, width)


def padded_on_both_sides_and_cut(model, x, ids):
    return F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1])[..., : x.shape[1]].mT


def cut_from_the_end(model, x, ids):
    return F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1])[:, :, :-3].mT


def padded_in_front(model, x, ids):
    return F.conv1d(F.pad(x.mT, (3, 0)), kernel(x), groups=x.shape[-1]).mT


def padded_in_front_and_valid(model, x, ids):
    return F.conv1d(F.pad(x.mT, (3, 0)), kernel(x), padding="valid", groups=x.shape[-1]).mT


def activated_before_it_is_cut(model, x, ids):
    return F.silu(F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1]))[..., : x.shape[1]].mT


def transposed_before_it_is_cut(model, x, ids):
    both = F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1]).transpose(1, 2)
    return both[:, : x.shape[1]] + F.silu(both).narrow(1, 0, x.shape[1])


def squared_before_it_is_cut(model, x, ids):
    both = F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1])
    return (both * both)[..., : x.shape[1]].mT


def power_before_it_is_cut(model, x, ids):
    both = F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1])
    return torch.pow(2.0, both)[..., : x.shape[1]].mT


def padded_by_convolution(x):
    return F.conv1d(x.mT, kernel(x), padding=3, groups=x.shape[-1])


def laid_out_before_it_is_cut(model, x, ids):
    both = padded_by_convolution(x).transpose(1, 2).contiguous()
    return both[:, : x.shape[1]].float().double() + both.float()[:, : x.shape[1]]


def gated_by_itself_before_it_is_cut(model, x, ids):
    both = padded_by_convolution(x)
    return (both * torch.sigmoid(both) * model.table[:1].mT + both)[..., : x.shape[1]].mT


def dropped_out_never_before_it_is_cut(model, x, ids):
    return F.dropout(padded_by_convolution(x), 0.0)[..., : x.shape[1]].mT


def padded_before_it_is_transposed(model, x, ids):
    return F.conv1d(F.pad(x, (0, 0, 3, 0)).transpose(1, 2), kernel(x), groups=x.shape[-1]).mT


def zeros_joined_in_front(model, x, ids):
    zeros = torch.zeros(1, x.shape[-1], 3, dtype=x.dtype)
    return F.conv1d(torch.cat([zeros, x.mT], 2), kernel(x), groups=x.shape[-1]).mT


def with_a_bias(model, x, ids):
    both = F.conv1d(x.mT, kernel(x), kernel(x, 1).flatten(), padding=3, groups=x.shape[-1])
    return both[..., : x.shape[1]].mT


def of_one_token(model, x, ids):
    return F.conv1d(x.mT, kernel(x, 1), groups=x.shape[-1]).mT


def wider_than_every_segment(model, x, ids):
    return F.conv1d(x.mT, kernel(x, 9), padding=8, groups=x.shape[-1])[..., : x.shape[1]].mT


def shifted(model, x, ids):
    return x + F.pad(x, (0, 0, 1, -1))


def shifted_and_cut(model, x, ids):
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def cut_and_shifted(model, x, ids):
    return x + F.pad(x[:, :-1], (0, 0, 1, 0))


def cut_and_zeros_joined_in_front(model, x, ids):
    return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def zeros_joined_in_front_and_cut(model, x, ids):
    return x + torch.cat([x.new_zeros(1, 1, x.shape[-1]), x], 1)[:, : x.shape[1]]


@pytest.mark.parametrize(
    "step",
    [
        padded_on_both_sides_and_cut, cut_from_the_end, padded_in_front, padded_in_front_and_valid,
        activated_before_it_is_cut, transposed_before_it_is_cut, squared_before_it_is_cut,
        power_before_it_is_cut, laid_out_before_it_is_cut, gated_by_itself_before_it_is_cut,
        dropped_out_never_before_it_is_cut, padded_before_it_is_transposed, zeros_joined_in_front, with_a_bias,
        of_one_token, wider_than_every_segment, shifted, shifted_and_cut, cut_and_shifted,
        cut_and_zeros_joined_in_front, zeros_joined_in_front_and_cut,
    ],
)  # fmt: skip
def test_form_is_computed_over_the_tree(step):
    model = tree_model(Tiny(step))
    report = model.check(SEQUENCES)
    assert report.greatest_output_difference < 1e-12
    assert report.greatest_gradient_difference < 1e-7  # some compute in float32
    if step is not of_one_token:
        assert "over the ancestors of every token" in str(model.explain())


def test_shift_of_positions_is_exact():
    def shifted_positions(model, x, ids):
        position = torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]
        return x * F.pad(position, (0, 0, 1, -1))

    report = tree_model(Tiny(shifted_positions)).check(SEQUENCES)
    assert max(report.greatest_output_difference, report.greatest_gradient_difference) < 1e-12
