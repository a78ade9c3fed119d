"""A model of which one step is given, and what becomes of it."""

import pytest
from torch import nn

from tree_compile import treecompile
from tree_compile.errors import TokenMixingError

WIDTH = 8
TREE = [[1, 2, 3, 4, 5, 6, 7, 8, 9, *tail] for tail in ([3, 1, 4, 1], [3, 1, 4, 1, 5, 9], [2, 6], [])] + [[5, 3, 5]]
"""Branches at two depths, a sequence that is a prefix of others, and two roots; none of one token."""


class Model(nn.Module):
    """Embeds, applies `middle(model, hidden)` to [1, T, WIDTH], and predicts."""

    def __init__(self, middle):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32)
        self.middle = middle

    def forward(self, input_ids):
        return self.head(self.middle(self, self.embed(input_ids)))


def is_exact(model, tolerance=1e-9):
    """Whether outputs and gradients in float64 are those of the unpacked model, compared once."""
    tree_model = treecompile(model.double(), backend="eager", min_shared_tokens=1, self_check=False)
    report = tree_model.check(TREE)
    return max(report.greatest_output_difference, report.greatest_gradient_difference) < tolerance


def refusal(model, error=TokenMixingError):
    """The text of the error that the proof raises."""
    with pytest.raises(error) as raised:
        treecompile(model.double(), backend="eager", self_check=False).check()
    return str(raised.value)
