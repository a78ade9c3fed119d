"""Layers of `linear_recurrence` by chunks, in torch's own operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.mixers import computed_in
from tree_compile.runtime.row_tree import CHUNK, RowTree, by_first_chunk, in_chunks, in_row, last_chunks
from tree_compile.runtime.state_scan import ChunkMaps, final_states, state_scan

__all__ = ["by_chunks"]

_LEAST_DECAY = {torch.float32: -60.0, torch.float64: -300.0}
"""What is kept of a state after a greater one is far below its rounding."""

_PART = 8
"""Tokens of a part of a chunk in which decays per channel are taken pair by pair."""


class _Pieces(NamedTuple):
    """Inputs by chunk: query and key [n, H, CHUNK, D], value [n, H, CHUNK, E], and numbers for every token of them.

    Attributes:
        query_factor: factor on the query, [n, H, CHUNK, 1].
        key_factor: factor on the key.
        decay: [n, H, CHUNK, D or 1].
        total: the sum of the decays from the start of the chunk on, in float64: differences of totals in float32 would
            not be precise where strong decays stand before weak ones.
        pair_decay: exp(total[i] - total[j]) for j <= i, 0 above, [n, H, CHUNK, CHUNK]; None with a decay per channel.
        beta: [n, H, CHUNK, 1], or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_factor: Tensor
    key_factor: Tensor
    decay: Tensor
    total: Tensor
    pair_decay: Tensor | None
    beta: Tensor | None

    def pair_products(self, left: Tensor) -> Tensor:
        """`sum_d left[i, d] key[j, d] exp(total[i, d] - total[j, d])` for j <= i, 0 above: [n, H, CHUNK, CHUNK]."""
        if self.pair_decay is None:
            return _pair_products_per_channel(left, self.key, self.decay, self.total)
        return left @ self.key.mT * self.pair_decay


def by_chunks(inputs: LinearInputs, tree: RowTree, options: LinearOptions) -> tuple[Tensor, Tensor | None]:
    """Outputs [1, T, H, E] and, where asked for, the states after every segment [S, H, D, E]."""
    pieces = _pieces(inputs, tree, options)
    attend = pieces.pair_products(pieces.query) * (pieces.query_factor * pieces.key_factor.mT)
    maps, initial = _chunk_maps(pieces), options.initial_state
    start = None if initial is None else by_first_chunk(initial.to(pieces.value.dtype), tree)
    scanned = state_scan(maps, tree.chunk_parent, start)
    out = in_row(scanned.found + attend @ scanned.written, tree, batch=1)
    return out, final_states(maps, scanned)[last_chunks(tree)] if options.output_final_state else None


def _pieces(inputs: LinearInputs, tree: RowTree, options: LinearOptions) -> _Pieces:
    dtype, heads = computed_in(inputs.value), inputs.value.shape[2]

    def by_chunk(values: Tensor) -> Tensor:
        return _for_heads(in_chunks(values.to(dtype), tree), heads)

    query, key = by_chunk(inputs.query), by_chunk(inputs.key)
    decay = by_chunk(inputs.decay).clamp(min=_LEAST_DECAY[dtype])
    total = decay.double().cumsum(-2)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    one = torch.ones_like(query[..., :1])
    query_factor, key_factor = (_one_over_length(query), _one_over_length(key)) if options.normalize else (one, one)
    gate = None if inputs.beta is None else by_chunk(inputs.beta[..., None])
    pair_decay = _factor(_without_later(total - total.mT, 0), query) if total.shape[-1] == 1 else None
    return _Pieces(query, key, by_chunk(inputs.value), query_factor * scale, key_factor, decay, total, pair_decay, gate)


def _chunk_maps(pieces: _Pieces) -> ChunkMaps:
    """What every chunk makes of the state before it.

    With a delta rule, what a token writes depends on what those before it in the chunk wrote, which is a triangular
    system: the UT transform of Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.
    """
    query, key, value, query_factor, key_factor, _, total, _, beta = pieces
    last, since = total[..., -1:, :], _factor(total, key)
    kept, left = _factor(last, key).mT, key * (key_factor * _factor(last - total, key))
    asks = query * (query_factor * since)
    if beta is None:
        return ChunkMaps(kept, value, left, None, asks)
    pair_factor = beta * key_factor * key_factor.mT
    system = pieces.pair_products(key) * pair_factor
    one = torch.eye(CHUNK, dtype=key.dtype, device=key.device)
    solved = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True) * beta.mT
    taken_off = -key_factor * since
    # One decay for each token is cheaper on the small matrix than on the keys.
    reads = (solved * taken_off.mT) @ key if total.shape[-1] == 1 else solved @ (key * taken_off)
    return ChunkMaps(kept, solved @ value, left, reads, asks)


def _factor(decay: Tensor, like: Tensor) -> Tensor:
    """exp(decay) in the dtype of `like`."""
    return decay.to(like.dtype).exp()


def _without_later(sums: Tensor, diagonal: int) -> Tensor:
    """[..., n, n], with -inf above a diagonal. Exponents are masked, not their factors, which may overflow there."""
    above = torch.ones(sums.shape[-2:], dtype=torch.bool, device=sums.device).triu(diagonal + 1)
    return sums.masked_fill(above, -torch.inf)


def _pair_products_per_channel(left: Tensor, right: Tensor, decay: Tensor, total: Tensor) -> Tensor:
    """`_Pieces.pair_products` without [CHUNK, CHUNK, D] numbers, and without an exponent above 0.

    Parts of `_PART` tokens are related to earlier parts over the total at the end of the earlier one and the start of
    their own, and to themselves pair by pair. (A product of exp(total[i]) and exp(-total[j]) would overflow.)
    """
    left, right, decay, total = (x.unflatten(-2, (CHUNK // _PART, _PART)) for x in (left, right, decay, total))
    begin, end = total[..., 0, :], total[..., -1, :]
    between = _without_later(begin.mT[..., :, None] - end.mT[..., None, :], -1).movedim(-3, -1)
    rest = right * _factor(end[..., None, :] - total, right)
    earlier = rest[..., None, :, :, :] * _factor(between, right)[..., None, :]
    before = (left * _factor(total - begin[..., None, :], left)) @ earlier.flatten(-3, -2).mT
    return before.flatten(-3, -2) + _block_diagonal(_pairs_inside(left, right, decay))


def _pairs_inside(left: Tensor, right: Tensor, decay: Tensor) -> Tensor:
    """Products of the tokens of one part: [n, H, parts, _PART, _PART]; sums of decays grow token by token."""
    pairs, since = torch.diag_embed((left * right).sum(-1)), torch.zeros_like(decay)
    for back in range(1, _PART):
        since = since[..., 1:, :] + decay[..., 1 : _PART + 1 - back, :]
        reached = left[..., back:, :] * right[..., :-back, :] * since.exp()
        pairs = pairs + torch.diag_embed(reached.sum(-1), -back)
    return pairs


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
    # The gradient of a norm reads the values once, that of a sum of squares three times.
    return torch.rsqrt(torch.linalg.vector_norm(values, dim=-1, keepdim=True).square() + 1e-6)
