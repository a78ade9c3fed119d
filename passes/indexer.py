"""Which keys an indexer chooses, as it stands in captured graphs: index scores -> causal mask -> top k."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from tree_compile.passes.masks import Mask, NoMatch, read_masks
from tree_compile.passes.nodes import arguments, shown_name
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.passes.roles import (
    Roles,
    factor_of,
    keeps_numbers,
    laid_out,
    number_of,
    product,
    same_numbers,
    sizes_of,
)
from tree_compile.passes.shapes import in_dtype, is_tensor, shape_of, size_expression
from tree_compile.passes.static_values import Pair, StaticValues

aten = torch.ops.aten
_NEVER_CHOSEN = -1.0e30
"""Index scores are sums of products: a key that is hidden by less than this might be chosen before one that is not."""


@dataclass(frozen=True)
class IndexScores:
    """sum over heads of weights * relu(query . key) for every query and key, less what `masks` hide.

    `dtype` is that of the product of query and key.
    """

    query: Roles
    key: Roles
    weights: Roles
    masks: tuple[Mask, ...]
    dtype: torch.dtype


# The selection


def topk_of(index: fx.Node) -> fx.Node:
    """The selection of the keys whose numbers `index` are.

    Raises:
        NoMatch: they come from something else.
    """
    node: Any = index
    while node.target in _SAME_NUMBERS and keeps_numbers(node):
        node = node.args[0]
    topk: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    if topk is None or topk.target is not aten.topk.default:
        raise NoMatch(f"its keys are chosen by {shown_name(node)}, not by the highest scores of an indexer")
    given = arguments(topk)
    if given["dim"] not in (-1, len(shape_of(given["self"])) - 1) or not given["largest"]:
        raise NoMatch("its indexer does not choose the keys with the highest scores")
    if any(user.target is not operator.getitem or user.args[1] == 0 for user in topk.users if user.users):
        raise NoMatch("the scores that its indexer chooses by are used for something else as well")
    return topk


_SAME_NUMBERS = {
    aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.unsqueeze.default, aten.expand.default,
}  # fmt: skip


def how_many(topk: fx.Node, symbol: sympy.Symbol) -> int:
    """c of a selection of c keys, or of all where they are fewer.

    Raises:
        NoMatch: the number depends on the number of tokens in another way.
    """
    size = size_expression(topk.meta["val"][1].shape[-1])
    most = size.subs(symbol, 1 << 40)
    tried = [1, 2, *(most * factor + step for factor in (1, 4) for step in (-1, 0, 1))]
    if most >= 1 << 20 or any(size.subs(symbol, t) not in (most, min(t, most)) for t in tried if t > 0):
        raise NoMatch(f"its indexer chooses {size} keys, where T is the number of tokens")
    return int(most)


# The scores


def read_index_scores(topk: fx.Node, statics: StaticValues) -> IndexScores:
    """Reads the scores that a selection goes by, from the selection upwards.

    Raises:
        NoMatch: they are not made in this way.
    """
    source: Any = topk.args[0]
    start = Roles(source, ()).moved(source, ["query", "key"])
    scores, masks = _read_masks(start, statics)
    pairs, weights = _heads_apart(scores)
    has_relu = False
    while (found := _query_and_key(pairs)) is None:
        pairs, is_relu = _step_to_product(pairs, statics)
        has_relu |= is_relu
    if not has_relu:
        raise NoMatch("its index scores are not cut off at 0 before the sum over heads")
    return IndexScores(*found, weights, masks, pairs.node.meta["val"].dtype)


def _read_masks(scores: Roles, statics: StaticValues) -> tuple[Roles, tuple[Mask, ...]]:
    """Goes up past masks and factors that keep the order of the scores."""
    masks: tuple[Mask, ...] = ()
    factor = 1.0
    while True:
        node: Any = scores.node
        factor *= factor_of(node, statics) or 1.0
        above = _in_order(scores, statics)
        if above is not None:
            scores = above
        elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            masks += _filled(node.args[1], True, number_of(node.args[2], statics), factor, statics)
            scores = scores.moved(node.args[0], scores.names)
        elif node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
            first, second = (number_of(part, statics) for part in node.args[1:3])
            is_hidden_where_true = first is not None
            fill, rest = (first, node.args[2]) if is_hidden_where_true else (second, node.args[1])
            masks += _filled(node.args[0], is_hidden_where_true, fill, factor, statics)
            scores = scores.moved(rest, scores.names)
        elif node.target is aten.add.Tensor and not node.kwargs:
            added, rest = node.args if node.args[0] in statics.nodes else node.args[::-1]
            masks += _added(added, factor, statics)
            scores = scores.moved(rest, scores.names)
        else:
            return scores, masks


def _filled(mask: Any, hides: bool, fill: float | None, factor: float, statics: StaticValues) -> tuple[Mask, ...]:
    """A boolean mask whose hidden scores are `fill`, times `factor`."""
    if fill is None or fill * factor > _NEVER_CHOSEN:
        raise NoMatch("its index scores are filled with a value that still may be chosen")
    return _static(mask, statics, hides, fill)


def _added(table: Any, factor: float, statics: StaticValues) -> tuple[Mask, ...]:
    """A table that is added to the scores, times `factor`."""
    kind = statics.kinds.get(table)
    hidden = [sample[sample <= HIDDEN_BELOW] for sample in kind.samples] if isinstance(kind, Pair) else []
    if any(bool((values * factor > _NEVER_CHOSEN).any()) for values in hidden):
        raise NoMatch("its index scores are lowered by a value with which they still may be chosen")
    return _static(table, statics)


def _static(node: Any, statics: StaticValues, hides: bool = False, fill: float = -math.inf) -> tuple[Mask, ...]:
    if not is_tensor(node):
        raise NoMatch("a number is added to its index scores")
    masks = read_masks(node, statics, hides, fill)
    if masks.chosen is not None:
        raise NoMatch("its keys are chosen twice")
    return masks.static


def _heads_apart(scores: Roles) -> tuple[Roles, Roles]:
    """The scores of every head, and what weighs them."""
    node: Any = scores.node
    names = list(scores.names)
    if node.target is aten.matmul.default and names[-2:] == ["", "key"]:
        weights, pairs = node.args
        return scores.moved(pairs, [*names[:-2], "head", "key"]), scores.moved(weights, [*names[:-1], "head"])
    if node.target is aten.sum.dim_IntList:
        return _heads_of_sum(scores)
    if node.target is aten.einsum.default and (found := product(scores, "head")) is not None:
        return found if "key" in found[0].names else found[::-1]
    raise NoMatch(f"its index scores come from {shown_name(node)}, not from a weighted sum over heads")


def _heads_of_sum(scores: Roles) -> tuple[Roles, Roles]:
    node: Any = scores.node
    names = list(scores.names)
    given = arguments(node)
    weighed: Any = given["self"]
    rank = len(shape_of(weighed))
    dims = [dim % rank for dim in given["dim"]]
    if len(dims) != 1 or weighed.target is not aten.mul.Tensor or not all(map(is_tensor, weighed.args)):
        raise NoMatch("its index scores are a sum, but not over heads that are weighed")
    if given["keepdim"]:
        names.pop(dims[0])
    names.insert(dims[0], "head")
    first, second = weighed.args
    pairs, weights = (second, first) if size_expression(shape_of(first)[-1]) == 1 else (first, second)
    return scores.moved(pairs, names), scores.moved(weights, [name if name != "key" else "" for name in names])


def _step_to_product(pairs: Roles, statics: StaticValues) -> tuple[Roles, bool]:
    """One step up from the scores of every head, and whether it cuts them off at 0."""
    node: Any = pairs.node
    above = _in_order(pairs, statics)
    if above is not None:
        return above, False
    is_clamp = node.target in (aten.clamp.default, aten.clamp_min.default)
    if node.target is aten.relu.default or (is_clamp and list(node.args[1:]) == [0] and not node.kwargs):
        return pairs.moved(node.args[0], pairs.names), True
    raise NoMatch(f"the step {shown_name(node)} in its index scores is not known")


def _query_and_key(pairs: Roles) -> tuple[Roles, Roles] | None:
    """Query and key of the node that multiplies them, else None."""
    found = product(pairs)
    if found is None:
        return None
    query, key = found if "query" in found[0].names else found[::-1]
    if sorted(filter(None, key.names)) != ["key", "width"]:
        raise NoMatch("the keys of its indexer are not the same for all heads and queries")
    return query, key


def _in_order(scores: Roles, statics: StaticValues) -> Roles | None:
    """Scores before a step that keeps their order: another shape or dtype, or a positive factor."""
    if (above := same_numbers(scores)) is not None:
        return above
    factor = factor_of(scores.node, statics)
    if factor is not None and factor <= 0:
        raise NoMatch("its index scores are multiplied by a number that is not positive")
    return None if factor is None else scores.moved(scores.node.args[0], scores.names)


# The operands of the op


def operands(graph: fx.Graph, scores: IndexScores, meta: dict[str, Any]) -> list[fx.Node]:
    """Query [1, T, H, D], key [1, T, D] and weights [1, T, H] as nodes of one dtype.

    Raises:
        NoMatch: they do not have the same heads and width.
    """
    query, key, weights = (sizes_of(given) for given in (scores.query, scores.key, scores.weights))
    if query.get("head", 1) != weights.get("head", 1) or query["width"] != key["width"]:
        raise NoMatch("its indexer does not have one weight for each of its heads")
    wanted = (
        (scores.query, ("query", "head", "width")),
        (scores.key, ("key", "width")),
        (scores.weights, ("query", "head")),
    )
    return [in_dtype(graph, laid_out(graph, given, names, meta, 1), scores.dtype) for given, names in wanted]
