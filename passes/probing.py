"""Runs the static part of a graph at several numbers of tokens, below and above every constant that occurs in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from tree_compile.passes.autocast import as_the_model
from tree_compile.passes.nodes import ancestors, is_number_of_tokens

_SIZES = (2, 3, 5, 8, 13, 41)
_SENTINEL = 1 << 40
"""Numbers from here on mean "to the end" in slices."""
SMALL = 64
"""A buffer of so few numbers may hold constants, such as the windows of all heads."""


def evaluate(
    graph_module: fx.GraphModule, nodes: set[fx.Node] | frozenset[fx.Node], wanted: Iterable[fx.Node], tokens: int
) -> dict[fx.Node, Any]:
    """Values of the static nodes `wanted` at T = `tokens`."""
    wanted = set(wanted)
    needed = ancestors(wanted)
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
    if is_number_of_tokens(node):
        return tokens
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: values[source])
    with torch.no_grad(), as_the_model(node.meta):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def constants(graph_module: fx.GraphModule, nodes: set[fx.Node]) -> list[int]:
    """Whole numbers that occur in the given nodes: windows, chunks, lengths at which something switches."""
    found: set[int] = set()
    for node in nodes:
        values = [*numbers(node.args), *numbers(tuple(node.kwargs.values()))]
        if node.op == "get_attr":
            buffer = attrgetter(str(node.target))(graph_module)
            if isinstance(buffer, Tensor) and buffer.numel() <= SMALL and not buffer.is_complex():
                values += [number for number in buffer.flatten().tolist() if math.isfinite(number)]
        found |= {abs(int(number)) for number in values if abs(number) < _SENTINEL}
    return sorted(number for number in found if number > 2)


def numbers(args: Any) -> Iterator[int | float]:
    """The finite numbers among arguments, and in lists of them."""
    for arg in args if isinstance(args, (tuple, list)) else (args,):
        if isinstance(arg, (tuple, list)):
            yield from numbers(arg)
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool) and arg == arg and abs(arg) != float("inf"):
            yield arg


def _probe_sizes(constants: Sequence[int], greatest: int, reach: int) -> list[int]:
    small = [c + step for c in constants if c <= 512 for step in (-1, 0, 1, 2)]
    large = [c + 1 for c in constants if c > 512]
    double = [2 * c + 1 for c in constants]
    return sorted({size for size in (*_SIZES, *small, *large, *double, min(reach, greatest)) if 2 <= size <= greatest})


def probe(
    graph_module: fx.GraphModule,
    nodes: set[fx.Node],
    wanted: set[fx.Node],
    greatest: int,
    reach: int,
) -> tuple[dict[fx.Node, dict[int, Tensor]], int]:
    """The values of every wanted node, by number of tokens; and the T up to which there are values.

    Args:
        graph_module: the graph.
        nodes: its static nodes.
        wanted: those to evaluate.
        greatest: the greatest T to evaluate at.
        reach: a T to evaluate at, whichever constants occur in the nodes.
    """
    found: dict[fx.Node, dict[int, Tensor]] = {node: {} for node in wanted}
    done = 0
    for tokens in _probe_sizes(constants(graph_module, ancestors(wanted)), greatest, reach) if wanted else ():
        values = evaluate_if_possible(graph_module, nodes, wanted, tokens)
        done = tokens if values is not None else _last_possible(graph_module, nodes, wanted, done, tokens)
        if values is None and done:
            values = evaluate(graph_module, nodes, wanted, done)
        for node, value in (values or {}).items():
            found[node][done] = value
        if done != tokens:
            break
    return found, done


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
