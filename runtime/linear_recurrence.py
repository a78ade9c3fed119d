"""Layers that keep a matrix as their state: gated delta rule, Kimi delta attention, linear attention, state spaces.

All of them turn the state S, `[D, E]` per head, at every token into

    S <- decay * S + key (beta * (value - key^T (decay * S)))      with a delta rule
    S <- decay * S + key value                                     without one

and return `query^T S`. Per chunk of tokens this is one linear map of the state before the chunk (Yang et al., Gated
Delta Networks, 2024, section 3; Dao and Gu, Mamba-2, 2024, section 6), so that all chunks of all segments of a row are
computed at once, and only the states between chunks go down the tree one after the other (`state_scan`).

Every function takes one row of a plan with its `tree`, or, without one, a batch of unpacked sequences. It computes
in float64 where its values are of that dtype, and in float32 elsewhere; kernels on CUDA in their own way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tree_compile.runtime.linear_inputs import LinearInputs, LinearOptions
from tree_compile.runtime.mixers import computed_in, mixer, require_rank, require_shape
from tree_compile.runtime.recurrence_chunks import by_chunks
from tree_compile.runtime.recurrence_fla import by_kernels, kernels_can
from tree_compile.runtime.row_tree import RowTree, row_or_chains, with_values_on_padding

__all__ = ["delta_rule", "linear_attention", "state_space_scan"]


def _state_of_heads(shapes: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    return shapes["value"][2], shapes["key"][3], shapes["value"][3]


def _state_of_space(shapes: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    return shapes["values"][2], shapes["values"][3], shapes["write"][3]


@mixer(
    {"query": 1, "key": 1, "value": 1, "beta": 1, "decay": 1}, "value", state=_state_of_heads, keys="key", over="chunks"
)
def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    normalize: bool = False,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule; with a decay the gated delta rule, with one for every channel Kimi delta attention.

    Args:
        query: [B, T, Hk, D]; with `tree`, B is 1 and T the tokens of a row.
        key: [B, T, Hk, D].
        value: [B, T, H, E]; value head h reads the keys of head h // (H // Hk).
        beta: [B, T, H], how much of the difference is written.
        decay: the logarithm of the factor on the state, 0 or less: [H], for each head; [B, T, H], for each token, too;
            or [B, T, H, D], for each channel of the keys, too; None for 0.
        tree: that of the row; None where each of the B is a sequence of its own.
        scale: factor on the queries; None for D ** -0.5.
        normalize: whether queries and keys are divided by their length first.
        initial_state: [B, H, D, E], or [roots, H, D, E] with `tree`; None for zeros.
        output_final_state: whether final states are returned.

    Returns:
        [B, T, H, E] in the dtype of `value`; and, where asked for, the states after the last token of each sequence,
        [B, H, D, E], or those after every segment, [S, H, D, E], with `tree`; they are float64 where `value` is, and
        float32 elsewhere.

    Raises:
        ValueError: there are no tokens, a tensor has another shape, or H is not a multiple of Hk; `initial_state` has
            not one state for each root; or `tree` is given, and B is not 1 or T another number than in the tree.
    """
    options = LinearOptions(scale, normalize, initial_state, output_final_state)
    return _recurrence(query, key, value, decay, beta, tree, options)


@mixer({"query": 1, "key": 1, "value": 1, "decay": 1}, "value", state=_state_of_heads, keys="key", over="chunks")
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    tree: RowTree | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention, with a decay for each head (lightning attention, retention), token, or channel (GLA).

    All of it as in `delta_rule`.
    """
    options = LinearOptions(scale, False, initial_state, output_final_state)
    return _recurrence(query, key, value, decay, None, tree, options)


@mixer(
    {"values": 1, "step": 1, "rate": None, "write": 1, "read": 1, "skip": None},
    "values",
    state=_state_of_space,
    keys="write",
    over="chunks",
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

    Mamba's own names are x for the values, Δ for the step, A for the rate, B for write, C for read, D for skip.

    Args:
        values: [B, T, H, E].
        step: [B, T, H], above 0.
        rate: [H], below 0.
        write: [B, T, G, D]; head h takes group h // (H // G).
        read: [B, T, G, D].
        tree: as in `delta_rule`.
        skip: [H] or [H, E], factor of the values that are added to the output.
        initial_state: [B, H, E, D], the state transposed, as this layer's implementations keep it; [roots, H, E, D]
            with `tree`.
        output_final_state: as in `delta_rule`.

    Returns:
        [B, T, H, E] in the dtype of `values`; and the final states or None, with D and E the other way round.

    Raises:
        ValueError: as in `delta_rule`.
    """
    require_rank("values", values, 4)
    require_rank("write", write, 4)
    batch, length, heads, width = values.shape
    require_shape("step", step, (batch, length, heads))
    require_shape("rate", rate, (heads,))
    require_shape("write", write, (batch, length, *write.shape[2:]))
    require_shape("read", read, tuple(write.shape))
    require_shape("skip", skip, (heads,), (heads, width))
    if initial_state is not None:
        require_shape("initial_state", initial_state, (len(initial_state), heads, width, write.shape[-1]))
    dtype = computed_in(values)
    wide, step = values.to(dtype), step.to(dtype)
    start = None if initial_state is None else initial_state.transpose(-1, -2)
    decay, written = step * rate.to(dtype), wide * step[..., None]
    out, states = _recurrence(
        read, write, written, decay, None, tree, LinearOptions(1.0, False, start, output_final_state)
    )
    if skip is not None:
        out = out + wide * skip.reshape(heads, -1)
    return out.to(values.dtype), None if states is None else states.transpose(-1, -2)


def _recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    tree: RowTree | None,
    options: LinearOptions,
) -> tuple[Tensor, Tensor | None]:
    require_rank("value", value, 4)
    require_rank("key", key, 4)
    batch, length = value.shape[:2]
    forest = row_or_chains(tree, "value", value)
    _require_shapes(query, key, value, decay, beta, options.initial_state)
    given = LinearInputs(query, key, value, _per_channel(decay, value), beta)
    inputs = given.of_each(lambda x: x.flatten(0, 1)[None])
    compute = by_kernels if kernels_can(key, value) else by_chunks
    # All of it is computed in the dtype of its inputs, also where autocast would choose another for the products.
    with torch.autocast(value.device.type, enabled=False):
        out, final = compute(inputs, forest, options)
    out = out.view(batch, length, *value.shape[2:]).to(value.dtype)
    return with_values_on_padding(out, value, tree), final


def _require_shapes(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None, initial: Tensor | None
) -> None:
    batch, length, heads, out_width = value.shape
    key_heads, width = key.shape[2:]
    if not key_heads or heads % key_heads:
        raise ValueError(f"{heads} heads of value are not a multiple of {key_heads} heads of key")
    require_shape("key", key, (batch, length, key_heads, width))
    require_shape("query", query, (batch, length, key_heads, width))
    require_shape("decay", decay, (heads,), (batch, length, heads), (batch, length, heads, width))
    require_shape("beta", beta, (batch, length, heads))
    if initial is not None:
        require_shape("initial_state", initial, (len(initial), heads, width, out_width))


def _per_channel(decay: Tensor | None, value: Tensor) -> Tensor:
    """None, [H], [B, T, H] or [B, T, H, D] -> [B, T, H, 1 or D]."""
    if decay is None:
        return torch.zeros_like(value[..., :1])
    return decay if decay.dim() == 4 else decay.expand(value.shape[:3])[..., None]
