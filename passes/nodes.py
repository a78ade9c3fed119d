"""What every pass asks of a node."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx

from tree_compile.runtime.autocast import without_autocast


def operator_name(node: fx.Node) -> str:
    """What an operator or a function is looked up by: `add` for every overload of `aten::add`; "" for no call."""
    return _name(node).removeprefix("aten::")


def shown_name(node: fx.Node) -> str:
    """What an operator or a function is called in a message: `aten::add`."""
    return _name(node) or str(node.target)


def _name(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(getattr(node.target, "__name__", "") if schema is None else schema.name)


def operator_of(node: fx.Node) -> Any:
    """The operator or function that a node calls, also where that is done with autocast switched off."""
    if node.target is without_autocast:
        return node.args[1]
    return node.target


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its operator's schema, defaults filled in.

    A function that has no schema has its keyword arguments here alone.
    """
    schema = getattr(operator_of(node), "_schema", None)
    if schema is None:
        return dict(node.kwargs)
    args = node.args[2:] if node.target is without_autocast else node.args
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values |= {argument.name: given for argument, given in zip(schema.arguments, args, strict=False)}
    return values | dict(node.kwargs)


class Einsum(NamedTuple):
    """An einsum of two operands: the letters of the dimensions of each, and of the result."""

    operands: tuple[fx.Node, fx.Node]
    letters: tuple[str, str]
    output: str

    @property
    def summed(self) -> str | None:
        """The one letter that is summed over, in both operands; None where others are, or none is."""
        found = (set(self.letters[0]) | set(self.letters[1])) - set(self.output)
        letter = "".join(found)
        return letter if len(found) == 1 and all(letter in letters for letters in self.letters) else None


def einsum_letters(node: fx.Node) -> tuple[list[str], str] | None:
    """The letters of an einsum's operands and of its result, also of dimensions that are `...`.

    None where the equation names no result.
    """
    inputs, _, output = str(node.args[0]).replace(" ", "").partition("->")
    if not output:
        return None
    parts, operands = inputs.split(","), list(node.args[1])  # type: ignore[arg-type]
    ranks = [
        operand.meta["val"].dim() - len(part.replace("...", "")) for part, operand in zip(parts, operands, strict=True)
    ]
    free = [letter for letter in string.ascii_letters if letter not in inputs]
    most = max((rank for rank, part in zip(ranks, parts, strict=True) if "..." in part), default=0)
    others = "".join(free[:most])
    named = [part.replace("...", others[most - rank :]) for part, rank in zip(parts, ranks, strict=True)]
    return named, output.replace("...", others)


def einsum_of_two(node: fx.Node) -> Einsum | None:
    """The letters of an einsum of two operands, each of which has a letter once; None for any other node."""
    found = einsum_letters(node) if node.target is torch.ops.aten.einsum.default else None
    if found is None or len(found[0]) != 2 or any(len(set(part)) < len(part) for part in found[0]):
        return None
    (left, right), output = found
    operands: Any = node.args[1]
    return Einsum(tuple(operands), (left, right), output)


def ancestors(nodes: Iterable[fx.Node], ends: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """The nodes and all that they are made from; of those that `ends` is true for, themselves alone."""
    seen = set(nodes)
    stack = list(seen)
    while stack:
        node = stack.pop()
        sources = set() if ends(node) else {source for source in node.all_input_nodes if source not in seen}
        seen |= sources
        stack += sources
    return seen


def is_number_of_tokens(node: fx.Node) -> bool:
    """Whether the node is T, read off an input of the graph."""
    return node.target is torch.ops.aten.sym_size.int and node.args[0].op == "placeholder"  # type: ignore[union-attr]
