"""Selective scan (Gu and Dao, Mamba, 2023): a state per channel whose every entry has a decay of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tree_compile.runtime.mixers import computed_in, mixer, require_rank, require_shape
from tree_compile.runtime.row_tree import (
    CHUNK,
    RowTree,
    by_first_chunk,
    in_chunks,
    in_row,
    last_chunks,
    row_or_chains,
    with_values_on_padding,
)
from tree_compile.runtime.state_scan import ChunkMaps, final_states, state_scan

__all__ = ["selective_scan"]


def _state(shapes: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    return shapes["rate"][0], shapes["rate"][1]


@mixer(
    {"values": 1, "step": 1, "rate": None, "write": 1, "read": 1, "skip": None}, "values", state=_state, over="chunks"
)
def selective_scan(
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
    """State-space layer of Mamba: `S <- exp(step * rate) S + step * values * write`, out `S read`, per channel.

    Mamba's own names are x for the values, Δ for the step, A for the rate, B for write, C for read, D for skip.
    It computes in float64 where `values` are of that dtype, and in float32 elsewhere.

    Args:
        values: [B, T, D]; with `tree`, B is 1 and T the tokens of a row.
        step: [B, T, D], above 0.
        rate: [D, N], below 0.
        write: [B, T, N].
        read: [B, T, N].
        tree: that of the row; None where each of the B is a sequence of its own.
        skip: [D], factor of the values that are added to the output.
        initial_state: [B, D, N], or [roots, D, N] with `tree`; None for zeros.
        output_final_state: whether final states are returned.

    Returns:
        [B, T, D] in the dtype of `values`; and, where asked for, the states after the last token of each sequence,
        [B, D, N], or those after every segment, [S, D, N], with `tree`; they are float64 where `values` are,
        and float32 elsewhere.

    Raises:
        ValueError: there are no tokens, or a tensor has another shape; `initial_state` has not one state for each root;
            or `tree` is given, and B is not 1 or T another number than in the tree.
    """
    require_rank("values", values, 3)
    require_rank("rate", rate, 2)
    forest, dtype = row_or_chains(tree, "values", values), computed_in(values)
    _require_shapes(values, step, rate, write, read, skip, initial_state)
    wide, step = values.to(dtype), step.to(dtype)

    def by_chunk(values: Tensor) -> Tensor:
        return in_chunks(values[:, :, None].to(dtype), forest)[:, 0]

    decay = by_chunk(step)[..., None] * rate.to(dtype)
    written = by_chunk(wide * step)[..., None] * by_chunk(write)[:, :, None]
    own, total = _states_of_own(decay.exp(), written), decay.cumsum(1).exp()
    maps = ChunkMaps(total[:, -1, ..., None], own[:, -1, ..., None])
    start = None if initial_state is None else by_first_chunk(initial_state.to(dtype), forest)[..., None]
    scanned = state_scan(maps, forest.chunk_parent, start)
    reached = own + total * scanned.states[:, None, ..., 0]
    out = in_row((reached * by_chunk(read)[:, :, None]).sum(-1)[:, None], forest, len(values))[:, :, 0]
    out = (out if skip is None else out + wide * skip).to(values.dtype)
    out = with_values_on_padding(out, values, tree)
    if not output_final_state:
        return out, None
    return out, final_states(maps, scanned)[last_chunks(forest), ..., 0]


def _require_shapes(
    values: Tensor, step: Tensor, rate: Tensor, write: Tensor, read: Tensor, skip: Tensor | None, initial: Tensor | None
) -> None:
    batch, length, channels = values.shape
    size = rate.shape[-1]
    require_shape("step", step, (batch, length, channels))
    require_shape("rate", rate, (channels, size))
    require_shape("write", write, (batch, length, size))
    require_shape("read", read, (batch, length, size))
    require_shape("skip", skip, (channels,))
    if initial is not None:
        require_shape("initial_state", initial, (len(initial), channels, size))


def _states_of_own(factor: Tensor, written: Tensor) -> Tensor:
    """The states [n, CHUNK, D, N] that the tokens of each chunk alone lead to."""
    state, states = torch.zeros_like(written[:, 0]), []
    for at in range(CHUNK):
        state = factor[:, at] * state + written[:, at]
        states.append(state)
    return torch.stack(states, 1)
