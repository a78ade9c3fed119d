"""Layers that carry a state along the tokens: every call gets the row's tree."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tree_compile.passes.axes import BLANK, TOKENS, Axis, Mixes, Value
from tree_compile.passes.finding import Finding
from tree_compile.passes.plan_inputs import tree_inputs
from tree_compile.passes.shapes import inherited, shape_of
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.token_rules import RULES, Result, Step
from tree_compile.runtime.mixers import MIXERS, Mixer, call_of, computed_in
from tree_compile.runtime.recurrence_fla import kernels_can
from tree_compile.runtime.row_tree import CHUNK

_NODE = torch.ops.tree_compile.mixer.default


@dataclass(frozen=True)
class RewriteMixers:
    """Replaces every node of a mixer by a call of its op with the tree of the row."""

    name: str = field(default="mixers", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        nodes = [node for node in graph_module.graph.nodes if node.target is _NODE]
        return tuple(_replace(graph_module.graph, node) for node in nodes)


def _replace(graph: fx.Graph, node: fx.Node) -> Finding:
    name, tensors, options = node.args
    found, arguments = call_of(str(name), list(tensors), str(options))  # type: ignore[arg-type]
    with graph.inserting_before(node):
        result, finding = insert_mixer(graph, node, found.op, arguments)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return finding


def insert_mixer(
    graph: fx.Graph, origin: fx.Node, op: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[fx.Node, Finding]:
    """Inserts a call of a mixer's op with the tree of the row; returns the node of its first result, and what it says.

    Args:
        graph: a graph with plan inputs.
        origin: the node whose place it takes.
        op: declared with `runtime.mixers.mixer`.
        arguments: those of the op by name, without `tree`.
    """
    found = MIXERS[op.__name__]
    RULES[op] = _rule
    value = arguments[found.like].meta["val"]
    result = graph.call_function(op, (), arguments | {"tree": tree_inputs(graph)})
    result.meta = inherited(origin.meta) | {"val": value if found.state is None else (value,)}
    became, state_bytes = _description(found, arguments)
    finding = Finding(op.__name__.replace("_", " "), became, source_line(origin), module_path(origin), state_bytes)
    if found.state is None:
        return result, finding
    first = graph.call_function(operator.getitem, (result, 0))
    first.meta = inherited(origin.meta) | {"val": value}
    return first, finding


def _description(found: Mixer, arguments: dict[str, Any]) -> tuple[str, int]:
    """What a mixer became, and the bytes of a state for each chunk; 0 where it has none there."""
    name = found.op.__name__ + _decay(found, arguments)
    if found.over != "chunks" or found.state is None:
        return f"{name}{_OVER.get(found.over, '')}, one call per pass", 0
    nodes = {key: arguments[key] for key in found.tokens if key in arguments}
    shape = found.state({key: shape_of(node) for key, node in nodes.items()})
    state_bytes = math.prod(map(int, shape)) * computed_in(arguments[found.like].meta["val"]).itemsize
    state = f"a state of {' x '.join(map(str, shape))}, {state_bytes:,} bytes"
    if runs_kernels(found, arguments):
        return f"{name} by fla's kernels, one call per depth and pass, with {state}, for each segment", state_bytes
    return f"{name}{_OVER[found.over]}, one call per pass, with {state}, for each", state_bytes


_OVER = {"chunks": f" in chunks of {CHUNK} tokens", "ancestors": " over the ancestors of every token"}


def _decay(found: Mixer, arguments: Mapping[str, Any]) -> str:
    """The shape of the decay: it says which of the layers the op stands for."""
    if "decay" not in found.tokens or arguments.get("decay") is None:
        return ""
    sizes = enumerate(shape_of(arguments["decay"]))
    return f" with decay [{', '.join('T' if dim == found.tokens['decay'] else str(size) for dim, size in sizes)}]"


def runs_kernels(found: Mixer, arguments: Mapping[str, Any]) -> bool:
    """Whether a call of the mixer's op runs kernels, which no compiled code can hold."""
    if found.keys is None:
        return False
    return kernels_can(arguments[found.keys].meta["val"], arguments[found.like].meta["val"])


def _rule(step: Step) -> Result:
    """Tokens must be in the order of the row, along the dimension that the op has for them.

    A tensor without that dimension is a parameter, as a decay for each head.
    """
    found = MIXERS[step.node.target.__name__]  # type: ignore[union-attr]
    for name, dim in found.tokens.items():
        if step.arguments.get(name) is not None:
            _require(step, name, dim if dim is not None and dim < len(shape_of(step[name])) else None)
    axes = _axes(len(shape_of(step[found.like])), found.tokens[found.like])
    return Value(axes) if found.state is None else (Value(axes),)


def _require(step: Step, name: str, dim: int | None) -> None:
    known = step.value(name)
    found = tuple(TOKENS if axis == BLANK else axis for axis in known.axes)
    if found != _axes(len(found), dim):
        raise Mixes(
            f"its {name} is not one for every token" if dim is not None else f"its {name} depends on the tokens"
        )
    if dim is not None and (dim == 0 or shape_of(step[name])[0] != 1):
        raise Mixes(f"its {name} has something else than one batch before its tokens")


def _axes(rank: int, dim: int | None) -> tuple[Axis | None, ...]:
    return tuple(TOKENS if at == dim else None for at in range(rank))
