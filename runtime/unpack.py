"""A row of values -> one tensor per sequence, and the gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["unpack_row"]

Ranges = list[tuple[int, int]]


def unpack_row(value: Tensor, ranges: list[Ranges]) -> list[Tensor]:
    """Reads every sequence of a row out of a per-token value.

    A token that several sequences share is copied to each of them, so that they can be changed in place one by
    one, and its gradient is the sum of theirs. A sequence that is alone in its row is a view.

    Args:
        value: one entry per token of the row, shape [T, ...], of any dtype.
        ranges: for each sequence the row indices of its tokens, as `Row.path_ranges` gives them.

    Returns:
        For each sequence a tensor of shape [len_i, ...].
    """
    if len(ranges) == 1 and len(ranges[0]) == 1:
        start, end = ranges[0][0]
        return [value[start:end]]
    parts: tuple[Tensor, ...] = _Unpack.apply(value, ranges)
    return list(parts)


class _Unpack(torch.autograd.Function):
    """All sequences of a row at once: slices of its own would each allocate a gradient as long as the row."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranges: list[Ranges]) -> tuple[Tensor, ...]:
        ctx.ranges = ranges
        ctx.shape = value.shape
        ctx.set_materialize_grads(False)
        return tuple(torch.cat([value[start:end] for start, end in path]) for path in ranges)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        buffer = None
        for grad, path in zip(grads, ctx.ranges, strict=True):
            if grad is None:
                continue
            if buffer is None:
                buffer = grad.new_zeros(ctx.shape)
            _add(buffer, grad, path)
        return buffer, None


def _add(buffer: Tensor, grad: Tensor, path: Ranges) -> None:
    begin = 0
    for start, end in path:
        buffer[start:end] += grad[begin : begin + end - start]
        begin += end - start
