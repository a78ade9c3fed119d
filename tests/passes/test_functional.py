"""Writes into parts of tensors become new values, for every name that the tensor has."""

import pytest
import torch

from tests.passes.model import Model, is_exact


def adds_to_a_part(_model, hidden):
    result = (hidden * 2).contiguous()
    result[:, :, 1:] += hidden[:, :, :1]
    return result


def fills_under_another_name(_model, hidden):
    doubled = hidden * 2
    result = doubled.contiguous()
    result[..., 0] = 1.0
    return result + doubled


def adds_to_a_part_of_a_part(_model, hidden):
    result = torch.stack([hidden, hidden * 2])
    result[1:, :, :, 0:2] += hidden[..., :2]
    result[0] = result[0] * 3
    return result.sum(0)


@pytest.mark.parametrize("change", [adds_to_a_part, fills_under_another_name, adds_to_a_part_of_a_part])
def test_write_into_a_part_is_exact(change):
    assert is_exact(Model(change))


def reads_an_overlapping_view(_model, hidden):
    result = hidden.clone()
    first, last = result[..., :4], result[..., 4:]
    result[..., 3:5].mul_(2)
    return torch.cat([last, first], -1)


def writes_through_two_views(_model, hidden):
    result = hidden.clone()
    view = result[0]
    view[:, 2] = hidden[0, :, 3]
    view[:, 3] *= 2
    return result


@pytest.mark.parametrize("change", [reads_an_overlapping_view, writes_through_two_views])
def test_view_that_is_used_after_a_write_through_another_is_taken_again(change):
    assert is_exact(Model(change))


@pytest.mark.parametrize("join", [torch.cat, torch.concat, torch.concatenate])
def test_other_names_of_an_operator_are_known(join):
    assert is_exact(Model(lambda _model, hidden: join([hidden[..., 4:], hidden[..., :4]], dim=-1)))
