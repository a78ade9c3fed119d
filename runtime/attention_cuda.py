"""Tree attention on CUDA: flex_attention with a block mask that is made from segment intervals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, FlexKernelOptions, flex_attention

from tree_compile.runtime.attention_score import Score
from tree_compile.runtime.block_mask import tile_of, tree_block_mask

__all__ = ["flex_tree_attention"]

# The narrowest head that flex_attention's kernels take.
_NARROWEST = 16

# Else rows below 128 tokens get the kernels for decoding, which do not fit the tiles of the mask for many head counts.
_KERNEL_OPTIONS: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}

_MOST_FORMS = 256
"""Of attention, in the models of one process. torch's own limit of 8 is for functions that forms should not need."""


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    subtree_end: Tensor,
    sinks: Tensor | None,
    score: Score,
) -> Tensor:
    """`tree_attention` by flex_attention; arguments and result as there.

    Inside a compiled graph it is traced with the rest; elsewhere it is compiled by itself, since flex_attention without
    compilation makes all scores.
    """
    arguments = (query, key, value, segments, position, subtree_end, sinks, score)
    if torch.compiler.is_compiling():
        return _attend(*arguments)
    from torch._dynamo import config as dynamo_config

    # The kernels take no symbolic floats, so every scale, window and cap of the models of a process is compiled for.
    with dynamo_config.patch(specialize_float=True, specialize_int=True, recompile_limit=_MOST_FORMS):
        return _compiled_attend()(*arguments)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    position: Tensor,
    subtree_end: Tensor,
    sinks: Tensor | None,
    score: Score,
) -> Tensor:
    outputs: tuple[Tensor, AuxOutput] = flex_attention(
        _at_least_narrowest(query),
        _at_least_narrowest(key),
        _at_least_narrowest(value),
        score_mod=_score_mod(score),
        block_mask=tree_block_mask(segments, position, subtree_end, score.window, score.chunk, tile_of(query.shape[3])),
        scale=score.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=sinks is not None),
        kernel_options=_KERNEL_OPTIONS,
    )
    out, lse = outputs[0][..., : value.shape[3]], outputs[1].lse
    if sinks is None or lse is None:
        return out
    # The sink's share of the softmax has the value 0, so it only scales what the keys give.
    return (out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)).to(out.dtype)


# Made when first used: torch.compile takes seconds to import.
@cache
def _compiled_attend() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_attend, dynamic=True, fullgraph=True)
    return compiled


def _at_least_narrowest(tensor: Tensor) -> Tensor:
    missing = _NARROWEST - tensor.shape[3]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing > 0 else tensor


def _score_mod(score: Score) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    softcap, key_bias, pair_bias = score.softcap, score.key_bias, score.pair_bias
    if not softcap and key_bias is None and pair_bias is None:
        return None

    def modified(product: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        if softcap:
            product = softcap * torch.tanh(product / softcap)
        if key_bias is not None:
            product = product + key_bias[head if key_bias.shape[0] > 1 else 0, key]
        if pair_bias is not None:
            product = product + pair_bias[head if pair_bias.shape[0] > 1 else 0, query, key]
        return product

    return modified
