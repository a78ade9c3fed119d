"""The token-axis proof: every operation of a rewritten graph works token by token, or is tree attention.

Each value gets, for every dimension, an axis or none (see `axes`). A dimension whose size does not mention T cannot
be a token axis; every other dimension has to be followed by a rule from the inputs to the outputs. What no rule
covers is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tree_compile.errors import RefusedModelError, TokenMixingError, UnknownOpError
from tree_compile.passes.axes import BLANK, TOKENS, Axis, Chosen, Counts, Mixes, Offsets, Value
from tree_compile.passes.draws import draws
from tree_compile.passes.finding import Finding
from tree_compile.passes.nodes import arguments, shown_name
from tree_compile.passes.plan_inputs import OUTSIDE
from tree_compile.passes.shapes import Extent, extent, is_size, is_tensor, shape_of, size_expression, token_symbol
from tree_compile.passes.source import source_line
from tree_compile.passes.token_rules import COUNT, TAKE_SIZES, USES_LENGTH, Result, Step, rule_of


@dataclass(frozen=True)
class ProveTokenAxis:
    """Proves that a rewritten graph treats every token by itself, apart from tree attention.

    Raises:
        TokenMixingError: an operation mixes tokens.
        UnknownOpError: an operation has no rule.
    """

    name: str = field(default="token axis", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        symbol = token_symbol(graph_module.graph)
        known: dict[fx.Node, Result] = {}
        for node in graph_module.graph.nodes:
            if node.op == "output":
                _require_per_token(node, known)
            elif not is_size(node):
                known[node] = _result(node, known, symbol)
        return ()


def _result(node: fx.Node, known: Mapping[fx.Node, Result], symbol: sympy.Symbol) -> Result:
    if node.op == "placeholder" or node.meta.get(OUTSIDE):
        return _per_token(node, symbol)
    if node.op == "get_attr":
        # The body of a region such as torch.cond is an attribute too; the region itself has no rule.
        return Value((None,) * (node.meta["val"].dim() if is_tensor(node) else 0))
    if node.target is operator.getitem:
        parts: Any = known[node.args[0]]  # type: ignore[index]
        return parts[node.args[1]]
    return _checked(node, _apply(node, known, symbol), symbol)


def _per_token(node: fx.Node, symbol: sympy.Symbol) -> Value:
    """A value of which every dimension of size T goes along the tokens of the row, and one of T // m along windows."""
    if not is_tensor(node):
        return Value(())
    found = [extent(size, symbol) for size in shape_of(node)]
    return Value(tuple(Axis(window=e.window) if e and e.factor == 1 and not e.fewer else None for e in found))


def _apply(node: fx.Node, known: Mapping[fx.Node, Result], symbol: sympy.Symbol) -> Result:
    rule = rule_of(node.target)
    step = Step(node, known, symbol, arguments(node))
    try:
        if rule is None:
            return _without_tokens(step)
        if rule not in TAKE_SIZES and any(is_size(source) for source in node.all_input_nodes):
            raise Mixes(USES_LENGTH)
        result = rule(step)
        _require_all_read(step)
        return result
    except Mixes as error:
        if str(error) == USES_LENGTH and any(map(_is_read, node.all_input_nodes)):
            raise _reads_a_number(node) from None
        raise _mixing(node, str(error)) from None


def _require_all_read(step: Step) -> None:
    """A rule cannot have taken into account what it never asked for."""
    for name, tensor in step.unread():
        if step.raw(tensor).has_tokens:
            raise Mixes(f"its {name} depends on the tokens")


_READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def _is_read(number: fx.Node) -> bool:
    """Whether a number comes from the values of a tensor, and not from the number of tokens."""
    return is_size(number) and (number.target in _READS or any(map(_is_read, number.all_input_nodes)))


def _without_tokens(step: Step) -> Result:
    """An operation without a rule is safe where it sees no tokens: its result is a constant of the model."""
    results = step.node.meta.get("val")
    values = results if isinstance(results, (tuple, list)) else (results,)
    sees_tokens = any(step.raw(node).has_tokens for node in step.inputs())
    makes_tokens = any(step.factor(size) for value in values if isinstance(value, Tensor) for size in value.shape)
    if sees_tokens or makes_tokens or draws(step.node):
        raise _unknown(step.node)
    if any(is_size(source) for source in step.node.all_input_nodes):
        raise Mixes(USES_LENGTH)
    shaped = tuple(Value((None,) * value.dim()) for value in values if isinstance(value, Tensor))
    return shaped if isinstance(results, (tuple, list)) else shaped[0]


def _checked(node: fx.Node, result: Result, symbol: sympy.Symbol) -> Result:
    """The rules are checked against the sizes that the capture knows; one value stands for all results of a node."""
    given = node.meta["val"]
    metas = given if isinstance(given, (tuple, list)) else (given,)
    values = result if isinstance(result, tuple) else (result,) * len(metas)
    for value, meta in zip(values, metas, strict=True):
        if isinstance(meta, Tensor):
            _check(node, value, meta, symbol)
    return values if isinstance(given, (tuple, list)) else values[0]


def _check(node: fx.Node, value: Value, meta: Tensor, symbol: sympy.Symbol) -> None:
    if sum(axis is not None for axis in value.axes) > 1:
        raise _mixing(node, "it relates every token to every other, and is not an attention that can be rewritten")
    extents = [extent(size, symbol) for size in meta.shape]
    if len(extents) != len(value.axes) or not all(map(_fits, extents, value.axes)):
        raise _mixing(node, "the sizes of its result do not fit to the tokens that go into it")
    if isinstance(value.content, (Counts, Offsets)) and rule_of(node.target) not in COUNT:
        raise _mixing(node, "it takes parts of counts over the tokens, or moves them")


def _fits(found: Extent | None, axis: Axis | None) -> bool:
    """Whether a dimension of that size can be `axis`; None stands for any size that mentions T otherwise."""
    if found is None:
        return axis is not None and isinstance(axis.order, Chosen)
    if axis is None or axis == BLANK:
        return found.factor == 0 if axis is None else found.factor > 0
    return not isinstance(axis.order, Chosen) and found == Extent(axis.left * axis.right, axis.window, axis.later)


def _require_per_token(node: fx.Node, known: Mapping[fx.Node, Result]) -> None:
    for result in node.all_input_nodes:
        value = known[result]
        assert isinstance(value, Value)
        has_batch = [size_expression(size) for size in shape_of(result)[:1]] == [1]
        leading = value.axes[: 2 if has_batch else 1]
        if value.content is not None or leading not in ((None, TOKENS), (TOKENS,)):
            raise _mixing(result, "the model returns it, and it is not one value for every token")


def _mixing(node: fx.Node, why: str) -> RefusedModelError:
    module = _innermost_module(node)
    what = f"{shown_name(node)} in {module}" if module else shown_name(node)
    return TokenMixingError(
        f"The operation {what} mixes tokens in a way that no rule covers.",
        where=source_line(node),
        why=f"{why}.",
        hint="compute it per sequence outside of the model, or from each token and its ancestors alone.",
    )


def _reads_a_number(node: fx.Node) -> RefusedModelError:
    return TokenMixingError(
        f"The operation {shown_name(node)} uses a number that the model reads from a tensor.",
        where=source_line(node),
        why="a captured graph knows only of the tensor, not of the number in it.",
        hint="leave .item() out: the tensor itself can be computed with.",
    )


def _unknown(node: fx.Node) -> UnknownOpError:
    return UnknownOpError(
        f"The operation {shown_name(node)} is not known.",
        where=source_line(node),
        why="there is no rule that says how it treats the token axis, so it cannot be proved to keep sequences apart.",
        hint="if it works token by token, say so: "
        "tree_compile.passes.token_rules.register_token_rule(op, elementwise).",
    )


def _innermost_module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    kinds = [kind for _, kind in stack.values()]
    name = kinds[-1] if kinds else ""
    return name.rsplit(".", 1)[-1] if isinstance(name, str) else getattr(name, "__name__", "")
