"""In-place operations become functional ones, so that every later stage sees values that never change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tree_compile.errors import TokenMixingError
from tree_compile.passes.report import PassReport
from tree_compile.passes.source import source_line

_ASSERTS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
_MAYBE_VIEWS = {
    torch.ops.aten.contiguous.default,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.device,
    torch.ops.aten.type_as.default,
    torch.ops.aten.reshape.default,
}
"""The value may be the first argument itself, or a copy of it."""
_SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


@dataclass(frozen=True)
class Functionalize:
    """Removes export's assertions and replaces writes into tensors by new values.

    A write into a slice or a row of a tensor becomes a `slice_scatter` or `select_scatter`; torch's own
    functionalization is not used, since it also decomposes the operators that training needs whole.
    """

    name: str = field(default="functional", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> PassReport:
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and _operator_name(node) in _ASSERTS:
                graph.erase_node(node)
        for node in list(graph.nodes):
            if node.op == "call_function" and writes(node):
                _replace_write(graph, node)
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.type_as.default:
                # The other tensor gives its dtype alone; its values are of no use.
                node.target, node.args = torch.ops.aten.to.dtype, (node.args[0], node.meta["val"].dtype)
        return PassReport(self.name, ())


def _operator_name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def writes(node: fx.Node) -> bool:
    """Whether the node changes one of its arguments in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether the node's value always shares memory with its first argument."""
    if node.target in _MAYBE_VIEWS:
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns or not node.args:
        return False
    aliases = schema.arguments[0].alias_info
    return aliases is not None and not aliases.is_write


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _replace_write(graph: fx.Graph, node: fx.Node) -> None:
    written = node.args[0]
    assert isinstance(written, fx.Node)
    root = _root(written)
    if root.op != "call_function":
        raise _refusal(node, "it writes into a parameter, a buffer or an input of the model")
    with graph.inserting_before(node):
        value = _functional(graph, node)
        value.meta = dict(node.meta)
        whole = value if written is root else _written_back(graph, node, value, written, root)
    later = _later(node)
    _require_no_other_views(node, root, written, later)
    _require_source_unused(node, root, later)
    for old, new in {root: whole, written: value}.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later and user is not node)
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    target: Any = node.target
    packet = getattr(torch.ops.aten, target._opname.removesuffix("_"), None)
    if target._opname == "copy_":
        return _copied(graph, node)
    overload = getattr(packet, target._overloadname, None) if packet is not None else None
    if overload is None or target.namespace != "aten" or not target._opname.endswith("_"):
        raise _refusal(node, "it changes a tensor in place, and has no form that does not")
    return graph.call_function(overload, node.args, node.kwargs)


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What `copy_` leaves behind: its source in the shape and dtype of its target (`aten.copy` has no derivative)."""
    written, source, *_ = node.args
    same = graph.call_function(torch.ops.aten.expand_as.default, (source, written))
    same.meta = dict(node.meta)
    return graph.call_function(torch.ops.aten.type_as.default, (same, written))


def _written_back(graph: fx.Graph, node: fx.Node, value: fx.Node, written: fx.Node, root: fx.Node) -> fx.Node:
    """The whole tensor `root` after `value` was written through the view `written` of it."""
    if not any(user in _later(node) for user in _aliases(root) if user is not written):
        users_later = [user for user in root.users if user in _later(node)]
        if not users_later:
            return value
    scatter = _SCATTERS.get(written.target)  # type: ignore[call-overload]
    if scatter is None or written.args[0] is not root:
        raise _refusal(node, "it changes a part of a tensor in place")
    whole = graph.call_function(scatter, (root, value, *written.args[1:]))
    whole.meta = dict(root.meta)
    return whole


def _aliases(root: fx.Node) -> Iterator[fx.Node]:
    """Views of `root`, and views of those."""
    stack = list(root.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and _is_view(user) and user.args[0] is not None and _root(user) is root:
            yield user
            stack.extend(user.users)


def _later(node: fx.Node) -> set[fx.Node]:
    later, current = set(), node.next
    while current.op != "root":
        later.add(current)
        current = current.next
    return later


def _require_no_other_views(node: fx.Node, root: fx.Node, written: fx.Node, later: set[fx.Node]) -> None:
    for alias in _aliases(root):
        made_before = alias not in later and alias is not written and alias is not node
        if made_before and any(user in later for user in alias.users):
            raise _refusal(node, "another view of the tensor that it changes is used afterwards")


def _require_source_unused(node: fx.Node, root: fx.Node, later: set[fx.Node]) -> None:
    """What `root` may be a copy of must not be read any more, since the write may or may not reach it."""
    while root.target in _MAYBE_VIEWS:
        source: Any = root.args[0]
        root = _root(source)
        users = {*root.users, *(user for alias in _aliases(root) for user in alias.users)}
        if root.op != "call_function" or any(user in later for user in users):
            raise _refusal(node, "it changes a tensor in place that may share memory with another")


def _refusal(node: fx.Node, why: str) -> TokenMixingError:
    return TokenMixingError(
        f"The operation {_operator_name(node)} cannot be followed.",
        where=source_line(node),
        why=why + ".",
        hint="write it without in-place operations.",
    )
