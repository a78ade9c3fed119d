"""For which numbers of tokens T static values say the same, beyond those T at which they were evaluated.

Where T is the size of ranges, tables and masks alone, and every operator gives for a prefix of its arguments the prefix
of its result, a value at a token cannot change with T. A value in which T is more than a size might be another at one
single T: every T is tried. What masks say beyond all T that were tried follows from their operators.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from tree_compile.passes.nodes import ancestors, arguments, is_number_of_tokens, operator_name
from tree_compile.passes.probing import SMALL, constants, evaluate_if_possible, numbers
from tree_compile.passes.shapes import extent, is_size, is_tensor, shape_of, token_symbol


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_KEEP_PREFIXES = _names(
    "view reshape _unsafe_view unflatten expand expand_as view_as unsqueeze squeeze transpose permute movedim swapaxes "
    "t mT contiguous clone to _to_copy detach alias lift_fresh_copy stack repeat repeat_interleave view_as_real "
    "view_as_complex ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like scalar_tensor where "
    "masked_fill copy outer polar __and__ __or__ __xor__ floor_divide cumsum diff tril triu"
)
"""Unless T is one of their arguments, other than as a size. Operators that torch tags as pointwise need no entry."""
_PLAIN = _names(
    "arange sym_size add sub unsqueeze slice select expand view reshape permute transpose index to clone detach alias "
    "lift_fresh_copy le lt ge gt eq ne __and__ __or__ logical_and logical_or logical_not bitwise_and bitwise_or "
    "bitwise_not ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like scalar_tensor where "
    "masked_fill diff cumsum floor_divide tril triu"
)
"""Operators of masks that compare positions, moved by constants, with each other."""
_TAKE_PLACES = _names("le lt ge gt eq ne add sub floor_divide index cumsum diff")
MOST_DRIFT = 2
"""A value that moves with T is nowhere greater than at the greatest T by more than this factor."""
_WRAP_LATER = (torch.int16, torch.uint16)
"""Numbers of fewer bits wrap, or are rounded, before the greatest T at which a mask is evaluated."""
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
    """f of every size f * T or f * (T // m); -1 of any other that mentions T."""
    found = [extent(size, symbol) for size in shape_of(node)]
    return [-1 if one is None or one.fewer else one.factor for one in found]


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


# Every length


def say_the_same(graph_module: fx.GraphModule, nodes: set[fx.Node], tried: int) -> bool:
    """Whether masks made of `nodes` that look the same at all T up to `tried` look the same at every T.

    They compare positions with each other, and every constant in them is small against what was evaluated.
    """
    operators = [node for node in nodes if node.op == "call_function"]
    # Of numbers made from T itself, as by Python's own `+`, nothing is known, but for how many windows there are.
    if not all(_counts_windows(node) or _is_plain(node) for node in operators):
        return False
    buffers = [attrgetter(str(node.target))(graph_module) for node in nodes if node.op == "get_attr"]
    if any(not isinstance(buffer, Tensor) or buffer.numel() > 1 for buffer in buffers):
        return False
    divisors = {node.args[1] for node in operators if operator_name(node) == "floor_divide" or _counts_windows(node)}
    if any(isinstance(divisor, fx.Node) for divisor in divisors) or math.prod(divisors) > tried // 2:  # type: ignore[arg-type]
        return False
    moves = [node for node in operators if operator_name(node) in ("add", "sub")]
    if any("alpha" in node.kwargs for node in moves):
        return False
    moved = sum(abs(number) for node in moves for number in numbers(node.args) if abs(number) > SMALL)
    if any(node.meta["val"].dtype in _WRAP_LATER for node in operators if is_tensor(node)):
        return False
    places = constants(graph_module, nodes - _fills(operators))
    return 2 * moved < tried and all(2 * constant < tried for constant in places)


def _is_plain(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and operator_name(node) in _PLAIN


def _counts_windows(node: fx.Node) -> bool:
    """Whether it is T // m, as a size."""
    return node.target is operator.floordiv and is_size(node) and is_number_of_tokens(node.args[0])  # type: ignore[arg-type]


def _fills(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes whose numbers are values of a mask, not places: nothing computes or compares with them."""
    names = ("where", "masked_fill", "full", "new_full", "full_like", "scalar_tensor")
    places = ancestors({node for node in nodes if operator_name(node) in _TAKE_PLACES})
    return {node for node in nodes if operator_name(node) in names and node not in places}


def changed_at_some_length(
    graph_module: fx.GraphModule,
    nodes: set[fx.Node],
    longest: Mapping[fx.Node, Tensor],
    drifting: Container[fx.Node],
    greatest: int,
) -> set[fx.Node]:
    """Nodes with a value at a long T that say something else at some T up to `greatest`.

    Args:
        graph_module: the graph.
        nodes: its static nodes.
        longest: the nodes in question, each with its value at a T of at least `greatest`.
        drifting: those that may move as a whole.
        greatest: the greatest T to try.
    """
    symbol = token_symbol(graph_module.graph)
    changed: set[fx.Node] = set()
    for tokens in range(2, greatest + 1):
        for node, value in (evaluate_if_possible(graph_module, nodes, set(longest), tokens) or {}).items():
            dims = [dim for dim, factor in enumerate(_factors(node, symbol)) if factor == 1]
            same = (
                _only_moved(value, longest[node], dims[0])
                if node in drifting
                else is_prefix(value, longest[node], dims)
            )
            if not same:
                changed.add(node)
    return changed


def _only_moved(smaller: Tensor, larger: Tensor, dim: int) -> bool:
    """Whether a value is that at a greater T, moved as a whole, and not so far that it would matter beside a mask."""
    is_near = bool(smaller.abs().max() <= MOST_DRIFT * larger.abs().max())
    return is_near and same_steps(smaller, larger, dim)


def is_prefix(smaller: Tensor, larger: Tensor, dims: Sequence[int]) -> bool:
    """Whether a value at one T says what that at a greater T says, along the token dimensions `dims`."""
    for dim in dims:
        larger = larger.narrow(dim, 0, smaller.shape[dim])
    if torch.equal(smaller, larger):
        return True
    same_gaps = torch.equal(smaller.isnan(), larger.isnan())
    return same_gaps and bool((smaller.nan_to_num() == larger.nan_to_num()).all())


def same_steps(smaller: Tensor, larger: Tensor, dim: int) -> bool:
    """As `is_prefix`, for each value less its own first number along `dim`, up to rounding."""
    larger_start = larger.narrow(dim, 0, smaller.shape[dim])
    both = torch.stack([smaller, larger_start]).double()
    firsts = both.narrow(dim + 1, 0, 1)
    rounding = 2 * torch.finfo(smaller.dtype).eps * torch.maximum(both.abs(), firsts.abs()).amax(0)
    steps = both - firsts
    return bool(((steps[0] - steps[1]).abs() <= rounding).all())
