"""The state that every chunk starts from, passed down the tree level by level: one op for all recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["final_states", "starting_states"]


def starting_states(transition: Tensor, written: Tensor, parent: Tensor, initial: Tensor | None = None) -> Tensor:
    """The state before each chunk, where a chunk turns the state S into `transition S + written`.

    Args:
        transition: [n, H, D, D], a matrix; or [n, H, D, 1] or [n, H, 1, 1], a factor for every row of the state or one
            for all.
        written: [n, H, D, E], what the chunk itself leaves in the state.
        parent: int64 [n] on the CPU, the chunk that each one follows, -1 at a root; ordered as in `Chunks`.
        initial: [roots, H, D, E], the states before the roots; None for zeros.

    Returns:
        [n, H, D, E]; receives gradients for the transitions, what was written, and the initial states.
    """
    states: Tensor = _scan(transition, written, parent, initial)
    return states


def final_states(transition: Tensor, written: Tensor, states: Tensor) -> Tensor:
    """The state after each chunk, from that before it. Shapes as in `starting_states`."""
    return _apply(transition, states) + written


@torch.library.custom_op("tree_compile::state_scan", mutates_args=())
def _scan(transition: Tensor, written: Tensor, parent: Tensor, initial: Tensor | None) -> Tensor:
    states, above = torch.empty_like(written), parent.to(written.device)
    (_, roots), *levels = _levels(parent)
    states[:roots] = 0 if initial is None else initial
    last = slice(0, roots)
    for first, past in levels:
        ended = final_states(transition[last], written[last], states[last])
        states[first:past] = ended.index_select(0, above[first:past] - last.start)
        last = slice(first, past)
    return states


@_scan.register_fake
def _(_transition: Tensor, written: Tensor, *_: object) -> Tensor:
    return torch.empty_like(written)


@torch.library.custom_op("tree_compile::state_scan_backward", mutates_args=())
def _scan_backward(grad: Tensor, transition: Tensor, states: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the transitions, and of what was written, which is that of the state after each chunk."""
    above, after = parent.to(grad.device), torch.zeros_like(states)
    for first, past in reversed(list(_levels(parent))[1:]):
        level = slice(first, past)
        after.index_add_(0, above[level], _before(grad[level], transition[level], after[level]))
    return _transition_gradient(after, states, transition), after


@_scan_backward.register_fake
def _(_grad: Tensor, transition: Tensor, states: Tensor, _parent: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(transition), torch.empty_like(states)


def _before(grad: Tensor, transition: Tensor, after: Tensor) -> Tensor:
    """The gradient of the state before a chunk, from its own and that of the state after the chunk."""
    return grad + _apply(_transposed(transition), after)


def _levels(parent: Tensor) -> Iterator[tuple[int, int]]:
    """First and past-last chunk of every level: those that follow one of the level before."""
    above = parent.numpy()
    first, past = 0, int(np.searchsorted(above, 0))
    while first < len(above):
        yield first, past
        first, past = past, int(np.searchsorted(above, past))


def _apply(transition: Tensor, states: Tensor) -> Tensor:
    return transition @ states if _is_matrix(transition) else transition * states


def _transposed(transition: Tensor) -> Tensor:
    return transition.transpose(-1, -2) if _is_matrix(transition) else transition


def _transition_gradient(after: Tensor, states: Tensor, transition: Tensor) -> Tensor:
    if _is_matrix(transition):
        return after @ states.transpose(-1, -2)
    return (after * states).sum_to_size(transition.shape)


def _is_matrix(transition: Tensor) -> bool:
    return transition.shape[-1] > 1


def _save_for_backward(ctx: FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    transition, _, parent, initial = inputs
    ctx.save_for_backward(transition, output, parent)  # type: ignore[arg-type]
    ctx.roots = initial.shape[0] if isinstance(initial, Tensor) else None  # type: ignore[attr-defined]


def _differentiate(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    transition, states, parent = ctx.saved_tensors  # type: ignore[attr-defined]
    to_transition, after = _scan_backward(grad, transition, states, parent)
    roots: int | None = ctx.roots  # type: ignore[attr-defined]
    to_initial = None if roots is None else _before(grad[:roots], transition[:roots], after[:roots])
    return to_transition, after, None, to_initial


_scan.register_autograd(_differentiate, setup_context=_save_for_backward)
