"""Operators that the readers of a graph know, by what they do to numbers: what several of them ask for stands here.

What is read past one of them has to be checked: a cast by `keeps_numbers`, a slice by the sizes.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

# The same numbers

CASTS = (
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default,
)  # fmt: skip
"""In another dtype, or on another device: the same only where `shapes.keeps_numbers` says so."""
COPIES = (aten.contiguous.default, aten.clone.default, aten.alias.default)
"""In other memory."""
DETACH = aten.detach.default
"""Without gradients: the same only for what has none, as choices and masks."""
RANKS = (aten.unsqueeze.default, aten.squeeze.dim)
"""With one dimension of size one more or less."""
EXPANSIONS = (aten.expand.default, aten.expand_as.default)
"""Repeated along dimensions of size one."""
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""In the same order, in any other shape: whose numbers they are has to be clear from the sizes."""

SAME_NUMBERS = (*CASTS, *COPIES)
"""In the same shape, with the same gradients."""
SAME_ROWS = (*SAME_NUMBERS, DETACH, *RANKS, *EXPANSIONS)
"""For masks and choices, whose last two dimensions stay what they are where their sizes do."""

# Parts, and what stands around them

SLICES = (aten.slice.Tensor, aten.narrow.default)
PADS = (aten.pad.default, aten.constant_pad_nd.default)

# One number everywhere

ZEROS = (aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)
ONES = (aten.ones.default, aten.new_ones.default, aten.ones_like.default)
FULL = (aten.full.default, aten.new_full.default, aten.full_like.default)

# Masks

FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
WHERES = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
NOT = (aten.logical_not.default, aten.bitwise_not.default)
BOTH = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)
EITHER = (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor)
SCATTERS = (aten.scatter.value, aten.scatter.src)
"""Without `reduce`: what was there is replaced."""

# Products

MATMULS = (aten.matmul.default, aten.bmm.default)
MULTIPLICATIONS = (aten.mul.Tensor, aten.mul.Scalar)
DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
"""Without a rounding mode."""
SOFTMAXES = (aten.softmax.int, aten._softmax.default)
SDPA = aten.scaled_dot_product_attention.default
