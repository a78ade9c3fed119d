"""What torch.export says in its own words is said in terms of the model."""

import pytest
import torch

from tests.errors.refusal import Tiny, named, require_refusal, tree_model
from tree_compile.errors import CaptureError, ControlFlowError, LengthDependentError, UnsupportedOutputError


def spaced(model, x, ids):
    return x * torch.linspace(0, 1, x.shape[1])[:, None]


def data(model, x, ids):
    return x + x.data * 2


def table_by_length(model, x, ids):
    tables = model.__dict__.setdefault("tables", {})
    if x.shape[1] not in tables:
        tables[x.shape[1]] = torch.ones(x.shape[1], 1)
    return x * tables[x.shape[1]]


CASES = [
    (spaced, LengthDependentError, "torch.linspace", "tokens after it"),
    (data, CaptureError, "x.data * 2", "takes it for a constant"),
    (table_by_length, ControlFlowError, "not in tables", "free number of tokens"),
]


@pytest.mark.parametrize(("step", "error", "code", "why"), named(CASES))
def test_refusal_names_what_the_model_does(step, error, code, why):
    require_refusal(Tiny(step), error, code, why, __file__)


def test_table_by_length_gets_a_hint_that_helps():
    with pytest.raises(ControlFlowError, match=r"self\.table\[:T\]"):
        tree_model(Tiny(table_by_length)).explain()


class WithLength(Tiny):
    def forward(self, ids):
        return super().forward(ids), ids.shape[1]


def test_number_of_tokens_in_the_output_is_refused_with_its_line():
    model = WithLength(lambda model, x, ids: x)
    require_refusal(model, UnsupportedOutputError, "def forward", "many sequences", __file__)


def test_setting_the_data_of_a_tensor_works_after_a_capture():
    with pytest.raises(CaptureError):
        tree_model(Tiny(data)).explain()
    x = torch.ones(2)
    x.data = torch.zeros(3)
    assert x.shape == (3,)
    assert "data" not in vars(torch.Tensor)
    assert "data" not in vars(x)
