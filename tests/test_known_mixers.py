"""Functions of other libraries that carry a state: how they may be called, and what is refused."""

from __future__ import annotations

import functools
import inspect
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tree_compile import treecompile
from tree_compile.errors import CaptureError, TokenMixingError
from tree_compile.known_mixers import _OF_USERS, kept_whole, register_mixer
from tree_compile.patches import recoded
from tree_compile.runtime.linear_recurrence import delta_rule, linear_attention
from tree_compile.runtime.mixers import MIXERS, mixer, one_node

qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
chunked, plain = qwen.torch_chunk_gated_delta_rule, inspect.unwrap(qwen.torch_chunk_gated_delta_rule)
SEQUENCES = [[1, 2, 3, 4, 5] * 9, [*[1, 2, 3, 4, 5] * 8, 7, 8], [1, 2]]


@pytest.fixture(autouse=True)
def tables():
    """What a test declares or registers is unknown again after it."""
    with mock.patch.dict(MIXERS), mock.patch.dict(_OF_USERS):
        yield


class Model(nn.Module):
    """Two heads of width 4 from embeddings, mixed by `mix(query, key, value, decay, beta)`."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.project = nn.Embedding(32, 8), nn.Linear(8, 24)
        self.gates, self.head = nn.Linear(8, 4), nn.Linear(8, 32)
        self.mix = mix

    def forward(self, ids):
        x = self.embed(ids)
        query, key, value = self.project(x).unflatten(-1, (6, 4)).chunk(3, 2)
        decay, beta = self.gates(x).chunk(2, -1)
        return self.head(self.mix(query, key, value, -F.softplus(decay), beta.sigmoid()).flatten(2))


def check(mix, sequences=None):
    tree_model = treecompile(Model(mix), min_shared_tokens=1, backend="eager", self_check=False)
    return tree_model.check(sequences or SEQUENCES)


CALLS = {
    "by position": lambda q, k, v, g, b: chunked(q, k, v, g, b)[0],
    "by name": lambda q, k, v, g, b: chunked(beta=b, g=g, value=v, key=k, query=q, use_qk_l2norm_in_kernel=True)[0],
    "with a chunk size": lambda q, k, v, g, b: chunked(q, k, v, g, b, 16)[0],
    "without its decorator": lambda q, k, v, g, b: plain(q, k, v, g, b)[0],
    "in a partial": lambda q, k, v, g, b: functools.partial(chunked, use_qk_l2norm_in_kernel=True)(q, k, v, g, b)[0],
    "the loop over tokens": lambda q, k, v, g, b: qwen.torch_recurrent_gated_delta_rule(q, k, v, g, b)[0],
    "our op": lambda q, k, v, g, b: delta_rule(q, k, v, b, g, scale=0.5, normalize=True)[0],
    "our op with ones": lambda q, k, v, g, b: delta_rule(q, k, v, torch.ones_like(b), g)[0],
    "a decay for each token": lambda q, k, v, g, b: linear_attention(q, k, v, g)[0],
    "a decay for each head": lambda q, k, v, g, b: linear_attention(q, k, v, torch.tensor([-0.1, -0.7]))[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_call_is_exact_however_it_is_written(name):
    report = check(CALLS[name])
    assert report.greatest_output_difference < 1e-5
    assert report.greatest_gradient_difference < 1e-4


@pytest.mark.parametrize(("name", "shape"), [("by position", "[1, T, 2]"), ("a decay for each head", "[2]")])
def test_explanation_gives_the_shape_of_the_decay(name, shape):
    explanation = treecompile(Model(CALLS[name]), backend="eager").explain()
    assert f" with decay {shape} in chunks of 32 tokens" in str(explanation)


def test_explanation_says_no_more_of_a_users_op_than_is_known():
    def total(values, tree=None):
        return linear_attention(torch.ones_like(values), torch.ones_like(values), values, tree=tree)[0]

    def total_with_a_state(values, decay=1.0, tree=None):
        return values * decay, None

    mixer({"values": 1}, "values")(total)
    mixer({"values": 1}, "values", state=lambda shapes: (7,))(total_with_a_state)
    for mix, name in (
        (lambda v: total(v), "total"),
        (lambda v: total_with_a_state(v, decay=0.5)[0], "total_with_a_state"),
    ):
        model = treecompile(Model(lambda q, k, v, g, b, mix=mix: mix(v)), backend="eager", self_check=False)
        explanation = model.explain(SEQUENCES)
        assert f"-> {name}, one call per pass\n" in str(explanation)
        assert explanation.rows == ()


def test_op_over_something_unknown_is_refused():
    def op(values, tree=None):
        return values

    for over in ("tokens", "chunks"):
        with pytest.raises(ValueError, match=f"over is '{over}'"):
            mixer({"values": 1}, "values", over=over)(op)


def test_double_precision_model_is_computed_in_float32_where_the_function_is():
    tree_model = treecompile(Model(CALLS["by position"]).double(), min_shared_tokens=1, backend="eager")
    report = tree_model.check(SEQUENCES)
    assert report.tolerance == 1e-4
    assert report.greatest_output_difference < 1e-5


STATE = torch.zeros(1, 2, 4, 4)
REFUSED = {
    "a given state": (lambda q, k, v, g, b: chunked(q, k, v, g, b, initial_state=STATE)[0], "with `initial_state`"),
    "its final state": (
        lambda q, k, v, g, b: chunked(q, k, v, g, b, output_final_state=True)[0],
        "with `output_final_state`",
    ),
    "a scale that transformers ignores": (lambda q, k, v, g, b: plain(q, k, v, g, b, scale=1.0)[0], "with `scale`"),
    "the state of our op": (
        lambda q, k, v, g, b: delta_rule(q, k, v, b, initial_state=STATE)[0],
        "with `initial_state`",
    ),
    "one beta for every channel": (
        lambda q, k, v, g, b: delta_rule(q, k, v, b[..., None].expand_as(v), g)[0],
        "beta is (1, T, 2, 4); it must be (1, T, 2)",
    ),
    "a decay for one channel": (
        lambda q, k, v, g, b: linear_attention(q, k, v, g[..., None])[0],
        "decay is (1, T, 2, 1); it must be",
    ),
    "heads as a batch": (
        lambda q, k, v, g, b: delta_rule(*(x.transpose(0, 2) for x in (q, k, v, b, g)))[0].transpose(0, 2),
        "one batch before its tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_call_that_has_no_place_in_a_tree_is_refused(name):
    mix, why = REFUSED[name]
    with pytest.raises(TokenMixingError) as raised:
        check(mix)
    assert why in str(raised.value)
    assert raised.value.where.file == __file__


def test_option_that_is_a_tensor_is_refused():
    with pytest.raises(CaptureError, match=r"scale of delta_rule is a .*; it must be a plain number, or a tensor that"):
        check(lambda q, k, v, g, b: delta_rule(q, k, v, b, g, scale=torch.ones(()))[0])


def test_function_that_is_registered_is_computed_by_its_replacement():
    def theirs(x, alpha=0.5):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = alpha * state + x[:, t]
            out.append(state)
        return torch.stack(out, 1)

    def replacement(x, alpha=0.5):
        decay = torch.full_like(x[..., 0], alpha).log()
        one = torch.ones_like(x[..., :1])
        return one_node(linear_attention, query=one, key=one, value=x, decay=decay, scale=1.0)

    register_mixer(theirs, replacement)
    report = check(lambda q, k, v, g, b: theirs(v, 0.25))
    assert report.greatest_output_difference < 1e-5
    with pytest.raises(TypeError, match="it must be a Python function"):
        register_mixer(torch.add, replacement)


def test_argument_that_the_replacement_does_not_take_is_refused():
    def theirs(x, flag=True):
        return x

    register_mixer(theirs, lambda x: one_node(linear_attention, query=x, key=x, value=x))
    with pytest.raises(TokenMixingError, match="called with `flag`, which its replacement does not take") as raised:
        check(lambda q, k, v, g, b: theirs(v, flag=False))
    assert raised.value.where.file == __file__


@pytest.mark.parametrize("view", [lambda values: values, lambda values: values[..., :]])
def test_op_that_returns_its_argument_is_refused(view):
    def op(values, tree=None):
        return view(values)

    def mix(q, k, v, g, b):
        own = v * 1
        mixed = op(own)
        mixed.mul_(2)
        return mixed + own

    mixer({"values": 1}, "values")(op)
    with pytest.raises(TokenMixingError, match="The op op returns an argument") as raised:
        check(mix)
    assert raised.value.where.file == __file__


def test_defaults_of_a_registered_function_are_those_of_its_replacement():
    def theirs(x, alpha=0.5, eps=1e-6):
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = alpha * state + x[:, t]
            out.append(state)
        return torch.stack(out, 1)

    def replacement(x, alpha):
        decay, one = torch.full_like(x[..., 0], alpha).log(), torch.ones_like(x[..., :1])
        return one_node(linear_attention, query=one, key=one, value=x, decay=decay, scale=1.0)

    register_mixer(theirs, replacement)
    assert check(lambda q, k, v, g, b: theirs(v)).greatest_output_difference < 1e-5


def test_op_with_the_name_of_another_is_refused():
    def token_shift(values, tree=None):
        return values

    with pytest.raises(ValueError, match=r"there is a mixer token_shift in tree_compile.runtime.causal_convolution"):
        mixer({"values": 1}, "values")(token_shift)


def averages_over(kept):
    def average_over(values, tree=None):
        return values * kept

    return average_over


def test_second_op_that_a_function_makes_is_refused():
    declare, op = mixer({"values": 1}, "values"), averages_over(0.5)
    assert declare(declare(op)) is op
    with pytest.raises(ValueError, match="there is a mixer average_over in"):
        declare(averages_over(0.7))


def test_module_that_is_loaded_again_declares_its_op_anew():
    def load():
        loaded = {"__name__": "loaded_again"}
        exec("def average_of_a_module(values, tree=None): return values", loaded)
        return mixer({"values": 1}, "values")(loaded["average_of_a_module"])

    assert load() is not load()


@pytest.mark.parametrize(
    ("tokens", "like", "why"),
    [
        ({"nope": 1}, "x", "has no argument nope; it has x, tree"),
        ({"x": 1}, "nope", "like is 'nope'"),
        ({}, "x", "like is 'x'"),
    ],
)
def test_op_whose_arguments_are_named_wrongly_is_refused(tokens, like, why):
    def average_of_tests(x, tree=None):
        return x

    with pytest.raises(ValueError, match=why):
        mixer(tokens, like)(average_of_tests)


def test_functions_are_themselves_again_after_a_capture():
    before = (plain.__code__, plain.__defaults__, plain.__kwdefaults__)
    with kept_whole(nn.Linear(1, 1)):
        assert plain.__code__ is not before[0]
    assert (plain.__code__, plain.__defaults__, plain.__kwdefaults__) == before


def test_other_threads_call_the_function_itself_during_a_capture():
    def function(x, *, by=2):
        return x * by

    found = []
    with recoded(function, lambda x, by=2: "replaced"):
        thread = threading.Thread(target=lambda: found.append((function(3), function(3, by=5))))
        thread.start()
        thread.join()
        assert function(3) == "replaced"
    assert found == [(6, 15)]
    assert function(3) == 6
