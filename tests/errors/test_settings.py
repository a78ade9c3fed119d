"""Whatever a model computes with is seen when it changes, wherever it is kept."""

import functools
import sys
import types
from collections import deque
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from tests.errors.refusal import WIDTH, Tiny, tree_model
from tests.errors.test_changes import require_equal
from tree_compile import treecompile
from tree_compile.errors import TokenRangeError
from tree_compile.state import state_of


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by


def frozen():
    return [nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)]


SETTINGS = {
    "numpy float": (np.float32(2), np.float32(3), lambda by, x: x * float(by)),
    "numpy integer": (np.int64(2), np.int64(3), lambda by, x: x * int(by)),
    "array": (np.ones(WIDTH), np.full(WIDTH, 2.0), lambda by, x: x * torch.from_numpy(by)),
    "partial": tuple(functools.partial(F.leaky_relu, negative_slope=by) for by in (0.1, 0.5)) + (lambda by, x: by(x),),
    "slots": (Slotted(2.0), Slotted(3.0), lambda by, x: x * by.by),
    "deque": (deque([2.0]), deque([3.0]), lambda by, x: x * by[0]),
    "fraction": (Fraction(2), Fraction(3), lambda by, x: x * float(by)),
    "complex": (2 + 0j, 3 + 0j, lambda by, x: x * by.real),
    "type of a number": (2, 2.5, lambda by, x: x * by if isinstance(by, int) else x),
    "long list": ([2.0] * 70, [3.0] * 70, lambda by, x: x * by[0]),
    "deep dict": ({"a": {"b": {"c": 2.0}}}, {"a": {"b": {"c": 3.0}}}, lambda by, x: x * by["a"]["b"]["c"]),
    "module in a list": (frozen(), frozen(), lambda by, x: x + by[0](x)),
    "activation": (nn.ReLU(), nn.SiLU(), lambda by, x: by(x)),
    "order": (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU()), lambda by, x: by(x)),
    "range": (range(2), range(3), lambda by, x: x * len(by)),
    "method": (frozen()[0].forward, frozen()[0].forward, lambda by, x: by(x)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_that_is_replaced_is_seen(name):
    before, after, use = SETTINGS[name]
    model = Tiny(lambda model, x, ids: use(model.by, x))
    model.by = before
    tree = tree_model(model)
    require_equal(tree)
    model.by = after
    require_equal(tree)


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


class Factor:
    more = 1.0

    def factor(self):
        return self.more


class WithClass(Tiny, Factor):
    by = 2.0

    def scaled(self, x):
        return x * self.by


class Other(WithClass):
    def scaled(self, x):
        return x * 7


class Hook:
    by = 2.0

    def __call__(self, module, inputs, output):
        return output * self.by


NUMBERS = {"by": 2.0}


def step(model, x, ids):
    return model.scaled(model.project[0](x)) * model.factor() * NUMBERS["by"] * Slotted.__dict__.get("more", 1)


def swap_parametrization(model):
    model.project[0].parametrizations.weight[0] = Doubled()


settings = types.ModuleType("settings_of_the_model")
settings.inner = types.ModuleType("settings_of_the_model.inner")
for module in (settings, settings.inner):
    sys.modules[module.__name__] = module
    exec("LEVEL, SCALE = 2.0, 3.0\ndef gate(x): return x * LEVEL", vars(module))


def step_with_modules(model, x, ids):
    import settings_of_the_model as found_inside

    return settings.gate(x) * settings.inner.SCALE + settings.inner.gate(x) * found_inside.SCALE


OF_MODULES = [(module, name) for module in (settings, settings.inner) for name in ("LEVEL", "SCALE", "gate")]


@pytest.mark.parametrize(("module", "name"), OF_MODULES)
def test_change_behind_the_name_of_a_module_is_seen(module, name, monkeypatch):
    tree = tree_model(Tiny(step_with_modules))
    require_equal(tree)
    monkeypatch.setattr(module, name, 5.0 if name.isupper() else lambda x: x * 7)
    require_equal(tree)


class WithOptions(Tiny):
    def forward(self, ids, options=None):
        return super().forward(ids) * options["by"]


@pytest.mark.parametrize("by", [3.0, torch.tensor(3.0)])
def test_change_of_a_constant_argument_is_seen(by):
    options, x = {"by": 2.0}, torch.tensor([[1, 2, 3]])
    tree = treecompile(WithOptions(lambda model, x, ids: x), backend="eager", forward_kwargs={"options": options})
    for options["by"] in (2.0, by):
        torch.testing.assert_close(tree(x.tolist())[0], tree.unpacked(x, options=options)[0])


CHANGES = {
    "class attribute": lambda model: setattr(WithClass, "by", WithClass.by + 1),
    "attribute of a class behind nn.Module": lambda model: setattr(Factor, "more", Factor.more + 1),
    "method of a class behind nn.Module": lambda model: setattr(Factor, "factor", lambda self: 7),
    "method of the class": lambda model: setattr(WithClass, "scaled", lambda self, x: x * 5),
    "class of the model": lambda model: setattr(model, "__class__", Other),
    "attribute of a hook": lambda model: setattr(model.hook, "by", 3.0),
    "variable around a hook": lambda model: model.around.update(by=3.0),
    "global variable": lambda model: NUMBERS.update(by=NUMBERS["by"] + 1),
    "class of a global name": lambda model: setattr(Slotted, "more", 3),
    "parametrization": swap_parametrization,
    "class of a part": lambda model: setattr(model.part, "__class__", Doubled),
    "part of another place": lambda model: setattr(model, "again", model.other),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_outside_of_the_attributes_is_seen(name):
    model, around = WithClass(lambda model, x, ids: model.again(model.part(step(model, x, ids)))), {"by": 2.0}
    model.hook, model.around, model.part, model.other = Hook(), around, Halved(), Doubled()
    model.again = model.part
    model.embed.register_forward_hook(model.hook)
    model.embed.register_forward_hook(lambda module, inputs, output: output * around["by"])
    parametrize.register_parametrization(model.project[0], "weight", Halved())
    tree = tree_model(model)
    require_equal(tree)
    before = state_of(model)
    CHANGES[name](model)
    assert state_of(model) != before
    require_equal(tree)


def test_hook_of_all_modules_is_seen():
    tree = tree_model(Tiny(lambda model, x, ids: model.project[0](x)))
    require_equal(tree)
    handle = register_module_forward_hook(lambda module, _, x: x * 1.5 if isinstance(module, nn.Embedding) else None)
    try:
        require_equal(tree)
    finally:
        handle.remove()
    require_equal(tree)


def test_embedding_with_fewer_rows_is_seen():
    tree = tree_model(Tiny(lambda model, x, ids: x))
    require_equal(tree)
    tree.unpacked.embed.weight.data = tree.unpacked.embed.weight.data[:6].clone()
    with pytest.raises(TokenRangeError, match="vocabulary's 6"):
        tree([[1, 2, 9]])


def test_setting_far_down_in_objects_is_seen():
    model = Tiny(lambda model, x, ids: x * model.a.by.by.by.by)
    model.a = Slotted(Slotted(Slotted(Slotted(2.0))))
    tree = tree_model(model)
    require_equal(tree)
    model.a.by.by.by.by = 3.0
    require_equal(tree)


def test_steps_of_an_optimizer_that_the_model_holds_are_no_changes():
    model = Tiny(lambda model, x, ids: x).double()
    model.trainer = Slotted(torch.optim.Adam(model.parameters()))
    before = state_of(model)
    model(torch.ones(1, 3, dtype=torch.int64)).sum().backward()
    model.trainer.by.step()
    assert state_of(model) == before


def test_state_is_the_same_while_nothing_changes():
    model = Tiny(step)
    model.settings = [setting for before, after, _ in SETTINGS.values() for setting in (before, after)]
    assert state_of(model) == state_of(model)
    assert hash(state_of(model)) == hash(state_of(model))
