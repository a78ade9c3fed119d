"""The plan's tensors as inputs of a rewritten graph, and static tables gathered at the positions of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tree_compile.passes.nodes import is_number_of_tokens
from tree_compile.passes.static_values import StaticValues
from tree_compile.runtime.row_tree import RowTree
from tree_compile.runtime.tables import pair_at_positions
from tree_compile.runtime.window_attention import all_entries, nearest_rows

PLAN_INPUTS = ("plan_segments", "plan_position", "plan_subtree_end", "plan_length")
"""In this order: int64 CPU `[S, 5]`, int64 `[T]`, int64 `[T]`, and the number of tokens of the longest path."""

TREE_INPUTS = {
    "plan_parent": "parent",
    "plan_chunk_tokens": "chunk_tokens",
    "plan_chunk_place": "chunk_place",
    "plan_chunk_parent": "chunk_parent",
}
"""Behind them where a graph has layers that carry a state, with the fields of `RowTree` that they are."""

WINDOW_INPUT = "plan_windows_"
"""Behind those, where a graph pools windows of m tokens: `plan_windows_4_tokens`, with a field of `WindowTables`."""

_WINDOW_SHAPES = {"tokens": "Em", "previous": "E", "number": "E", "last": "T"}
"""The sizes of the fields that are on the device of the row; of the others nothing is asked."""

_PER_TOKEN = ("plan_position", "plan_subtree_end", "plan_parent", "plan_chunk_place")

OUTSIDE = "tree_compile_outside"
"""Meta key of nodes over positions 0 … plan_length - 1, which have no token axis."""


def add_plan_inputs(graph_module: fx.GraphModule) -> None:
    """Adds the plan's placeholders behind the inputs of a captured graph."""
    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last, per_token = placeholders[-1], placeholders[0].meta["val"][0]
    for name in (*PLAN_INPUTS, *TREE_INPUTS):
        with graph.inserting_after(last):
            last = graph.placeholder(name)
            last.meta[OUTSIDE] = True
            if name in _PER_TOKEN:
                last.meta["val"] = per_token


def window_input(graph: fx.Graph, window: int, field: str) -> fx.Node:
    """The placeholder of a field of the `WindowTables` for windows of `window` tokens; added where it is missing."""
    name = f"{WINDOW_INPUT}{window}_{field}"
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    found = next((node for node in placeholders if node.target == name), None)
    if found is None:
        with graph.inserting_after(placeholders[-1]):
            found = graph.placeholder(name)
        found.meta[OUTSIDE] = True
        if shape := _WINDOW_SHAPES.get(field):
            tokens = plan_input(graph, "plan_position").meta["val"]
            sizes = {"T": tokens.shape[0], "E": tokens.shape[0] // window, "m": window}
            found.meta["val"] = tokens.new_empty([sizes[letter] for letter in shape])
    return found


def window_inputs(graph: fx.Graph) -> tuple[tuple[int, str], ...]:
    """The fields of `WindowTables` that a graph reads, each with the tokens of its windows, in order."""
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    parts = [name.removeprefix(WINDOW_INPUT).split("_", 1) for name in names if name.startswith(WINDOW_INPUT)]
    return tuple((int(window), field) for window, field in parts)


def plan_input(graph: fx.Graph, name: str) -> fx.Node:
    """The placeholder `name`, one of PLAN_INPUTS or TREE_INPUTS."""
    return next(node for node in graph.nodes if node.op == "placeholder" and node.target == name)


def tree_inputs(graph: fx.Graph) -> RowTree:
    """The placeholders of the row's tree, in the place of its tensors."""
    nodes: dict[str, Any] = {field: plan_input(graph, name) for name, field in TREE_INPUTS.items()}
    return RowTree(**nodes, segments=plan_input(graph, "plan_segments"))  # type: ignore[arg-type]


def reads_tree(graph: fx.Graph) -> bool:
    """Whether a layer that carries a state reads the row's tree."""
    return any(plan_input(graph, name).users for name in TREE_INPUTS)


def remove_tree_inputs(graph: fx.Graph) -> None:
    """Removes the placeholders of the row's tree from a graph that does not read it."""
    for name in TREE_INPUTS:
        graph.erase_node(plan_input(graph, name))


class RowTables:
    """Puts static values into the layout of a row.

    A static value is computed for the positions 0 … plan_length - 1, as for one unpacked sequence, and gathered at
    every token's position. All of it stands at the top of the graph, once for all layers.
    """

    def __init__(self, graph_module: fx.GraphModule, statics: StaticValues) -> None:
        self._graph = graph_module.graph
        self._statics = statics
        self._copies: dict[fx.Node, fx.Node] = {}
        self._gathered: dict[tuple[fx.Node, int], fx.Node] = {}
        self._pairs: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._nearest: dict[int, fx.Node] = {}
        self._entries: dict[int, fx.Node] = {}
        self._top = self._first_operation()

    @property
    def has_pairs(self) -> bool:
        """Whether a pair table is written out as T x T."""
        return bool(self._pairs)

    def _first_operation(self) -> fx.Node:
        return next(node for node in self._graph.nodes if node.op in ("call_function", "output"))

    def at_positions(self, node: fx.Node, dim: int) -> fx.Node:
        """The table `node`, whose token dimension is `dim`, at the position of every token of the row."""
        if (node, dim) not in self._gathered:
            self._gathered[node, dim] = self._gather(node, dim)
        return self._gathered[node, dim]

    def _gather(self, node: fx.Node, dim: int) -> fx.Node:
        table = self._copy(node)
        gathered = self._insert(torch.ops.aten.index_select.default, table, dim, self._position())
        return self._described(gathered, node)

    def at_windows(self, node: fx.Node, dim: int, window: int) -> fx.Node:
        """The table `node`, whose dimension `dim` of T // window goes along windows, at the number of every entry."""
        if (node, dim) not in self._gathered:
            number = window_input(self._graph, window, "number")
            gathered = self._insert(torch.ops.aten.index_select.default, self._copy(node), dim, number)
            self._gathered[node, dim] = self._described(gathered, node)
        return self._gathered[node, dim]

    def nearest(self, window: int) -> fx.Node:
        """Each token and the tokens before it, `window` in all: int32 `[T, window]`."""
        if window not in self._nearest:
            segments = plan_input(self._graph, "plan_segments")
            self._nearest[window] = self._insert(nearest_rows, segments, self._position(), window)
        return self._nearest[window]

    def all_entries(self, window: int) -> fx.Node:
        """All entries that each token sees, for windows of `window` tokens: int32 `[1, T, n]`."""
        if window not in self._entries:
            plan = [window_input(self._graph, window, name) for name in ("path", "last")]
            self._entries[window] = self._insert(all_entries, *plan)
        return self._entries[window]

    def positions(self, node: fx.Node, dim: int, first: int) -> fx.Node:
        """The integers `first + position` in the shape and dtype of `node`, whose token dimension is `dim`."""
        if (node, dim) not in self._gathered:
            shape = [1] * node.meta["val"].dim()
            shape[dim] = -1
            value = self._position()
            if len(shape) > 1:
                value = self._insert(torch.ops.aten.view.default, value, shape)
            if first:
                value = self._insert(torch.ops.aten.add.Tensor, value, first)
            if node.meta["val"].dtype != torch.int64:
                value = self._insert(torch.ops.aten.to.dtype, value, node.meta["val"].dtype)
            self._gathered[node, dim] = self._described(value, node)
        return self._gathered[node, dim]

    def pair(self, node: fx.Node, hides: bool) -> fx.Node:
        """The pair table `node` for all pairs of the row's tokens, as a bias: floating `[heads, T, T]`."""
        if (node, hides) not in self._pairs:
            self._pairs[node, hides] = self._insert(pair_at_positions, self._copy(node), self._position(), hides)
        return self._pairs[node, hides]

    def pairs(self, tables: Sequence[tuple[fx.Node, bool]]) -> fx.Node:
        """The sum of several pair tables, each with whether it hides, as `pair`."""
        total, *others = (self.pair(node, hides) for node, hides in tables)
        for other in others:
            total = self._insert(torch.ops.aten.add.Tensor, total, other)
        return total

    def slopes(self, slopes: torch.Tensor, dtype: torch.dtype) -> fx.Node:
        """The bias `slope * position` of every head, `[heads, T]`, for queries and keys of `dtype`."""
        # The model's own bias is near 0 where it counts; positions in half precision would be rounded to fours.
        dtype = torch.promote_types(dtype, torch.float32)
        column = self._insert(torch.tensor, [[slope] for slope in slopes.tolist()], dtype=dtype, device=slopes.device)
        return self._insert(torch.ops.aten.mul.Tensor, column, self._position())

    def _position(self) -> fx.Node:
        return plan_input(self._graph, "plan_position")

    def _copy(self, node: fx.Node) -> fx.Node:
        """`node` and all that it depends on, computed for plan_length tokens."""
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [source for source in current.all_input_nodes if source not in self._copies]
            if is_number_of_tokens(current):
                self._copies[current] = plan_input(self._graph, "plan_length")
            elif current.op == "get_attr":
                self._copies[current] = current
            elif missing:
                stack.extend(missing)
                continue
            else:
                self._copies[current] = self._copy_one(current)
            stack.pop()
        return self._copies[node]

    def _copy_one(self, node: fx.Node) -> fx.Node:
        with self._graph.inserting_before(self._top):
            copy = self._graph.node_copy(node, lambda source: self._copies[source])
        copy.meta[OUTSIDE] = True
        copy.meta.pop("nn_module_stack", None)
        return copy

    def _insert(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_before(self._top):
            node = self._graph.call_function(target, args, kwargs)
        node.meta[OUTSIDE] = True
        return node

    def _described(self, node: fx.Node, original: fx.Node) -> fx.Node:
        node.meta.update(val=original.meta["val"], stack_trace=original.meta.get("stack_trace"))
        return node
