"""Writes into parts of tensors become new values, for every name that the tensor has."""

import pytest
import torch
from torch import nn

from tree_compile import treecompile
from tree_compile.errors import TokenMixingError


class Model(nn.Module):
    """Embeds, applies `change` to [1, T, 8], and predicts."""

    def __init__(self, change):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)
        self.change = change

    def forward(self, input_ids):
        return self.head(self.change(self.embed(input_ids)))


def adds_to_a_part(hidden):
    result = (hidden * 2).contiguous()
    result[:, :, 1:] += hidden[:, :, :1]
    return result


def fills_under_another_name(hidden):
    doubled = hidden * 2
    result = doubled.contiguous()
    result[..., 0] = 1.0
    return result + doubled


def adds_to_a_part_of_a_part(hidden):
    result = torch.stack([hidden, hidden * 2])
    result[1:, :, :, 0:2] += hidden[..., :2]
    result[0] = result[0] * 3
    return result.sum(0)


@pytest.mark.parametrize("change", [adds_to_a_part, fills_under_another_name, adds_to_a_part_of_a_part])
def test_write_into_a_part_is_exact(change):
    assert treecompile(Model(change).double(), backend="eager").check().ok


def reads_an_overlapping_view(hidden):
    result = hidden.clone()
    first, last = result[..., :4], result[..., 4:]
    result[..., 3:5].mul_(2)
    return torch.cat([last, first], -1)


def writes_through_two_views(hidden):
    result = hidden.clone()
    view = result[0]
    view[:, 2] = hidden[0, :, 3]
    view[:, 3] *= 2
    return result


@pytest.mark.parametrize("change", [reads_an_overlapping_view, writes_through_two_views])
def test_view_that_is_used_after_a_write_through_another_is_refused(change):
    with pytest.raises(TokenMixingError, match="another view"):
        treecompile(Model(change).double(), backend="eager").check()


def test_write_into_a_buffer_is_refused():
    model = Model(None).double()
    model.register_buffer("calls", torch.zeros(1, dtype=torch.float64))

    def change(hidden):
        model.calls.add_(1)
        return hidden + model.calls

    model.change = change
    with pytest.raises(TokenMixingError, match="buffer"):
        treecompile(model, backend="eager").check()
