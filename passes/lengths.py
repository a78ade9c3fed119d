"""Static values that might be others at one single number of tokens T: those in which T is more than a size.

Where T is the size of ranges, tables and masks alone, and every operator gives for a prefix of its arguments the prefix
of its result, a value at a token cannot change with T.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.nodes import ancestors, arguments, operator_name
from tree_compile.passes.shapes import is_size, is_tensor, shape_of, token_factor


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_KEEP_PREFIXES = _names(
    "view reshape _unsafe_view unflatten expand expand_as view_as unsqueeze squeeze transpose permute movedim swapaxes "
    "t mT contiguous clone to _to_copy detach alias lift_fresh_copy stack repeat repeat_interleave view_as_real "
    "view_as_complex ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like scalar_tensor where "
    "masked_fill copy outer polar __and__ __or__ __xor__ floor_divide cumsum diff tril triu"
)
"""Unless T is one of their arguments, other than as a size. Operators that torch tags as pointwise need no entry."""
_PICK_ROWS = _names("index embedding index_select gather")
_COUNT = _names("arange sym_size unsqueeze expand view reshape slice clone to detach alias ones cumsum")
_PARTS = _names("split split_with_sizes chunk unbind")


def that_may_change(graph: fx.Graph, static: Iterable[fx.Node], symbol: sympy.Symbol) -> set[fx.Node]:
    """The static nodes that might be others at one single T, and those that are made from them."""
    static, found = set(static), set[fx.Node]()
    for node in graph.nodes:
        if node in static and node.op == "call_function":
            is_made_from_one = not found.isdisjoint(node.all_input_nodes)
            if is_made_from_one or (is_tensor(node) and not _keeps_prefixes(node, symbol)):
                found.add(node)
    return found


def _keeps_prefixes(node: fx.Node, symbol: sympy.Symbol) -> bool:
    name = operator_name(node)
    if any(factor not in (0, 1) for factor in _factors(node, symbol)):
        return False
    if name in _RULES:
        return _RULES[name](node, symbol)
    if any(is_size(argument) for argument in (*node.args, *node.kwargs.values())):
        return False
    return name in _KEEP_PREFIXES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _factors(node: Any, symbol: sympy.Symbol) -> list[int]:
    return [token_factor(size, symbol) for size in shape_of(node)]


def _range_from_a_constant(node: fx.Node, _symbol: sympy.Symbol) -> bool:
    given = arguments(node)
    return not any(is_size(given.get(name)) for name in ("start", "step"))


def _part_from_the_front(node: fx.Node, _symbol: sympy.Symbol) -> bool:
    given = arguments(node)
    start, end = given["start"], given.get("end")
    is_from_the_front = start is None or (isinstance(start, int) and start >= 0)
    return is_from_the_front and not (isinstance(end, int) and end < 0) and not is_size(given.get("step"))


def _one_from_the_front(node: fx.Node, _symbol: sympy.Symbol) -> bool:
    index = arguments(node)["index"]
    return isinstance(index, int) and index >= 0


def _rows_by_number(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Rows of a table, or of T rows by numbers that are never counted from the end."""
    table, *numbers = node.all_input_nodes
    return not any(_factors(table, symbol)) or all(_counts_up(number) for number in numbers)


def _counts_up(node: fx.Node) -> bool:
    return all(
        source.op == "placeholder" or operator_name(source) in _COUNT or _adds_a_count(source)
        for source in ancestors([node])
    )


def _adds_a_count(node: fx.Node) -> bool:
    added: Any = node.args[1] if operator_name(node) == "add" else None
    return isinstance(added, int) and added >= 0 and not node.kwargs


def _joined(node: fx.Node, symbol: sympy.Symbol) -> bool:
    return _factors(node, symbol)[arguments(node)["dim"]] == 0


def _taken_apart(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """A part of a tensor that was split along something else than the tokens."""
    source: Any = node.args[0]
    if operator_name(source) not in _PARTS or any(is_size(argument) for argument in source.args):
        return False
    return _factors(source.args[0], symbol)[arguments(source)["dim"]] == 0


def _product(node: fx.Node, symbol: sympy.Symbol) -> bool:
    left, right = (_factors(operand, symbol) for operand in node.args[:2])
    return left[-1] == 0 and right[-2:][0] == 0


_RULES: dict[str, Callable[[fx.Node, sympy.Symbol], bool]] = {
    "arange": _range_from_a_constant,
    "slice": _part_from_the_front,
    "narrow": _part_from_the_front,
    "select": _one_from_the_front,
    "cat": _joined,
    operator.getitem.__name__: _taken_apart,
    "matmul": _product,
    "bmm": _product,
    "mm": _product,
    **dict.fromkeys(_PICK_ROWS, _rows_by_number),
}
