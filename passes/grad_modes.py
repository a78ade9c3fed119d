"""Regions under `torch.no_grad()` become part of the graph, with their results detached."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from tree_compile.errors import CaptureError, LostGradientError
from tree_compile.passes.autocast import AUTOCAST_OFF, switch_off_autocast
from tree_compile.passes.finding import Finding
from tree_compile.passes.functional import storages, writes
from tree_compile.passes.nodes import arguments, operator_name
from tree_compile.passes.shapes import inherited, size_expression
from tree_compile.passes.source import source_line

_GRAD_MODE = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_MAY_DO_NOTHING = (
    "atleast_1d", "atleast_2d", "atleast_3d", "conj_physical", "contiguous", "flatten", "positive", "real",
    "resolve_conj", "resolve_neg", "sum_to_size", "to", "to_dense", "type_as",
)  # fmt: skip
"""Where these have nothing to do, the model gets the very tensor that it gave them."""
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout")


@dataclass(frozen=True)
class InlineGradModes:
    """Replaces the regions that export keeps for `torch.no_grad()` and `torch.autocast(enabled=False)` by their body.

    What leaves a region without gradients is detached, which is all that the region means to the rest of the graph.
    What stands in a region without autocast is noted, for `KeepAutocastOff`.

    What does nothing to a tensor, as a cast to its own dtype, gives back that very tensor, with its gradients.

    Raises:
        CaptureError: gradients are switched on inside of a region without them, or autocast is switched on.
        LostGradientError: a region without gradients changes a tensor from outside in place.
    """

    name: str = field(default="gradient modes", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        while regions := [node for node in graph_module.graph.nodes if node.target in (_GRAD_MODE, _AUTOCAST)]:
            for region in regions:
                _inline(graph_module, region)
        return ()


def _inline(graph_module: fx.GraphModule, region: fx.Node) -> None:
    settings = 1 if region.target is _GRAD_MODE else 4
    with_gradients, (body_node, *inputs) = _keeps_gradients(region), region.args[settings:]
    body = getattr(graph_module, str(body_node.target))  # type: ignore[union-attr]
    if not with_gradients:
        if any(_enables(node) for node in body.graph.nodes):
            raise _refusal(region, "it switches gradients on inside of torch.no_grad()")
        # What a region inside writes or gives back may be a tensor from outside.
        InlineGradModes()(body)
        _require_own_writes(body, inputs)
    for device in _without_autocast(region):
        for node in body.graph.nodes:
            switch_off_autocast(node, device)
    copies = dict(zip((node for node in body.graph.nodes if node.op == "placeholder"), inputs, strict=True))
    with graph_module.graph.inserting_before(region):
        results = _copy(graph_module, body, copies)
        if not with_gradients:
            results = [_left(graph_module.graph, result, inputs) for result in results]
    for item in list(region.users):
        assert item.target is operator.getitem
        item.replace_all_uses_with(results[item.args[1]])  # type: ignore[index]
        graph_module.graph.erase_node(item)
    graph_module.graph.erase_node(region)


def _keeps_gradients(region: fx.Node) -> bool:
    if region.target is _GRAD_MODE:
        return bool(region.args[0])
    if region.args[2]:
        raise _refusal(region, "it switches autocast on")
    return True


def _without_autocast(region: fx.Node) -> Iterator[str]:
    """The types of devices that autocast is switched off for, outside of the region or by it."""
    if AUTOCAST_OFF in region.meta:
        yield region.meta[AUTOCAST_OFF]
    if region.target is _AUTOCAST:
        yield str(region.args[0])


def _enables(node: fx.Node) -> bool:
    return node.target is _GRAD_MODE and bool(node.args[0])


def _require_own_writes(body: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """A write without gradients into a tensor from outside changes its values, and not its gradient."""
    outside = {memory for node in inputs if isinstance(node, fx.Node) for memory in storages(node)}
    for node in body.graph.nodes:
        if node.op == "call_function" and writes(node) and not outside.isdisjoint(storages(node.args[0])):
            raise LostGradientError(
                "The model changes a tensor in place under torch.no_grad().",
                where=source_line(node),
                why="its values change and its gradient does not, which a graph without writes cannot say.",
                hint="write it as x + (changed - x).detach().",
            )


def _copy(graph_module: fx.GraphModule, body: fx.GraphModule, copies: dict[fx.Node, Any]) -> list[Any]:
    """Copies the nodes of `body`; returns what it returns."""
    for node in body.graph.nodes:
        if node.op == "output":
            return list(_flat(fx.map_arg(node.args[0], lambda old: copies[old])))
        if node.op == "get_attr":
            copies[node] = _copy_attribute(graph_module, body, node)
        elif node.op != "placeholder":
            copies[node] = graph_module.graph.node_copy(node, lambda old: copies[old])
    raise AssertionError


def _copy_attribute(graph_module: fx.GraphModule, body: fx.GraphModule, node: fx.Node) -> fx.Node:
    name = f"region_{len(graph_module.graph.nodes)}_{str(node.target).replace('.', '_')}"
    setattr(graph_module, name, attrgetter(str(node.target))(body))
    copy = graph_module.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy


def _flat(results: Any) -> Iterator[Any]:
    yield from results if isinstance(results, (tuple, list)) else (results,)


def _left(graph: fx.Graph, result: Any, inputs: Sequence[Any]) -> Any:
    """What a `result` of a region without gradients is outside of it."""
    source = result
    while source not in inputs and _does_nothing(source):
        source = source.args[0]
    return source if source in inputs else _detached(graph, result)


def _does_nothing(node: Any) -> bool:
    """Whether the model got its first argument itself from `node`."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if operator_name(node) in _DROPOUTS:
        given = arguments(node)
        return not given["train"] or given["p"] == 0
    return operator_name(node) in _MAY_DO_NOTHING and _is_same(node.meta["val"], node.args[0].meta["val"])  # type: ignore[union-attr]


def _is_same(first: Tensor, second: Tensor) -> bool:
    memory, other = first.untyped_storage()._cdata, second.untyped_storage()._cdata
    layouts = [[size_expression(n) for n in (*value.shape, *value.stride())] for value in (first, second)]
    return memory == other and first.dtype == second.dtype and layouts[0] == layouts[1]


def _detached(graph: fx.Graph, result: Any) -> Any:
    value = result.meta.get("val") if isinstance(result, fx.Node) else None
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return result
    node = graph.call_function(torch.ops.aten.detach.default, (result,))
    node.meta = {**inherited(result.meta), "val": value}
    return node


def _refusal(node: fx.Node, why: str) -> CaptureError:
    return CaptureError(
        "A region with other settings of autograd cannot be followed.",
        where=source_line(node),
        why=f"{why}.",
        hint="move torch.autocast around the call of the tree model, and torch.enable_grad out of the model.",
    )
