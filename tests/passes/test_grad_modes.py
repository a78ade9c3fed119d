"""Regions with other settings of autograd are part of the graph with the gradients that the model has."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from tests.passes.model import Model, is_exact, refusal
from tree_compile import treecompile
from tree_compile.errors import LostGradientError


def gradients(middle):
    torch.manual_seed(0)
    model = Model(middle).double()
    out = treecompile(model, backend="eager", min_shared_tokens=1)([[1, 2, 3, 4], [1, 2, 5]])
    sum(part.square().sum() for part in out).backward()
    return [parameter.grad for parameter in model.parameters()]


def without_gradients(model, hidden):
    with torch.no_grad():
        gate = model.inner(hidden).sigmoid()
        place = gate.argmax(-1, keepdim=True)
    return hidden * gate + place


def test_region_without_gradients_is_exact():
    assert is_exact(Model(without_gradients))


def autocast_off(hidden):
    with torch.autocast("cpu", enabled=False):
        return hidden.double()


UNCHANGED = [
    lambda hidden: hidden.to(hidden.dtype),
    lambda hidden: hidden.double(),
    lambda hidden: hidden.type_as(hidden).cpu().double(),
    lambda hidden: hidden.contiguous(),
    lambda hidden: hidden.flatten(1, 1),
    lambda hidden: +hidden,
    lambda hidden: hidden.conj_physical(),
    lambda hidden: F.dropout(hidden, 0.5, training=False),
    autocast_off,
]


@pytest.mark.parametrize("cast", UNCHANGED)
@pytest.mark.parametrize("use", ["outside", "of the result"])
def test_cast_that_does_nothing_in_a_region_without_gradients_keeps_them_outside(cast, use):
    def middle(model, hidden):
        inner = model.inner(hidden)
        with torch.no_grad():
            same = cast(hidden)
            norm = same.norm(dim=-1, keepdim=True)
        return 2 * inner + (same if use == "of the result" else hidden) * 0.5 / norm

    assert is_exact(Model(middle))


def test_other_tensor_of_a_region_without_gradients_has_none():
    def middle(_model, hidden):
        with torch.no_grad():
            views = hidden.view_as(hidden), hidden.detach(), hidden.to(torch.float64, copy=True), hidden.float()
        return hidden + sum(views) + F.dropout(hidden, 0.5, training=False)

    assert is_exact(Model(middle))


def test_gradients_switched_on_inside_of_a_region_without_are_exact():
    def middle(model, hidden):
        with torch.no_grad():
            scaled = hidden * 2
            with torch.enable_grad():
                inner = model.inner(scaled)
            gate = inner.sigmoid()
        return hidden * gate + inner

    assert is_exact(Model(middle))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_has_the_gradients_of_what_it_computes(use_reentrant):
    def middle(model, hidden):
        return checkpoint(model.inner, hidden, use_reentrant=use_reentrant)

    plain = gradients(lambda model, hidden: model.inner(hidden))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(middle), plain, strict=True))


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(_context, value):
        return value * 1

    @staticmethod
    def backward(_context, gradient):
        return -gradient


def test_functions_are_themselves_again_after_a_refusal():
    apply = torch.autograd.Function.__dict__["apply"]
    assert "Reversal" in refusal(Model(lambda _model, hidden: Reversal.apply(hidden)), LostGradientError)
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert "apply" not in CheckpointFunction.__dict__


def test_backward_written_by_hand_is_of_no_matter_where_no_gradient_is_asked():
    def middle(_model, hidden):
        with torch.no_grad():
            return Reversal.apply(hidden)

    assert is_exact(Model(middle))
