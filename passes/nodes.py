"""What every pass asks of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx


def operator_name(node: fx.Node) -> str:
    """What an operator or a function is looked up by: `add` for every overload of `aten::add`; "" for no call."""
    return _name(node).removeprefix("aten::")


def shown_name(node: fx.Node) -> str:
    """What an operator or a function is called in a message: `aten::add`."""
    return _name(node) or str(node.target)


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(getattr(node.target, "__name__", "") if schema is None else schema.name)


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema, defaults filled in.

    A function that has no schema has its keyword arguments here alone.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values |= {argument.name: given for argument, given in zip(schema.arguments, node.args, strict=False)}
    return values | dict(node.kwargs)


def ancestors(nodes: Iterable[fx.Node], ends: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """The nodes and all that they are made from; of those that `ends` is true for, themselves alone."""
    seen = set(nodes)
    stack = list(seen)
    while stack:
        node = stack.pop()
        sources = set() if ends(node) else {source for source in node.all_input_nodes if source not in seen}
        seen |= sources
        stack += sources
    return seen


def is_number_of_tokens(node: fx.Node) -> bool:
    """Whether the node is T, read off an input of the graph."""
    return node.target is torch.ops.aten.sym_size.int and node.args[0].op == "placeholder"  # type: ignore[union-attr]
