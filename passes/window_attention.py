"""Attention over tokens and the entries that windows of them are pooled into: every query reads a list of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tree_compile.errors import RefusedModelError, TokenMixingError
from tree_compile.passes.attention import require_no_dropout
from tree_compile.passes.attention_patterns import AttentionMatch, Operand, match_sdpa, match_softmax
from tree_compile.passes.axes import TOKENS, Ancestors, Axis, Mixes, Value
from tree_compile.passes.finding import Finding
from tree_compile.passes.indexer import how_many, operands, require_as_exact
from tree_compile.passes.masks import NoMatch
from tree_compile.passes.nodes import arguments
from tree_compile.passes.operators import SAME_NUMBERS, SAME_ROWS, SDPA
from tree_compile.passes.pair_tables import NotCausal, SeesNothing, as_visibility, pair_form
from tree_compile.passes.plan_inputs import RowTables, plan_input, window_input
from tree_compile.passes.shapes import (
    Extent,
    extent,
    in_dtype,
    in_one_dtype,
    inherited,
    is_boolean,
    is_full_slice,
    is_softmax_over_last,
    keeps_numbers,
    shape_of,
    sizes,
    token_symbol,
    window_beside_tokens,
)
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import Pair, StaticValues
from tree_compile.passes.token_rules import RULES, Step
from tree_compile.passes.window_patterns import WindowReader
from tree_compile.runtime.window_attention import all_entries, nearest_rows, topk_entries, window_attention

aten = torch.ops.aten


@dataclass(frozen=True)
class _Found:
    """An attention over the `near` nearest tokens, and over all entries or those of the selection `chosen`."""

    match: AttentionMatch
    near: int
    chosen: fx.Node | None


@dataclass(frozen=True)
class RewriteWindowAttention:
    """Replaces every attention over T tokens and T // m entries.

    Raises:
        TokenMixingError: it has a form that is not known.
    """

    statics: StaticValues
    tables: RowTables
    name: str = field(default="window attention", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        symbol = token_symbol(graph_module.graph)
        findings: list[Finding] = []
        for node in list(graph_module.graph.nodes):
            if window := _windows_among_keys(node, symbol):
                reader = WindowReader(graph_module, self.statics, symbol, window)
                try:
                    findings += self._replace(graph_module.graph, node, reader)
                except (NoMatch, NotCausal, SeesNothing) as error:
                    raise _unknown(node, str(error)) from None
        return tuple(findings)

    def _replace(self, graph: fx.Graph, node: fx.Node, reader: WindowReader) -> list[Finding]:
        found = self._read(graph, node, reader)
        output = found.match.output
        with graph.inserting_before(output):
            replacement = self._emit(graph, found, reader)
        output.replace_all_uses_with(replacement)
        graph.erase_node(output)
        return _findings(found, reader)

    def _read(self, graph: fx.Graph, node: fx.Node, reader: WindowReader) -> _Found:
        masks = _masks(graph, reader)
        match = self._match(node, masks)
        mask = match.scores.masks[0]
        of_tokens, of_entries = masks[mask.node]
        near, seen = self._window(of_tokens, mask.hides), reader.mask(of_entries, mask.hides)
        if not seen.closed:
            raise NoMatch("a query sees entries whose windows end behind it")
        return _Found(match, near, seen.chosen)

    def _match(self, node: fx.Node, masks: Iterable[fx.Node]) -> AttentionMatch:
        """The attention at `node`, with one of the joined masks; what that says is of no matter here."""
        pairs = dict.fromkeys(masks, Pair(()))
        statics = replace(self.statics, nodes=self.statics.nodes | pairs.keys(), kinds={**self.statics.kinds, **pairs})
        match = (match_sdpa if node.target is SDPA else match_softmax)(node, statics)
        require_no_dropout(match.dropout, node)
        scores = match.scores
        more = (scores.softcap, scores.factors, scores.key_biases, scores.causal, scores.chosen)
        if any(more) or [mask.node in pairs for mask in scores.masks] != [True]:
            raise NoMatch("its scores are more than products, one mask and a sink")
        return match

    def _window(self, node: fx.Node, hides: bool) -> int:
        """How many tokens a query sees before the entries, itself among them."""
        kind = self.statics.kinds.get(node)
        if not isinstance(kind, Pair):
            raise NoMatch("its mask over tokens is not made from positions alone")
        form = pair_form([as_visibility(sample, hides and sample.dtype == torch.bool) for sample in kind.samples])
        if form.visibility is None or form.slopes is not None or not form.visibility.window:
            raise NoMatch("beside entries, a query may see a window of tokens and no others")
        return form.visibility.window

    def _emit(self, graph: fx.Graph, found: _Found, reader: WindowReader) -> fx.Node:
        match, meta = found.match, found.match.output.meta
        if match.output_order != (0, 1, 2, 3) or match.query.order != (0, 1, 2, 3):
            raise NoMatch("its output has some other layout than [1, heads, tokens, width]")
        key, value = (_parts(graph, operand, reader) for operand in (match.key, match.value))
        if shape_of(key[0])[1] != shape_of(value[0])[1]:
            raise NoMatch("its keys and its values are repeated for groups of heads in different ways")
        tensors = [match.query.node, key[0], value[0], key[1], value[1]]
        values = in_one_dtype(graph, tensors)
        rows = self.tables.nearest(found.near)
        if found.chosen is None:
            entries = self.tables.all_entries(reader.window)
        else:
            entries = _chosen(graph, reader, found.chosen, found.match.output)
        node = graph.call_function(
            window_attention, (*values, rows, entries), {"scale": match.scores.scale, "sinks": match.scores.sinks}
        )
        node.meta = inherited(meta)
        node.meta["val"] = values[0].meta["val"].new_empty((*shape_of(values[0])[:-1], shape_of(values[2])[-1]))
        return in_dtype(graph, node, meta["val"].dtype)


def _windows_among_keys(node: fx.Node, symbol: Any) -> int:
    """m where `node` is attention over T tokens and T // m entries, and maybe a sink; else 0."""
    if node.target is SDPA:
        return window_beside_tokens(shape_of(arguments(node)["key"])[-2], symbol)
    if not is_softmax_over_last(node) or sizes(node)[-2] != symbol:
        return 0
    size = shape_of(node)[-1]
    return window_beside_tokens(size, symbol) or window_beside_tokens(size - 1, symbol)


def _masks(graph: fx.Graph, reader: WindowReader) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Joined masks, or casts of them, each with its parts `[…, T, T]` and `[…, T, T // m]`."""
    found: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.cat.default and (parts := _parts_of_cat(node, -1, reader)) is not None:
            if sizes(node)[-2] == reader.symbol:
                _require_same_truth(node, parts)
                found[node] = parts
        elif node.target in SAME_ROWS and node.args[0] in found:
            _require_same_mask(node)
            found[node] = found[node.args[0]]
    return found


def _require_same_mask(node: fx.Node) -> None:
    source: Any = node.args[0]
    _require_same_truth(node, [source])
    if not keeps_numbers(node) or sizes(node)[-2:] != sizes(source)[-2:]:
        raise NoMatch("its mask is reshaped, or cast to numbers that are not the same")


def _require_same_truth(node: fx.Node, sources: Sequence[Any]) -> None:
    """A mask that hides where it is False is a bias of 0 and 1 once it is a number, and hides nothing."""
    if any(is_boolean(source) != is_boolean(node) for source in sources):
        raise NoMatch("its mask is cast between truth and numbers")


def _parts_of_cat(node: fx.Node, dim: int, reader: WindowReader) -> tuple[fx.Node, fx.Node] | None:
    given = arguments(node)
    parts, rank = given["tensors"], len(shape_of(node))
    if len(parts) != 2 or given["dim"] % rank != dim % rank:
        return None
    extents = [extent(shape_of(part)[dim], reader.symbol) for part in parts]
    return tuple(parts) if extents == [Extent(1), Extent(1, reader.window)] else None


def _parts(graph: fx.Graph, operand: Operand, reader: WindowReader) -> tuple[fx.Node, fx.Node]:
    """Tokens and entries of keys or values `[1, heads, T + T // m, width]`, without what repeats their heads."""
    if operand.order != (0, 1, 2, 3) or shape_of(operand.node)[0] != 1:
        raise NoMatch("its keys have some other layout than [1, heads, tokens and entries, width]")
    node = _one_of_each_head(operand.node)
    while node.target in SAME_NUMBERS and keeps_numbers(node):
        node = node.args[0]  # type: ignore[assignment]
    parts = _parts_of_cat(node, 2, reader) if node.target is aten.cat.default else None
    if parts is None:
        raise NoMatch("its keys or values are not tokens and entries, joined right before the attention")
    dtype = operand.node.meta["val"].dtype
    return in_dtype(graph, parts[0], dtype), in_dtype(graph, parts[1], dtype)


def _one_of_each_head(node: fx.Node) -> fx.Node:
    """`node` before every head was repeated for a group of query heads, as `repeat_interleave(n, dim=1)` does."""
    if node.target is aten.repeat_interleave.self_int and arguments(node)["dim"] == 1:
        return node.args[0]  # type: ignore[return-value]
    source: Any = node
    for targets in ((aten.reshape.default, aten.view.default), (aten.expand.default,)):
        if source.target not in targets:
            return node
        source = source.args[0]
    while is_full_slice(source):
        source = source.args[0]
    is_repeated = source.target is aten.unsqueeze.default and arguments(source)["dim"] == 2
    # With a width of its own, heads and features are mixed.
    return source.args[0] if is_repeated and sizes(source)[-2:] == sizes(node)[-2:] else node


def _chosen(graph: fx.Graph, reader: WindowReader, topk: fx.Node, attention: fx.Node) -> fx.Node:
    """The entries that every query of an attention keeps of a selection."""
    query, key, weights = operands(graph, reader.index_scores(topk), topk.meta)
    require_as_exact(weights, attention)
    ranges, last = (window_input(graph, reader.window, name) for name in ("ranges", "last"))
    keep = how_many(topk, reader.entries)
    plan = (plan_input(graph, "plan_segments"), ranges, last)
    node = graph.call_function(topk_entries, (query, key, weights, *plan, keep))
    node.meta = inherited(topk.meta)
    node.meta["val"] = query.meta["val"].new_empty((1, shape_of(query)[1], keep), dtype=torch.int32)
    return node


def _findings(found: _Found, reader: WindowReader) -> list[Finding]:
    entries, output = f"the entries of windows of {reader.window} tokens", found.match.output
    findings = []
    if found.chosen is not None:
        keep = how_many(found.chosen, reader.entries)
        entries = f"the {keep} best of {entries}"
        became = f"topk_entries, {keep} of the entries on every token's path, of equal scores the earliest"
        findings.append(_finding("indexer", became, found.chosen))
    became = f"window_attention over the {found.near} nearest tokens and {entries} on its path"
    return [*findings, _finding("attention", became, output)]


def _finding(kind: str, became: str, node: fx.Node) -> Finding:
    return Finding(kind, became, source_line(node), module_path(node))


def _unknown(node: fx.Node, why: str) -> RefusedModelError:
    return TokenMixingError(
        "This attention over tokens and windows of tokens has a form that cannot be rewritten.",
        where=source_line(node),
        why=f"{why}.",
        hint="write it as in tree_compile.models.compressed.",
    )


# The proof


def _rule(step: Step) -> Value:
    query, key, value, entry_key, entry_value = (step.plain(argument) for argument in step.node.args[:5])
    for operand in (query, key, value):
        if operand.axes[2:] != (TOKENS, None):
            raise Mixes("the keys of its attention are not one for every token of the row")
    for operand in (entry_key, entry_value):
        axis = operand.axes[2]
        if axis is None or axis != Axis(window=axis.window) or not axis.window or operand.axes[3] is not None:
            raise Mixes("the entries of its attention are not one for every window of the row")
    if entry_key.axes[2] != entry_value.axes[2]:
        raise Mixes("the keys and the values of its entries are those of different windows")
    _require_lists(step)
    sinks = step.node.kwargs.get("sinks")
    if sinks is not None and step.raw(sinks).has_tokens:
        raise Mixes("the sinks of its attention depend on the tokens")
    return Value((None, None, TOKENS, None))


def _require_lists(step: Step) -> None:
    """What it reads are the lists of this package, which name ancestors and closed entries alone."""
    rows, entries = step.node.args[5:7]
    if getattr(rows, "target", None) is not nearest_rows:
        raise Mixes("its tokens are chosen by something else than the numbers of ancestors")
    target = getattr(entries, "target", None)
    is_chosen = target is topk_entries and step.raw(entries) == Value((None, TOKENS, None), Ancestors())
    if target is not all_entries and not is_chosen:
        raise Mixes("its entries are chosen by something else than the numbers of those that are closed")


def _rule_of_choice(step: Step) -> Value:
    query, key, weights = (step.plain(argument) for argument in step.node.args[:3])
    entries = key.axes[1]
    if query.axes != (None, TOKENS, None, None) or weights.axes != (None, TOKENS, None):
        raise Mixes("the queries of its indexer are not one for every token of the row")
    if entries is None or not entries.window or key.axes != (None, Axis(window=entries.window), None):
        raise Mixes("the keys of its indexer are not one for every window of the row")
    return Value((None, TOKENS, None), Ancestors())


RULES[window_attention] = _rule
RULES[topk_entries] = _rule_of_choice
