"""Whatever a model computes with is seen when it changes, wherever it is kept."""

import enum
import functools
import importlib
import sys
import threading
import types
import weakref
from collections import UserDict, UserList, defaultdict, deque, namedtuple
from contextvars import ContextVar
from ctypes import c_double, c_int
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


OF_A_THREAD, IN_CONTEXT = threading.local(), ContextVar("a scale", default=1.0)


class Options(dict):
    scale = 1.0


class Pair(namedtuple("Pair", "first")):
    __slots__ = ()
    scale = 1.0


class Kind(enum.Enum):
    ONE = 1


class Special:
    __scale__ = _abc_scale = scale = 1.0


class Endless:
    def __iter__(self):
        return self

    def __next__(self):
        return self.scale


class Number(float):
    pass


class Part(Special):
    pass


settings.Part, Part.__module__ = Part, settings.__name__
OPTIONS, LIST, DICT, PAIR, SPECIAL = Options(hidden=8), UserList([1]), UserDict(hidden=8), Pair(1), Special()
LONG, ENDLESS, NUMBER, WEAK = Options.fromkeys(range(70)), Endless(), Number(2), weakref.ref(SPECIAL)
PROXY, KEYS, OF_C, NUMBERS_OF_C, MADE = weakref.proxy(SPECIAL), [{1: 0}], c_double(1), (c_int * 2)(), defaultdict(int)
OF_A_THREAD.scale = LIST.scale = DICT.scale = LONG.scale = ENDLESS.scale = NUMBER.scale = Kind.ONE.scale = 1.0
READ = {
    "attribute of a thread": (lambda: OF_A_THREAD.scale, lambda: (OF_A_THREAD, "scale")),
    "module by getattr": (lambda: getattr(settings, "SCALE", 1.0), lambda: (settings, "SCALE")),
    "module by vars": (lambda: vars(settings)["SCALE"], lambda: (settings, "SCALE")),
    "module by __dict__": (lambda: settings.__dict__["SCALE"], lambda: (settings, "SCALE")),
    "module by import_module": (
        lambda: importlib.import_module("settings_of_the_model").SCALE,
        lambda: (settings, "SCALE"),
    ),
    "module by sys.modules": (
        lambda: sys.modules["settings_of_the_model.inner"].SCALE,
        lambda: (settings.inner, "SCALE"),
    ),
    "function by getattr": (lambda: getattr(settings, "gate")(1), lambda: (settings, "LEVEL")),  # noqa: B009
    "class by getattr": (lambda: getattr(settings, "Part").scale, lambda: (Part, "scale")),  # noqa: B009
    "attribute of a dict": (lambda: OPTIONS.scale, lambda: (OPTIONS, "scale")),
    "attribute of a long dict": (lambda: LONG.scale, lambda: (LONG, "scale")),
    "class of a dict": (lambda: OPTIONS.scale, lambda: (Options, "scale")),
    "UserList": (lambda: LIST.scale, lambda: (LIST, "scale")),
    "UserDict": (lambda: DICT.scale, lambda: (DICT, "scale")),
    "named tuple": (lambda: PAIR.scale, lambda: (Pair, "scale")),
    "number": (lambda: NUMBER.scale, lambda: (NUMBER, "scale")),
    "iterator": (lambda: next(ENDLESS), lambda: (ENDLESS, "scale")),
    "member of an enum": (lambda: Kind.ONE.scale, lambda: (Kind.ONE, "scale")),
    "weak reference": (lambda: WEAK().scale, lambda: (SPECIAL, "scale")),
    "weak proxy": (lambda: PROXY.scale, lambda: (SPECIAL, "scale")),
    "special name": (lambda: SPECIAL.__scale__, lambda: (Special, "__scale__")),
    "name as of an abstract class": (lambda: SPECIAL._abc_scale, lambda: (Special, "_abc_scale")),
    "number of C": (lambda: OF_C.value, lambda: (OF_C, "value")),
    "factory": (lambda: MADE[0], lambda: (MADE, "default_factory")),
}


@pytest.mark.parametrize("name", READ)
def test_attribute_that_is_kept_anywhere_is_seen(name, monkeypatch):
    scale, place = READ[name]
    model = Tiny(lambda model, x, ids: x * scale())
    before = state_of(model)
    assert state_of(model) == before
    monkeypatch.setattr(*place(), 7.0 if name != "factory" else float)
    assert state_of(model) != before


def transpose(model):
    model.project[0].weight.data = model.project[0].weight.data.mT


OTHER_CHANGES = {
    "context variable": (lambda model: IN_CONTEXT.get(), lambda model: IN_CONTEXT.set(2.0)),
    "type of a key": (lambda model: KEYS[0][1], lambda model: KEYS.__setitem__(0, {"1": 0})),
    "array of C": (lambda model: NUMBERS_OF_C[0], lambda model: NUMBERS_OF_C.__setitem__(0, NUMBERS_OF_C[0] + 1)),
    "attribute of a buffer": (lambda model: model.table.scale, lambda model: setattr(model.table, "scale", 2.0)),
    "attribute of a parameter": (lambda model: model.gain.scale, lambda model: setattr(model.gain, "scale", 2.0)),
    "layout of a parameter": (lambda model: model.project[0].weight.is_contiguous(), transpose),
    "switch of torch": (
        lambda model: torch.backends.mkldnn.enabled,
        lambda model: torch.backends.mkldnn.set_flags(not torch.backends.mkldnn.enabled),
    ),
    "threads": (lambda model: torch.get_num_threads(), lambda model: torch.set_num_threads(3)),
}


@pytest.mark.parametrize("name", OTHER_CHANGES)
def test_other_change_is_seen(name):
    asked, change = OTHER_CHANGES[name]
    model, threads = Tiny(lambda model, x, ids: x * asked(model)), torch.get_num_threads()
    before = state_of(model)
    assert state_of(model) == before
    try:
        with torch.backends.mkldnn.flags(enabled=True):
            change(model)
            assert state_of(model) != before
    finally:
        torch.set_num_threads(threads)


step_of_the_loop = 0


def test_variable_that_is_called_like_an_attribute_is_left_alone(monkeypatch):
    model = Tiny(lambda model, x, ids: x * model.step_of_the_loop)
    before = state_of(model)
    monkeypatch.setitem(globals(), "step_of_the_loop", 1)
    assert state_of(model) == before


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
