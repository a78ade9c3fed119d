"""Which keys an indexer chooses, as it stands in captured graphs: index scores -> causal mask -> top k."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import Max, Min

from tree_compile.passes.fills import filled
from tree_compile.passes.masks import Mask, NoMatch, read_masks
from tree_compile.passes.nodes import arguments, shown_name
from tree_compile.passes.operators import DETACH, FILLS, WHERES
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.passes.roles import (
    GREATEST_FACTOR,
    Roles,
    factor_of,
    laid_out,
    product,
    same_numbers,
    sizes_of,
    with_roles,
)
from tree_compile.passes.shapes import in_dtype, is_tensor, keeps_numbers, shape_of, size_expression, sizes
from tree_compile.passes.static_values import Pair, StaticValues

aten = torch.ops.aten
_NEVER_CHOSEN = -1.0e30
"""Index scores are sums of products: a key that is hidden by less than this might be chosen before one that is not."""
_GREATEST_FACTOR_IN_HALF = 1e3
"""As GREATEST_FACTOR, in float16: scores may all become equal, 0 or infinite."""


@dataclass(frozen=True)
class IndexScores:
    """sum over heads of weights * relu(query . key) for every query and key, less what `masks` hide.

    Attributes:
        query: the queries of every head.
        key: the keys, the same for all heads.
        weights: one for every query and head.
        masks: what hides keys.
        dtype: that of the product of query and key.
        sum_dtype: that of the sum: many models add up in float32 what they multiply in fewer bits.
    """

    query: Roles
    key: Roles
    weights: Roles
    masks: tuple[Mask, ...]
    dtype: torch.dtype
    sum_dtype: torch.dtype


# The selection


def topk_of(index: fx.Node) -> fx.Node:
    """The selection of the keys whose numbers `index` `[…, queries, k]` are.

    Raises:
        NoMatch: they come from something else.
    """
    lead = ["" if size == 1 else f"lead {dim}" for dim, size in enumerate(sizes(index)[:-2])]
    return selection(with_roles(index, [*lead, "query", "slot"]))


def selection(index: Roles) -> fx.Node:
    """The selection whose numbers, for every query and slot, `index` has.

    Raises:
        NoMatch: they come from something else, or are not one list for every query.
    """
    while (above := same_numbers(index)) is not None:
        index = above
    node: Any = index.node
    topk: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    if topk is None or topk.target is not aten.topk.default:
        raise NoMatch(f"its keys are chosen by {shown_name(node)}, not by the highest scores of an indexer")
    if [name for name in index.names if name] != ["query", "slot"] or index.names[-1] != "slot":
        raise NoMatch("its chosen keys are not one list for every query")
    given = arguments(topk)
    if given["dim"] not in (-1, len(index.names) - 1) or not given["largest"]:
        raise NoMatch("its indexer does not choose the keys with the highest scores")
    if any(user.target is not operator.getitem or user.args[1] == 0 for user in topk.users if user.users):
        raise NoMatch("the scores that its indexer chooses by are used for something else as well")
    return topk


def how_many(topk: fx.Node, there_are: sympy.Expr) -> int:
    """c of a selection of c keys, or of all where they are fewer.

    Args:
        topk: the selection.
        there_are: how many keys there are, of which it depends how many are chosen.

    Raises:
        NoMatch: the number depends on the number of tokens in another way.
    """
    keys = sympy.Symbol("keys", integer=True, nonnegative=True)
    size = size_expression(topk.meta["val"][1].shape[-1])
    chosen = size.xreplace({there_are: keys})
    most = chosen.subs(keys, 1 << 40)
    if not most.is_Integer or most < 1 or not _is_all_or(int(most), chosen, keys):
        raise NoMatch(f"its indexer chooses {size} keys, where T is the number of tokens")
    return int(most)


def _is_all_or(most: int, chosen: sympy.Expr, keys: sympy.Symbol) -> bool:
    """Whether `chosen` keys are `most` of them, or all where there are fewer."""
    if chosen in (sympy.Integer(most), Min(sympy.Integer(most), keys)):
        return most < 1 << 20
    # Another way to write it. A lattice of `keys` and numbers changes its form at one of the numbers alone.
    if not all(isinstance(part, _LATTICE) for part in sympy.preorder_traversal(chosen)):
        return False
    numbers = [int(number) for number in chosen.atoms(sympy.Integer)]
    tried = {max(0, number + step) for number in numbers for step in (-1, 0, 1)}
    return all(chosen.subs(keys, n) in (most, min(n, most)) for n in tried)


_LATTICE = (Min, Max, sympy.Min, sympy.Max, sympy.Integer, sympy.Symbol)


# The scores


def read_index_scores(topk: fx.Node, statics: StaticValues) -> IndexScores:
    """Reads the scores that a selection goes by, from the selection upwards.

    Raises:
        NoMatch: they are not made in this way.
    """
    scores, masks = _read_masks(with_roles(topk.args[0], ["query", "key"]), statics)
    pairs, weights = _heads_apart(scores)
    has_relu, factor = False, 1.0
    while (found := _query_and_key(pairs)) is None:
        own = factor_of(pairs.node, statics) or 1.0
        factor *= own
        _require_in_range(factor, pairs.node)
        _require_exact(own, pairs.node, scores.node)
        pairs, is_relu = _step_to_product(pairs, statics)
        has_relu |= is_relu
    dtype = pairs.node.meta["val"].dtype
    if not has_relu or not dtype.is_floating_point:
        raise NoMatch("its index scores are not cut off at 0 before the sum over heads")
    return IndexScores(*found, weights, masks, dtype, scores.node.meta["val"].dtype)


def _read_masks(scores: Roles, statics: StaticValues) -> tuple[Roles, tuple[Mask, ...]]:
    """Goes up past masks and factors that keep the order of the scores."""
    masks: tuple[Mask, ...] = ()
    factor = 1.0
    while True:
        node: Any = scores.node
        factor *= factor_of(node, statics) or 1.0
        above = _in_order(scores, statics)
        if above is None:
            if (found := _step_to_scores(scores, factor, statics)) is None:
                return scores, masks
            above, more = found
            masks += more
        _require_in_range(factor, node)
        scores = above


def _require_in_range(factor: float, node: Any) -> None:
    most = _GREATEST_FACTOR_IN_HALF if node.meta["val"].dtype == torch.float16 else GREATEST_FACTOR
    if not 1.0 / most <= abs(factor) <= most:
        raise NoMatch("its index scores are multiplied by numbers that may make them all 0, or infinite")


def _require_exact(factor: float, node: Any, scores: Any) -> None:
    """Refuses a factor that rounds in half precision, among scores that are added up in more."""
    is_power_of_2 = math.frexp(factor)[0] in (0.5, -0.5)
    if not is_power_of_2 and _is_half(node) and not _is_half(scores):
        raise NoMatch(_ROUNDED)


def _is_half(node: Any) -> bool:
    return torch.finfo(node.meta["val"].dtype).bits < torch.finfo(torch.float32).bits


def require_as_exact(weights: fx.Node, attention: fx.Node) -> None:
    """Refuses index scores that are added up in half precision, for an attention in more.

    Many of them are equal then, or nearly, and which of those are chosen rests on how the sum is rounded.

    Raises:
        NoMatch: `weights`, in the dtype of the sum, are in half precision, and `attention` is not.
    """
    if _is_half(weights) and not _is_half(attention):
        raise NoMatch("its index scores are in half precision, and what it attends to is not")


_ROUNDED = "its index scores are rounded to half precision on the way, and then added up in more"


def _step_to_scores(scores: Roles, factor: float, statics: StaticValues) -> tuple[Roles, tuple[Mask, ...]] | None:
    """The scores before a mask, and that mask; None where there is none."""
    node: Any = scores.node
    if node.target in (*FILLS, *WHERES):
        found = filled(node, statics, lambda fill: fill * factor <= _NEVER_CHOSEN)
        if found is None:
            raise NoMatch("its index scores are filled with a value that still may be chosen")
        rest, mask, hides, fill = found.above, found.mask, found.hides, found.fill
    elif node.target is aten.add.Tensor and not node.kwargs:
        mask, rest = node.args if node.args[0] in statics.nodes else node.args[::-1]
        hides, fill = False, -math.inf
    else:
        return None
    if not is_tensor(mask) or not is_tensor(rest):
        raise NoMatch("a number is added to its index scores")
    if scores.names[-2:] != ("query", "key"):
        raise NoMatch("its index scores are masked while their last two dimensions are not those of queries and keys")
    return scores.moved(rest, scores.names), _static(mask, hides, fill, factor, statics)


def _static(node: fx.Node, hides: bool, fill: float, factor: float, statics: StaticValues) -> tuple[Mask, ...]:
    masks = read_masks(node, statics, hides, fill)
    if masks.chosen is not None:
        raise NoMatch("its keys are chosen twice")
    lowest = [values * factor for mask in masks.static for values in _hiding(mask, statics)]
    if not all(bool((values <= _NEVER_CHOSEN).all()) for values in lowest):
        raise NoMatch("its index scores are lowered by a value with which they still may be chosen")
    return masks.static


def _hiding(mask: Mask, statics: StaticValues) -> list[Tensor]:
    """The scores that a mask gives to what it hides."""
    kind = statics.kinds[mask.node]
    samples = kind.samples if isinstance(kind, Pair) else ()
    if any(sample.dtype == torch.bool for sample in samples):
        return [torch.tensor(mask.fill, dtype=torch.float64)]
    return [sample[~(sample > HIDDEN_BELOW)] for sample in samples]


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
    dims = [dim % rank for dim in given["dim"] or ()]
    is_weighed = weighed.target is aten.mul.Tensor and all(map(is_tensor, weighed.args))
    if len(dims) != 1 or not is_weighed or not keeps_numbers(node):
        raise NoMatch("its index scores are a sum, but not over heads that are weighed")
    _require_same_order(weighed, node)
    if _is_half(weighed) and not _is_half(node):
        raise NoMatch(_ROUNDED)
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
        _require_same_order(above.node, scores.node)
        return above
    if scores.node.target is DETACH:  # a choice has no gradients
        return scores.moved(scores.node.args[0], scores.names)
    factor = factor_of(scores.node, statics)
    if factor is not None and factor <= 0:
        raise NoMatch("its index scores are multiplied by a number that is not positive")
    return None if factor is None else scores.moved(scores.node.args[0], scores.names)


def _require_same_order(before: Any, after: Any) -> None:
    """Refuses a cast to half precision, where many scores are equal: among them the order is that of the keys."""
    had, has = (torch.finfo(node.meta["val"].dtype) for node in (before, after))
    if has.bits < torch.finfo(torch.float32).bits and has.dtype != had.dtype:
        raise NoMatch(
            f"its index scores are cast from {had.dtype} to {has.dtype}, in which some, or all, may become equal"
        )


# The operands of the op


def operands(graph: fx.Graph, scores: IndexScores, meta: dict[str, Any]) -> list[fx.Node]:
    """Query [1, T, H, D] and key [1, T, D] in the dtype of their product, weights [1, T, H] in that of the sum.

    Raises:
        NoMatch: they do not have the same heads and width.
    """
    query, key, weights = (sizes_of(given) for given in (scores.query, scores.key, scores.weights))
    if query.get("head", 1) != weights.get("head", 1) or query["width"] != key["width"]:
        raise NoMatch("its indexer does not have one weight for each of its heads")
    wanted = (
        (scores.query, ("query", "head", "width"), scores.dtype),
        (scores.key, ("key", "width"), scores.dtype),
        (scores.weights, ("query", "head"), scores.sum_dtype),
    )
    return [in_dtype(graph, laid_out(graph, given, names, meta, 1), dtype) for given, names, dtype in wanted]
