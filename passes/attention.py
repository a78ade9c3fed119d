"""Attention becomes tree attention: every token sees its own ancestors only."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tree_compile.errors import (
    BidirectionalAttentionError,
    DropoutError,
    LengthDependentError,
    RefusedModelError,
    TokenMixingError,
)
from tree_compile.passes.attention_patterns import (
    AttentionMatch,
    KeyBias,
    Operand,
    Scores,
    is_score_softmax,
    match_sdpa,
    match_softmax,
)
from tree_compile.passes.choices import Choices
from tree_compile.passes.finding import Finding
from tree_compile.passes.gathered import insert_sparse_attention, is_softmax_over_chosen, match_gathered
from tree_compile.passes.indexer import topk_of
from tree_compile.passes.lengths import MOST_DRIFT
from tree_compile.passes.masks import ChangesWithLength, NoMatch
from tree_compile.passes.operators import SDPA
from tree_compile.passes.pair_tables import (
    HIDDEN_BELOW,
    NotCausal,
    PairForm,
    SeesNothing,
    Visibility,
    as_visibility,
    greatest_hidden,
    pair_form,
    split_mask,
    sum_of_masks,
)
from tree_compile.passes.plan_inputs import RowTables, plan_input
from tree_compile.passes.shapes import call, in_dtype, in_one_dtype, inherited, shape_of, size_expression, token_symbol
from tree_compile.passes.source import module_path, source_line
from tree_compile.passes.static_values import Drifting, Pair, StaticValues, Table
from tree_compile.runtime.attention import tree_attention
from tree_compile.runtime.sparse_attention import sparse_attention

aten = torch.ops.aten
_SPARSE = "sparse_attention over the keys that an indexer chose"


@dataclass(frozen=True)
class RewriteAttention:
    """Replaces every attention of a captured graph by `tree_attention`.

    Raises:
        BidirectionalAttentionError: a token sees tokens after it.
        DropoutError: attention weights are dropped out.
        LengthDependentError: a mask or bias changes with the number of tokens.
        TokenMixingError: a softmax over keys is not attention that can be read.
    """

    statics: StaticValues
    tables: RowTables
    name: str = field(default="attention", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        symbol = token_symbol(graph_module.graph)
        findings = []
        choices = Choices(self.statics, functools.cache(self._read))  # the layers of a model share few masks
        for node in list(graph_module.graph.nodes):
            if node.target is SDPA:
                findings.append(self._replace(graph_module.graph, self._match(match_sdpa, node), choices))
            elif node.op == "call_function" and is_score_softmax(node, symbol):
                findings.append(self._replace(graph_module.graph, self._match(match_softmax, node), choices))
            elif node.op == "call_function" and is_softmax_over_chosen(node, symbol):
                findings.append(self._replace_gathered(node, symbol, choices))
        return (*choices.findings, *findings)

    def _match(self, matcher: Any, node: fx.Node) -> AttentionMatch:
        try:
            match: AttentionMatch = matcher(node, self.statics)
        except ChangesWithLength as error:
            raise _length_dependent(node, str(error)) from None
        except NoMatch as error:
            raise _unknown_form(node, str(error)) from None
        require_no_dropout(match.dropout, node)
        return match

    def _replace(self, graph: fx.Graph, match: AttentionMatch, choices: Choices) -> Finding:
        form = self._form(match, choices.read)
        indices = self._indices(match, form, choices)
        with graph.inserting_before(match.output):
            replacement = self._emit(graph, match, form, indices)
        match.output.replace_all_uses_with(replacement)
        graph.erase_node(match.output)
        became = _description(match.scores, form)
        return Finding("attention", became, source_line(match.output), module_path(match.output))

    def _replace_gathered(self, softmax: fx.Node, symbol: sympy.Symbol, choices: Choices) -> Finding:
        try:
            match = match_gathered(softmax, self.statics, symbol)
            require_no_dropout(match.dropout, softmax)
            output = match.output.node
            indices = choices.indices(match.key.topk, output)
            with softmax.graph.inserting_before(output):
                replacement = insert_sparse_attention(softmax.graph, match, indices)
        except ChangesWithLength as error:
            raise _length_dependent(softmax, str(error)) from None
        except NoMatch as error:
            raise _unknown_choice(softmax, str(error)) from None
        output.replace_all_uses_with(replacement)
        softmax.graph.erase_node(output)
        return Finding("attention", _SPARSE, source_line(output), module_path(output))

    # What is visible

    def _form(self, match: AttentionMatch, read: Callable[[Scores], PairForm]) -> PairForm:
        _require_tokens(match)
        if not match.scores.masks:
            if match.scores.causal:
                return PairForm(Visibility())
            raise _bidirectional(match.output, "it has no mask")
        try:
            form = read(replace(match.scores, sinks=None, chosen=None))
        except NotCausal:
            raise _bidirectional(match.output, "its mask shows a token what comes after it") from None
        except SeesNothing:
            raise TokenMixingError(
                "The mask of this attention hides all tokens from some token.",
                where=source_line(match.output),
                why="softmax over nothing gives that token a mean over hidden tokens.",
                hint="let every token see itself.",
            ) from None
        except NoMatch as error:
            raise _unknown_form(match.output, str(error)) from None
        if not _biases_fit(match):
            raise _unknown_form(match.output, "a bias or a sink has some of the leading dimensions of its scores only")
        if form.slopes is not None and match.scores.sinks is not None:
            return PairForm(None)
        return form

    def _read(self, scores: Scores) -> PairForm:
        """What the masks say.

        Raises:
            NoMatch, NotCausal, SeesNothing.
        """
        form = pair_form(list(self._combined(scores)))
        if scores.factors and not self._factors_are_one(scores):
            raise NoMatch("its scores are multiplied by a table that changes what is visible")
        if not self._hides_enough(scores):
            raise NoMatch("its biases are so great that hidden tokens get weight")
        return form

    def _combined(self, scores: Scores) -> Iterator[Tensor]:
        """The masks of one attention as one table, at each probed number of tokens."""
        for samples in zip(*(self._samples(mask.node) for mask in scores.masks), strict=True):
            tables = [as_visibility(sample, mask.hides) for sample, mask in zip(samples, scores.masks, strict=True)]
            if scores.causal:
                tables.append(Visibility().table(samples[0].shape[-1], samples[0].device))
            yield sum_of_masks(tables)

    def _hides_enough(self, scores: Scores) -> bool:
        """Whether the hidden scores stay far below all others, whatever biases are added to both."""
        *_, table = self._combined(scores)
        visible, bias = split_mask(table)
        tables = [self._samples(mask.node)[-1] for mask in scores.masks]
        shown = [as_visibility(table, mask.hides) for table, mask in zip(tables, scores.masks, strict=True)]
        hidden = greatest_hidden(shown, [mask.fill for mask in scores.masks], scores.floor, visible)
        if math.isnan(hidden):
            return False
        of_keys = sum(self._greatest(bias.node) * abs(bias.factor) for bias in scores.key_biases)
        of_pairs = float(bias.abs().max()) if bias is not None else 0.0
        is_far_below = hidden + of_pairs + 2 * of_keys <= HIDDEN_BELOW / 2
        return is_far_below and of_pairs + of_keys <= -hidden / 3

    def _greatest(self, node: fx.Node) -> float:
        kind = self.statics.kinds[node]
        assert isinstance(kind, (Table, Drifting))
        return kind.greatest * (MOST_DRIFT if isinstance(kind, Drifting) else 1)

    def _factors_are_one(self, scores: Scores) -> bool:
        """Whether every factor is 1 where something is visible, and raises nothing that is hidden, at each probed T."""
        tables = [split_mask(table)[0] for table in self._combined(scores)]
        return all(
            bool(torch.where(visible, factor == 1, factor.abs() <= 1).all())
            for node in scores.factors
            for factor, visible in zip(self._samples(node), tables, strict=True)
        )

    def _samples(self, node: fx.Node) -> tuple[Tensor, ...]:
        kind = self.statics.kinds[node]
        assert isinstance(kind, Pair)
        return kind.samples

    def _indices(self, match: AttentionMatch, form: PairForm, choices: Choices) -> fx.Node | None:
        """The rows that every query keeps; None where it keeps all that the masks show."""
        scores = match.scores
        if scores.chosen is None:
            return None
        try:
            if form != PairForm(Visibility()) or scores.softcap or scores.key_biases:
                raise NoMatch("its keys are chosen by an indexer, beside a window, a softcap or a bias")
            return choices.indices(topk_of(scores.chosen), match.output)
        except ChangesWithLength as error:
            raise _length_dependent(match.output, str(error)) from None
        except NoMatch as error:
            raise _unknown_choice(match.output, str(error)) from None

    # The new nodes

    def _emit(self, graph: fx.Graph, match: AttentionMatch, form: PairForm, indices: fx.Node | None) -> fx.Node:
        meta, lead = match.output.meta, _lead_of_output(match)
        operands = in_one_dtype(graph, _operands(graph, match, lead))
        plan = [plan_input(graph, name) for name in ("plan_segments", "plan_position", "plan_subtree_end")]
        keywords = self._keywords(graph, match, form)
        if indices is not None:
            node = graph.call_function(sparse_attention, (*operands, indices), keywords)
        else:
            node = graph.call_function(tree_attention, (*operands, *plan), keywords)
        node.meta = inherited(meta)
        node.meta["val"] = _value_in_heads(operands[0], operands[2])
        if len(lead) != 2 or lead[0] != 1:
            node = call(graph, aten.reshape.default, (node, [*lead, -1, match.value.shape[-1]]), meta)
        node = in_dtype(graph, node, match.output.meta["val"].dtype)
        if match.output_order != tuple(range(len(lead) + 2)):
            node = call(graph, aten.permute.default, (node, list(match.output_order)), meta)
        return node

    def _keywords(self, graph: fx.Graph, match: AttentionMatch, form: PairForm) -> dict[str, Any]:
        scores = match.scores
        keywords: dict[str, Any] = {"scale": scores.scale}
        if form.visibility is not None:
            keywords |= {"window": form.visibility.window, "chunk": form.visibility.chunk}
        keywords |= {"softcap": scores.softcap, "sinks": scores.sinks}
        biases = [self._key_bias(graph, bias) for bias in scores.key_biases]
        if form.slopes is not None:
            biases.append(self.tables.slopes(form.slopes, match.query.node.meta["val"].dtype))
        keywords["key_bias"] = _total(graph, biases)
        if form.visibility is None:
            keywords["pair_bias"] = self.tables.pairs([(mask.node, mask.hides) for mask in scores.masks])
        return {
            name: value for name, value in keywords.items() if name == "scale" or (value is not None and value != 0)
        }

    def _key_bias(self, graph: fx.Graph, bias: KeyBias) -> fx.Node:
        gathered = self.tables.at_positions(bias.node, bias.dim)
        heads = math.prod(int(size) for size in shape_of(bias.node)[:-1])
        flat = call(graph, aten.reshape.default, (gathered, [heads, -1]), {})
        return flat if bias.factor == 1.0 else call(graph, aten.mul.Tensor, (flat, bias.factor), {})


def _require_tokens(match: AttentionMatch) -> None:
    """Refuses attention between something else than the tokens of a sequence.

    Raises:
        TokenMixingError: its queries or its keys are something else.
    """
    symbol = token_symbol(match.output.graph)
    found = {name: operand.shape[-2] for name, operand in (("queries", match.query), ("keys", match.key))}
    for name, size in found.items():
        if size_expression(size) != symbol:
            raise TokenMixingError(
                f"The {name} of this attention are not the tokens of a sequence.",
                where=source_line(match.output),
                why=f"there are {size} of them; tree attention is between tokens and their ancestors.",
                hint="for attention inside of a token, or to a learned memory, write "
                "(query @ key.mT).softmax(-1) @ value.",
            )


def _biases_fit(match: AttentionMatch) -> bool:
    """Whether every mask and bias is the same for all heads, or has one table for each; and sinks one for each."""
    heads = math.prod(_lead_of_output(match))
    nodes = [mask.node for mask in match.scores.masks] + [bias.node for bias in match.scores.key_biases]
    sinks = match.scores.sinks
    is_for_each = sinks is None or shape_of(sinks) == (heads,)
    return is_for_each and all(math.prod(shape_of(node)[:-2]) in (1, heads) for node in nodes)


def _lead_of_output(match: AttentionMatch) -> tuple[Any, ...]:
    """Sizes before tokens and width in the output; scores may have been reshaped on their way to the values."""
    sizes = dict(zip(match.output_order, shape_of(match.output), strict=True))
    return tuple(sizes[dim] for dim in range(len(sizes) - 2))


def _operands(graph: fx.Graph, match: AttentionMatch, lead: tuple[Any, ...]) -> list[fx.Node]:
    """Query, key and value as `[1, heads, tokens, width]`; keys and values may have fewer heads, each for a group."""
    query, key, meta = match.query.shape[:-2], match.key.shape[:-2], match.output.meta
    if match.output.target is SDPA:
        leads = [lead]
    elif math.prod(of_scores := torch.broadcast_shapes(query, key)) == math.prod(lead):
        leads = [of_scores]
    else:
        leads = [of_scores, _lead_of_weights(match), lead]
    grouped = key == match.value.shape[:-2] and leads == [lead]
    return [
        _in_heads(graph, match.query, leads, meta, grouped=False),
        _in_heads(graph, match.key, leads, meta, grouped=grouped),
        _in_heads(graph, match.value, [lead], meta, grouped=grouped),
    ]


def _lead_of_weights(match: AttentionMatch) -> tuple[Any, ...]:
    """Sizes before query and key in the weights, each head of which is for several of the values."""
    weights: Any = match.output.args[0]
    return shape_of(weights)[:-2]


def _in_heads(
    graph: fx.Graph, operand: Operand, leads: Sequence[tuple[Any, ...]], meta: dict[str, Any], *, grouped: bool
) -> fx.Node:
    """An operand in the first of `leads`, reshaped to the second, and expanded to the last."""
    node, shape, lead = operand.node, operand.shape, leads[0]
    if operand.order != tuple(range(len(shape))):
        node = call(graph, aten.permute.default, (node, list(operand.order)), meta)
    is_whole = len(lead) == 2 and lead[0] == shape[0] == 1 and len(shape) == 4 and len(leads) == 1
    if is_whole and (grouped or shape[1] == lead[1]):
        return node
    if len(shape) > 2 and shape[-3] not in (1, lead[-1]):
        node = call(graph, aten.repeat_interleave.self_int, (node, lead[-1] // shape[-3], -3), meta)
    if shape[:-2] != lead:
        node = call(graph, aten.expand.default, (node, [*lead, -1, -1]), meta)
    for between in leads[1:]:
        is_reshaped = between is leads[1]
        target = aten.reshape.default if is_reshaped else aten.expand.default
        tokens: list[Any] = [-1, shape[-1]] if is_reshaped else [-1, -1]
        node = call(graph, target, (node, [*between, *tokens]), meta)
    heads = math.prod(int(size) for size in leads[-1])
    return call(graph, aten.reshape.default, (node, [1, heads, -1, shape[-1]]), meta)


def _value_in_heads(query: fx.Node, value: fx.Node) -> Tensor:
    width = shape_of(value)[-1]
    return query.meta["val"].new_empty((*shape_of(query)[:-1], width))


def _total(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node | None:
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = call(graph, aten.add.Tensor, (total, term), {})
    return total


def _description(scores: Scores, form: PairForm) -> str:
    parts = ["tree_attention" if scores.chosen is None else _SPARSE]
    if form.visibility is None:
        parts.append("mask without a closed form, gathered as T x T")
    else:
        parts.append(f"visible: {form.visibility.expression}")
    if scores.softcap:
        parts.append(f"softcap {scores.softcap:g}")
    if scores.sinks is not None:
        parts.append("sinks")
    if scores.key_biases or form.slopes is not None:
        parts.append("bias per key")
    return ", ".join(parts)


def _bidirectional(node: fx.Node, why: str) -> RefusedModelError:
    return BidirectionalAttentionError(
        "This attention is not causal.",
        where=source_line(node),
        why=f"{why}, so a shared prefix would depend on what follows it.",
        hint="use a causal mask (is_causal=True); for a transformers model, the causal-LM class and is_decoder=True.",
    )


def _length_dependent(node: fx.Node, why: str) -> LengthDependentError:
    return LengthDependentError(
        "The mask or bias of this attention is not the same for a prefix alone.",
        where=source_line(node),
        why=f"{why}, so sequences of different lengths cannot share a prefix.",
        hint="make it from the positions of query and key alone, without the number of tokens.",
    )


def _unknown_form(node: fx.Node, why: str) -> TokenMixingError:
    return TokenMixingError(
        "This attention has a form that cannot be rewritten.",
        where=source_line(node),
        why=f"{why}.",
        hint="use torch.nn.functional.scaled_dot_product_attention, with a mask made from positions alone.",
    )


def _unknown_choice(node: fx.Node, why: str) -> TokenMixingError:
    return TokenMixingError(
        "This attention takes keys that are chosen in a way that cannot be rewritten.",
        where=source_line(node),
        why=f"{why}.",
        hint="choose them as docs/sparse_attention.md shows: the weighed sum over heads of relu(q . k), a causal mask, "
        "topk, and a mask or a gather made of its indices.",
    )


def require_no_dropout(probability: float, node: fx.Node) -> None:
    """Refuses attention whose weights are dropped out with some probability.

    Raises:
        DropoutError: they are.
    """
    if not probability:
        return
    raise DropoutError(
        f"Attention weights are dropped out with probability {probability:g}.",
        where=source_line(node),
        why="tree attention has no dropout, and without it the result would differ.",
        hint="set attention dropout to 0 before the model is built (in transformers: config.attention_dropout or "
        "attn_pdrop), or in the modules that hold it, "
        "or call model.eval().",
    )
