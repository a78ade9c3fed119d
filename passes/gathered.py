"""Attention over gathered keys, as it stands in captured graphs: the rows that an indexer chose for every query.

Index scores -> causal mask -> top k -> gather of those rows -> scores, with the later ones hidden -> softmax -> sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.fills import filled
from tree_compile.passes.indexer import selection
from tree_compile.passes.masks import NoMatch
from tree_compile.passes.nodes import arguments, einsum_of_two, shown_name
from tree_compile.passes.operators import FILLS, MATMULS, NOT, SAME_NUMBERS, WHERES
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.passes.roles import (
    Roles,
    factor_of,
    laid_out,
    operand_of,
    product,
    same_numbers,
    sizes_of,
    with_roles,
)
from tree_compile.passes.shapes import (
    call,
    in_dtype,
    in_one_dtype,
    inherited,
    is_softmax_over_last,
    is_tensor,
    keeps_numbers,
    shape_of,
    sizes,
)
from tree_compile.passes.static_values import StaticValues, Table
from tree_compile.runtime.sparse_attention import sparse_attention

aten = torch.ops.aten
_MANY = 1 << 40


@dataclass(frozen=True)
class GatheredMatch:
    """One attention over gathered keys.

    Attributes:
        output: the node that is replaced, with the roles of its dimensions.
        query: the queries.
        key, value: the rows that are gathered.
        scale: factor on q.k.
        dropout: probability of dropping an attention weight.
    """

    output: Roles
    query: Roles
    key: _Rows
    value: _Rows
    scale: float
    dropout: float


@dataclass(frozen=True)
class _Rows:
    """Rows `[…, tokens, width]` of `source`, features [start, end), gathered by `topk`."""

    source: fx.Node
    topk: fx.Node
    start: int
    end: int


def is_softmax_over_chosen(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether `node` is a softmax over as many entries as there are tokens, or a fixed number where that is less."""
    if not is_softmax_over_last(node):
        return False
    *before, last = sizes(node)
    return bool(last.free_symbols) and symbol in before and bool(last.subs(symbol, _MANY) < _MANY)


def match_gathered(softmax: fx.Node, statics: StaticValues, symbol: sympy.Symbol) -> GatheredMatch:
    """Reads the attention around a softmax over chosen keys.

    Raises:
        NoMatch: it has a step that is not known.
    """
    weights = Roles(softmax, tuple(_names(softmax, symbol)))
    query, keys, scale, hides_later_of = _read_scores(weights.moved(softmax.args[0], weights.names), statics)
    output, values, dropout = _weighed_values(weights)
    if sizes_of(query).get("head", 1) != sizes_of(output).get("head", 1):
        raise NoMatch("its queries are the same for all heads")
    key, value = _rows(keys), _rows(values)
    if not key.topk is value.topk is hides_later_of:
        raise NoMatch("keys that lie after the query are not hidden by chosen > position, or not those that it weighs")
    return GatheredMatch(output, query, key, value, scale, dropout)


def _read_scores(scores: Roles, statics: StaticValues) -> tuple[Roles, Roles, float, fx.Node | None]:
    """The queries, the gathered keys, the factor on their product, and the selection whose later keys are hidden."""
    scale, hides_later_of = 1.0, None
    while (found := product(scores)) is None:
        node: Any = scores.node
        if (above := same_numbers(scores)) is not None:
            scores = above
        elif (factor := factor_of(node, statics)) is not None:
            scores, scale = scores.moved(node.args[0], scores.names), scale * factor
        elif scale == 1.0 and hides_later_of is None:
            scores, hides_later_of = _unmasked(scores, statics)
        else:
            raise NoMatch("its scores are changed after some were hidden, or by a step that is not known")
    query, keys = found if "slot" in found[1].names else found[::-1]
    return query, keys, scale, hides_later_of


def _names(softmax: fx.Node, symbol: sympy.Symbol) -> list[str]:
    names = ["query" if size == symbol else "" if size == 1 else "head" for size in sizes(softmax)[:-1]]
    if names.count("query") != 1 or names.count("head") > 1:
        raise NoMatch("its weights have other dimensions than queries, heads and chosen keys")
    return [*names, "slot"]


# What hides keys after the query


def _unmasked(scores: Roles, statics: StaticValues) -> tuple[Roles, fx.Node]:
    """Scores before those of keys after the query were hidden, and the selection whose keys those are."""
    node: Any = scores.node
    if node.target not in (*FILLS, *WHERES):
        raise NoMatch(f"the step {shown_name(node)} between its chosen keys and the softmax is not known")
    found = filled(node, statics, lambda fill: fill <= HIDDEN_BELOW)
    if found is None or not is_tensor(found.above):
        raise NoMatch("hidden scores are filled with a value that still gets weight")
    return scores.moved(found.above, scores.names), _hides_later(operand_of(scores, found.mask), found.hides, statics)


def _hides_later(mask: Roles, hides: bool, statics: StaticValues) -> fx.Node:
    """The selection whose keys a mask hides just where they lie after the query."""
    node: Any = mask.node
    while node.target not in _COMPARISONS:
        if node.target in NOT:
            mask, hides = mask.moved(node.args[0], mask.names), not hides
        elif (above := same_numbers(mask)) is not None:
            mask = above
        else:
            raise NoMatch("what hides its chosen keys is not whether they lie after the query")
        node = mask.node
    is_later, first = _COMPARISONS[node.target]
    chosen, position = (operand_of(mask, argument) for argument in node.args)
    if _first_position(position, statics) is None:
        chosen, position, is_later, first = position, chosen, not is_later, 1 - first
    if _first_position(position, statics) != first or is_later is not hides:
        raise NoMatch("what hides its chosen keys is not whether they lie after the query")
    return selection(chosen)


def _first_position(given: Roles, statics: StaticValues) -> int | None:
    """n where `given` is n + the position of the query; None where it is something else."""
    while given.node not in statics.kinds:
        above = same_numbers(given)
        if above is None:
            return None
        given = above
    kind = statics.kinds[given.node]
    return kind.first if isinstance(kind, Table) and given.names[kind.dim] == "query" else None


_COMPARISONS = {
    aten.gt.Tensor: (True, 0), aten.ge.Tensor: (True, 1), aten.lt.Tensor: (False, 1), aten.le.Tensor: (False, 0),
}  # fmt: skip
"""Whether `chosen ? first + position` is true for keys after the query, and for which `first`."""


# What is gathered


def _rows(given: Roles) -> _Rows:
    """The rows that `given`, with the roles "query", "slot" and "width", has gathered."""
    start, end = 0, _width(given)
    while True:
        node: Any = given.node
        if (reader := _GATHERS.get(node.target)) is not None:
            if [name for name in given.names if name] != ["query", "slot", "width"] or given.names[-1] != "width":
                raise NoMatch("its gathered keys are not one list for every query")
            source, topk = reader(given)
            return _Rows(source, topk, start, end)
        if (above := same_numbers(given)) is None:
            above, offset = _part(given)
            start, end = start + offset, end + offset
        given = above


def _width(given: Roles) -> int:
    width = sizes_of(given).get("width")
    if not isinstance(width, int):
        raise NoMatch("its keys have no features, or as many as there are tokens")
    return width


def _part(given: Roles) -> tuple[Roles, int]:
    """All features of rows of which `given` has some, and the first that it has."""
    node: Any = given.node
    named, first = _cut(node)
    if not named or given.names[named["dim"] % len(given.names)] != "width":
        raise NoMatch(f"its keys come from {shown_name(node)}, not from a gather of the rows that an indexer chose")
    return with_roles(named["self"], given.names), first


def _cut(node: Any) -> tuple[dict[str, Any], int]:
    """The arguments of what takes some entries, in a row, of a dimension, and the first of them; none for others."""
    if node.target is aten.slice.Tensor:
        named = arguments(node)
        start, size = named["start"] or 0, shape_of(named["self"])[named["dim"]]
        if named["step"] == 1 and isinstance(start, int) and isinstance(size, int):
            return named, max(start + size, 0) if start < 0 else start
    if node.target is operator.getitem and node.args[0].target in (aten.split_with_sizes.default, aten.split.Tensor):
        named = arguments(node.args[0])
        return named, sum(int(part.shape[named["dim"]]) for part in node.args[0].meta["val"][: node.args[1]])
    return {}, 0


def _indexed(given: Roles) -> tuple[fx.Node, fx.Node]:
    """x[…, chosen], where the dimensions of x before its tokens have size one."""
    node: Any = given.node
    source, indices = node.args
    found = sizes(source)
    if len(indices) != len(found) - 1 or any(size != 1 for size in found[:-2]) or not is_tensor(indices[-1]):
        raise NoMatch("its chosen keys are indexed in a way that is not known")
    names = [name for name in given.names if name in ("query", "slot")]
    return source, selection(given.moved(indices[-1], names))


def _gathered(given: Roles) -> tuple[fx.Node, fx.Node]:
    """x.unsqueeze(1).expand(-1, T, -1, -1).gather(2, chosen[..., None].expand(…, width))."""
    named, names = arguments(given.node), list(given.names)
    if named["dim"] % len(names) != names.index("slot"):
        raise NoMatch("its chosen keys are gathered along something else than the tokens")
    rows = with_roles(named["self"], ["key" if name == "slot" else name for name in names])
    while "query" in rows.names:
        above = same_numbers(rows)
        if above is None:
            raise NoMatch("its chosen keys are gathered from rows that differ from query to query")
        rows = above
    if list(rows.names[-2:]) != ["key", "width"]:
        raise NoMatch("its chosen keys are gathered in a way that is not known")
    index = given.moved(named["index"], names)
    while "width" in index.names and (above := same_numbers(index)) is not None:
        index = above
    return rows.node, selection(index)


_GATHERS: dict[Any, Callable[[Roles], tuple[fx.Node, fx.Node]]] = {
    aten.index.Tensor: _indexed,
    aten.gather.default: _gathered,
}


# From the softmax down


def _weighed_values(weights: Roles) -> tuple[Roles, Roles, float]:
    """The sum of values, the gathered values, and the dropout of the weights."""
    dropout = 0.0
    while True:
        users = list(weights.node.users)
        if len(users) != 1:
            raise NoMatch("its weights are used for something else than the values")
        user = users[0]
        if user.target is aten.dropout.default:
            given = arguments(user)
            dropout = max(dropout, float(given["p"]) if given["train"] else 0.0)
        elif user.target not in SAME_NUMBERS or not keeps_numbers(user):
            return *_sum_of_values(weights, user), dropout
        weights = Roles(user, weights.names)


def _sum_of_values(weights: Roles, output: Any) -> tuple[Roles, Roles]:
    if output.target not in (*MATMULS, aten.einsum.default):
        raise NoMatch(f"its weights go into {shown_name(output)}, not into a product with values")
    total = with_roles(output, _names_of_sum(weights, output))
    found = product(total, "slot")
    if found is None or found[0].node is found[1].node or weights.node not in (found[0].node, found[1].node):
        raise NoMatch(f"its weights go into {shown_name(output)}, not into a product with values")
    first, second = found
    mine, values = (first, second) if first.node is weights.node else (second, first)
    if mine.names != weights.names:
        raise NoMatch("its weights are multiplied along something else than the chosen keys")
    return total, values


def _names_of_sum(weights: Roles, output: Any) -> tuple[str, ...]:
    if output.target is not aten.einsum.default:
        return (*weights.names[:-1], "width")
    found = einsum_of_two(output)
    mine = "" if found is None else found.letters[found.operands.index(weights.node)]
    if found is None or len(mine) != len(weights.names):
        raise NoMatch(f"the einsum {output.args[0]} of weights and values is not known")
    names = dict(zip(mine, weights.names, strict=True))
    return tuple(names.get(letter, "width") for letter in found.output)


# The new nodes


def insert_sparse_attention(graph: fx.Graph, match: GatheredMatch, indices: fx.Node) -> fx.Node:
    """Inserts `sparse_attention` in the place of `match.output`; returns the node with its shape.

    Raises:
        NoMatch: an operand has other dimensions than tokens, heads and width.
    """
    output, meta = match.output, match.output.node.meta
    query = laid_out(graph, match.query, ("head", "query", "width"), meta, 1)
    key, value = (_rows_in_one_head(graph, rows, meta) for rows in (match.key, match.value))
    operands = in_one_dtype(graph, [query, key, value])
    node = graph.call_function(sparse_attention, (*operands, indices), {"scale": match.scale})
    node.meta = inherited(meta)
    node.meta["val"] = operands[0].meta["val"].new_empty((*shape_of(query)[:-1], shape_of(value)[-1]))
    node = in_dtype(graph, node, meta["val"].dtype)
    order = [("head", "query", "width").index(name) + 1 for name in output.names if name]
    missing = [dim for dim in range(4) if dim not in order]
    node = call(graph, aten.permute.default, (node, missing + order), meta)
    shape = [size if isinstance(size, int) else -1 for size in shape_of(output.node)]
    return call(graph, aten.reshape.default, (node, shape), meta)


def _rows_in_one_head(graph: fx.Graph, rows: _Rows, meta: dict[str, Any]) -> fx.Node:
    width = int(shape_of(rows.source)[-1])
    node = rows.source
    if (rows.start, rows.end) != (0, width):
        node = call(graph, aten.slice.Tensor, (node, -1, rows.start, rows.end), meta)
    return call(graph, aten.reshape.default, (node, [1, 1, -1, rows.end - rows.start]), meta)
