"""Which entries a query sees, as it stands in captured graphs: all that are closed, or the best of an indexer.

Only read here; nothing is changed. An entry is closed for the query that closes its window, and for all after it.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._sympy.functions import FloorDiv

from tree_compile.passes.fills import number_of
from tree_compile.passes.indexer import IndexScores, read_index_scores, topk_of
from tree_compile.passes.masks import MaskReader, NoMatch, View, index_of_visible
from tree_compile.passes.nodes import arguments, shown_name
from tree_compile.passes.operators import FULL, SAME_ROWS, SCATTERS, VIEWS, WHERES
from tree_compile.passes.pair_tables import HIDDEN_BELOW, as_visibility
from tree_compile.passes.probing import evaluate
from tree_compile.passes.shapes import Extent, extent, is_boolean, is_full_slice, keeps_numbers, sizes
from tree_compile.passes.static_values import FIRST_REACH, Pair, StaticValues, Table, WindowPair

aten = torch.ops.aten
_AT_LEAST = (aten.ge.Tensor, aten.ge.Scalar)
_LESS = (aten.lt.Tensor, aten.lt.Scalar)


class Dropped(Enum):
    """What stands in an index for an entry that it drops."""

    MINUS_ONE = auto()
    SPARE = auto()
    """T // m, behind the last entry."""


@dataclass(frozen=True)
class Seen:
    """What is known of the entries that a query sees.

    Attributes:
        closed: whether all of them are closed.
        chosen: the `topk` that they are from; None for all.
    """

    closed: bool = False
    chosen: fx.Node | None = None

    def __add__(self, other: Seen) -> Seen:
        if self.chosen is not None and other.chosen not in (None, self.chosen):
            raise NoMatch("its entries are chosen twice")
        return Seen(self.closed or other.closed, self.chosen or other.chosen)


@dataclass(frozen=True)
class WindowReader(MaskReader[Seen]):
    """Reads masks over windows of `window` tokens, in a graph with the given static values."""

    graph_module: fx.GraphModule
    statics: StaticValues
    symbol: sympy.Symbol
    window: int
    nothing: Seen = Seen()

    @property
    def entries(self) -> sympy.Expr:
        """How many entries there are."""
        return FloorDiv(self.symbol, sympy.Integer(self.window))

    def mask(self, node: Any, hides: bool = False) -> Seen:
        """What a boolean or floating `[…, T, T // m]` lets a query see; `hides` for one that is True where hidden.

        Raises:
            NoMatch: it is not known.
        """
        return self.read(node, View(hides, as_bool=is_boolean(node)))

    def static(self, node: Any, view: View) -> Seen:
        """Which entries are closed: those of windows that end at the query or before it, and no others."""
        kind = self.statics.kinds.get(node)
        if not isinstance(kind, WindowPair):
            raise NoMatch("its mask over entries depends on the tokens, or is not one of queries and entries")
        for sample in kind.samples:
            visible = as_visibility(sample, view.hides) if sample.dtype == torch.bool else sample > HIDDEN_BELOW
            if sample.dtype != torch.bool and bool((sample[visible] != 0).any()):
                raise NoMatch("its scores of entries have a bias")
            if not bool((visible == self._closed(*sample.shape[-2:])).all()):
                raise NoMatch("a query sees other entries than those whose windows end at it or before it")
        return Seen(closed=True)

    def _closed(self, queries: int, entries: int) -> Tensor:
        """Which entries are closed for each query: bool [queries, entries]."""
        return torch.arange(entries) < (torch.arange(queries)[:, None] + 1) // self.window

    # Chosen by an index

    def other(self, node: fx.Node, view: View) -> Seen:
        """What a mask shows that is made of an index of entries: with a spare one, which is cut off, for none."""
        source: Any = node.args[0] if self._cuts_the_spare(node) else node
        if source.target not in SCATTERS:
            raise NoMatch(f"the step {shown_name(source)} of its mask over entries is not known")
        seen, dropped = self._index(index_of_visible(source, view, self.statics))
        if dropped not in (None, Dropped.SPARE if source is not node else None):
            raise NoMatch("entries that are not seen are written to a place that is")
        return seen

    def _cuts_the_spare(self, node: fx.Node) -> bool:
        """Whether it leaves out the last of T // m + 1 entries, which stands for none."""
        if node.target is not aten.slice.Tensor:
            return False
        given = arguments(node)
        *lead, before = sizes(given["self"])
        is_last = [*lead, before - 1] == sizes(node) and extent(before - 1, self.symbol) == Extent(1, self.window)
        return is_last and given["start"] in (0, None) and given["step"] == 1

    def _stripped(self, node: Any) -> Any:
        """A node without what only changes its precision, memory or leading dimensions; static ones stay."""
        while isinstance(node, fx.Node) and node not in self.statics.kinds:
            if not (node.target in SAME_ROWS or is_full_slice(node)) or not keeps_numbers(node):
                break
            if sizes(node)[-2:] != sizes(node.args[0])[-2:]:  # type: ignore[arg-type]
                break
            node = node.args[0]
        return node

    def _index(self, node: fx.Node) -> tuple[Seen, Dropped | None]:
        """The entries that numbers `[…, T, k]` name, and what stands for those that were dropped."""
        node = self._stripped(node)
        if node.target is operator.getitem:
            return Seen(chosen=topk_of(node)), None
        if node.target not in WHERES:
            raise NoMatch(f"the step {shown_name(node)} of its index of entries is not known")
        condition, one, other = node.args
        when = self._stands_for_dropped(one) is not None
        kept, stands = (other, one) if when else (one, other)
        dropped = self._stands_for_dropped(stands)
        if dropped is None or not isinstance(kept, fx.Node) or not isinstance(condition, fx.Node):
            raise NoMatch("dropped entries of its index are replaced by something that is not known")
        seen, before = self._index(kept)
        if before is None and self._drops_unclosed(condition, kept, when):
            return seen + Seen(closed=True), dropped
        if before is Dropped.MINUS_ONE and self._drops_negative(condition, kept, when):
            return seen, dropped
        raise NoMatch("the entries that its index drops are not those whose windows end behind the query")

    def _stands_for_dropped(self, node: Any) -> Dropped | None:
        if number_of(node, self.statics) == -1:
            return Dropped.MINUS_ONE
        node = self._stripped(node)
        if isinstance(node, fx.Node) and node.target in FULL:
            is_whole = node.meta["val"].dtype in (torch.int32, torch.int64)
            node = arguments(node)["fill_value"] if is_whole else None
        size = node.meta["val"] if isinstance(node, fx.Node) else None
        is_spare = isinstance(size, torch.SymInt) and extent(size, self.symbol) == Extent(1, self.window)
        return Dropped.SPARE if is_spare else None

    def _drops_unclosed(self, condition: fx.Node, kept: fx.Node, when: bool) -> bool:
        """Whether what is dropped, where `condition` is `when`, are entries from the first on that is not closed."""
        targets, bound = (_AT_LEAST if when else _LESS), self._bound(condition, kept)
        return condition.target in targets and bound is not None and self._is_threshold(bound)

    def _drops_negative(self, condition: fx.Node, kept: fx.Node, when: bool) -> bool:
        targets, bound = (_LESS if when else _AT_LEAST), self._bound(condition, kept)
        return condition.target in targets and isinstance(bound, (int, float)) and bound == 0

    def _bound(self, condition: fx.Node, kept: fx.Node) -> Any:
        """What `kept` is compared with; None where something else is compared."""
        args = condition.args
        return args[1] if len(args) == 2 and self._stripped(args[0]) is self._stripped(kept) else None

    def _is_threshold(self, node: Any) -> bool:
        """Whether it is (position + 1) // m, the number of windows that are closed."""
        while isinstance(node, fx.Node) and node not in self.statics.kinds and node.target in (*SAME_ROWS, *VIEWS):
            if not keeps_numbers(node):
                return False
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
        pairs = {node: Pair(kind.samples) for node, kind in self.statics.kinds.items() if isinstance(kind, WindowPair)}
        scores = read_index_scores(topk, replace(self.statics, kinds={**self.statics.kinds, **pairs}))
        seen = functools.reduce(operator.add, (self.mask(mask.node, mask.hides) for mask in scores.masks), Seen())
        if not seen.closed or seen.chosen is not None:
            raise NoMatch("its indexer chooses among entries whose windows end behind the query")
        return scores
