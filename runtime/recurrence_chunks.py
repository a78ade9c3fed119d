"""Layers of `linear_recurrence` by chunks, in torch's own operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.mixers import computed_in
from tree_compile.runtime.row_tree import CHUNK, RowTree, by_first_chunk, in_chunks, in_row, last_chunks
from tree_compile.runtime.state_scan import ChunkMaps, final_states, starting_states

__all__ = ["by_chunks"]

_LEAST_DECAY = {torch.float32: -60.0, torch.float64: -300.0}
"""What is kept of a state after a greater one is far below its rounding; sums of greater ones would lose digits."""

_PART = 8
"""Tokens of a part of a chunk in which decays per channel are taken pair by pair."""


class _Pieces(NamedTuple):
    """Inputs by chunk: query and key [n, H, CHUNK, D], value [n, H, CHUNK, E], and numbers for every token of them.

    Attributes:
        query_factor: factor on the query, [n, H, CHUNK, 1].
        key_factor: factor on the key.
        total: the sum of the decays from the start of the chunk on, [n, H, CHUNK, D or 1].
        beta: [n, H, CHUNK, 1], or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_factor: Tensor
    key_factor: Tensor
    total: Tensor
    beta: Tensor | None


def by_chunks(inputs: LinearInputs, row: RowTree, options: LinearOptions) -> tuple[Tensor, Tensor | None]:
    """Outputs [1, T, H, E] and, where asked for, the states after every segment [S, H, D, E]."""
    pieces = _pieces(inputs, row, options)
    attend = _pair_products(pieces.query, pieces.key, pieces.total) * (pieces.query_factor * pieces.key_factor.mT)
    maps, initial = _chunk_maps(pieces), options.initial_state
    start = None if initial is None else by_first_chunk(initial.to(pieces.value.dtype), row)
    states, written = starting_states(maps, row.chunk_parent, start)
    asked = pieces.query * (pieces.query_factor * pieces.total.exp())
    out = in_row(asked @ states + attend @ written, row, batch=1)
    return out, final_states(maps, states, written)[last_chunks(row)] if options.output_final_state else None


def _pieces(inputs: LinearInputs, row: RowTree, options: LinearOptions) -> _Pieces:
    dtype, heads = computed_in(inputs.value), inputs.value.shape[2]

    def by_chunk(values: Tensor) -> Tensor:
        return _for_heads(in_chunks(values.to(dtype), row), heads)

    query, key, total = by_chunk(inputs.query), by_chunk(inputs.key), _total_decay(by_chunk(inputs.decay))
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    one = torch.ones_like(query[..., :1])
    query_factor, key_factor = (_one_over_length(query), _one_over_length(key)) if options.normalize else (one, one)
    gate = None if inputs.beta is None else by_chunk(inputs.beta[..., None])
    return _Pieces(query, key, by_chunk(inputs.value), query_factor * scale, key_factor, total, gate)


def _chunk_maps(pieces: _Pieces) -> ChunkMaps:
    """What every chunk makes of the state before it.

    With a delta rule, what a token writes depends on what those before it in the chunk wrote, which is a triangular
    system: the UT transform of Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.
    """
    _, key, value, _, key_factor, total, beta = pieces
    last = total[..., -1:, :]
    kept, left = last.exp().mT, key * (key_factor * (last - total).exp())
    if beta is None:
        return ChunkMaps(kept, value, left)
    pair_factor = beta * key_factor * key_factor.mT
    system = _pair_products(key, key, total) * pair_factor
    one = torch.eye(CHUNK, dtype=key.dtype, device=key.device)
    solved = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True) * beta.mT
    since = key_factor * total.exp()
    # One decay for each token is cheaper on the small matrix than on the keys.
    reads = (solved * since.mT) @ key if total.shape[-1] == 1 else solved @ (key * since)
    return ChunkMaps(kept, solved @ value, left, reads)


def _total_decay(decay: Tensor) -> Tensor:
    """The sum of the decays from the start of the chunk on."""
    return decay.clamp(min=_LEAST_DECAY[decay.dtype]).cumsum(-2)


def _pair_products(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """`sum_d left[i, d] right[j, d] exp(total[i, d] - total[j, d])` for j <= i, 0 above: [n, H, CHUNK, CHUNK]."""
    if total.shape[-1] == 1:
        return left @ right.mT * _decay_between(total)[..., 0]
    return _pair_products_per_channel(left, right, total)


def _decay_between(total: Tensor) -> Tensor:
    """exp(total[i] - total[j]) for j <= i, else 0: [..., n, D] -> [..., n, n, D]."""
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=total.device).triu(1)[..., None]
    # The exponent is masked, since it may overflow there.
    return (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later, -torch.inf).exp()


def _pair_products_per_channel(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """The same with a decay per channel, without [CHUNK, CHUNK, D] numbers, and without an exponent above 0.

    Parts of `_PART` tokens are related to earlier parts over the total at their own start, and to themselves pair by
    pair. (A product of exp(total[i]) and exp(-total[j]) would overflow.)
    """
    parts = CHUNK // _PART
    left_parts, total_parts = left.unflatten(-2, (parts, _PART)), total.unflatten(-2, (parts, _PART))
    begin = total_parts[..., :1, :]
    index = torch.arange(CHUNK, device=total.device)
    later = (index >= _PART * index[:parts, None])[..., None]
    since = (begin - total[..., None, :, :]).masked_fill(later, -torch.inf).exp()
    before = (left_parts * (total_parts - begin).exp()) @ (right[..., None, :, :] * since).mT
    inside = _pairs_inside(left_parts, right.unflatten(-2, (parts, _PART)), total_parts)
    return before.flatten(-3, -2) + _block_diagonal(inside)


def _pairs_inside(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Products of the tokens of one part: [n, H, parts, _PART, _PART]."""
    return (left[..., :, None, :] * right[..., None, :, :] * _decay_between(total)).sum(-1)


def _block_diagonal(blocks: Tensor) -> Tensor:
    """[..., parts, s, s] on the diagonal of [..., parts * s, parts * s]."""
    parts = blocks.shape[-3]
    own = torch.eye(parts, dtype=blocks.dtype, device=blocks.device)[:, None, :, None]
    return (blocks[..., :, :, None, :] * own).flatten(-2).flatten(-3, -2)


def _for_heads(values: Tensor, heads: int) -> Tensor:
    """[n, Hk, CHUNK, D] -> [n, heads, CHUNK, D]; each head of the former serves some neighbouring ones."""
    own = values.shape[1]
    return values if own == heads else values.repeat_interleave(heads // own, 1)


def _one_over_length(values: Tensor) -> Tensor:
    return torch.rsqrt((values * values).sum(-1, keepdim=True) + 1e-6)
