"""A model that was changed after the first call is captured again; one that its own calls change is refused."""

import argparse
import contextlib
import cProfile
import functools
import itertools
import logging
import pstats
import random
import re
import threading
import time
import timeit
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.errors.refusal import POSITIONS, Tiny, causal, merged, named, require_refusal, tree_model
from tree_compile.errors import (
    LostGradientError,
    RefusedModelError,
    SequenceTooLongError,
    StatefulModelError,
    TokenMixingError,
)
from tree_compile.state import first_difference, state_of

SEQUENCES = [[1, 2, 3], [1, 2, 4]]


class Scaled(Tiny):
    """Multiplies by a number that is an attribute of the module, and by one in an object of its own."""

    def __init__(self):
        super().__init__(lambda model, x, ids: model.project[0](x) * model.scale * model.options["by"].factor)
        self.scale = 2.0
        self.options = {"by": SimpleNamespace(factor=3.0)}
        self.mask = causal(POSITIONS)


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


def masked(model, x, ids):
    tokens = x.shape[1]
    query, key, value = model.heads(x)
    mask = model.mask[:tokens, :tokens]
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def test_mask_that_gets_other_memory_is_seen():
    model = Scaled()
    mask = model.__dict__.pop("mask")
    model.step, model.mask = masked, nn.Buffer(mask)
    tree = tree_model(model)
    require_equal(tree)
    model.mask.data = model.mask.triu(-1)
    require_equal(tree)


def test_mask_that_is_no_buffer_and_changes_in_place_is_seen():
    model = Scaled()
    model.step = masked
    tree = tree_model(model)
    require_equal(tree)
    model.mask.triu_(-1)
    require_equal(tree)


def test_setting_in_an_object_of_the_model_is_seen():
    tree = tree_model(Scaled())
    require_equal(tree)
    tree.unpacked.options["by"].factor = 5.0
    require_equal(tree)


SCALE = 2.0


def times_scale(x):
    return x * SCALE


@contextlib.contextmanager
def a_scale():
    yield SCALE


def in_a_context(x):
    with a_scale() as scale:
        return x * scale


@functools.lru_cache
def keyed_by(scale):
    return SCALE + 0 * scale


class WithMethod(Tiny):
    @torch.no_grad()
    def scaled(self, x):
        return x * SCALE


DECORATED = [
    torch.no_grad()(times_scale),
    torch.autocast("cpu", enabled=False)(times_scale),
    torch.compiler.disable(times_scale),
    torch.no_grad()(torch.autocast("cpu", enabled=False)(times_scale)),
    in_a_context,
    lambda x: x * keyed_by.__wrapped__(1),
]


def require_scale_is_seen(model, monkeypatch):
    before = state_of(model)
    assert first_difference(before, state_of(model)) is None
    monkeypatch.setitem(globals(), "SCALE", SCALE + 1)
    assert first_difference(before, state_of(model)) is not None


@pytest.mark.parametrize("scaled", DECORATED)
def test_variable_of_a_decorated_function_is_seen(scaled, monkeypatch):
    require_scale_is_seen(Tiny(lambda model, x, ids: model.project[0](x) + scaled(x)), monkeypatch)


def test_variable_of_a_decorated_method_is_seen(monkeypatch):
    model = WithMethod(lambda model, x, ids: model.project[0](x) + model.scaled(x))
    require_scale_is_seen(Tiny(torch.no_grad()(model.scaled)), monkeypatch)
    require_scale_is_seen(model, monkeypatch)
    tree = tree_model(model)
    require_equal(tree)
    monkeypatch.setitem(globals(), "SCALE", SCALE + 1)
    require_equal(tree)


def gate(x):
    return x * gate.scale


gate.scale = 2.0


@torch.no_grad()
def gate_of_a_library(x):
    return x * gate_of_a_library.scale


gate_of_a_library.scale = 2.0
NAMESPACE = SimpleNamespace(scale=2.0, inner=argparse.Namespace(scale=2.0))
TIMER = timeit.Timer()
HOLDERS = [
    (lambda x: gate(x), lambda: gate, "scale"),
    (lambda x: gate_of_a_library(x), lambda: gate_of_a_library, "scale"),
    (lambda x: x * NAMESPACE.scale, lambda: NAMESPACE, "scale"),
    (lambda x: x * NAMESPACE.inner.scale, lambda: NAMESPACE.inner, "scale"),
    (lambda x: x if TIMER.inner is None else 2 * x, lambda: TIMER, "inner"),
]


@pytest.mark.parametrize(("scaled", "holder", "name"), HOLDERS)
def test_attribute_of_a_function_or_a_plain_object_is_seen(scaled, holder, name, monkeypatch):
    model = Tiny(lambda model, x, ids: model.project[0](x) + scaled(x))
    before = state_of(model)
    assert first_difference(before, state_of(model)) is None
    monkeypatch.setattr(holder(), name, 3.0)
    assert first_difference(before, state_of(model)) is not None


LOGGER = logging.getLogger("a model")


def test_logger_is_no_part_of_a_model():
    def logged(model, x, ids):
        LOGGER.debug("called")
        return model.project[0](x)

    model = Tiny(logged)
    before = state_of(model)
    assert LOGGER.isEnabledFor(logging.INFO) or LOGGER._cache
    assert first_difference(before, state_of(model)) is None


class WithUnregistered(Tiny):
    def __init__(self):
        super().__init__(lambda model, x, ids: model.project[0](x) + model.frozen[0](x))
        self.frozen = [nn.Linear(8, 8, dtype=torch.float64).requires_grad_(False)]


def replace_values(parameter):
    parameter.data = parameter.data * 2


@pytest.mark.parametrize("change", [replace_values, lambda parameter: parameter.mul_(2)])
def test_change_of_a_parameter_that_is_not_registered_is_seen(change):
    tree = tree_model(WithUnregistered())
    require_equal(tree)
    change(tree.unpacked.frozen[0].weight)
    require_equal(tree)


def test_parameter_that_is_frozen_is_seen():
    tree = tree_model(Tiny(lambda model, x, ids: x * 2 if model.gain.requires_grad else x))
    require_equal(tree)
    tree.unpacked.gain.requires_grad_(False)
    require_equal(tree)


def test_first_difference_names_what_changed():
    model = Scaled()
    before = state_of(model)
    assert first_difference(before, state_of(model)) is None
    model.options["by"].factor = 5.0
    assert first_difference(before, state_of(model)) == "options.by.factor"


# What a call itself changes


def counts(model, x, ids):
    model.calls = getattr(model, "calls", 0) + 1
    return x


def moves_a_buffer(model, x, ids):
    model.table = model.table * 0.9
    return x + model.table[0]


def writes_to_a_buffer(model, x, ids):
    model.table.mul_(0.9)
    return x + model.table[0]


def keeps_its_last_tokens(model, x, ids):
    model.last = x
    return x


def draws_from_python(model, x, ids):
    return x if random.random() < 0.5 else x * 2


def draws_from_numpy(model, x, ids):
    return x * np.random.rand()


def draws_from_its_own_generator(model, x, ids):
    model.__dict__.setdefault("generator", np.random.default_rng(0))
    return x * model.generator.random()


COUNT, CLOCK = [0], SimpleNamespace(read=time.perf_counter)
SHARED = np.random.default_rng(0)


def counts_in_a_global_list(model, x, ids):
    COUNT[0] += 1
    return x * COUNT[0]


def counts_in_its_class(model, x, ids):
    Tiny.calls = getattr(Tiny, "calls", 0) + 1
    return x


def counts_in_a_queue(model, x, ids):
    model.__dict__.setdefault("queue", deque()).append(1)
    return x


def counts_with_an_iterator(model, x, ids):
    model.__dict__.setdefault("iterator", itertools.count())
    return x * next(model.iterator)


def draws_from_a_global_generator(model, x, ids):
    return x * SHARED.random()


REMEMBERS = [
    (counts_in_a_global_list, "COUNT[0] += 1", "changes nothing"),
    (counts_in_its_class, "Tiny.calls = ", "changes nothing"),
    (counts_in_a_queue, "append(1)", "changes nothing"),
    (counts_with_an_iterator, "next(model.iterator)", "changes nothing"),
    (draws_from_a_global_generator, "SHARED.random()", "changes nothing"),
    (counts, "model.calls = ", "changes nothing"),
    (moves_a_buffer, "model.table = ", "changes nothing"),
    (keeps_its_last_tokens, "model.last = x", "changes nothing"),
    (draws_from_python, "random.random()", "keeps the numbers"),
]
WITHOUT_A_LINE = [
    (draws_from_numpy, "keeps the numbers of its capture"),
    (draws_from_its_own_generator, "keeps the value of its capture"),
]


@pytest.mark.parametrize(("step", "code", "why"), named(REMEMBERS))
def test_call_that_changes_the_next_is_refused_with_its_line(step, code, why):
    require_refusal(Tiny(step), StatefulModelError, code, why, __file__)


@pytest.mark.parametrize(("step", "why"), named(WITHOUT_A_LINE))
def test_call_that_changes_the_next_is_refused(step, why):
    with pytest.raises(StatefulModelError) as raised:
        tree_model(Tiny(step)).explain()
    assert type(raised.value) is StatefulModelError
    assert why in raised.value.why


def test_calls_before_a_capture_leave_buffers_and_random_numbers_as_they_were():
    model = Tiny(writes_to_a_buffer)
    table, states = model.table.clone().double(), (random.getstate(), str(np.random.get_state()), torch.get_rng_state())
    with pytest.raises(TokenMixingError):
        tree_model(model).explain()
    torch.testing.assert_close(model.table, table)
    assert states[:2] == (random.getstate(), str(np.random.get_state()))
    assert torch.equal(states[2], torch.get_rng_state())


def reads_a_clock(model, x, ids):
    return x * CLOCK.read()


@pytest.mark.parametrize("training", [True, False])
def test_model_whose_calls_differ_is_refused(training):
    model = Tiny(lambda model, x, ids: F.dropout(reads_a_clock(model, x, ids), 0.1, model.training)).train(training)
    with pytest.raises(StatefulModelError, match="give different outputs"):
        tree_model(model).explain()


class Masked(Tiny):
    def forward(self, ids):
        return super().forward(ids).masked_fill(torch.arange(32) > 20, torch.finfo(torch.float64).min)


def test_model_whose_calls_differ_beside_a_fill_is_refused():
    with pytest.raises(StatefulModelError, match="give different outputs"):
        tree_model(Masked(reads_a_clock)).explain()


def asks_for_gradients(model, x, ids):
    return x * 2 if torch.is_grad_enabled() else x


def caches_without_gradients(model, x, ids):
    if not torch.is_grad_enabled():
        model.cached = x
    return x


@pytest.mark.parametrize(
    ("step", "found"),
    [(asks_for_gradients, "under torch.no_grad()"), (caches_without_gradients, "changes its 'cached'")],
)
def test_model_that_asks_whether_gradients_are_needed_is_refused(step, found):
    with pytest.raises(StatefulModelError, match=re.escape(found)):
        tree_model(Tiny(step)).explain()


def asks_for_a_gradient(model, x, ids):
    return x * 2 if model.gain.grad is None else x


def asks_for_the_version(model, x, ids):
    return x * (1 + model.gain._version)


def asks_for_the_seed(model, x, ids):
    return x * (torch.initial_seed() % 2)


OF_TRAINING = [
    (asks_for_a_gradient, "model.gain.grad"),
    (asks_for_the_version, "model.gain._version"),
    (asks_for_the_seed, "torch.initial_seed()"),
]


@pytest.mark.parametrize(("step", "code"), named(OF_TRAINING))
def test_model_that_asks_what_changes_in_every_step_is_refused(step, code):
    require_refusal(Tiny(step), StatefulModelError, code, "changes from step to step", __file__)


COUNTS = threading.local()


def counts_in_its_thread(model, x, ids):
    COUNTS.calls = getattr(COUNTS, "calls", 0) + 1
    return x * COUNTS.calls


def test_counter_of_a_thread_is_refused():
    require_refusal(Tiny(counts_in_its_thread), StatefulModelError, "COUNTS.calls = ", "changes nothing", __file__)


def in_the_default_dtype(model, x, ids):
    return x * torch.full((), 1 / 3).to(x.dtype)


def test_default_dtype_that_changes_is_seen():
    tree = tree_model(Tiny(in_the_default_dtype))
    require_equal(tree)
    torch.set_default_dtype(torch.float64)
    try:
        require_equal(tree)
    finally:
        torch.set_default_dtype(torch.float32)


def test_model_that_only_draws_from_torch_is_not_taken_for_one_that_remembers():
    assert tree_model(Tiny(lambda model, x, ids: F.dropout(x, 0.5))).explain()


def moves_its_gain(model, x, ids):
    with torch.no_grad():
        model.gain.mul_(1.1)
    return x


def moves_its_gain_unseen(model, x, ids):
    model.gain.data.add_(1)
    return x


def replaces_its_gain(model, x, ids):
    model.gain.data = model.gain.data + 1
    return x


@pytest.mark.parametrize("step", [moves_its_gain, moves_its_gain_unseen, replaces_its_gain])
def test_call_that_writes_to_a_parameter_is_refused_and_leaves_it(step):
    model = Tiny(step).double()
    gain = model.gain.detach().clone()
    with pytest.raises(RefusedModelError) as raised:
        tree_model(model).explain()
    assert torch.equal(model.gain, gain)
    assert raised.value.where is not None


def fills_a_cache(model, x, ids):
    if getattr(model, "cache", None) is None:
        model.cache = torch.arange(POSITIONS, dtype=x.dtype)
    return x + model.cache[: x.shape[1], None]


def test_cache_that_the_first_call_fills_is_real_and_exact():
    tree = tree_model(Tiny(fills_a_cache), self_check=True)
    require_equal(tree)
    assert type(tree.unpacked.cache) is torch.Tensor


def test_model_with_few_positions_is_captured():
    tree = tree_model(Tiny(lambda model, x, ids: x + model.rows[:9][torch.arange(x.shape[1])]))
    require_equal(tree)
    with pytest.raises(SequenceTooLongError):
        tree([[1] * 10])


def attends(model, x, ids):
    return merged(F.scaled_dot_product_attention(*model.heads(x), is_causal=True))


def test_first_call_under_a_profiler_is_exact_and_profiled_to_its_end():
    tree = tree_model(Tiny(attends))
    with cProfile.Profile() as profiler:
        require_equal(tree)
        last = sorted(SEQUENCES)
    assert last == SEQUENCES
    assert any("sorted" in str(function) for function in pstats.Stats(profiler).stats)


def test_draw_under_a_profiler_is_refused():
    with cProfile.Profile(), pytest.raises(StatefulModelError, match="Python's or NumPy's generator"):
        tree_model(Tiny(draws_from_python)).explain()
