"""What torch.export says in its own words is said in terms of the model."""

import random

import numpy as np
import pytest
import torch

from tests.errors.refusal import Tiny, named, require_refusal, tree_model
from tree_compile import api, rehearsal, treecompile
from tree_compile.errors import CaptureError, ControlFlowError, LengthDependentError, UnsupportedOutputError
from tree_compile.models import dense
from tree_compile.passes import attention
from tree_compile.passes.source import is_own, is_users
from tree_compile.runtime import unpack
from tree_compile.tiny import tiny_model


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


class ByName(Tiny):
    def forward(self, *, ids):
        return super().forward(ids)


class WithSegments(Tiny):
    def forward(self, ids, segments):
        return super().forward(ids + segments)


WRONG_CALLS = [
    (ByName, {}, "takes no argument by position", "forward(self, input_ids, …)"),
    (WithSegments, {}, "needs the argument 'segments'", "forward_kwargs={'segments': …}"),
    (WithSegments, {"ids": 1, "segments": 1}, "is given 'ids' twice", "leave 'ids' out"),
]


@pytest.mark.parametrize(("kind", "keywords", "what", "hint"), WRONG_CALLS)
def test_call_that_forward_does_not_take_is_refused_with_its_line(kind, keywords, what, hint):
    model = kind(lambda model, x, ids: x)
    with pytest.raises(CaptureError, match=what) as raised:
        treecompile(model, backend="eager", forward_kwargs=keywords)([[1, 2]])
    assert raised.value.where.file == __file__
    assert raised.value.where.code.startswith("def forward(")
    assert hint in raised.value.hint


def test_argument_in_the_place_of_token_ids_is_refused():
    tree = treecompile(WithSegments(lambda model, x, ids: x), backend="eager", forward_kwargs={"segments": 1})
    with pytest.raises(CaptureError, match="given 'segments' in the place of token ids") as raised:
        tree({"segments": [[1, 2]]})
    assert "'input_ids': […], 'segments': […]" in raised.value.hint


def test_payload_that_forward_needs_is_taken():
    tree = treecompile(WithSegments(lambda model, x, ids: x), min_shared_tokens=1, backend="eager")
    assert tree({"input_ids": [[1, 2], [1, 3]], "segments": [[0, 1], [0, 1]]})[1].shape[0] == 2


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


FILES = [
    (__file__, True, True),
    (dense.__file__, True, True),
    (np.__file__, True, False),
    (random.__file__, True, False),
    (torch.nn.__file__, False, False),
    ("<eval_with_key>.3", False, False),
    *((module.__file__, False, False) for module in (api, rehearsal, attention, unpack)),
]


@pytest.mark.parametrize(("file", "is_of_users", "is_of_model"), FILES)
def test_files_of_torch_and_of_this_package_are_never_the_models(file, is_of_users, is_of_model):
    assert is_users(file) is is_of_users
    assert is_own(file) is is_of_model


def test_pass_that_fails_refuses_the_model(monkeypatch):
    def fails(_pass, _graph_module):
        raise KeyError("a form of graph that nobody has seen")

    monkeypatch.setattr(attention.RewriteAttention, "__call__", fails)
    with pytest.raises(CaptureError, match="could not be rewritten: KeyError: 'a form of graph") as caught:
        treecompile(tiny_model("llama"), backend="eager")([[1, 2, 3]])
    assert isinstance(caught.value.__cause__, KeyError)
    assert "report the model" in caught.value.hint
