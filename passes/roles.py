"""Products of pairs read from a graph: nodes whose dimensions are known by their roles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tree_compile.passes.masks import NoMatch
from tree_compile.passes.shapes import call, shape_of, size_expression
from tree_compile.passes.static_values import Fixed, StaticValues

aten = torch.ops.aten


@dataclass(frozen=True)
class Roles:
    """A node with what its dimensions are, such as "query", "key", "head" or "width"; "" for one of size one."""

    node: fx.Node
    names: tuple[str, ...]

    def moved(self, node: Any, names: list[str] | tuple[str, ...]) -> Roles:
        """Another node; dimensions before those that `names` names have size one.

        Raises:
            NoMatch: a dimension without a role is more than one wide.
        """
        sizes = shape_of(node)
        names = ("",) * (len(sizes) - len(names)) + tuple(names)
        if len(names) != len(sizes) or any(
            size_expression(size) != 1 for size, name in zip(sizes, names, strict=True) if not name
        ):
            raise NoMatch("its scores have other dimensions than those of queries, heads and keys")
        return Roles(node, names)


def product(pairs: Roles, contracted: str = "width") -> tuple[Roles, Roles] | None:
    """The two operands of a matmul or einsum whose result has the roles of `pairs`; None where it is neither.

    Raises:
        NoMatch: an einsum that sums over something else than one letter.
    """
    node: Any = pairs.node
    if node.target in (aten.matmul.default, aten.bmm.default):
        *lead, rows, columns = pairs.names
        left, right = node.args
        return (
            pairs.moved(left, _wide(left, [*lead, rows, contracted])),
            pairs.moved(right, _wide(right, [*lead, contracted, columns])),
        )
    return _einsum(pairs, contracted) if node.target is aten.einsum.default else None


def _wide(node: Any, names: list[str]) -> list[str]:
    """The names of an operand's dimensions; leading ones of size one are broadcast."""
    sizes = shape_of(node)
    names = names[len(names) - len(sizes) :]
    return [
        "" if size_expression(size) == 1 and place < len(sizes) - 2 else name
        for place, (size, name) in enumerate(zip(sizes, names, strict=True))
    ]


def _einsum(result: Roles, contracted: str) -> tuple[Roles, Roles]:
    node: Any = result.node
    equation, operands = node.args
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    names = dict(zip(output, result.names, strict=True)) if output and "." not in output else None
    parts = inputs.split(",")
    summed = set(inputs) - set(output) - {","}
    if names is None or len(parts) != 2 or len(summed) != 1 or any(len(set(part)) < len(part) for part in parts):
        raise NoMatch(f"the einsum {equation} in its scores is not known")
    names[summed.pop()] = contracted
    first, second = (
        result.moved(operand, [names[letter] for letter in part]) for operand, part in zip(operands, parts, strict=True)
    )
    return first, second


# Steps that change nothing but shape, dtype and scale


def same_numbers(given: Roles) -> Roles | None:
    """What a node has from its only input in another shape or dtype; None where it does something else."""
    node: Any = given.node
    mover = _MOVERS.get(node.target)
    if mover is None or not keeps_numbers(node):
        return None
    if node.target is aten.slice.Tensor and _sizes(node) != _sizes(node.args[0]):
        return None
    return given.moved(node.args[0], mover(node, list(given.names)))


def keeps_numbers(node: fx.Node) -> bool:
    """Whether the dtype of a node holds the numbers of its only input, up to rounding: no truths, none that wrap."""
    source: Any = node.args[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if after == before:
        return True
    if after.is_floating_point:
        return bool(before.is_floating_point)
    return after in (torch.int32, torch.int64) and before in (torch.int32, torch.int64)


def _sizes(node: Any) -> list[Any]:
    return [size_expression(size) for size in shape_of(node)]


def _squeezed(node: Any, names: list[str]) -> list[str]:
    dim = int(node.args[1]) % len(shape_of(node.args[0]))
    return names if len(names) == len(shape_of(node.args[0])) else [*names[:dim], "", *names[dim:]]


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
    **dict.fromkeys(
        (
            aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default, aten.alias.default,
            aten.detach.default, aten.slice.Tensor,
        ),
        _kept,
    ),
    aten.squeeze.dim: _squeezed,
    aten.unsqueeze.default: _unsqueezed,
    aten.transpose.int: _transposed,
    aten.mT.default: _last_two_swapped,
    aten.permute.default: _permuted,
    aten.expand.default: _expanded,
}  # fmt: skip


def factor_of(node: Any, statics: StaticValues) -> float | None:
    """The number that a node multiplies its first input with; None where it does something else."""
    is_division = node.target in (aten.div.Tensor, aten.div.Scalar)
    if not is_division and node.target not in (aten.mul.Tensor, aten.mul.Scalar):
        return None
    number = number_of(node.args[1], statics)
    return 1.0 / number if is_division and number else number


def number_of(value: Any, statics: StaticValues) -> float | None:
    """A number, or a tensor of one element that is always the same."""
    if isinstance(value, (int, float)):
        return float(value)
    kind = statics.kinds.get(value)
    return float(kind.value) if isinstance(kind, Fixed) and kind.value.numel() == 1 else None


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
    sizes = {name: size for name, size in zip(given.names, shape_of(given.node), strict=True) if name}
    shape = [1] * batch + [_plain(sizes.get(name, 1)) for name in wanted]
    return call(graph, aten.reshape.default, (node, shape), meta)


def _plain(size: Any) -> int:
    """A size as an argument of reshape: T is what is left."""
    return size if isinstance(size, int) else -1


def sizes_of(given: Roles) -> dict[str, Any]:
    """Sizes by role."""
    return dict(zip(given.names, shape_of(given.node), strict=True))
