"""What torch.export would drop from the backward pass without a word is refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.errors.refusal import WIDTH, Tiny, named, require_refusal, tree_model
from tree_compile import treecompile
from tree_compile.errors import CaptureError, LostGradientError


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def function_with_its_own_backward(model, x, ids):
    return Tripled.apply(x)


def hook_on_a_gradient(model, x, ids):
    projected = model.project[0](x)
    projected.register_hook(lambda gradient: gradient * 5)
    return projected


def inference_mode(model, x, ids):
    with torch.inference_mode():
        scale = x * 2
    return x + scale


@torch.inference_mode()
def scaled(x):
    return x * 2


def inference_mode_as_a_decorator(model, x, ids):
    return x + scaled(x)


def no_grad_inside_of_autocast(model, x, ids):
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        gate = model.project[0](x)
    return x + gate


@torch.no_grad()
def gated(x):
    return x * 2


@torch.autocast("cpu", enabled=False)
def no_grad_as_a_decorator_inside_of_autocast(model, x, ids):
    return x + gated(x)


def set_grad_enabled_inside_of_autocast(model, x, ids):
    with torch.autocast("cpu", enabled=False):
        torch.set_grad_enabled(False)
        gate = model.project[0](x)
        torch.set_grad_enabled(True)
    return x + gate


def enable_grad_inside_of_autocast(model, x, ids):
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.enable_grad():
        gate = model.project[0](x)
    return x + gate


LOST = [
    (function_with_its_own_backward, "Tripled.apply(x)", "drops its backward"),
    (hook_on_a_gradient, "projected.register_hook", "drops the hook"),
    (inference_mode, "torch.inference_mode()", "drops the switch"),
    (inference_mode_as_a_decorator, "scaled(x)", "drops the switch"),
    (no_grad_inside_of_autocast, "torch.no_grad()", "drops the switch"),
    (no_grad_as_a_decorator_inside_of_autocast, "gated(x)", "drops the switch"),
    (set_grad_enabled_inside_of_autocast, "torch.set_grad_enabled(False)", "drops the switch"),
    (enable_grad_inside_of_autocast, "torch.enable_grad()", "drops the switch"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(LOST))
def test_lost_gradient_is_refused(step, code, why):
    require_refusal(Tiny(step), LostGradientError, code, why, __file__)


def no_grad_outside_of_autocast(model, x, ids):
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        gate = gated(model.project[0](x))
    with torch.autocast("cpu", enabled=False), torch.enable_grad():
        same = model.project[1](x)
    with torch.no_grad():
        return same + gate.detach() + x


def test_switch_of_gradients_outside_of_autocast_is_exact():
    def step(model, x, ids):
        return no_grad_outside_of_autocast(model, x, ids) + checkpoint(model.project[2], x, use_reentrant=False)

    assert tree_model(Tiny(step)).check().ok
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hook_of_a_module_is_refused(register):
    model = Tiny(lambda model, x, ids: model.project[0](x))
    handle = getattr(model.project[0], register)(lambda module, *gradients: None)
    with pytest.raises(LostGradientError, match=r"'project\.0' \(Linear\) has a backward hook"):
        tree_model(model).explain()
    handle.remove()
    assert tree_model(model).check().ok


class Unregistered(Tiny):
    """Has parameters that nn.Module does not know of."""

    def __init__(self, step):
        super().__init__(step)
        self.gains = [nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))]


OUTSIDE = torch.randn(WIDTH, dtype=torch.float64, requires_grad=True)


def parameter_in_a_list(model, x, ids):
    return x * model.gains[0]


def tensor_from_outside(model, x, ids):
    return x * OUTSIDE


UNREGISTERED = [
    (parameter_in_a_list, "x * model.gains[0]", "no gradient"),
    (tensor_from_outside, "x * OUTSIDE", "no gradient"),
]


@pytest.mark.parametrize(("step", "code", "why"), named(UNREGISTERED))
def test_tensor_that_would_get_no_gradient_is_refused(step, code, why):
    require_refusal(Unregistered(step), LostGradientError, code, why, __file__)


class WithGain(Tiny):
    """Takes a gain as a constant keyword argument."""

    def forward(self, ids, gain=None):
        return self.head(self.embed(ids) * gain)


def test_keyword_argument_that_would_get_no_gradient_is_refused():
    options = {"min_shared_tokens": 1, "backend": "eager", "self_check": False}
    with pytest.raises(LostGradientError, match=r"shape \[8\]"):
        treecompile(WithGain(None).double(), forward_kwargs={"gain": OUTSIDE}, **options).explain()
    assert treecompile(WithGain(None).double(), forward_kwargs={"gain": OUTSIDE.detach()}, **options).check().ok


def test_refusal_leaves_torch_as_it_was():
    before = (torch.Tensor.register_hook, torch.inference_mode.__enter__, torch.autograd.Function.apply)
    for step, *_ in LOST:
        with pytest.raises(LostGradientError):
            tree_model(Tiny(step)).explain()
    assert (torch.Tensor.register_hook, torch.inference_mode.__enter__, torch.autograd.Function.apply) == before
    x = torch.ones(2, requires_grad=True)
    Tripled.apply(x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def autocast(model, x, ids):
    with torch.autocast("cpu", torch.bfloat16):
        return model.project[0](x.float()).to(x.dtype)


def gradient_inside(model, x, ids):
    return torch.func.grad(lambda values: (values**3).sum())(x)


@pytest.mark.parametrize(
    ("step", "why"), named([(autocast, "switches autocast on"), (gradient_inside, "takes it for a constant")])
)
def test_region_with_other_settings_is_refused(step, why):
    with pytest.raises(CaptureError) as raised:
        tree_model(Tiny(step)).explain()
    assert why in raised.value.why


# What keeps its gradients


def straight_through(model, x, ids):
    return x + (x.round() - x).detach()


def without_gradients(model, x, ids):
    with torch.no_grad():
        scale = model.project[0](x)
    return x * scale


def checkpointed(model, x, ids):
    return checkpoint(lambda values: model.project[0](values).sin(), x, use_reentrant=False)


def hook_on_a_parameter(model, x, ids):
    return x * model.gain[0]


@pytest.mark.parametrize("step", [straight_through, without_gradients, checkpointed, hook_on_a_parameter])
def test_gradient_that_a_graph_keeps_is_exact(step):
    model = Tiny(step)
    model.gain.register_hook(lambda gradient: gradient * 2)
    assert tree_model(model).check().ok


def test_forward_hook_is_captured():
    model = Tiny(lambda model, x, ids: model.project[0](x))
    model.project[0].register_forward_hook(lambda module, inputs, output: output * 2)
    assert tree_model(model).check().ok


def test_weight_norm_is_exact():
    model = Tiny(lambda model, x, ids: model.project[0](x))
    nn.utils.parametrizations.weight_norm(model.project[0])
    assert tree_model(model).check().ok


def write_without_gradients(model, x, ids):
    x = x + 0
    with torch.no_grad():
        x.mul_(2)
    return x


def write_without_gradients_and_autocast(model, x, ids):
    x = x + 0
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        x.mul_(2)
    return x


def write_without_gradients_into_a_view(model, x, ids):
    x = x + 0
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cpu", enabled=False):
        x.flatten(-1).mul_(2)
    return x


WRITES = [write_without_gradients, write_without_gradients_and_autocast, write_without_gradients_into_a_view]


@pytest.mark.parametrize("step", WRITES)
def test_write_without_gradients_into_a_tensor_with_them_is_refused(step):
    require_refusal(Tiny(step), LostGradientError, "mul_(2)", "its gradient does not", __file__)


def test_write_without_gradients_into_a_tensor_of_the_region_is_exact():
    def step(model, x, ids):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            gate = model.project[0](x).mul_(2)
        return x * gate

    assert tree_model(Tiny(step)).check().ok


def hook_on_a_node(model, x, ids):
    scaled = x * 2
    if scaled.grad_fn is not None:
        scaled.grad_fn.register_hook(lambda outer, inner: tuple(g and g / 2 for g in outer))
    return scaled


def hook_before_a_node(model, x, ids):
    scaled = x * 2
    if scaled.grad_fn is not None:
        torch.autograd.graph.get_gradient_edge(scaled).node.register_prehook(lambda inner: inner)
    return scaled


def altered_saved_tensors(model, x, ids):
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a * 2, lambda a: a):
        return x.sin()


class Doubling(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda a: a * 2, lambda a: a)


def altered_saved_tensors_by_a_class(model, x, ids):
    with Doubling():
        return x.sin()


HIDDEN = [
    (hook_on_a_node, "register_hook", "drops the hook"),
    (hook_before_a_node, "register_prehook", "drops the hook"),
    (altered_saved_tensors, "saved_tensors_hooks", "drops the hooks"),
    (altered_saved_tensors_by_a_class, "with Doubling()", "drops the hooks"),
]


@pytest.mark.parametrize(("step", "code", "why"), named(HIDDEN))
def test_hook_inside_of_autograd_is_refused(step, code, why):
    require_refusal(Tiny(step), LostGradientError, code, why, __file__)


def saved_on_the_cpu(model, x, ids):
    with torch.autograd.graph.save_on_cpu():
        return x.sin()


def complex_without_gradients(model, x, ids):
    with torch.no_grad():
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * 1j
    return x + torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("step", [saved_on_the_cpu, complex_without_gradients])
def test_gradient_is_exact_where_values_are_only_moved_or_detached(step):
    assert tree_model(Tiny(step)).check().ok
