"""The state that every chunk starts from, passed down the tree level by level: one op for all recurrent layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["ChunkMaps", "final_states", "levels_of", "starting_states"]


class ChunkMaps(NamedTuple):
    """What each chunk makes of the state S before it: `kept * S + left^T (fresh - reads S)`.

    Attributes:
        kept: [n, H, D or 1, 1], the factor on every row of the state.
        fresh: [n, H, C, E], what is written.
        left: [n, H, C, D], where what is written is in the state at the end of the chunk; None where `fresh` is
            [n, H, D, E], and added as it is.
        reads: [n, H, C, D], what of the state is taken off what is written; None where nothing is.
    """

    kept: Tensor
    fresh: Tensor
    left: Tensor | None = None
    reads: Tensor | None = None


def starting_states(maps: ChunkMaps, parent: Tensor, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The state S before each chunk, and what each chunk writes.

    Args:
        maps: those of the chunks.
        parent: int64 [n] on the CPU, the chunk that each one follows, -1 at a root; ordered as in `RowTree`.
        initial: [roots, H, D, E], the states before the roots; None for zeros.

    Returns:
        [n, H, D, E] and `fresh - reads S` in the shape of `fresh`.
    """
    states, written = _scan(*maps, parent, initial)
    return states, maps.fresh if maps.reads is None else written


def final_states(maps: ChunkMaps, states: Tensor, written: Tensor) -> Tensor:
    """The state after each chunk, from what `starting_states` returns."""
    return maps.kept * states + (written if maps.left is None else maps.left.mT @ written)


class _Level(NamedTuple):
    """One level of chunks: those that others follow come first, up to `followed`."""

    chunks: slice
    followed: slice
    parent: Tensor
    """For each chunk the one that it follows, counted from the start of the level before."""


def levels_of(parent: Tensor, device: torch.device) -> list[_Level]:
    """The levels of chunks, from the `chunk_parent` of a `RowTree`; with indices on `device`."""
    above = parent.numpy()
    highest = np.maximum.accumulate(above)
    bounds = [0, int(np.searchsorted(highest, 0))]
    while bounds[-1] < len(above):
        bounds.append(int(np.searchsorted(highest, bounds[-1])))
    past_followed = [int(highest[end - 1]) + 1 for end in bounds[2:]] + [bounds[-2]]
    on_device, before = parent.to(device, non_blocking=True), [0, *bounds]
    return [
        _Level(slice(first, past), slice(first, followed), on_device[first:past] - start)
        for start, first, past, followed in zip(before, bounds[:-1], bounds[1:], past_followed, strict=False)
    ]


@torch.library.custom_op("tree_compile::state_scan", mutates_args=())
def _scan(
    kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None, parent: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    maps, levels = ChunkMaps(kept, fresh, left, reads), levels_of(parent, fresh.device)
    states, written = _empty(maps)
    states[levels[0].chunks] = 0 if initial is None else initial
    for level, following in zip(levels, [*levels[1:], None], strict=True):
        if reads is not None:
            _write(maps, states, written, level.chunks)
        if following is not None:
            ended = _ended(maps, states, written, level.followed)
            torch.index_select(ended, 0, following.parent, out=states[following.chunks])
    return states, written


@_scan.register_fake
def _(kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return _empty(ChunkMaps(kept, fresh, left, reads))


def _empty(maps: ChunkMaps) -> tuple[Tensor, Tensor]:
    fresh, width = maps.fresh, maps.fresh.shape[2] if maps.left is None else maps.left.shape[3]
    states = fresh.new_empty((*fresh.shape[:2], width, fresh.shape[3]))
    return states, fresh.new_empty(fresh.shape if maps.reads is not None else 0)


def _write(maps: ChunkMaps, states: Tensor, written: Tensor, chunks: slice) -> None:
    """`written` gets what the chunks write, where some of the state is taken off it."""
    assert maps.reads is not None
    fresh, reads = maps.fresh[chunks].flatten(0, 1), maps.reads[chunks].flatten(0, 1)
    torch.baddbmm(fresh, reads, states[chunks].flatten(0, 1), alpha=-1, out=_by_head(written[chunks]))


def _ended(maps: ChunkMaps, states: Tensor, written: Tensor, chunks: slice) -> Tensor:
    """The states after the chunks."""
    new = (maps.fresh if maps.reads is None else written)[chunks]
    if maps.left is None:
        return torch.addcmul(new, maps.kept[chunks], states[chunks])
    kept = (maps.kept[chunks] * states[chunks]).contiguous()
    _by_head(kept).baddbmm_(maps.left[chunks].flatten(0, 1).mT, new.flatten(0, 1))
    return kept


class _Gradients(NamedTuple):
    """Of `kept`, of what is written, of `left`, and of the initial states; the last two are empty without them."""

    kept: Tensor
    written: Tensor
    left: Tensor
    initial: Tensor


@torch.library.custom_op("tree_compile::state_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor, grad_written: Tensor, kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None,
    parent: Tensor, initial: Tensor | None, states: Tensor, written: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    maps, levels = ChunkMaps(kept, fresh, left, reads), levels_of(parent, grad.device)
    gradients = _empty_gradients(maps, initial)
    for gradient in gradients[:3]:
        gradient.zero_()
    if reads is not None:
        gradients.written.copy_(grad_written)
    new, begun = fresh if reads is None else written, grad
    for level, following in zip(reversed(levels), [None, *levels[:0:-1]], strict=True):
        after = None
        if following is not None:
            after = _sum_by_parent(begun, following.parent, level.followed)
            _through_followed(maps, states, new, after, gradients, level.followed)
        begun = _begun(maps, grad, after, gradients.written, level)
    if initial is not None:
        gradients.initial.copy_(begun)
    return gradients.kept, gradients.written, gradients.left, gradients.initial


@_scan_backward.register_fake
def _(
    _grad: Tensor, _grad_written: Tensor, kept: Tensor, fresh: Tensor, left: Tensor | None, reads: Tensor | None,
    _parent: Tensor, initial: Tensor | None, *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _empty_gradients(ChunkMaps(kept, fresh, left, reads), initial)
    return gradients.kept, gradients.written, gradients.left, gradients.initial


def _empty_gradients(maps: ChunkMaps, initial: Tensor | None) -> _Gradients:
    none = maps.kept.new_empty(0)
    to_left = none if maps.left is None else maps.left.new_empty(maps.left.shape)
    to_initial = none.clone() if initial is None else initial.new_empty(initial.shape)
    to_kept, to_written = maps.kept.new_empty(maps.kept.shape), maps.fresh.new_empty(maps.fresh.shape)
    return _Gradients(to_kept, to_written, to_left, to_initial)


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


def _begun(maps: ChunkMaps, grad: Tensor, after: Tensor | None, to_written: Tensor, level: _Level) -> Tensor:
    """The gradient of the states before the chunks of a level, of which `after` is that after the followed ones."""
    begun = grad[level.chunks].clone(memory_format=torch.contiguous_format)
    if after is not None:
        begun[: len(after)].addcmul_(maps.kept[level.followed], after)
    if maps.reads is not None:
        reads, to_new = maps.reads[level.chunks].flatten(0, 1), to_written[level.chunks].flatten(0, 1)
        _by_head(begun).baddbmm_(reads.mT, to_new, alpha=-1)
    return begun


def _by_head(target: Tensor) -> Tensor:
    """[n, H, …] -> [n * H, …] as a view, so that what is written into it is written into `target`."""
    return target.view(-1, *target.shape[2:])


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)  # type: ignore[arg-type]


def _differentiate(ctx: FunctionCtx, grad: Tensor, grad_written: Tensor) -> tuple[Tensor | None, ...]:
    kept, fresh, left, reads, parent, initial, states, written = ctx.saved_tensors  # type: ignore[attr-defined]
    to_kept, to_written, to_left, to_initial = _scan_backward(
        grad, grad_written, kept, fresh, left, reads, parent, initial, states, written
    )
    return (
        to_kept,
        to_written,
        None if left is None else to_left,
        None if reads is None else -(to_written @ states.mT),
        None,
        None if initial is None else to_initial,
    )


_scan.register_autograd(_differentiate, setup_context=_save_for_backward)
