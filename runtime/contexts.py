"""Which tokens are trained on -> how many of a sequence others may share: its context, where only that is shared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import PayloadError, TokenTypeError
from tree_compile.runtime.counts import a_kind, count_of
from tree_compile.runtime.options import check_choice
from tree_compile.runtime.sequences import Batch, IntArray, as_array

__all__ = ["SHARES", "check_share", "mask_of", "shared_at_most"]

SHARES = ("all", "context")
_WHY = "it says of each token whether it is trained on."
_HINT = "pass one list, array or tensor for every sequence, with one 0 or 1 for every token."


def check_share(share: str, trainable: object) -> None:
    """Refuses what does not go together.

    Raises:
        ValueError: `share` is unknown, or `trainable` is given with another one than "context", or missing with that.
    """
    check_choice("share", share, SHARES)
    if share == "context" and trainable is None:
        raise ValueError('trainable is None; it must be one value per token where share is "context"')
    if share == "all" and trainable is not None:
        raise ValueError('share is "all"; it must be "context" where trainable is given')


def shared_at_most(batch: Batch, trainable: Any) -> IntArray:
    """Tokens that others may share: those before the one that predicts the first trainable token, int64 [sequences].

    Args:
        batch: the sequences.
        trainable: per sequence one bool or number per token, not 0 where it is trained on.

    Raises:
        InputError: `trainable` is something else, or does not fit the sequences.
    """
    masks = _masks(trainable)
    if len(masks) != len(batch):
        raise _misfit(f"trainable is for {count_of(len(masks), 'sequence')}, and the batch has {len(batch)}.")
    for i, (mask, length) in enumerate(zip(masks, batch.lengths.tolist(), strict=True)):
        if mask.shape != (length,):
            raise _misfit(f"trainable does not fit sequence {i}: it is of shape {mask.shape}, not {(length,)}.")
    first = [int(mask.argmax()) if mask.any() else len(mask) + 1 for mask in masks]
    return np.maximum(np.array(first) - 1, 0)


def _masks(trainable: Any) -> list[NDArray[np.bool_]]:
    if not isinstance(trainable, Iterable) or isinstance(trainable, str | bytes):
        what = f"trainable is {a_kind(trainable)}, not a list of one list per sequence."
        raise TokenTypeError(what, why=_WHY, hint=_HINT)
    return [mask_of(mask, f"trainable of sequence {i}") for i, mask in enumerate(trainable)]


def mask_of(value: Any, label: str) -> NDArray[np.bool_]:
    """Which entries of one list, array or tensor on any device are not 0."""
    array = as_array(value, label, "bools or numbers", _WHY, _HINT)
    if array.dtype.kind not in "biuf":
        raise TokenTypeError(f"{label} is of type {array.dtype}, not of bools or numbers.", why=_WHY, hint=_HINT)
    if not np.isfinite(array).all():
        raise TokenTypeError(f"{label} has entries that are not finite.", why=_WHY, hint=_HINT)
    return array != 0


def _misfit(what: str) -> PayloadError:
    return PayloadError(what, why="trainable has one value for every token of every sequence.", hint=_HINT)
