"""Products of pairs read from a graph: nodes whose dimensions are known by their roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tree_compile.passes.fills import number_of
from tree_compile.passes.masks import NoMatch
from tree_compile.passes.nodes import einsum_of_two
from tree_compile.passes.operators import DETACH, DIVISIONS, MATMULS, MULTIPLICATIONS, SAME_NUMBERS
from tree_compile.passes.shapes import call, is_full_slice, keeps_numbers, shape_of, size_expression, sizes
from tree_compile.passes.static_values import StaticValues

aten = torch.ops.aten
GREATEST_FACTOR = 1e12
"""Numbers times a factor beyond this, or beyond its inverse, may all become 0 or infinite, in some dtype."""


@dataclass(frozen=True)
class Roles:
    """A node with what its dimensions are, such as "query", "key", "head" or "width"; "" for one of size one."""

    node: fx.Node
    names: tuple[str, ...]

    def moved(self, node: Any, names: Sequence[str]) -> Roles:
        """Another node; dimensions before those that `names` names have size one.

        Raises:
            NoMatch: a dimension without a role is more than one wide, or a role has another size than here.
        """
        found = with_roles(node, names)
        here, there = sizes_of(self), sizes_of(found)
        if any(size_expression(here[name]) != size_expression(there[name]) for name in here if name and name in there):
            raise NoMatch("one of its operands is the same for all queries, heads or keys")
        return found


def with_roles(node: Any, names: Sequence[str]) -> Roles:
    """A node with the roles of its last dimensions; those before have size one.

    Raises:
        NoMatch: a dimension without a role is more than one wide.
    """
    found = sizes(node)
    names = ("",) * (len(found) - len(names)) + tuple(names)
    if len(names) != len(found) or any(size != 1 for size, name in zip(found, names, strict=True) if not name):
        raise NoMatch("its scores have other dimensions than those of queries, heads and keys")
    return Roles(node, names)


def operand_of(result: Roles, operand: Any) -> Roles:
    """An operand of an elementwise node, which may be broadcast.

    Raises:
        NoMatch: it is broadcast in a dimension that has a role, to another size than one.
    """
    found = sizes(operand)
    names = result.names[len(result.names) - len(found) :]
    return result.moved(operand, ["" if size == 1 else name for size, name in zip(found, names, strict=True)])


def product(pairs: Roles, contracted: str = "width") -> tuple[Roles, Roles] | None:
    """The two operands of a matmul or einsum whose result has the roles of `pairs`; None where it is neither.

    Raises:
        NoMatch: an einsum that sums over something else than one letter, or an operand that is broadcast along it.
    """
    node: Any = pairs.node
    if node.target in MATMULS:
        *lead, rows, columns = pairs.names
        left, right = node.args
        first = pairs.moved(left, _wide(left, [*lead, rows, contracted]))
        second = pairs.moved(right, _wide(right, [*lead, contracted, columns]))
    elif node.target is aten.einsum.default:
        first, second = _operands_of_einsum(pairs, contracted)
    else:
        return None
    if size_expression(sizes_of(first)[contracted]) != size_expression(sizes_of(second)[contracted]):
        raise NoMatch("one of its operands is the same at all places that a product sums over")
    return first, second


def _wide(node: Any, names: list[str]) -> list[str]:
    """The names of an operand's dimensions; leading ones of size one are broadcast."""
    found = sizes(node)
    if not 1 < len(found) <= len(names):
        raise NoMatch("it multiplies vectors, or more dimensions than its scores have")
    names = names[len(names) - len(found) :]
    return [
        "" if size == 1 and place < len(found) - 2 else name
        for place, (size, name) in enumerate(zip(found, names, strict=True))
    ]


def _operands_of_einsum(result: Roles, contracted: str) -> tuple[Roles, Roles]:
    node: Any = result.node
    found = einsum_of_two(node)
    if found is None or found.summed is None:
        raise NoMatch(f"the einsum {node.args[0]} in its scores is not known")
    names = dict(zip(found.output, result.names, strict=True)) | {found.summed: contracted}
    first, second = (
        result.moved(operand, [names[letter] for letter in letters])
        for operand, letters in zip(found.operands, found.letters, strict=True)
    )
    return first, second


# Steps that change nothing but shape, dtype and scale


def same_numbers(given: Roles) -> Roles | None:
    """What a node has from its first input in another shape or dtype; None where it does something else.

    The gradients are the same as well: what is detached is followed only where it has none.
    """
    node: Any = given.node
    mover = _MOVERS.get(node.target)
    if mover is None or not keeps_numbers(node) or not _takes_all(node):
        return None
    return given.moved(node.args[0], mover(node, list(given.names)))


def _takes_all(node: Any) -> bool:
    if node.target is aten.slice.Tensor:
        return is_full_slice(node)
    if node.target is aten.select.int:
        return bool(sizes(node.args[0])[node.args[1]] == 1)
    return node.target is not DETACH or not node.meta["val"].is_floating_point()


def _squeezed(node: Any, names: list[str]) -> list[str]:
    return names if len(names) == len(shape_of(node.args[0])) else _selected(node, names)


def _selected(node: Any, names: list[str]) -> list[str]:
    dim = int(node.args[1]) % len(shape_of(node.args[0]))
    return [*names[:dim], "", *names[dim:]]


def _unsqueezed(node: Any, names: list[str]) -> list[str]:
    dim = int(node.args[1]) % len(names)
    return names[:dim] + names[dim + 1 :]


def _transposed(node: Any, names: list[str]) -> list[str]:
    first, second = (int(dim) % len(names) for dim in node.args[1:3])
    names[first], names[second] = names[second], names[first]
    return names


def _last_two_swapped(_node: Any, names: list[str]) -> list[str]:
    return [*names[:-2], names[-1], names[-2]]


def _permuted(node: Any, names: list[str]) -> list[str]:
    order = [int(dim) % len(names) for dim in node.args[1]]
    return [names[order.index(dim)] for dim in range(len(names))]


def _expanded(node: Any, names: list[str]) -> list[str]:
    before = shape_of(node.args[0])
    kept = list(zip(before, names[len(names) - len(before) :], strict=True))
    return ["" if size_expression(size) == 1 else name for size, name in kept]


def _kept(_node: Any, names: list[str]) -> list[str]:
    return names


_MOVERS: dict[Any, Callable[[Any, list[str]], list[str]]] = {
    **dict.fromkeys((*SAME_NUMBERS, DETACH, aten.slice.Tensor), _kept),
    aten.select.int: _selected,
    aten.squeeze.dim: _squeezed,
    aten.unsqueeze.default: _unsqueezed,
    aten.transpose.int: _transposed,
    aten.mT.default: _last_two_swapped,
    aten.permute.default: _permuted,
    aten.expand.default: _expanded,
}


def factor_of(node: Any, statics: StaticValues) -> float | None:
    """The number that a node multiplies its first input with; None where it does something else."""
    is_division = node.target in DIVISIONS
    if not is_division and node.target not in MULTIPLICATIONS:
        return None
    number = number_of(node.args[1], statics)
    if number is None or not 1.0 / GREATEST_FACTOR <= abs(number) <= GREATEST_FACTOR:
        return None
    return 1.0 / number if is_division else number


# Laid out anew


def laid_out(graph: fx.Graph, given: Roles, wanted: tuple[str, ...], meta: dict[str, Any], batch: int) -> fx.Node:
    """`given` as `[1, …]` with the dimensions `wanted`, in that order; `batch` is how many of size one come first.

    Raises:
        NoMatch: it has other dimensions.
    """
    names = [name for name in given.names if name]
    if not set(names) <= set(wanted) or len(set(names)) != len(names):
        raise NoMatch("its queries, keys or weights have other dimensions than tokens, heads and width")
    node, order = given.node, [given.names.index(name) for name in wanted if name in names]
    order = [dim for dim, name in enumerate(given.names) if not name] + order
    if order != sorted(order):
        node = call(graph, aten.permute.default, (node, order), meta)
    found = sizes_of(given)
    shape = [1] * batch + [_plain(found.get(name, 1)) for name in wanted]
    if shape.count(-1) > 1:
        raise NoMatch("its heads or its width depend on the number of tokens")
    return call(graph, aten.reshape.default, (node, shape), meta)


def _plain(size: Any) -> int:
    """A size as an argument of reshape: T is what is left."""
    return size if isinstance(size, int) else -1


def sizes_of(given: Roles) -> dict[str, Any]:
    """Sizes by role."""
    return dict(zip(given.names, shape_of(given.node), strict=True))
