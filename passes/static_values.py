"""Static values: what depends on T, constants and buffers alone, and what such a value means.

A static value is classified by its values, never by the operations that made it: the static part of the graph is run
at several numbers of tokens, below and above every constant that occurs in it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from tree_compile.passes.lengths import that_may_change
from tree_compile.passes.random import draws
from tree_compile.passes.shapes import is_tensor, shape_of, token_factor, token_symbol

GREATEST_PAIR = 8_200
"""Greatest T at which a value with two token dimensions is evaluated: 67 MB as booleans."""
GREATEST_TABLE = 1 << 21
FIRST_REACH = 1_024
"""Greatest T that a first classification holds for, at least; `find_static_values` can be asked for more."""
_SIZES = (2, 3, 5, 8, 13, 41)
_SENTINEL = 1 << 40
"""Numbers from here on mean "to the end" in slices."""
_SMALL_BUFFER = 64


@dataclass(frozen=True)
class Fixed:
    """The same `value` at every T; no dimension mentions T."""

    value: Tensor


@dataclass(frozen=True)
class Fill:
    """The same for all tokens: `value`, with token dimensions of size one."""

    value: Tensor


@dataclass(frozen=True)
class Table:
    """f(t) along `dim`: the value at a token depends on its position alone.

    `first` is set where the value is the integer `first + t`; `greatest` is the greatest absolute value that was seen.
    """

    dim: int
    first: int | None = None
    greatest: float = 0.0


@dataclass(frozen=True)
class Drifting:
    """f(t) + c(T) along `dim`: a table, up to a number for all tokens that changes with T.

    A bias per key may be one, counted from the end of the sequence: softmax does not see c. `greatest` is the greatest
    absolute value that was seen.
    """

    dim: int
    greatest: float = 0.0


@dataclass(frozen=True)
class Pair:
    """f(q, k): dimension -2 is the query, -1 the key. `samples` are its values at growing T."""

    samples: tuple[Tensor, ...]


@dataclass(frozen=True)
class Numbering:
    """A value over several entries per token; it can only number rows, which the token-axis proof decides."""


@dataclass(frozen=True)
class LengthDependent:
    """The value at a token changes with T."""

    why: str


Kind = Fixed | Fill | Table | Drifting | Pair | Numbering | LengthDependent


@dataclass(frozen=True)
class StaticValues:
    """The static part of a graph.

    Attributes:
        nodes: every static node.
        kinds: what each static tensor means that a node outside the static part uses.
        proved_length: greatest number of tokens that the classification holds for, None for no limit.
    """

    nodes: frozenset[fx.Node]
    kinds: Mapping[fx.Node, Kind]
    proved_length: int | None


def find_static_values(
    graph_module: fx.GraphModule, longest: int | None = None, reach: int = FIRST_REACH
) -> StaticValues:
    """Finds and classifies the static values of a captured graph (without in-place operations).

    Args:
        graph_module: the graph. The shapes of static values that only look as if they depended on T in some other way
            are written as what they are.
        longest: the greatest T that the graph holds for; None where there is no limit.
        reach: the T up to which values are evaluated at least, whichever constants occur in the graph.
    """
    symbol = token_symbol(graph_module.graph)
    nodes = static_nodes(graph_module)
    frontier = _shared_frontier(graph_module.graph, nodes, symbol)
    wide = {node for node in frontier if sum(token_factor(size, symbol) != 0 for size in shape_of(node)) > 1}
    may_change = that_may_change(graph_module.graph, nodes, symbol)
    kinds: dict[fx.Node, Kind] = {}
    proved: list[int] = []
    for group, greatest in ((wide, GREATEST_PAIR), (frontier - wide, GREATEST_TABLE)):
        samples, tokens = _samples(graph_module, nodes, group, greatest, longest, reach)
        settled = group is wide and tokens == GREATEST_PAIR and _is_plain(graph_module, _ancestors(group))
        if group and tokens != longest and not settled:
            proved.append(tokens)
        for node in group:
            _write_shape(node, samples[node], symbol)
            kinds[node] = _classify(node, list(samples[node].values()), symbol)
        unsure = {
            node: samples[node][tokens]
            for node in group & may_change
            if not isinstance(kinds[node], (Numbering, LengthDependent))
        }
        if unsure:
            proved.append(min(tokens, reach))
            for node in _changed_at_some_length(graph_module, nodes, kinds, unsure, proved[-1]):
                kinds[node] = LengthDependent(_CHANGES)
    ordered = {node: kinds[node] for node in graph_module.graph.nodes if node in kinds}
    return StaticValues(frozenset(nodes), ordered, min(proved, default=None))


def static_nodes(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on T, constants and buffers alone."""
    static: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            is_static = not isinstance(attrgetter(str(node.target))(graph_module), nn.Parameter)
        elif node.op == "call_function":
            is_static = _is_size_of_input(node) or (
                all(source in static for source in node.all_input_nodes) and not draws(node)
            )
        else:
            is_static = False
        if is_static:
            static.add(node)
    return static


def evaluate(
    graph_module: fx.GraphModule, nodes: set[fx.Node] | frozenset[fx.Node], wanted: Iterable[fx.Node], tokens: int
) -> dict[fx.Node, Any]:
    """Values of the static nodes `wanted` at T = `tokens`."""
    wanted = set(wanted)
    needed = _ancestors(wanted)
    remaining = {node: sum(user in needed for user in node.users) for node in needed}
    values: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node not in needed or node not in nodes:
            continue
        values[node] = _value(graph_module, node, values, tokens)
        for source in node.all_input_nodes:
            remaining[source] -= 1
            if remaining[source] == 0 and source not in wanted:
                values.pop(source, None)
    return {node: values[node] for node in wanted}


def _value(graph_module: fx.GraphModule, node: fx.Node, values: Mapping[fx.Node, Any], tokens: int) -> Any:
    if node.op == "get_attr":
        return attrgetter(str(node.target))(graph_module)
    if _is_size_of_input(node):
        return tokens
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source])
    with torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _ancestors(nodes: set[fx.Node]) -> set[fx.Node]:
    seen, stack = set(nodes), list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return seen


def _frontier(graph: fx.Graph, static: set[fx.Node]) -> set[fx.Node]:
    return {
        node
        for node in graph.nodes
        if node in static
        and node.op == "call_function"
        and is_tensor(node)
        and any(user not in static for user in node.users)
    }


def _shared_frontier(graph: fx.Graph, static: set[fx.Node], symbol: Any) -> set[fx.Node]:
    """The frontier, once the reshaping that every layer does for itself is taken out of `static`.

    Every layer unsqueezes the same rotary table: what is gathered should be the table, once.
    """
    while True:
        frontier = _frontier(graph, static)
        reshaping = {node for node in frontier if static.isdisjoint(node.users) and _reshapes_a_table(node, symbol)}
        if not reshaping:
            return frontier
        static -= reshaping


def _reshapes_a_table(node: fx.Node, symbol: Any) -> bool:
    """Whether `node` is a view of a table f(t) that is a table again, with all its tokens."""
    if node.target not in (torch.ops.aten.unsqueeze.default, torch.ops.aten.slice.Tensor):
        return False
    source: Any = node.args[0]
    before, after = ([token_factor(size, symbol) for size in shape_of(value)] for value in (source, node))
    if source.op != "call_function" or any(sorted(set(factors)) not in ([1], [0, 1]) for factors in (before, after)):
        return False
    if before.count(1) != 1 or after.count(1) != 1:
        return False
    cut: Any = node.args[1]
    return node.target is torch.ops.aten.unsqueeze.default or cut % len(before) != before.index(1)


def _is_size_of_input(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.sym_size.int and node.args[0].op == "placeholder"  # type: ignore[union-attr]


# Probing


def _constants(graph_module: fx.GraphModule, nodes: set[fx.Node]) -> list[int]:
    """Whole numbers that occur in the given nodes: windows, chunks, lengths at which something switches."""
    found: set[int] = set()
    for node in nodes:
        numbers = [*_numbers(node.args), *_numbers(tuple(node.kwargs.values()))]
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(graph_module)
            if isinstance(value, Tensor) and value.numel() <= _SMALL_BUFFER and not value.is_complex():
                numbers += [number for number in value.flatten().tolist() if math.isfinite(number)]
        found |= {abs(int(number)) for number in numbers if abs(number) < _SENTINEL}
    return sorted(number for number in found if number > 2)


def _numbers(args: Any) -> Iterable[int | float]:
    for arg in args if isinstance(args, (tuple, list)) else (args,):
        if isinstance(arg, (tuple, list)):
            yield from _numbers(arg)
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == arg and abs(arg) != float("inf"):
            yield arg


def _probe_sizes(constants: Sequence[int], greatest: int, reach: int) -> list[int]:
    small = [c + step for c in constants if c <= 512 for step in (-1, 0, 1, 2)]
    large = [c + 1 for c in constants if c > 512]
    double = [2 * c + 1 for c in constants]
    return sorted({size for size in (*_SIZES, *small, *large, *double, min(reach, greatest)) if 2 <= size <= greatest})


def _samples(
    graph_module: fx.GraphModule,
    nodes: set[fx.Node],
    wanted: set[fx.Node],
    greatest: int,
    longest: int | None,
    reach: int,
) -> tuple[dict[fx.Node, dict[int, Tensor]], int]:
    """The values of every wanted node, by number of tokens; and the T up to which there are values."""
    samples: dict[fx.Node, dict[int, Tensor]] = {node: {} for node in wanted}
    constants = _constants(graph_module, _ancestors(wanted))
    done = 0
    for tokens in _probe_sizes(constants, min(greatest, longest or greatest), reach) if wanted else ():
        values = evaluate_if_possible(graph_module, nodes, wanted, tokens)
        done = tokens if values is not None else _last_possible(graph_module, nodes, wanted, done, tokens)
        if values is None and done:
            values = evaluate(graph_module, nodes, wanted, done)
        for node, value in (values or {}).items():
            samples[node][done] = value
        if done != tokens:
            break
    return samples, done


def evaluate_if_possible(
    graph_module: fx.GraphModule, nodes: set[fx.Node], wanted: set[fx.Node], tokens: int
) -> dict[fx.Node, Tensor] | None:
    """None where a buffer ends before `tokens` (a mask of `max_length` rows, say)."""
    try:
        return evaluate(graph_module, nodes, wanted, tokens)
    except (IndexError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error):
            raise
        return None


def _last_possible(
    graph_module: fx.GraphModule, nodes: set[fx.Node], wanted: set[fx.Node], possible: int, impossible: int
) -> int:
    while impossible - possible > 1:
        middle = (possible + impossible) // 2
        if evaluate_if_possible(graph_module, nodes, wanted, middle) is None:
            impossible = middle
        else:
            possible = middle
    return possible


_PLAIN = frozenset(
    [
        "arange",
        "sym_size",
        "add",
        "sub",
        "unsqueeze",
        "slice",
        "select",
        "expand",
        "view",
        "reshape",
        "permute",
        "transpose",
        "index",
        "to",
        "clone",
        "detach",
        "alias",
        "lift_fresh_copy",
        "le",
        "lt",
        "ge",
        "gt",
        "eq",
        "ne",
        "__and__",
        "__or__",
        "logical_and",
        "logical_or",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "ones",
        "zeros",
        "full",
        "new_ones",
        "new_zeros",
        "new_full",
        "ones_like",
        "zeros_like",
        "full_like",
        "scalar_tensor",
        "where",
        "masked_fill",
        "diff",
        "cumsum",
        "floor_divide",
        "tril",
        "triu",
    ]
)
"""Operators of masks that compare positions, moved by constants, with each other."""
_TAKE_PLACES = frozenset(["le", "lt", "ge", "gt", "eq", "ne", "add", "sub", "floor_divide", "index", "cumsum", "diff"])
_WRAP_LATER = (torch.int16, torch.uint16)
"""Numbers of fewer bits wrap, or are rounded, before GREATEST_PAIR."""


def _is_plain(graph_module: fx.GraphModule, nodes: set[fx.Node]) -> bool:
    """Whether masks that look the same at all T up to GREATEST_PAIR look the same at every T.

    They compare positions with each other, and every constant in them is small against what was evaluated.
    """
    operators = [node for node in nodes if node.op == "call_function"]
    if any(getattr(node.target, "_opname", "") not in _PLAIN for node in operators):
        return False
    buffers = [attrgetter(str(node.target))(graph_module) for node in nodes if node.op == "get_attr"]
    if any(not isinstance(buffer, Tensor) or buffer.numel() > 1 for buffer in buffers):
        return False
    divisors = {node.args[1] for node in operators if node.target._opname == "floor_divide"}  # type: ignore[union-attr]
    if any(isinstance(divisor, fx.Node) for divisor in divisors) or math.prod(divisors) > GREATEST_PAIR // 2:  # type: ignore[arg-type]
        return False
    moves = [node for node in operators if node.target._opname in ("add", "sub")]  # type: ignore[union-attr]
    if any("alpha" in node.kwargs for node in moves):
        return False
    moved = sum(abs(number) for node in moves for number in _numbers(node.args) if abs(number) > _SMALL_BUFFER)
    if any(node.meta["val"].dtype in _WRAP_LATER for node in operators if is_tensor(node)):
        return False
    constants = _constants(graph_module, nodes - _fills(operators))
    return 2 * moved < GREATEST_PAIR and all(2 * constant < GREATEST_PAIR for constant in constants)


def _fills(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes whose numbers are values of a mask, not places: nothing computes or compares with them."""
    names = ("where", "masked_fill", "full", "new_full", "full_like", "scalar_tensor")
    places = _ancestors({node for node in nodes if node.target._opname in _TAKE_PLACES})  # type: ignore[union-attr]
    return {node for node in nodes if node.target._opname in names and node not in places}  # type: ignore[union-attr]


def _changed_at_some_length(
    graph_module: fx.GraphModule,
    nodes: set[fx.Node],
    kinds: Mapping[fx.Node, Kind],
    longest: Mapping[fx.Node, Tensor],
    greatest: int,
) -> set[fx.Node]:
    """Of the nodes with a value at a long T, those that say something else at some T up to `greatest`."""
    symbol = token_symbol(graph_module.graph)
    changed: set[fx.Node] = set()
    for tokens in range(2, greatest + 1):
        for node, value in (evaluate_if_possible(graph_module, nodes, set(longest), tokens) or {}).items():
            dims = [dim for dim, size in enumerate(shape_of(node)) if token_factor(size, symbol) == 1]
            drifts = isinstance(kinds[node], Drifting)
            if not (_same_steps(value, longest[node], dims[0]) if drifts else _is_prefix(value, longest[node], dims)):
                changed.add(node)
    return changed


# Meaning


_CHANGES = "its value at a token changes with the number of tokens that follow"


def _write_shape(node: fx.Node, samples: Mapping[int, Tensor], symbol: Any) -> None:
    """Sizes such as `2048 - max(0, 2048 - T)` are T, or one number, for every T that was tried."""
    written = {
        dim: size
        for dim, expression in enumerate(shape_of(node))
        if token_factor(expression, symbol) == -1 and samples
        if (size := _plain_size(node.graph, {at: value.shape[dim] for at, value in samples.items()})) is not None
    }
    if written:
        node.meta["val"] = node.meta["val"].new_empty([written.get(d, size) for d, size in enumerate(shape_of(node))])


def _plain_size(graph: fx.Graph, sizes: Mapping[int, int]) -> Any:
    if all(size == tokens for tokens, size in sizes.items()):
        return next(node for node in graph.nodes if node.op == "placeholder").meta["val"].shape[1]
    return next(iter(sizes.values())) if len(set(sizes.values())) == 1 else None


def _classify(node: fx.Node, samples: Sequence[Tensor], symbol: Any) -> Kind:
    factors = [token_factor(size, symbol) for size in shape_of(node)]
    if any(factor not in (0, 1) for factor in factors):
        return Numbering()
    dims = [dim for dim, factor in enumerate(factors) if factor == 1]
    if not samples or not all(_is_prefix(a, b, dims) for a, b in itertools.pairwise(samples)):
        if len(dims) == 1 and len(samples) > 2 and _drifts(samples, dims[0]):
            return Drifting(dims[0], _greatest(samples))
        return LengthDependent(_CHANGES)
    last = samples[-1]
    if not dims:
        return Fixed(last)
    if all(bool((last == last.narrow(dim, 0, 1)).all()) for dim in dims):
        return Fill(functools.reduce(lambda value, dim: value.narrow(dim, 0, 1), dims, last))
    if len(dims) == 1:
        return Table(dims[0], _first_of_range(last, dims[0]), _greatest(samples))
    if dims == [len(factors) - 2, len(factors) - 1]:
        return Pair(tuple(samples))
    return LengthDependent("it has token dimensions that are not those of a mask")


def _is_prefix(smaller: Tensor, larger: Tensor, dims: Sequence[int]) -> bool:
    for dim in dims:
        larger = larger.narrow(dim, 0, smaller.shape[dim])
    if torch.equal(smaller, larger):
        return True
    same_gaps = torch.equal(smaller.isnan(), larger.isnan())
    return same_gaps and bool((smaller.nan_to_num() == larger.nan_to_num()).all())


def _drifts(samples: Sequence[Tensor], dim: int) -> bool:
    """Whether every sample, less its value at the first token, is a prefix of the next, up to rounding."""
    if not samples[0].is_floating_point() or not all(bool(sample.isfinite().all()) for sample in samples):
        return False
    return all(_same_steps(smaller, larger, dim) for smaller, larger in itertools.pairwise(samples))


def _same_steps(smaller: Tensor, larger: Tensor, dim: int) -> bool:
    larger_start = larger.narrow(dim, 0, smaller.shape[dim])
    both = torch.stack([smaller, larger_start]).double()
    firsts = both.narrow(dim + 1, 0, 1)
    rounding = 2 * torch.finfo(smaller.dtype).eps * torch.maximum(both.abs(), firsts.abs()).amax(0)
    steps = both - firsts
    return bool(((steps[0] - steps[1]).abs() <= rounding).all())


def _greatest(samples: Sequence[Tensor]) -> float:
    return max(float((sample if sample.dtype == torch.bool else sample.abs()).max()) for sample in samples)


def _first_of_range(value: Tensor, dim: int) -> int | None:
    """n where `value` is the integers n, n + 1, … along `dim` and has no other dimension of size above one."""
    if value.dtype not in (torch.int32, torch.int64) or value.numel() != value.shape[dim]:
        return None
    flat = value.flatten()
    first = int(flat[0])
    numbers = torch.arange(first, first + len(flat), device=flat.device, dtype=flat.dtype)
    return first if torch.equal(flat, numbers) else None
