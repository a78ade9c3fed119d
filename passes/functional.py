"""In-place operations become functional ones, so that every later stage sees values that never change."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_batchedtensor

from tree_compile.errors import LengthDependentError, TokenMixingError
from tree_compile.passes.draws import draws
from tree_compile.passes.finding import Finding
from tree_compile.passes.nodes import ancestors, operator_name, shown_name
from tree_compile.passes.shapes import call, size_expression
from tree_compile.passes.source import source_line

_ASSERTS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
_INACTIVE_COPIES = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
}
"""The model gets the first argument itself from these where they do nothing; in a capture it gets a copy."""
_POWERS = {
    (name, overload): f"Tensor_{overload}" for name in ("pow", "float_power") for overload in ("Scalar", "Tensor")
}
"""Operators whose overloads are called otherwise in place, by name and overload."""
_OPERATORS = {"__ior__": "bitwise_or", "__iand__": "bitwise_and", "__ixor__": "bitwise_xor"}
_ALIASES: dict[Any, Any] = dict.fromkeys(
    (torch.ops.aten.concat.default, torch.ops.aten.concatenate.default), torch.ops.aten.cat.default
)
"""Other names of an operator, of which later stages know one."""
_SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


@dataclass(frozen=True)
class Functionalize:
    """Removes export's assertions and other names of operators, and replaces writes into tensors by new values.

    A write into a slice or a row of a tensor becomes a `slice_scatter` or `select_scatter`; torch's own
    functionalization is not used, since it also decomposes the operators that training needs whole.
    """

    name: str = field(default="functional", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        graph = graph_module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and operator_name(node) in _ASSERTS:
                graph.erase_node(node)
        memory = _Memory(graph)
        for node in list(graph.nodes):
            if node.op == "call_function" and writes(node):
                _replace_write(graph, node, memory)
        for node in list(graph.nodes):
            node.target = _ALIASES.get(node.target, node.target)
            if node.target is torch.ops.aten.type_as.default:
                # The other tensor gives its dtype alone; its values are of no use.
                node.target, node.args = torch.ops.aten.to.dtype, (node.args[0], node.meta["val"].dtype)
        return ()


def writes(node: fx.Node) -> bool:
    """Whether the node changes one of its arguments in place."""
    schema = _schema(node)
    return schema is not None and schema.is_mutable


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


class _Memory:
    """Which nodes share memory, as they did while the model was traced.

    The fake tensors of a capture have fake storages: two tensors share one exactly where the model's do.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._nodes: dict[int, list[fx.Node]] = {}
        self._same: dict[int, int] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        """For each new value of a part the view that it is a value of."""
        for node in graph.nodes:
            for storage in () if _is_only_copied(node) else storages(node):
                self._nodes.setdefault(self._place(storage), []).append(node)
            if node.target in _INACTIVE_COPIES and not draws(node) and [*storages(node)]:
                self._unite(node, node.args[0])

    def _unite(self, first: fx.Node, second: Any) -> None:
        one, other = (self._place(next(storages(node))) for node in (first, second))
        if one != other:
            self._same[one] = other
            self._nodes[other] = sorted(self._nodes[other] + self._nodes.pop(one))

    def _place(self, storage: int) -> int:
        while storage in self._same:
            storage = self._same[storage]
        return storage

    def sharing(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that share memory with `node`, in order; the first stands for the whole of that memory."""
        return self._nodes[self._place(next(storages(node)))]

    def source(self, view: fx.Node) -> fx.Node | None:
        """What a view was taken of."""
        taken_of = view.args[0] if view.args else None
        return self.views.get(taken_of, taken_of) if isinstance(taken_of, fx.Node) else None

    def rewritten(self, old: fx.Node, whole: fx.Node, parts: Sequence[fx.Node]) -> None:
        """From now on `whole` stands for the whole of the memory of `old`, and `parts` are parts of it."""
        nodes = self.sharing(old)
        nodes[:] = [whole, *(node for node in nodes if node is not whole), *parts]


def _is_only_copied(node: fx.Node) -> bool:
    """Whether `node` is a constant of the model's code, which the model copies before it does anything else with it."""
    return node.op == "get_attr" and all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)


def storages(node: fx.Node) -> Iterator[int]:
    """The memory that each tensor of the node's value had while the model was traced."""
    value = node.meta.get("val")
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        # The tensors inside of torch.vmap have no storage of their own; the proof refuses them.
        if isinstance(tensor, Tensor) and not is_batchedtensor(tensor):
            yield tensor.untyped_storage()._cdata


def _replace_write(graph: fx.Graph, node: fx.Node, memory: _Memory) -> None:
    written = _written(node)
    sharing = memory.sharing(written)
    if any(other.op != "call_function" for other in sharing):
        if _comes_from_length(node.args[1:]):
            raise _length_dependent(node)
        raise _lasting(node)
    later = _later(node)
    earlier = [other for other in sharing if other not in later and other is not node]
    wholes = [other for other in earlier if _is_same_view(other, sharing[0])]
    read_later = [other for other in earlier if any(user in later for user in other.users)]
    with graph.inserting_before(node):
        value = _functional(graph, node)
        is_part = written not in wholes and any(other is not written for other in read_later)
        whole = _written_back(graph, node, value, wholes, memory) if is_part else value
        changed = {**dict.fromkeys(wholes, whole), written: value}
        stale = [view for view in read_later if view not in changed]
        views = {view: _view_again(graph, node, view, changed, memory) for view in stale}
    for old, new in {**changed, **views}.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
    node.replace_all_uses_with(value)
    graph.erase_node(node)
    memory.rewritten(written, whole, [*views.values(), value])
    memory.views[value] = memory.views.get(written, written)


def _comes_from_length(arguments: Any) -> bool:
    """Whether the arguments are made from the number of tokens, and not from the tokens themselves."""
    nodes = [argument for argument in arguments if isinstance(argument, fx.Node)]
    found = ancestors(nodes, ends=_reads_a_size)
    return any(_reads_a_size(node) for node in found) and all(node.op != "placeholder" for node in found)


def _reads_a_size(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int


def _written(node: fx.Node) -> fx.Node:
    """The tensor that `node` changes, which must be its first argument alone."""
    changed = [argument.alias_info is not None and argument.alias_info.is_write for argument in _schema(node).arguments]
    written = node.args[0] if node.args else None
    if not changed[0] or any(changed[1:]) or not isinstance(written, fx.Node) or len(list(storages(written))) != 1:
        raise _refusal(node, "it changes more than one tensor in place")
    return written


def _functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What `node` leaves in the tensor that it changes."""
    target: Any = node.target
    if target._opname == "copy_":
        value = _copied(graph, node)
    else:
        name = _OPERATORS.get(target._opname, target._opname.removesuffix("_"))
        packet = getattr(torch.ops.aten, name, None)
        overload = getattr(packet, _POWERS.get((name, target._overloadname), target._overloadname), None)
        if overload is None or target.namespace != "aten" or name == target._opname:
            raise _refusal(node, "it changes a tensor in place, and has no form that does not")
        value = call(graph, overload, node.args, node.meta, **node.kwargs)
    dtype = node.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = call(graph, torch.ops.aten.to.dtype, (value, dtype), node.meta)
    value.meta = dict(node.meta)
    return value


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """What `copy_` leaves behind: its source in the shape and dtype of its target (`aten.copy` has no derivative)."""
    written, source, *_ = node.args
    return call(graph, torch.ops.aten.expand_as.default, (source, written), node.meta)


def _is_same_view(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes that share memory are one and the same tensor, as `x` and `x.contiguous()` may be.

    A detached tensor is not: a write through it changes the values, and not the gradient.
    """
    if node is not other and torch.ops.aten.detach.default in (node.target, other.target):
        return False
    first, second = node.meta["val"], other.meta["val"]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dtype != second.dtype:
        return False
    layouts = [(*value.shape, *value.stride(), value.storage_offset()) for value in (first, second)]
    return [size_expression(number) for number in layouts[0]] == [size_expression(number) for number in layouts[1]]


def _written_back(
    graph: fx.Graph, node: fx.Node, value: fx.Node, wholes: Sequence[fx.Node], memory: _Memory
) -> fx.Node:
    """The whole tensor after `value` was written through a view of it, or a view of a view."""
    chain = _chain(node.args[0], wholes, memory)  # type: ignore[arg-type]
    if chain is not None and any(view.target is torch.ops.aten.detach.default for view in chain):
        raise _refusal(node, "it changes a detached tensor: its values change and its gradient does not")
    if chain is None or any(view.target not in _SCATTERS for view in chain):
        raise _refusal(node, "it changes a part of a tensor in place")
    parents = [wholes[0]]
    for view in chain[:0:-1]:
        parents.append(_again(graph, view, parents[-1]))
    for view, parent in zip(chain, reversed(parents), strict=True):
        scatter = _SCATTERS[view.target]  # type: ignore[index]
        value = graph.call_function(scatter, (parent, value, *view.args[1:]))
        value.meta = dict(parent.meta)
    return value


def _view_again(
    graph: fx.Graph, node: fx.Node, view: fx.Node, changed: Mapping[fx.Node, fx.Node], memory: _Memory
) -> fx.Node:
    """A view that was taken before `node` writes, taken of what the memory holds afterwards."""
    chain = _chain(view, changed, memory)
    if chain is None or not all(map(_is_view, chain)):
        raise _refusal(node, "another view of the tensor that it changes is used afterwards")
    source = memory.source(chain[-1]) if chain else memory.views.get(view, view)
    current = changed[source]  # type: ignore[index]
    for step in reversed(chain):
        current = _again(graph, step, current)
    return current


def _chain(view: fx.Node, ends: Container[fx.Node], memory: _Memory) -> list[fx.Node] | None:
    """The views from `view` up to one of `ends`, without that; None where something else comes before."""
    chain: list[fx.Node] = []
    current: Any = memory.views.get(view, view)
    while current not in ends:
        chain.append(current)
        current = memory.source(current)
        if current is None:
            return None
    return chain


def _again(graph: fx.Graph, view: fx.Node, source: fx.Node) -> fx.Node:
    again = graph.create_node(view.op, view.target, (source, *view.args[1:]), view.kwargs)
    again.meta = dict(view.meta)
    return again


def _is_view(node: fx.Node) -> bool:
    """Whether the node's operator gives its first argument back in another form, whatever its memory."""
    if node.target in _INACTIVE_COPIES or node.target is operator.getitem:
        return True
    schema = _schema(node)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return aliases and not schema.is_mutable and node.target is not torch.ops.aten.as_strided.default


def _later(node: fx.Node) -> set[fx.Node]:
    later, current = set(), node.next
    while current.op != "root":
        later.add(current)
        current = current.next
    return later


def _length_dependent(node: fx.Node) -> LengthDependentError:
    return LengthDependentError(
        "The model changes a buffer by the number of tokens.",
        where=source_line(node),
        why="it would not be the same for a prefix alone, so sequences of different lengths cannot share a prefix.",
        hint="for a rotary embedding that switches on the sequence's length (longrope, dynamic), choose a fixed one.",
    )


def _lasting(node: fx.Node) -> TokenMixingError:
    hint = (
        "write it without in-place operations; what a call counts belongs into the training loop, such as the tokens "
        "of every expert: losses.expert_counts(out, top_k=…)."
    )
    return _refusal(node, "it writes into a parameter, a buffer or an input of the model", hint)


def _refusal(node: fx.Node, why: str, hint: str = "write it without in-place operations.") -> TokenMixingError:
    return TokenMixingError(
        f"The operation {shown_name(node)} cannot be followed.", where=source_line(node), why=why + ".", hint=hint
    )
