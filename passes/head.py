"""The head: what makes logits from the states of the last block, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from tree_compile.passes.draws import draws
from tree_compile.passes.nodes import ancestors, operator_of
from tree_compile.passes.operators import FULL, ONES, ZEROS
from tree_compile.passes.shapes import is_size, is_tensor, shape_of, size_expression, token_symbol

aten = torch.ops.aten
_PRODUCTS = {
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default, aten.bmm.default,
    aten.einsum.default,
}  # fmt: skip
_FILLED = {*ONES, *ZEROS, *FULL}


@dataclass(frozen=True)
class Head:
    """The end of a graph that makes logits.

    Attributes:
        hidden: the states that they are made from, [1, T, width] or [T, width].
        logits: [1, T, vocabulary] or [T, vocabulary].
        nodes: the operations from `hidden` down to `logits`, in their order.
    """

    hidden: fx.Node
    logits: fx.Node
    nodes: tuple[fx.Node, ...]


def find_head(graph: fx.Graph, logits: fx.Node) -> Head | None:
    """The last product of tokens and parameters above `logits`, with what follows it; None where there is none.

    In a graph that is proved to work token by token, what lies between one tensor with tokens and the logits does so
    for any of them alone, with T read off that tensor. Nothing of it may be used elsewhere, draw random numbers, be an
    op over trees, or take another number that is made from T.
    """
    symbol = token_symbol(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    inside: set[fx.Node] = set()
    above = {logits}
    has_product = False
    while not has_product or len(above) != 1:
        node = max(above, key=places.__getitem__, default=None)
        if node is None or not _can_be_cut_off(node, inside, logits):
            return None
        above.remove(node)
        inside.add(node)
        has_product |= operator_of(node) in _PRODUCTS
        if any(is_size(source) and size_expression(source.meta["val"]) != symbol for source in node.all_input_nodes):
            return None
        above |= {source for source in node.all_input_nodes if _has_tokens(source, symbol)}
    (hidden,) = above
    if not (_is_by_token(hidden, symbol) and _is_by_token(logits, symbol)):
        return None
    if _reads_tokens({source for node in inside for source in node.all_input_nodes} - inside - {hidden}):
        return None
    # What goes around the product is a block, as that of a model without a head.
    if any(operator_of(user) not in _PRODUCTS for user in hidden.users if user in inside):
        return None
    return Head(hidden, logits, tuple(sorted(inside, key=places.__getitem__)))


def _can_be_cut_off(node: fx.Node, inside: set[fx.Node], logits: fx.Node) -> bool:
    users = set(node.users) - inside
    is_used_elsewhere = any(user.op != "output" for user in users) if node is logits else bool(users)
    return isinstance(operator_of(node), OpOverload) and is_tensor(node) and not is_used_elsewhere and not draws(node)


def _reads_tokens(nodes: set[fx.Node]) -> bool:
    """Whether a tensor without T among its sizes is made of tokens, as chosen rows and counts are.

    A head computes with the whole of it, for some of the tokens that it is made of.
    """
    tensors = {node for node in nodes if is_tensor(node)}
    return any(node.op == "placeholder" for node in ancestors(tensors, ends=_reads_no_values))


def _reads_no_values(node: fx.Node) -> bool:
    return is_size(node) or operator_of(node) in _FILLED


def _has_tokens(node: fx.Node, symbol: sympy.Symbol) -> bool:
    return is_tensor(node) and any(symbol in size_expression(size).free_symbols for size in shape_of(node))


def _is_by_token(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether a node is [1, T, width] or [T, width]."""
    sizes = [size_expression(size) for size in shape_of(node)]
    return sizes[:-1] in ([symbol], [1, symbol]) and not sizes[-1].free_symbols
