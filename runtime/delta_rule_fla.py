"""The gated delta rule by the kernels inside of fla's own function, which take all segments of a row at once.

The two that carry the state are called once for each depth of the tree: down it for the states, up it for their
gradients. Tokens, chunks and segments lie depth by depth, so that those of one depth are a slice of each.

Imported where it is first called, since fla is optional, and some versions have other functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from fla.modules.norm.l2norm import l2norm
from fla.ops.gated_delta_rule.chunk import (
    RCP_LN2,
    chunk_bwd_dqkwg,
    chunk_bwd_dv_local,
    chunk_fwd_o,
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
    chunk_gated_delta_rule_fwd_intra,
    chunk_local_cumsum,
    prepare_wy_repr_bwd,
    recompute_w_u_fwd,
)
from torch import Tensor

from tree_compile.runtime.depth_calls import CHUNK, DepthCalls, Packed
from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions

__all__ = ["delta_rule_of_row"]


def delta_rule_of_row(x: LinearInputs, calls: DepthCalls, options: LinearOptions) -> tuple[Tensor, Tensor]:
    """Outputs [1, T, H, E] in the dtype of `x.value`, and final states, float32 [S, H, D, E], in the order of `calls`.

    Args:
        x: tokens in the order of `calls.rows`; a decay for each head; query and key have the dtype of value.
        calls: those for the row.
        options: as in `delta_rule`.
    """
    query, key = (l2norm(x.query), l2norm(x.key)) if options.normalize else (x.query, x.key)
    scale = key.shape[-1] ** -0.5 if options.scale is None else options.scale
    initial = _initial_states(x, calls) if options.initial_state is None else options.initial_state.float()
    found: tuple[Tensor, Tensor] = _DeltaRule.apply(
        query, key, x.value, x.decay[..., 0].contiguous(), x.beta, initial.contiguous(), calls, scale
    )
    return found


def _initial_states(x: LinearInputs, calls: DepthCalls) -> Tensor:
    roots, (heads, width) = len(calls.depths[0].parents), x.value.shape[2:]
    return x.value.new_zeros(roots, heads, x.key.shape[-1], width, dtype=torch.float32)


class _Saved(NamedTuple):
    """What gradients are computed from.

    Attributes:
        query: [1, T, Hk, D].
        key: [1, T, Hk, D].
        value: [1, T, H, E].
        decays: sums of decays from the start of each chunk, as logarithms to base 2, float32 [1, T, H].
        beta: [1, T, H].
        inverse: of what the tokens of a chunk write over each other, [1, T, H, CHUNK].
        starts: states before each segment, float32 [S, H, D, E].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decays: Tensor
    beta: Tensor
    inverse: Tensor
    starts: Tensor


class _DeltaRule(torch.autograd.Function):
    """`delta_rule_of_row` of the tensors, all of them contiguous."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        initial: Tensor,
        calls: DepthCalls,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        tables = _tables(calls.packed)
        # Triton launches kernels on the current device, which need not be that of the tensors.
        with torch.cuda.device_of(value):
            decays = chunk_local_cumsum(decay, chunk_size=CHUNK, scale=RCP_LN2, **tables)
            reads, fresh, inverse = chunk_gated_delta_rule_fwd_intra(k=key, v=value, g=decays, beta=beta, **tables)
            states, written, starts, ends = _down(key, reads, fresh, decays, initial, calls)
            out = chunk_fwd_o(q=query, k=key, v=written, h=states, g=decays, scale=scale, **tables)
        ctx.save_for_backward(*_Saved(query, key, value, decays, beta, inverse, starts))
        ctx.calls, ctx.scale = calls, scale
        return out, ends

    @staticmethod
    def backward(ctx: Any, out: Tensor, ends: Tensor) -> tuple[Tensor | None, ...]:
        saved = _Saved(*ctx.saved_tensors)
        # The forward pass is outside of autocast; a backward pass may be called inside of it.
        with torch.cuda.device_of(out), torch.autocast(out.device.type, enabled=False):
            grads = _gradients(saved, out.contiguous(), ends.contiguous(), ctx.calls, ctx.scale)
        return *grads, None, None


def _tables(packed: Packed) -> dict[str, Tensor]:
    return {"cu_seqlens": packed.offsets, "chunk_indices": packed.chunks}


def _tables_of_states(packed: Packed) -> dict[str, Tensor]:
    """The tables for kernels that carry the state."""
    return _tables(packed) | {"chunk_offsets": packed.chunk_offsets}


def _by_depth(calls: DepthCalls, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tokens of each depth, of tensors [1, T, ...]."""
    lengths = [call.tokens for call in calls.depths]
    return list(zip(*(tensor.split(lengths, 1) for tensor in tensors), strict=True))


def _down(
    key: Tensor, reads: Tensor, fresh: Tensor, decays: Tensor, initial: Tensor, calls: DepthCalls
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States before chunks [1, C, H, D, E], what is written [1, T, H, E], and states before and after segments.

    Args:
        key: as in `_Saved`.
        reads: what each token reads of the state before its chunk, [1, T, H, D].
        fresh: what it would write to a state of zeros, [1, T, H, E].
        decays: as in `_Saved`.
        initial: states before the roots.
        calls: those for the row.
    """
    starts: list[Tensor] = []
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for call, (k, w, u, g) in zip(calls.depths, _by_depth(calls, key, reads, fresh, decays), strict=True):
        starts.append(found[-1][2].index_select(0, call.parents) if found else initial)
        tables = _tables_of_states(call.packed)
        found.append(
            chunk_gated_delta_rule_fwd_h(
                k=k, w=w, u=u, g=g, initial_state=starts[-1], output_final_state=True, **tables
            )
        )
    states, written, ends = zip(*found, strict=True)
    return torch.cat(states, 1), torch.cat(written, 1), torch.cat(starts), torch.cat(ends)


def _gradients(x: _Saved, out: Tensor, ends: Tensor, calls: DepthCalls, scale: float) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, decay, beta and initial states, from those of outputs and final states."""
    tables = _tables(calls.packed)
    reads, states, written = _states_again(x, calls)
    of_states, of_written, of_initial = _up(x, reads, out, ends, calls, scale)
    query, key, of_reads, decay = chunk_bwd_dqkwg(
        q=x.query, k=x.key, v=written, w=reads, g=x.decays, h=states, dv=of_written, do=out, dh=of_states,
        scale=scale, **tables,
    )  # fmt: skip
    more_key, value, beta, more_decay = prepare_wy_repr_bwd(
        k=x.key, v=x.value, beta=x.beta, g=x.decays, A=x.inverse, dw=of_reads, du=of_written, **tables
    )
    # From the last token of a chunk to its first: a decay is in the sums of its own token and of all behind it.
    decay = chunk_local_cumsum(decay + more_decay, chunk_size=CHUNK, reverse=True, **tables)
    return query, key + more_key, value, decay, beta, of_initial


def _states_again(x: _Saved, calls: DepthCalls) -> tuple[Tensor, Tensor, Tensor]:
    """What tokens read, [1, T, H, D], states before chunks, and what is written, as in `_down`.

    They are computed again, as in fla's own function: states of all chunks would take about the memory of all keys and
    values, if they were kept.
    """
    reads, fresh = recompute_w_u_fwd(k=x.key, v=x.value, beta=x.beta, A=x.inverse, g=x.decays, **_tables(calls.packed))
    # All segments at once: what each starts from is known by now.
    states, written, _ = chunk_gated_delta_rule_fwd_h(
        k=x.key, w=reads, u=fresh, g=x.decays, initial_state=x.starts, **_tables_of_states(calls.packed)
    )
    return reads, states, written


def _up(
    x: _Saved, reads: Tensor, out: Tensor, ends: Tensor, calls: DepthCalls, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of states after chunks [1, C, H, D, E], of what is written [1, T, H, E], and of initial states."""
    written = chunk_bwd_dv_local(q=x.query, k=x.key, g=x.decays, do=out, scale=scale, **_tables(calls.packed))
    parts = _by_depth(calls, x.query, x.key, reads, x.decays, out, written)
    counts = [len(call.parents) for call in calls.depths]
    by_depth = zip(calls.depths, parts, x.starts.split(counts), ends.split(counts), strict=True)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    parents = None
    for call, (q, k, w, g, do, dv), before, after in reversed(list(by_depth)):
        of_ends = after if parents is None else after.index_add(0, parents, found[-1][1])
        tables = _tables_of_states(call.packed)
        found.append(
            chunk_gated_delta_rule_bwd_dhu(
                q=q, k=k, w=w, g=g, h0=before, dht=of_ends, do=do, dv=dv, scale=scale, **tables
            )
        )
        parents = call.parents
    states, starts, all_written = zip(*reversed(found), strict=True)
    return torch.cat(states, 1), torch.cat(all_written, 1), starts[0]
