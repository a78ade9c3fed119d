"""The state that every chunk starts from, passed down the tree level by level: one op for all recurrent layers."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from tree_compile.runtime.transfers import READS_ON_HOST, stream_of, to_device

__all__ = ["ChunkMaps", "Scanned", "final_states", "levels_of", "state_scan"]


class ChunkMaps(NamedTuple):
    """What each chunk makes of the state S before it, `kept * S + left^T (fresh + reads S)`, and `asks S` of it.

    Attributes:
        kept: [n, H, D or 1, 1], the factor on every row of the state.
        fresh: [n, H, C, E], what is written.
        left: [n, H, C, D], where what is written is in the state at the end of the chunk; None where `fresh` is
            [n, H, D, E], and added as it is.
        reads: [n, H, C, D], what of the state is added to what is written; None where nothing is.
        asks: [n, H, C, D], what of the state the tokens of the chunk look up; None where they do so in another way.
    """

    kept: Tensor
    fresh: Tensor
    left: Tensor | None = None
    reads: Tensor | None = None
    asks: Tensor | None = None


class Scanned(NamedTuple):
    """What a scan finds.

    Attributes:
        states: the state S before each chunk, [n, H, D, E].
        written: `fresh + reads S`, in the shape of `fresh`.
        found: `asks S`, [n, H, C, E]; [0] without `asks`.
    """

    states: Tensor
    written: Tensor
    found: Tensor


def state_scan(maps: ChunkMaps, parent: Tensor, initial: Tensor | None = None) -> Scanned:
    """States passed from chunk to chunk, and what the chunks write and find.

    Args:
        maps: those of the chunks.
        parent: int64 [n] on the CPU, the chunk that each one follows, -1 at a root; ordered as in `RowTree`.
        initial: [roots, H, D, E], the states before the roots; None for zeros.
    """
    states, written, found = _scan(*maps, parent, initial)
    return Scanned(states, maps.fresh if maps.reads is None else written, found)


def final_states(maps: ChunkMaps, scanned: Scanned) -> Tensor:
    """The state after each chunk, [n, H, D, E]."""
    new = scanned.written
    return maps.kept * scanned.states + (new if maps.left is None else maps.left.mT @ new)


class _Level(NamedTuple):
    """One level of chunks: those that others follow come first, up to `followed`."""

    chunks: slice
    followed: slice
    parent: Tensor
    """For each chunk the one that it follows, counted from the start of the level before."""


def levels_of(parent: Tensor, device: torch.device) -> list[_Level]:
    """The levels of chunks, from the `chunk_parent` of a `RowTree`; with indices on `device`."""
    return _cached_levels(parent.numpy().tobytes(), device, stream_of(device))


# All layers of a model and both directions ask for the same.
@lru_cache(maxsize=4)
def _cached_levels(parent: bytes, device: torch.device, _stream: int) -> list[_Level]:
    above = np.frombuffer(parent, np.int64)
    highest = np.maximum.accumulate(above)
    bounds = [0, int(np.searchsorted(highest, 0))]
    while bounds[-1] < len(above):
        bounds.append(int(np.searchsorted(highest, bounds[-1])))
    past_followed = [int(highest[end - 1]) + 1 for end in bounds[2:]] + [bounds[-2]]
    starts = np.repeat([0, *bounds[:-2]], np.diff(bounds))
    parents = to_device(above - starts, device).split(np.diff(bounds).tolist())
    return [
        _Level(slice(first, past), slice(first, followed), own)
        for first, past, followed, own in zip(bounds[:-1], bounds[1:], past_followed, parents, strict=True)
    ]


@torch.library.custom_op("tree_compile::state_scan", mutates_args=(), tags=READS_ON_HOST)
def _scan(
    kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None, asks: Tensor | None,
    parent: Tensor, initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    maps, levels = ChunkMaps(kept, fresh, left, reads, asks), levels_of(parent, fresh.device)
    scanned = _empty(maps)
    scanned.states[levels[0].chunks] = 0 if initial is None else initial
    for level, following in zip(levels, [*levels[1:], None], strict=True):
        _read(maps, scanned, level.chunks)
        if following is not None:
            ended = _ended(maps, scanned, level.followed)
            torch.index_select(ended, 0, following.parent, out=scanned.states[following.chunks])
    return scanned


@_scan.register_fake
def _(
    kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None, asks: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(ChunkMaps(kept, fresh, left, reads, asks))


def _empty(maps: ChunkMaps) -> Scanned:
    fresh, width = maps.fresh, maps.fresh.shape[2] if maps.left is None else maps.left.shape[3]
    written = fresh.new_empty(fresh.shape if maps.reads is not None else 0)
    found = fresh.new_empty(0 if maps.asks is None else (*maps.asks.shape[:3], fresh.shape[3]))
    return Scanned(fresh.new_empty((*fresh.shape[:2], width, fresh.shape[3])), written, found)


def _read(maps: ChunkMaps, scanned: Scanned, chunks: slice) -> None:
    """What the chunks write and find of the states before them."""
    states = _by_head(scanned.states[chunks])
    if maps.reads is not None:
        fresh, reads = maps.fresh[chunks].flatten(0, 1), maps.reads[chunks].flatten(0, 1)
        torch.baddbmm(fresh, reads, states, out=_by_head(scanned.written[chunks]))
    if maps.asks is not None:
        torch.bmm(maps.asks[chunks].flatten(0, 1), states, out=_by_head(scanned.found[chunks]))


def _ended(maps: ChunkMaps, scanned: Scanned, chunks: slice) -> Tensor:
    """The states after the chunks."""
    new, states = (maps.fresh if maps.reads is None else scanned.written)[chunks], scanned.states[chunks]
    if maps.left is None:
        return torch.addcmul(new, maps.kept[chunks], states)
    kept = (maps.kept[chunks] * states).contiguous()
    _by_head(kept).baddbmm_(maps.left[chunks].flatten(0, 1).mT, new.flatten(0, 1))
    return kept


class _Gradients(NamedTuple):
    """Of `kept`, of what is written, of `left`, and of the initial states; the last two are empty without them."""

    kept: Tensor
    written: Tensor
    left: Tensor
    initial: Tensor


@torch.library.custom_op("tree_compile::state_scan_backward", mutates_args=(), tags=READS_ON_HOST)
def _scan_backward(
    to_states: Tensor | None, to_written: Tensor | None, to_found: Tensor | None,
    kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None, asks: Tensor | None,
    parent: Tensor, initial: Tensor | None, states: Tensor, written: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    maps, levels = ChunkMaps(kept, fresh, left, reads, asks), levels_of(parent, fresh.device)
    gradients = _empty_gradients(maps, initial)
    if reads is None or to_written is None:
        gradients.written.zero_()
    else:
        gradients.written.copy_(to_written)
    new = fresh if reads is None else written
    begun: Tensor | None = None
    for level, following in zip(reversed(levels), [None, *levels[:0:-1]], strict=True):
        after = None
        _zero_where_none_follow(gradients, level)
        if following is not None and begun is not None:
            after = _sum_by_parent(begun, following.parent, level.followed)
            _through_followed(maps, states, new, after, gradients, level.followed)
        begun = _through_read(maps, states, gradients.written, to_found, level.chunks)
        if to_states is not None:
            begun += to_states[level.chunks]
        if after is not None:
            begun[: len(after)].addcmul_(kept[level.followed], after)
    if initial is not None and begun is not None:
        gradients.initial.copy_(begun)
    return gradients


@_scan_backward.register_fake
def _(
    _to_states: Tensor | None, _to_written: Tensor | None, _to_found: Tensor | None,
    kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None, asks: Tensor | None,
    _parent: Tensor, initial: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(ChunkMaps(kept, fresh, left, reads, asks), initial)


def _empty_gradients(maps: ChunkMaps, initial: Tensor | None) -> _Gradients:
    none = maps.kept.new_empty(0)
    to_left = none if maps.left is None else maps.left.new_empty(maps.left.shape)
    to_initial = none.clone() if initial is None else initial.new_empty(initial.shape)
    to_kept, to_written = maps.kept.new_empty(maps.kept.shape), maps.fresh.new_empty(maps.fresh.shape)
    return _Gradients(to_kept, to_written, to_left, to_initial)


def _zero_where_none_follow(gradients: _Gradients, level: _Level) -> None:
    """What makes the state after a chunk that none follows has no gradient."""
    ends = slice(level.followed.stop, level.chunks.stop)
    gradients.kept[ends] = 0
    if len(gradients.left):
        gradients.left[ends] = 0


def _sum_by_parent(begun: Tensor, parent: Tensor, followed: slice) -> Tensor:
    """The gradient of the states after followed chunks: that of all states that began with them."""
    after = begun.new_zeros((followed.stop - followed.start, *begun.shape[1:]))
    return after.index_add_(0, parent, begun)


def _through_followed(
    maps: ChunkMaps, states: Tensor, new: Tensor, after: Tensor, gradients: _Gradients, chunks: slice
) -> None:
    """The gradients that the states after `chunks` give to what they are made of."""
    gradients.kept[chunks] = (after * states[chunks]).sum_to_size(maps.kept[chunks].shape)
    if maps.left is None:
        gradients.written[chunks] += after
        return
    by_head = after.flatten(0, 1)
    torch.bmm(new[chunks].flatten(0, 1), by_head.mT, out=_by_head(gradients.left[chunks]))
    _by_head(gradients.written[chunks]).baddbmm_(maps.left[chunks].flatten(0, 1), by_head)


def _through_read(
    maps: ChunkMaps, states: Tensor, to_written: Tensor, to_found: Tensor | None, chunks: slice
) -> Tensor:
    """The gradient of the states before `chunks` from what they write and find of them."""
    begun = torch.empty_like(states[chunks], memory_format=torch.contiguous_format)
    by_head = _by_head(begun)
    if maps.asks is None or to_found is None:
        begun.zero_()
    else:
        torch.bmm(maps.asks[chunks].flatten(0, 1).mT, to_found[chunks].flatten(0, 1), out=by_head)
    if maps.reads is not None:
        by_head.baddbmm_(maps.reads[chunks].flatten(0, 1).mT, to_written[chunks].flatten(0, 1))
    return begun


def _by_head(target: Tensor) -> Tensor:
    """[n, H, …] -> [n * H, …] as a view, so that what is written into it is written into `target`."""
    return target.view(-1, *target.shape[2:])


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output[:2])  # type: ignore[arg-type]


def _differentiate(
    ctx: FunctionCtx, to_states: Tensor | None, to_written: Tensor | None, to_found: Tensor | None
) -> tuple[Tensor | None, ...]:
    _, _, left, reads, asks, _, initial, states, _ = saved = ctx.saved_tensors  # type: ignore[attr-defined]
    to_kept, to_new, to_left, to_initial = _scan_backward(to_states, to_written, to_found, *saved)
    return (
        to_kept,
        to_new,
        None if left is None else to_left,
        None if reads is None else to_new @ states.mT,
        None if asks is None or to_found is None else to_found @ states.mT,
        None,
        None if initial is None else to_initial,
    )


_scan.register_autograd(_differentiate, setup_context=_save_for_backward)
