"""Which entries a query sees, as it stands in captured graphs: all that are closed, or the best of an indexer.

Only read here; nothing is changed. An entry is closed for the query that closes its window, and for all after it.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv

from tree_compile.passes.indexer import IndexScores, read_index_scores
from tree_compile.passes.masks import NoMatch
from tree_compile.passes.nodes import arguments, shown_name
from tree_compile.passes.pair_tables import HIDDEN_BELOW, as_visibility
from tree_compile.passes.probing import evaluate
from tree_compile.passes.roles import keeps_numbers
from tree_compile.passes.shapes import extent, is_tensor, shape_of, size_expression
from tree_compile.passes.static_values import FIRST_REACH, Fill, Fixed, Pair, StaticValues, Table, WindowPair

aten = torch.ops.aten
_SAME = {
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default, aten.contiguous.default,
    aten.clone.default, aten.alias.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default,
    aten.expand_as.default, aten.detach.default,
}  # fmt: skip
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_FILLED = {
    aten.full.default: "fill_value", aten.full_like.default: "fill_value", aten.new_full.default: "fill_value",
    aten.zeros.default: 0.0, aten.zeros_like.default: 0.0, aten.new_zeros.default: 0.0,
    aten.ones.default: 1.0, aten.ones_like.default: 1.0, aten.new_ones.default: 1.0,
}  # fmt: skip
_WHERES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_BOTH = {aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor}
_EITHER = {aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor}
_NOT = {aten.logical_not.default, aten.bitwise_not.default}
_ON_BITS = _BOTH | _EITHER | _NOT


@dataclass(frozen=True)
class Seen:
    """What is known of the entries that a query sees.

    Attributes:
        closed: whether all of them are closed.
        chosen: the `topk` that they are from; None for all.
    """

    closed: bool = False
    chosen: fx.Node | None = None

    def __and__(self, other: Seen) -> Seen:
        if self.chosen is not None and other.chosen not in (None, self.chosen):
            raise NoMatch("its entries are chosen twice")
        return Seen(self.closed or other.closed, self.chosen or other.chosen)


@dataclass(frozen=True)
class WindowReader:
    """Reads masks over windows of `window` tokens, in a graph with the given static values."""

    graph_module: fx.GraphModule
    statics: StaticValues
    symbol: sympy.Symbol
    window: int

    def _stripped(self, node: Any) -> Any:
        """A node without what only changes its precision, memory or dimensions of size one; static ones stay."""
        kinds = self.statics.kinds
        while isinstance(node, fx.Node) and node not in kinds and (node.target in _SAME or is_full_slice(node)):
            if not keeps_numbers(node):
                break
            node = node.args[0]
        return node

    def mask(self, node: Any, hides: bool = False) -> Seen:
        """What a boolean or floating `[…, T, T // m]` lets a query see; `hides` for one that is True where hidden.

        Raises:
            NoMatch: it is not known.
        """
        node = self._stripped(node)
        kind = self.statics.kinds.get(node)
        if isinstance(kind, WindowPair):
            return self._static(kind, hides)
        args: Any = node.args if isinstance(node, fx.Node) else ()
        target = getattr(node, "target", None)
        if self._is_all(node, hides):
            return Seen()
        if target in _FILLS and self._is_hidden(args[2], hides):
            return self.mask(args[0], hides) & self.mask(args[1], hides=True)
        if target in _WHERES:
            return self._where(args, hides)
        if target in _ON_BITS and not is_boolean(node):
            raise NoMatch("its mask over entries is combined as numbers")
        # A sum of truths is true where either is.
        is_sum = target is aten.add.Tensor and not node.kwargs and (hides or not is_boolean(node))
        if is_sum or target in (_EITHER if hides else _BOTH):
            return self.mask(args[0], hides) & self.mask(args[1], hides)
        if target in _NOT:
            return self.mask(args[0], not hides)
        if target is aten.slice.Tensor and self._drops_the_spare(node):
            return self._scattered(args[0], hides, spare=True)
        return self._scattered(node, hides, spare=False)

    def _static(self, kind: WindowPair, hides: bool) -> Seen:
        for sample in kind.samples:
            visible = as_visibility(sample, hides) if sample.dtype == torch.bool else sample > HIDDEN_BELOW
            if sample.dtype != torch.bool and bool((sample[visible] != 0).any()):
                raise NoMatch("its scores of entries have a bias")
            if not bool((visible == self._closed(*sample.shape[-2:])).all()):
                raise NoMatch("a query sees other entries than those whose windows end at it or before it")
        return Seen(closed=True)

    def _closed(self, queries: int, entries: int) -> Tensor:
        """Which entries are closed for each query: bool [queries, entries]."""
        return torch.arange(entries) < (torch.arange(queries)[:, None] + 1) // self.window

    def _where(self, args: Any, hides: bool) -> Seen:
        condition, one, other = args
        if self._is_hidden(other, hides):
            return self.mask(condition) & self.mask(one, hides)
        if self._is_hidden(one, hides):
            return self.mask(condition, hides=True) & self.mask(other, hides)
        raise NoMatch("neither side of a torch.where in its mask hides something")

    def _is_hidden(self, node: Any, hides: bool) -> bool:
        number = self._number(node)
        return number is not None and ((number == 1) if hides else number <= HIDDEN_BELOW or _is_false(node, number))

    def _is_all(self, node: Any, hides: bool) -> bool:
        number = self._number(node)
        if number is None:
            return False
        return number == (0 if hides or not is_boolean(node) else 1)

    def _number(self, node: Any) -> float | None:
        """The number that a node holds everywhere."""
        node = self._stripped(node)
        if isinstance(node, (bool, int, float)):
            return float(node)
        kind = self.statics.kinds.get(node)
        if isinstance(kind, Fixed | Fill) and kind.value.numel():
            first = kind.value.flatten()[0]
            return float(first) if bool((kind.value == first).all()) else None
        filled: Any = _FILLED.get(getattr(node, "target", None))  # type: ignore[arg-type]
        number = arguments(node)[filled] if isinstance(filled, str) else filled
        return None if isinstance(number, fx.Node) or number is None else float(number)

    # Chosen by an index

    def _drops_the_spare(self, node: fx.Node) -> bool:
        """Whether it leaves out the last of T // m + 1 entries, which stands for none."""
        given = arguments(node)
        before, after = (size_expression(shape_of(value)[-1]) for value in (given["self"], node))
        is_last = given["dim"] % len(shape_of(node)) == len(shape_of(node)) - 1
        return is_last and given["start"] in (0, None) and given["step"] == 1 and before - after == 1

    def _scattered(self, node: Any, hides: bool, *, spare: bool) -> Seen:
        if getattr(node, "target", None) not in (aten.scatter.value, aten.scatter.src):
            what = shown_name(node) if isinstance(node, fx.Node) and node.op == "call_function" else str(node)
            raise NoMatch(f"the step {what} of its mask over entries is not known")
        given = arguments(node)
        visible = self._is_all_of(given.get("value", given.get("src")), node, hides)
        is_last = given["dim"] % len(shape_of(node)) == len(shape_of(node)) - 1
        if not is_last or not visible or not self._is_hidden_in(given["self"], hides):
            raise NoMatch("what it writes at the chosen entries does not make them visible, and them alone")
        rows, all_rows = ([size_expression(size) for size in shape_of(of)[:-1]] for of in (given["index"], node))
        if rows != all_rows:
            raise NoMatch("its index names entries for some of the tokens only")
        seen, dropped_to = self._index(given["index"])
        if dropped_to != ("spare" if spare else None) and not (spare and dropped_to is None):
            raise NoMatch("entries that are not seen are written to a place that is")
        return seen

    def _is_all_of(self, value: Any, node: fx.Node, hides: bool) -> bool:
        number = self._number(value)
        return number == (1 if node.meta["val"].dtype == torch.bool and not hides else 0)

    def _is_hidden_in(self, node: Any, hides: bool) -> bool:
        number = self._number(node)
        if number is None:
            return False
        if node.meta["val"].dtype == torch.bool:
            return number == (1 if hides else 0)
        return number <= HIDDEN_BELOW

    def _index(self, node: Any) -> tuple[Seen, str | None]:
        """The entries that numbers `[…, T, k]` name, and what stands for those that were dropped: "none" for -1."""
        node = self._stripped(node)
        if node.target is operator.getitem and node.args[0].target is aten.topk.default and node.args[1] == 1:
            return Seen(chosen=node.args[0]), None
        if node.target not in _WHERES:
            raise NoMatch(f"the step {shown_name(node)} of its index of entries is not known")
        condition, one, other = node.args
        dropped = one if self._sentinel(one) else other
        kept = other if dropped is one else one
        sentinel = self._sentinel(dropped)
        if sentinel is None:
            raise NoMatch("dropped entries of its index are replaced by something that is not known")
        seen, before = self._index(kept)
        drops = self._drops(condition, kept, when=dropped is one)
        if drops == "unclosed" and before is None:
            return seen & Seen(closed=True), sentinel
        if drops == "none" and before == "none":
            return seen, sentinel
        raise NoMatch("the entries that its index drops are not those whose windows end behind the query")

    def _sentinel(self, node: Any) -> str | None:
        """What a number of an entry stands for: "none" for -1, "spare" for T // m, behind the last entry."""
        if self._number(node) == -1:
            return "none"
        node = self._stripped(node)
        fill = arguments(node).get("fill_value") if isinstance(node, fx.Node) and node.target in _FILLED else node
        if isinstance(fill, fx.Node) and not is_tensor(fill):
            found = extent(fill.meta["val"], self.symbol)
            return (
                "spare"
                if found is not None and (found.factor, found.window, found.fewer) == (1, self.window, 0)
                else None
            )
        return None

    def _drops(self, condition: Any, kept: Any, *, when: bool) -> str | None:
        """What is dropped where `condition` is `when`: entries that are not "unclosed", or those that are "none"."""
        target, args = condition.target, condition.args
        if len(args) != 2 or self._stripped(args[0]) is not self._stripped(kept):
            return None
        at_least = {aten.ge.Tensor, aten.ge.Scalar}
        less = {aten.lt.Tensor, aten.lt.Scalar}
        if target not in at_least | less:
            return None
        if isinstance(args[1], (int, float)):
            return "none" if args[1] == 0 and (target in less) == when else None
        return "unclosed" if self._is_threshold(args[1]) and (target in at_least) == when else None

    def _is_threshold(self, node: Any) -> bool:
        """Whether it is (position + 1) // m, the number of windows that are closed."""
        while isinstance(node, fx.Node) and node not in self.statics.kinds and node.target in _SAME | _VIEWS:
            node = node.args[0]
        if not isinstance(self.statics.kinds.get(node), Table):
            return False
        tokens = self.statics.proved_length or self.statics.longest or FIRST_REACH
        value = evaluate(self.graph_module, self.statics.nodes, {node}, tokens)[node].flatten()
        expected = (torch.arange(tokens, device=value.device) + 1) // self.window
        return value.shape == expected.shape and bool((value == expected).all())

    # The indexer

    def index_scores(self, topk: fx.Node) -> IndexScores:
        """The scores that a selection of entries goes by.

        Raises:
            NoMatch: it is not an indexer that is known, or it compares entries that are not closed.
        """
        given = arguments(topk)
        if given["dim"] % len(shape_of(given["self"])) != len(shape_of(given["self"])) - 1 or not given["largest"]:
            raise NoMatch("its indexer does not choose the entries with the highest scores")
        pairs = {node: Pair(kind.samples) for node, kind in self.statics.kinds.items() if isinstance(kind, WindowPair)}
        scores = read_index_scores(topk, replace(self.statics, kinds={**self.statics.kinds, **pairs}))
        seen = functools.reduce(operator.and_, (self.mask(mask.node, mask.hides) for mask in scores.masks), Seen())
        if not seen.closed or seen.chosen is not None:
            raise NoMatch("its indexer chooses among entries whose windows end behind the query")
        return scores

    def how_many(self, topk: fx.Node) -> int:
        """c of a selection of c entries, or of all where they are fewer.

        Raises:
            NoMatch: the number depends on the number of tokens in another way.
        """
        entries = sympy.Symbol("entries", integer=True, nonnegative=True)
        size = size_expression(topk.meta["val"][1].shape[-1])
        size = size.xreplace(
            {whole: entries for whole in size.atoms(FloorDiv) if whole.args == (self.symbol, self.window)}
        )
        most = size.subs(entries, 1 << 40)
        tried = [0, 1, 2, *(most * factor + step for factor in (1, 4) for step in (-1, 0, 1))]
        if most >= 1 << 20 or any(size.subs(entries, n) not in (most, min(n, most)) for n in tried if n >= 0):
            raise NoMatch(f"its indexer chooses {size} entries")
        return int(most)


def is_boolean(node: Any) -> bool:
    """Whether `node` has a boolean tensor as its value."""
    return is_tensor(node) and node.meta["val"].dtype == torch.bool


def is_full_slice(node: fx.Node) -> bool:
    """Whether `node` is a slice that takes everything."""
    if node.target is not aten.slice.Tensor:
        return False
    args: Any = node.args
    sizes = [[size_expression(size) for size in shape_of(value)] for value in (args[0], node)]
    return sizes[0] == sizes[1]


def _is_false(node: Any, number: float) -> bool:
    return number == 0 and is_boolean(node)
