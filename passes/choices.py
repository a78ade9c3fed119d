"""Lists of chosen keys in a rewritten graph: one for every selection, however many attentions read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tree_compile.passes.attention_patterns import Scores
from tree_compile.passes.axes import TOKENS, Ancestors, Mixes, Value
from tree_compile.passes.finding import Finding
from tree_compile.passes.indexer import how_many, operands, read_index_scores, require_as_exact
from tree_compile.passes.masks import NoMatch
from tree_compile.passes.pair_tables import NotCausal, PairForm, SeesNothing, Visibility
from tree_compile.passes.plan_inputs import plan_input
from tree_compile.passes.shapes import inherited, token_symbol
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import StaticValues
from tree_compile.passes.token_rules import RULES, Step
from tree_compile.runtime.sparse_attention import sparse_attention
from tree_compile.runtime.topk_index import tree_topk_index


@dataclass
class Choices:
    """The selections of a graph that were rewritten.

    Attributes:
        statics: its static values.
        read: gives the closed form of the masks among scores.
        findings: what became of the selections.
    """

    statics: StaticValues
    read: Callable[[Scores], PairForm]
    findings: list[Finding] = field(default_factory=list)
    _made: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def indices(self, topk: fx.Node, attention: fx.Node) -> fx.Node:
        """The ancestors that every query of an attention keeps of a selection, int32 [1, T, k] with -1 for none.

        Raises:
            NoMatch: they are not chosen by the scores of an indexer from all tokens up to the query, or by scores in
                half precision for an attention that is not.
        """
        if topk not in self._made:
            self._made[topk] = self._make(topk)
        weights: Any = self._made[topk].args[2]
        require_as_exact(weights, attention)
        return self._made[topk]

    def _make(self, topk: fx.Node) -> fx.Node:
        graph = topk.graph
        scores, k = read_index_scores(topk, self.statics), how_many(topk, token_symbol(graph))
        if not self._is_causal(Scores(masks=scores.masks)):
            raise NoMatch("its indexer chooses among other tokens than all those up to the query")
        with graph.inserting_before(topk):
            tensors = operands(graph, scores, topk.meta)
            node = graph.call_function(tree_topk_index, (*tensors, plan_input(graph, "plan_segments"), k))
        length = tensors[0].meta["val"].shape[1]
        node.meta = inherited(topk.meta)
        node.meta["val"] = tensors[0].meta["val"].new_empty((1, length, k), dtype=torch.int32)
        became = f"tree_topk_index, {k} of every token's ancestors, of equal scores the earliest"
        self.findings.append(Finding("indexer", became, source_line(topk), module_path(topk)))
        return node

    def _is_causal(self, scores: Scores) -> bool:
        try:
            return bool(scores.masks) and self.read(scores) == PairForm(Visibility())
        except (NotCausal, SeesNothing):
            return False


def _tree_topk_index(step: Step) -> Value:
    """Tokens of queries, keys and weights must be in the order of the row."""
    query, key, weights = (step.plain(argument) for argument in step.node.args[:3])
    if query.axes != (None, TOKENS, None, None) or key.axes != (None, TOKENS, None) or weights.axes != key.axes:
        raise Mixes("what its indexer scores is not one for every token of the row")
    return Value((None, TOKENS, None), Ancestors())


def _sparse_attention(step: Step) -> Value:
    """Tokens of queries, keys and values must be in the order of the row, whose numbers the indices are."""
    *operands, indices = (step.raw(argument) for argument in step.node.args[:4])
    if any(operand.content is not None or operand.axes[2:] != (TOKENS, None) for operand in operands):
        raise Mixes("the keys of its attention are not one for every token of the row")
    if indices != Value((None, TOKENS, None), Ancestors()):
        raise Mixes("its keys are chosen by something else than the numbers of ancestors")
    sinks = step.node.kwargs.get("sinks")
    if sinks is not None and step.raw(sinks).has_tokens:
        raise Mixes("the sinks of its attention depend on the tokens")
    return Value((None, None, TOKENS, None))


RULES[tree_topk_index] = _tree_topk_index
RULES[sparse_attention] = _sparse_attention
