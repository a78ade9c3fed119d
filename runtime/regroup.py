"""Rows of a tensor in another order, with a gather as the gradient of a gather."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["regroup"]


def regroup(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Rows of `values` in the order of `index`, with zeros for indices past the last row.

    As `index_select`, whose gradient adds row by row; here every row is asked for at most once.

    Args:
        values: [R, D].
        index: int64 [M], the row of `values` that each row of the result is; R or more for none.
        inverse: int64 [R], the row of the result that each row of `values` became; M or more for none.

    Returns:
        [M, D].
    """
    result: Tensor = _regroup(values, index, inverse)
    return result


@torch.library.custom_op("tree_compile::regroup", mutates_args=())
def _regroup(values: Tensor, index: Tensor, inverse: Tensor) -> Tensor:  # noqa: ARG001
    found, is_none = values.index_select(0, index.clamp(max=len(values) - 1)), index >= len(values)
    if values.device.type == "cpu":  # few rows, and elsewhere their number would have to be waited for
        return found.index_fill_(0, is_none.nonzero()[:, 0], 0)
    return found.masked_fill_(is_none[:, None], 0)


@_regroup.register_fake
def _(values: Tensor, index: Tensor, _inverse: Tensor) -> Tensor:
    return values.new_empty(index.shape[0], values.shape[1])


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[1:])


def _differentiate(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, inverse = ctx.saved_tensors  # type: ignore[attr-defined]
    return regroup(grad.contiguous(), inverse, index), None, None


_regroup.register_autograd(_differentiate, setup_context=_save_for_backward)
