"""Zeros before the first token, and the cut to as many entries as there are tokens, as models write them.

Dimensions are counted from the end, as -1, which broadcasting does not change.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from tree_compile.passes.nodes import arguments
from tree_compile.passes.operators import PADS, SLICES, ZEROS
from tree_compile.passes.shapes import shape_of, size_expression

aten = torch.ops.aten


def pads(node: fx.Node) -> list[int] | None:
    """The padding with zeros, from the last dimension on; None for any other operation."""
    if node.target not in PADS:
        return None
    given = arguments(node)
    is_zeros = given.get("mode", "constant") == "constant" and given["value"] in (None, 0)
    return list(given["pad"]) if is_zeros else None


def without_zeros(node: fx.Node, dim: int, count: int) -> fx.Node | None:
    """What the node puts `count` zeros before, by a pad or a cat; None where it does not."""
    if pads(node) == [0] * (-2 * dim - 2) + [count, 0]:
        return node.all_input_nodes[0]
    if node.target is not aten.cat.default:
        return None
    given, rank = arguments(node), len(shape_of(node))
    front, *rest = given["tensors"]
    is_in_front = given["dim"] % rank - rank == dim and len(rest) == 1 and len(shape_of(front)) == rank
    is_zeros = is_in_front and front.target in ZEROS and size_expression(shape_of(front)[dim]) == count
    return rest[0] if is_zeros else None


def keeps_first(node: fx.Node, dim: int, size: sympy.Expr) -> bool:
    """Whether the node keeps the first `size` entries of a dimension."""
    if node.target not in SLICES:
        return False
    given, rank = arguments(node), len(shape_of(node))
    is_first = given["dim"] % rank - rank == dim and given["start"] in (None, 0) and given.get("step", 1) == 1
    return is_first and bool(size_expression(shape_of(node)[dim]) == size)


def transposed(node: fx.Node, dim: int) -> int | None:
    """Where a transposition puts a dimension; None for any other operation."""
    if node.target is aten.mT.default:
        return {-1: -2, -2: -1}.get(dim, dim)
    if node.target not in (aten.transpose.int, aten.permute.default):
        return None
    given, rank = arguments(node), len(shape_of(node))
    if node.target is aten.permute.default:
        return [place % rank - rank for place in given["dims"]].index(dim) - rank
    one, other = given["dim0"] % rank - rank, given["dim1"] % rank - rank
    return {one: other, other: one}.get(dim, dim)
