"""A model that was changed after the first call is captured again, or refused."""

import pytest
import torch

from tests.errors.refusal import Tiny, tree_model
from tree_compile.errors import LostGradientError

SEQUENCES = [[1, 2, 3], [1, 2, 4]]


class Scaled(Tiny):
    """Multiplies by a number that is an attribute of the module."""

    def __init__(self):
        super().__init__(lambda model, x, ids: model.project[0](x) * model.scale)
        self.scale = 2.0
        self.calls = 0

    def forward(self, ids):
        self.calls += 1
        return super().forward(ids)


def require_equal(tree):
    for tokens, logits in zip(SEQUENCES, tree(SEQUENCES), strict=True):
        torch.testing.assert_close(logits, tree.unpacked(torch.tensor([tokens]))[0])


def test_attribute_that_changes_is_seen():
    tree = tree_model(Scaled())
    require_equal(tree)
    tree.unpacked.scale = 3.0
    require_equal(tree)


def test_hook_that_takes_the_place_of_another_is_seen():
    tree = tree_model(Scaled())
    for factor in (2, 3):
        handle = tree.unpacked.project[0].register_forward_hook(lambda _m, _i, output, by=factor: output * by)
        require_equal(tree)
        handle.remove()
    require_equal(tree)


def test_backward_hook_that_is_added_is_refused():
    tree = tree_model(Scaled())
    tree(SEQUENCES)
    tree.unpacked.project[0].register_full_backward_hook(lambda module, *gradients: None)
    with pytest.raises(LostGradientError):
        tree(SEQUENCES)


def test_buffer_that_is_changed_in_place_is_seen():
    tree = tree_model(Tiny(lambda model, x, ids: x + model.table[: x.shape[1]]))
    require_equal(tree)
    tree.unpacked.table.mul_(2)
    require_equal(tree)


def test_model_that_counts_its_calls_is_captured_once():
    tree = tree_model(Scaled(), self_check=True)
    tree(SEQUENCES)
    programs = list(tree._programs.values())
    tree(SEQUENCES)
    assert [program is before for program, before in zip(tree._programs.values(), programs, strict=True)] == [True]
