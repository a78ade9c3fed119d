"""Causal convolution and token shift over a tree: every token takes its nearest ancestors, wherever they lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tree_compile.runtime.mixers import computed_in, mixer, require_rank, require_shape
from tree_compile.runtime.row_tree import RowTree, require_row

__all__ = ["causal_convolution", "token_shift"]


@mixer({"values": 1, "weight": None, "bias": None}, "values", over="ancestors")
def causal_convolution(
    values: Tensor, weight: Tensor, bias: Tensor | None = None, tree: RowTree | None = None
) -> Tensor:
    """Convolution of every channel by itself over a token and those before it.

    Args:
        values: [B, T, D]; with `tree`, B is 1 and T the tokens of a row.
        weight: [D, K]; the last column is the factor of the token itself.
        bias: [D].
        tree: that of the row; None where each of the B is a sequence of its own.

    Returns:
        [B, T, D] in the dtype of `values`; sums are kept in float32 at least.

    Raises:
        ValueError: `weight` or `bias` has another shape; or `values` are not one row, as long as that of `tree`.
    """
    require_rank("values", values, 3)
    require_rank("weight", weight, 2)
    require_shape("weight", weight, (values.shape[2], max(weight.shape[-1], 1)))
    require_shape("bias", bias, (values.shape[2],))
    width, dtype = weight.shape[-1], computed_in(values)
    wide, weight = values.to(dtype), weight.to(dtype)
    rows = _with_zero_row(wide)
    result = wide * weight[:, width - 1]
    for back, ancestor in enumerate(_ancestors(values, width - 1, tree), start=1):
        result = result + rows.index_select(0, ancestor).view(values.shape) * weight[:, width - 1 - back]
    return (result if bias is None else result + bias).to(values.dtype)


@mixer({"values": 1}, "values", over="ancestors")
def token_shift(values: Tensor, tree: RowTree | None = None) -> Tensor:
    """The values [B, T, …] of the token before each token; 0 at the first of a sequence.

    With `tree`, B is 1 and T the tokens of a row; without it each of the B is a sequence of its own.

    Raises:
        ValueError: `values` have no tokens, or are not one row, as long as that of `tree`.
    """
    if values.dim() < 2:
        raise ValueError(f"values is {tuple(values.shape)}; it must have 2 dimensions or more")
    (parent,) = _ancestors(values, 1, tree)
    return _with_zero_row(values).index_select(0, parent).view(values.shape)


def _ancestors(values: Tensor, count: int, tree: RowTree | None) -> list[Tensor]:
    """The `count` tokens before each token, the nearest first: int64 [B * T], B * T where there is none."""
    batch, length = values.shape[:2]
    tokens = batch * length
    if tree is not None:
        require_row(tree, "values", values)
    parent = _parents_of_chains(tokens, length, values.device) if tree is None else tree.parent
    nearest = torch.where(parent < 0, tokens, parent)
    beyond = torch.cat([nearest, nearest.new_full((1,), tokens)])
    found = [nearest][:count]
    for _ in range(count - 1):
        found.append(beyond.index_select(0, found[-1]))
    return found


def _parents_of_chains(tokens: int, length: int, device: torch.device) -> Tensor:
    index = torch.arange(tokens, device=device)
    return torch.where(index % length == 0, -1, index - 1)


def _with_zero_row(values: Tensor) -> Tensor:
    flat = values.flatten(0, 1)
    # Not by torch.cat, which takes no float16 under autocast on the CPU.
    return F.pad(flat, (0, 0) * (flat.dim() - 1) + (0, 1))
