"""Layers that keep a matrix as their state: gated delta rule, Kimi delta attention, linear attention, state spaces.

All of them turn the state S, `[D, E]` per head, at every token into

    S <- decay * S + key (beta * (value - key^T (decay * S)))      with a delta rule
    S <- decay * S + key value                                     without one

and return `query^T S`. Per chunk of tokens this is one linear map of the state before the chunk (Yang et al., Gated
Delta Networks, 2024, section 3; Dao and Gu, Mamba-2, 2024, section 6), so that all chunks of all segments of a row are
computed at once, and only the states between chunks go down the tree one after the other (`state_scan`).

Every function takes one row of a plan with its `tree`, or, without one, a batch of unpacked sequences. It computes
in float64 where its inputs are of that dtype, and in float32 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.mixers import mixer
from tree_compile.runtime.recurrence_fla import by_kernels, kernels_can
from tree_compile.runtime.row_tree import CHUNK, RowTree, by_first_chunk, in_chunks, in_row, last_chunks, tree_of_chains
from tree_compile.runtime.state_scan import ChunkMaps, final_states, starting_states

__all__ = [
    "by_chunks",
    "decay_linear_attention",
    "delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "state_space_scan",
]


def _state_of_heads(shapes: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    return shapes["value"][2], shapes["key"][3], shapes["value"][3]


def _state_of_space(shapes: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    return shapes["values"][2], shapes["values"][3], shapes["write"][3]


_SUB = 8
"""Tokens of a part of a chunk in which decays per channel are taken pair by pair."""


@mixer({"query": 1, "key": 1, "value": 1, "decay": 1, "beta": 1}, "value", state=_state_of_heads, has_kernels=True)
def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule: one decay for each token and head.

    Args:
        query: [B, T, Hk, D]; with `tree`, B is 1 and T the tokens of a row.
        key: [B, T, Hk, D].
        value: [B, T, H, E]; value head h reads the keys of head h // (H // Hk).
        decay: [B, T, H], the logarithm of the factor on the state, 0 or less.
        beta: [B, T, H], how much of the difference is written.
        tree: that of the row; None where each of the B is a sequence of its own.
        scale: factor on the queries; None for D ** -0.5.
        normalize: whether queries and keys are divided by their length first.
        initial_state: [B, H, D, E], or [roots, H, D, E] with `tree`; None for zeros.
        output_final_state: whether final states are returned.

    Returns:
        [B, T, H, E] in the dtype of `value`; and, where asked for, the states after the last token of each sequence,
        [B, H, D, E], or those after every segment, [S, H, D, E], with `tree`.
    """
    return _recurrence(
        query,
        key,
        value,
        decay[..., None],
        beta,
        tree,
        LinearOptions(scale, normalize, initial_state, output_final_state),
    )


@mixer({"query": 1, "key": 1, "value": 1, "decay": 1, "beta": 1}, "value", state=_state_of_heads, has_kernels=True)
def kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule with a decay for every channel of the keys: as `gated_delta_rule`, but for `decay` [B, T, H, D]."""
    return _recurrence(
        query, key, value, decay, beta, tree, LinearOptions(scale, normalize, initial_state, output_final_state)
    )


@mixer({"query": 1, "key": 1, "value": 1, "beta": 1}, "value", state=_state_of_heads, has_kernels=True)
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule without decay: as `gated_delta_rule` with a decay of 0."""
    kept = torch.zeros_like(beta)[..., None]
    return _recurrence(
        query, key, value, kept, beta, tree, LinearOptions(scale, normalize, initial_state, output_final_state)
    )


@mixer({"query": 1, "key": 1, "value": 1, "decay": 1}, "value", state=_state_of_heads, has_kernels=True)
def gated_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with a decay for every channel, [B, T, H, D]; the rest as in `gated_delta_rule`."""
    return _recurrence(
        query, key, value, decay, None, tree, LinearOptions(scale, False, initial_state, output_final_state)
    )


@mixer({"query": 1, "key": 1, "value": 1, "decay": 1}, "value", state=_state_of_heads, has_kernels=True)
def decay_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with one decay for each head, [H], or for each token and head, [B, T, H].

    Lightning attention and retention have the former. The rest as in `gated_delta_rule`.
    """
    per_token = decay.expand(*value.shape[:2], -1)[..., None]
    return _recurrence(
        query, key, value, per_token, None, tree, LinearOptions(scale, False, initial_state, output_final_state)
    )


@mixer(
    {"values": 1, "step": 1, "rate": None, "write": 1, "read": 1, "skip": None},
    "values",
    state=_state_of_space,
    has_kernels=True,
)
def state_space_scan(
    values: Tensor,
    step: Tensor,
    rate: Tensor,
    write: Tensor,
    read: Tensor,
    tree: RowTree | None = None,
    *,
    skip: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """State-space layer of Mamba-2: linear attention with the decay `step * rate` that writes `step * values`.

    Args:
        values: [B, T, H, E].
        step: [B, T, H], above 0.
        rate: [H], below 0.
        write: [B, T, G, D]; head h takes group h // (H // G).
        read: [B, T, G, D].
        tree: as in `gated_delta_rule`.
        skip: [H], factor of the values that are added to the output.
        initial_state: [B, H, E, D], the state transposed, as this layer's implementations keep it.

        output_final_state: as in `gated_delta_rule`.

    Returns:
        [B, T, H, E] in the dtype of `values`; and the final states or None, with D and E the other way round.
    """
    dtype = _dtype(values)
    wide, step = values.to(dtype), step.to(dtype)
    start = None if initial_state is None else initial_state.transpose(-1, -2)
    decay, written = (step * rate.to(dtype))[..., None], wide * step[..., None]
    out, states = _recurrence(
        read, write, written, decay, None, tree, LinearOptions(1.0, False, start, output_final_state)
    )
    if skip is not None:
        out = out + wide * skip[:, None]
    return out.to(values.dtype), None if states is None else states.transpose(-1, -2)


class _Pieces(NamedTuple):
    """Inputs by chunk: query and key [n, H, CHUNK, D], value [n, H, CHUNK, E], and numbers for every token of them.

    Attributes:
        of_query: factor on the query, [n, H, CHUNK, 1].
        of_key: factor on the key.
        total: the sum of the decays from the start of the chunk on, [n, H, CHUNK, D or 1].
        beta: [n, H, CHUNK, 1], or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    of_query: Tensor
    of_key: Tensor
    total: Tensor
    beta: Tensor | None


def _recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    tree: RowTree | None,
    options: LinearOptions,
) -> tuple[Tensor, Tensor | None]:
    batch, length = value.shape[:2]
    row = tree_of_chains(batch, length, value.device) if tree is None else tree
    inputs = LinearInputs(query, key, value, decay, beta).of_each(lambda x: x.flatten(0, 1)[None])
    compute = by_kernels if kernels_can(value) else by_chunks
    # All of it is computed in the dtype of its inputs, also where autocast would choose another for the products.
    with torch.autocast(value.device.type, enabled=False):
        out, final = compute(inputs, row, options)
    return out.view(batch, length, *value.shape[2:]).to(value.dtype), final


def by_chunks(inputs: LinearInputs, row: RowTree, options: LinearOptions) -> tuple[Tensor, Tensor | None]:
    """What all of these functions come to, in torch's own operations: outputs [1, T, H, E], and final states."""
    pieces = _pieces(inputs, row, options)
    attend = _pair_products(pieces.query, pieces.key, pieces.total) * (pieces.of_query * pieces.of_key.mT)
    maps, initial = _chunk_maps(pieces), options.initial_state
    start = None if initial is None else by_first_chunk(initial.to(pieces.value.dtype), row)
    states, written = starting_states(maps, row.chunk_parent, start)
    asked = pieces.query * (pieces.of_query * pieces.total.exp())
    out = in_row(asked @ states + attend @ written, row, batch=1)
    return out, final_states(maps, states, written)[last_chunks(row)] if options.output_final_state else None


def _pieces(inputs: LinearInputs, row: RowTree, options: LinearOptions) -> _Pieces:
    dtype, heads = _dtype(inputs.value), inputs.value.shape[2]

    def by_chunk(values: Tensor) -> Tensor:
        return _for_heads(in_chunks(values.to(dtype), row), heads)

    query, key, total = by_chunk(inputs.query), by_chunk(inputs.key), by_chunk(inputs.decay).cumsum(-2)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    one = torch.ones_like(query[..., :1])
    of_query, of_key = (_one_over_length(query), _one_over_length(key)) if options.normalize else (one, one)
    gate = None if inputs.beta is None else by_chunk(inputs.beta[..., None])
    return _Pieces(query, key, by_chunk(inputs.value), of_query * scale, of_key, total, gate)


def _chunk_maps(pieces: _Pieces) -> ChunkMaps:
    """What every chunk makes of the state before it.

    With a delta rule, what a token writes depends on what those before it in the chunk wrote, which is a triangular
    system: the UT transform of Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.
    """
    _, key, value, _, of_key, total, beta = pieces
    last = total[..., -1:, :]
    kept, left = last.exp().mT, key * (of_key * (last - total).exp())
    if beta is None:
        return ChunkMaps(kept, value, left)
    of_pair = beta * of_key * of_key.mT
    system = _pair_products(key, key, total) * of_pair
    one = torch.eye(CHUNK, dtype=key.dtype, device=key.device)
    solved = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True) * beta.mT
    since = of_key * total.exp()
    # One decay for each token is cheaper on the small matrix than on the keys.
    reads = (solved * since.mT) @ key if total.shape[-1] == 1 else solved @ (key * since)
    return ChunkMaps(kept, solved @ value, left, reads)


def _pair_products(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """`sum_d left[i, d] right[j, d] exp(total[i, d] - total[j, d])` for j <= i, 0 above: [n, H, CHUNK, CHUNK]."""
    if total.shape[-1] == 1:
        return left @ right.transpose(-1, -2) * _decay_between(total[..., 0])
    return _pair_products_per_channel(left, right, total)


def _decay_between(total: Tensor) -> Tensor:
    """exp(total[i] - total[j]) for j <= i, else 0: the exponent is masked, since it may overflow there."""
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def _pair_products_per_channel(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """The same with a decay per channel, without [CHUNK, CHUNK, D] numbers, and without an exponent above 0.

    Parts of `_SUB` tokens are related to earlier parts over the total at their own start, and to themselves pair by
    pair. (A product of exp(total[i]) and exp(-total[j]) would overflow.)
    """
    parts = CHUNK // _SUB
    left_parts, total_parts = left.unflatten(-2, (parts, _SUB)), total.unflatten(-2, (parts, _SUB))
    begin = total_parts[..., :1, :]
    index = torch.arange(CHUNK, device=total.device)
    later = (index >= _SUB * index[:parts, None])[..., None]
    since = (begin - total[..., None, :, :]).masked_fill(later, -torch.inf).exp()
    before = (left_parts * (total_parts - begin).exp()) @ (right[..., None, :, :] * since).transpose(-1, -2)
    inside = _pairs_inside(left_parts, right.unflatten(-2, (parts, _SUB)), total_parts)
    return before.flatten(-3, -2) + _block_diagonal(inside)


def _pairs_inside(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """Products of the tokens of one part: [n, H, parts, _SUB, _SUB]."""
    later = torch.ones(_SUB, _SUB, dtype=torch.bool, device=total.device).triu(1)[..., None]
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later, -torch.inf).exp()
    return (left[..., :, None, :] * right[..., None, :, :] * between).sum(-1)


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


def _dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
