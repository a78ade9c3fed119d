"""Attention as it stands in captured graphs: scaled_dot_product_attention, or matmul -> softmax -> matmul.

Both are read into one description, `AttentionMatch`; nothing is changed here.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tree_compile.passes.fills import filled, number_of
from tree_compile.passes.masks import Mask, Masks, NoMatch, read_masks
from tree_compile.passes.nodes import Einsum, arguments, einsum_of_two, shown_name
from tree_compile.passes.operators import (
    DIVISIONS,
    FILLS,
    FULL,
    MATMULS,
    MULTIPLICATIONS,
    ONES,
    RANKS,
    SAME_NUMBERS,
    VIEWS,
    WHERES,
    ZEROS,
)
from tree_compile.passes.pair_tables import HIDDEN_BELOW
from tree_compile.passes.roles import factor_of
from tree_compile.passes.shapes import (
    is_full_slice,
    is_softmax_over_last,
    is_tensor,
    keeps_numbers,
    shape_of,
    size_expression,
    sizes,
)
from tree_compile.passes.static_values import Drifting, Pair, StaticValues, Table

aten = torch.ops.aten
_SAME_VALUES = (*SAME_NUMBERS, *RANKS, *VIEWS)
"""What keeps scores, weights and sinks, with their gradients, where the sizes say so."""


@dataclass(frozen=True)
class Operand:
    """A tensor of the graph in the layout `[…, tokens, width]`: `node` with its dimensions in the order `order`."""

    node: fx.Node
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes in the new order."""
        sizes = shape_of(self.node)
        return tuple(sizes[dim] for dim in self.order)


@dataclass(frozen=True)
class KeyBias:
    """A static table along the keys that is added to the scores, times `factor`."""

    node: fx.Node
    dim: int
    factor: float = 1.0


@dataclass(frozen=True)
class Scores:
    """score = softcap(scale * q.k) + biases, softcap(x) = c * tanh(x / c); sinks are one more logit per head.

    `factors` are pair tables that have to be 1 wherever the masks hide nothing. No hidden score is below `floor`.
    `chosen` is a node with the numbers of the keys that are left of those, for every query; None where all are left.
    """

    scale: float = 1.0
    softcap: float = 0.0
    causal: bool = False
    masks: tuple[Mask, ...] = ()
    chosen: fx.Node | None = None
    factors: tuple[fx.Node, ...] = ()
    floor: float = -math.inf
    key_biases: tuple[KeyBias, ...] = ()
    sinks: fx.Node | None = None


@dataclass(frozen=True)
class AttentionMatch:
    """One attention of the graph.

    Attributes:
        output: the node that is replaced.
        query, key, value: the operands.
        scores: how scores are made of q.k.
        output_order: dimensions of the output in terms of `[…, tokens, width]`.
        dropout: probability of dropping an attention weight.
    """

    output: fx.Node
    query: Operand
    key: Operand
    value: Operand
    scores: Scores
    output_order: tuple[int, ...]
    dropout: float


# scaled_dot_product_attention


def match_sdpa(node: fx.Node, statics: StaticValues) -> AttentionMatch:
    """Reads a `scaled_dot_product_attention` node."""
    given = arguments(node)
    width, mask = shape_of(given["query"])[-1], given["attn_mask"]
    masks = Masks() if mask is None else read_masks(mask, statics)
    scores = Scores(
        scale=float(given["scale"]) if given["scale"] is not None else width**-0.5,
        causal=bool(given["is_causal"]),
        masks=masks.static,
        chosen=masks.chosen,
    )
    query, key, value = (_plain(given[name]) for name in ("query", "key", "value"))
    return AttentionMatch(node, query, key, value, scores, _identity(node), float(given["dropout_p"]))


def _plain(node: fx.Node) -> Operand:
    return Operand(node, _identity(node))


def _identity(node: fx.Node) -> tuple[int, ...]:
    return tuple(range(len(shape_of(node))))


# matmul -> softmax -> matmul


def match_softmax(softmax: fx.Node, statics: StaticValues) -> AttentionMatch:
    """Reads the attention around a softmax over keys.

    Raises:
        NoMatch: it is not attention, or has a step that is not known.
    """
    scores, query, key = _read_scores(softmax, statics)
    dropout, weights = _follow_weights(softmax, scores.sinks is not None)
    output = next(iter(weights.users))
    value, order = _read_value(output, weights)
    return AttentionMatch(output, query, key, value, scores, order, dropout)


_LEAST = {aten.maximum.default, aten.max.other, aten.clamp_min.default, aten.clamp.default}
_MAXIMA = (aten.amax.default, aten.max.dim)


@dataclass(frozen=True)
class _Reading:
    """Steps between the product q.k and the softmax, read from the softmax upwards."""

    factor_after: float = 1.0
    is_capped: bool = False
    factor: float = 1.0
    scores: Scores = Scores()

    @property
    def is_untouched(self) -> bool:
        """Whether the scores read so far go into the softmax as they are, but for biases."""
        return not self.is_capped and self.factor_after == 1.0

    def scaled(self, factor: float) -> _Reading:
        if not self.is_capped:
            return replace(self, factor_after=self.factor_after * factor)
        return replace(self, factor=self.factor * factor)

    def finished(self) -> Scores:
        """As `scale` and `softcap`: post * tanh(pre * x) is c * tanh(scale * x / c) with c = post, scale = c * pre."""
        if not self.is_capped:
            return replace(self.scores, scale=self.factor_after)
        return replace(self.scores, softcap=self.factor_after, scale=self.factor_after * self.factor)


def _read_scores(softmax: fx.Node, statics: StaticValues) -> tuple[Scores, Operand, Operand]:
    node: Any = softmax.args[0]
    below, reading = softmax, _Reading()
    while True:
        _require_one_use(node, below)
        below = node
        product = _product(node)
        if product is not None:
            return reading.finished(), *product
        if node.target is aten.baddbmm.default:
            return _read_baddbmm(node, reading, statics)
        node, reading = _step_up(node, reading, statics)


def _require_one_use(scores: Any, below: fx.Node) -> None:
    """Scores are gone once the attention is rewritten, so nothing else may read them, apart from their maximum."""
    for user in scores.users if isinstance(scores, fx.Node) else ():
        reads_shape = user.target in (*ONES, *ZEROS, *FULL) or not is_tensor(user)
        if user is not below and not _is_maximum(user) and not reads_shape:
            raise NoMatch(f"its scores are used by {shown_name(user)} as well, and not for the weights alone")


def _is_maximum(user: fx.Node) -> bool:
    if user.target is aten.detach.default:
        return all(map(_is_maximum, user.users))
    return user.target in _MAXIMA


def _without_detach(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is aten.detach.default:
        node = node.args[0]
    return node


def _step_up(node: fx.Node, reading: _Reading, statics: StaticValues) -> tuple[fx.Node, _Reading]:
    if node.op != "call_function" or node in statics.nodes:
        raise NoMatch("its scores are not a product of queries and keys")
    args: Any = node.args
    target = node.target
    if _keeps_pairs(node):
        return args[0], reading
    if target in (*MULTIPLICATIONS, *DIVISIONS) and (scaled := _scaled(node, reading, statics)) is not None:
        return args[0], scaled
    if (floor := _floor_below_all(node, statics)) is not None:
        return args[0], _raised_to(floor, reading)
    if target is aten.tanh.default and not reading.is_capped:
        return args[0], replace(reading, is_capped=True)
    if target is aten.add.Tensor:
        return _read_add(node, reading, statics)
    if target is aten.sub.Tensor and _is_maximum_over_keys(args[1], args[0]):
        return args[0], _moved_by_a_constant(reading)
    if target in (*FILLS, *WHERES):
        return _read_fill(node, reading, statics)
    if target is aten.cat.default and reading.scores.sinks is None:
        return _read_sinks(node, reading)
    raise NoMatch(f"the step {shown_name(node)} between the product of queries and keys and the softmax is not known")


def _scaled(node: fx.Node, reading: _Reading, statics: StaticValues) -> _Reading | None:
    """Scores times a number, or times a static pair table."""
    if (number := factor_of(node, statics)) is not None:
        return reading.scaled(number) if sizes(node) == sizes(node.args[0]) else None  # type: ignore[arg-type]
    factor: Any = node.args[1]
    if node.target is aten.mul.Tensor and isinstance(statics.kinds.get(factor), Pair) and not reading.is_capped:
        return replace(reading, scores=replace(reading.scores, factors=(*reading.scores.factors, factor)))
    return None


def _floor_below_all(node: fx.Node, statics: StaticValues) -> float | None:
    """The number that a node raises scores to where they are below it: hidden ones at the most, which stay hidden."""
    if node.target not in _LEAST or len(node.args) != 2 or node.kwargs:
        return None
    floor = number_of(node.args[1], statics)
    is_below_all = floor is not None and floor <= HIDDEN_BELOW and sizes(node) == sizes(node.args[0])  # type: ignore[arg-type]
    return floor if is_below_all else None


def _raised_to(floor: float, reading: _Reading) -> _Reading:
    if not reading.is_untouched:
        raise NoMatch("its scores are scaled after they were raised to a floor")
    return replace(reading, scores=replace(reading.scores, floor=max(floor, reading.scores.floor)))


def _read_add(node: fx.Node, reading: _Reading, statics: StaticValues) -> tuple[fx.Node, _Reading]:
    given = arguments(node)
    first, second = given["self"], given["other"]
    if given["alpha"] != 1:
        raise NoMatch("a scaled addition to the scores is not known")
    if not is_tensor(second):
        return first, _moved_by_a_constant(reading)
    is_second = second in statics.nodes or (first not in statics.nodes and _chooses_keys(second, statics))
    bias, rest = (second, first) if is_second else (first, second)
    if not reading.is_untouched:
        raise NoMatch("its scores are scaled after a bias was added")
    return rest, replace(reading, scores=_with_bias(reading.scores, bias, 1.0, statics))


def _chooses_keys(node: fx.Node, statics: StaticValues) -> bool:
    try:
        return read_masks(node, statics).chosen is not None
    except NoMatch:
        return False


def _with_bias(scores: Scores, bias: fx.Node, factor: float, statics: StaticValues) -> Scores:
    kind = statics.kinds.get(bias)
    if isinstance(kind, (Table, Drifting)) and kind.dim - len(shape_of(bias)) == -1:
        if isinstance(kind, Drifting):
            _require_harmless_drift(bias, scores)
        return replace(scores, key_biases=(*scores.key_biases, KeyBias(bias, kind.dim, factor)))
    if factor != 1.0:
        raise NoMatch("a scaled mask is not known")
    return _with_masks(scores, read_masks(bias, statics))


def _require_harmless_drift(bias: fx.Node, scores: Scores) -> None:
    if scores.sinks is not None:
        raise NoMatch("its bias per key moves with the number of tokens, which its sink does not")
    if bias.meta["val"].dtype.itemsize < torch.float32.itemsize:
        raise NoMatch(
            "its bias per key is counted from the last token in half precision, where that of a short sequence would "
            "be rounded as that of the longest one; make it in float32"
        )


def _with_masks(scores: Scores, masks: Masks) -> Scores:
    if masks != Masks() and scores.factors:
        raise NoMatch("its scores are multiplied by a table after some were hidden")
    together = Masks(scores.masks, scores.chosen) + masks
    return replace(scores, masks=together.static, chosen=together.chosen)


def _read_fill(node: fx.Node, reading: _Reading, statics: StaticValues) -> tuple[fx.Node, _Reading]:
    if reading.is_capped or not reading.factor_after > 0:
        raise NoMatch("its scores are changed after some were hidden")
    found = filled(node, statics, lambda fill: fill * reading.factor_after <= HIDDEN_BELOW)
    if found is None or not is_tensor(found.above):
        raise NoMatch("hidden scores are filled with a value that still gets weight")
    masks = read_masks(found.mask, statics, found.hides, found.fill * reading.factor_after)
    return found.above, replace(reading, scores=_with_masks(reading.scores, masks))


def _read_sinks(node: fx.Node, reading: _Reading) -> tuple[fx.Node, _Reading]:
    given = arguments(node)
    parts, dim = given["tensors"], given["dim"]
    if len(parts) != 2 or dim not in (-1, len(shape_of(node)) - 1):
        raise NoMatch("its scores are concatenated with something that is not one sink per head")
    scores, sinks = parts
    source: Any = sinks
    while source.target in (*_SAME_VALUES, aten.expand.default) and keeps_numbers(source):
        source = source.args[0]
    heads = math.prod(shape_of(sinks)[:-2])
    if shape_of(sinks)[-1] != 1 or shape_of(source) != (heads,):
        raise NoMatch("its scores are concatenated with something that is not one sink per head")
    if not reading.is_untouched:
        raise NoMatch("sinks are scaled")
    return scores, replace(reading, scores=replace(reading.scores, sinks=source))


def _read_baddbmm(node: fx.Node, reading: _Reading, statics: StaticValues) -> tuple[Scores, Operand, Operand]:
    given = arguments(node)
    beta, alpha = float(given["beta"]), float(given["alpha"])
    if not reading.is_untouched:
        raise NoMatch("its scores are scaled after a bias was added")
    scores = _with_bias(reading.scores, given["self"], beta, statics) if beta else reading.scores
    return replace(scores, scale=alpha), _plain(given["batch1"]), _transposed(given["batch2"])


def _keeps_pairs(node: fx.Node) -> bool:
    """Whether a node only changes dtype, memory or leading dimensions of its input."""
    if node.target not in _SAME_VALUES or not keeps_numbers(node) or not node.meta["val"].is_floating_point():
        return is_full_slice(node)
    return sizes(node)[-2:] == sizes(node.args[0])[-2:]  # type: ignore[arg-type]


def _moved_by_a_constant(reading: _Reading) -> _Reading:
    """The softmax does not see a number that is added to all scores of a query; a tanh or a sink does."""
    if reading.is_capped or reading.scores.sinks is not None:
        raise NoMatch("a number is added to its scores before a softcap or beside a sink")
    return reading


def _is_maximum_over_keys(node: Any, scores: fx.Node) -> bool:
    """Whether `node` is the greatest of `scores` for every query, or over more than its keys."""
    node = _without_detach(node)
    source = node.args[0] if isinstance(node, fx.Node) and node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or source.target not in _MAXIMA:
        return False
    if _without_detach(source.args[0]) is not scores or (source is not node and node.args[1] != 0):
        return False
    if shape_of(node)[-1:] != (1,):
        return False
    dims = arguments(source)["dim"]
    last = len(shape_of(scores)) - 1
    return any(dim in (-1, last) for dim in (dims if isinstance(dims, (list, tuple)) else [dims]))


# Products


def _product(node: fx.Node) -> tuple[Operand, Operand] | None:
    """Queries and keys of a node that multiplies them, else None."""
    if node.target in MATMULS:
        return _plain(node.args[0]), _transposed(node.args[1])  # type: ignore[arg-type]
    if node.target is aten.einsum.default:
        return _einsum_scores(node)
    return None


def _transposed(node: fx.Node) -> Operand:
    """`node` with its last two dimensions swapped, without a swap that the graph already made."""
    rank = len(shape_of(node))
    if node.target is aten.transpose.int:
        swapped: Any = node.args[1:3]
        dims = {int(dim) % rank for dim in swapped}
        if dims == {rank - 1, rank - 2}:
            return _plain(node.args[0])  # type: ignore[arg-type]
    return Operand(node, (*range(rank - 2), rank - 1, rank - 2))


def _einsum_scores(node: fx.Node) -> tuple[Operand, Operand]:
    found = _einsum(node)
    (left, right), operands = found.letters, found.operands
    *lead, query, key = list(found.output)
    if query not in left:
        left, right, operands = right, left, operands[::-1]
    if found.summed is None or query not in left or key not in right or key in left or query in right:
        raise NoMatch("the einsum of its scores does not end in query and key")
    return (
        _by_letters(operands[0], left, [*lead, query, found.summed]),
        _by_letters(operands[1], right, [*lead, key, found.summed]),
    )


def _einsum(node: fx.Node) -> Einsum:
    found = einsum_of_two(node)
    if found is None:
        raise NoMatch(f"the einsum {node.args[0]} is not known")
    return found


def _by_letters(node: fx.Node, letters: str, wanted: list[str]) -> Operand:
    """An operand in the order `wanted`; leading dimensions that it lacks are broadcast, where all before them are 1."""
    found = [letter for letter in wanted if letter in letters]
    missing = [place for place, letter in enumerate(wanted) if letter not in letters]
    before = wanted[: missing[-1]] if missing else []
    sizes_before = [shape_of(node)[letters.index(letter)] for letter in before if letter in letters]
    if sorted(found) != sorted(letters) or found[-2:] != wanted[-2:] or any(size != 1 for size in sizes_before):
        raise NoMatch("an einsum broadcasts over heads")
    return Operand(node, tuple(letters.index(letter) for letter in found))


# From the softmax down


def _follow_weights(softmax: fx.Node, has_sinks: bool) -> tuple[float, fx.Node]:
    """The attention weights as the last node before the values, and their dropout."""
    node, dropout = softmax, 0.0
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise NoMatch("its weights are used for something else than the values")
        user = users[0]
        if user.target is aten.dropout.default:
            given = arguments(user)
            dropout = max(dropout, float(given["p"]) if given["train"] else 0.0)
        elif user.target is aten.slice.Tensor and has_sinks and _drops_sink(user):
            has_sinks = False
        elif not _keeps_pairs(user):
            if has_sinks:
                raise NoMatch("the weight of its sink is used")
            return dropout, node
        node = user


def _drops_sink(node: fx.Node) -> bool:
    given = arguments(node)
    before, after = shape_of(given["self"])[-1], shape_of(node)[-1]
    return given["start"] in (0, None) and size_expression(before) - size_expression(after) == 1


def _read_value(output: fx.Node, weights: fx.Node) -> tuple[Operand, tuple[int, ...]]:
    if output.target in MATMULS and output.args[0] is weights:
        if len(shape_of(output.args[1])) < 2:  # type: ignore[arg-type]
            raise NoMatch("its values are one number for every token, not one vector")
        return _plain(output.args[1]), _identity(output)  # type: ignore[arg-type]
    if output.target is aten.einsum.default:
        return _einsum_value(output, weights)
    raise NoMatch(f"its weights go into {shown_name(output)}, not into a product with values")


def _einsum_value(output: fx.Node, weights: fx.Node) -> tuple[Operand, tuple[int, ...]]:
    found = _einsum(output)
    (left, right), operands, result = found.letters, found.operands, found.output
    if operands[0] is not weights:
        left, right, operands = right, left, operands[::-1]
    *lead, query, key = list(left)
    width = [letter for letter in right if letter not in left]
    if operands[0] is not weights or len(width) != 1 or sorted(result) != sorted([*lead, query, *width]):
        raise NoMatch("the einsum of weights and values is not known")
    natural = [*lead, query, width[0]]
    return _by_letters(operands[1], right, [*lead, key, width[0]]), tuple(natural.index(letter) for letter in result)


def is_score_softmax(node: fx.Node, symbol: Any) -> bool:
    """Whether `node` is a softmax whose last two dimensions are (T, T), or (T, T + 1) with a sink."""
    if not is_softmax_over_last(node):
        return False
    *_, queries, keys = sizes(node)
    return bool(queries == symbol and keys in (symbol, symbol + 1))
