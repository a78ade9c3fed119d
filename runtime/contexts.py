"""Which tokens are trained on -> how many of a sequence others may share: its context, where only that is shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import PayloadError, TokenTypeError
from tree_compile.runtime.counts import a_kind, count_of
from tree_compile.runtime.sequences import Batch, IntArray, as_array

__all__ = ["shared_limits", "zeros_and_ones"]

_WHY = "it says of each token whether it is trained on."
_HINT = "pass one list, array or tensor for every sequence, with one 0 or 1 for every token."


def shared_limits(batch: Batch, share: str, trainable: Any) -> IntArray | None:
    """Tokens that others may share: those before the one that predicts the first trainable token, int64 [sequences].

    Args:
        batch: the sequences; where they are of samples, these say what is trained on.
        share: "all" or "context".
        trainable: per sequence one bool or number per token, not 0 where it is trained on; None for what samples say.

    Returns:
        None where all of them may be shared.

    Raises:
        InputError: `trainable` is something else, or does not fit the sequences.
        ValueError: `trainable` is given with another `share` than "context", or beside samples, or missing with that.
    """
    if share == "all":
        if trainable is not None:
            raise ValueError('share is "all"; it must be "context" where trainable is given')
        return None
    if batch.samples is not None:
        if trainable is not None:
            raise ValueError("trainable is given beside samples; it must be left out, since they say it themselves")
        trainable = [sample.is_trained for sample in batch.samples.all]
    if trainable is None:
        raise ValueError('trainable is None; it must be one value per token where share is "context"')
    # The first token of a sequence has no log-probability, so that no loss reads it.
    masks = [mask[1:] for mask in _masks(trainable, batch.lengths.tolist())]
    return np.array([int(mask.argmax()) if mask.any() else len(mask) + 1 for mask in masks])


def _masks(trainable: Any, lengths: Sequence[int]) -> list[NDArray[np.bool_]]:
    if not isinstance(trainable, Iterable) or isinstance(trainable, str | bytes):
        what = f"trainable is {a_kind(trainable)}, not a list of one list per sequence."
        raise TokenTypeError(what, why=_WHY, hint=_HINT)
    given = list(trainable)
    if len(given) != len(lengths):
        raise _misfit(f"trainable is for {count_of(len(given), 'sequence')}, and the batch has {len(lengths)}.")
    pairs = enumerate(zip(given, lengths, strict=True))
    return [_marks(mask, f"trainable of sequence {i}", length) != 0 for i, (mask, length) in pairs]


def zeros_and_ones(value: Any, label: str, tokens: int) -> NDArray[np.bool_]:
    """Which entries of one list, array or tensor on any device are 1: a new array, bool [tokens].

    Raises:
        TokenTypeError: there is something else than 0 and 1, as weights, which would count as 1.
        PayloadError: it has not one for every token.
    """
    marks = _marks(value, label, tokens)
    if (others := marks[(marks != 0) & (marks != 1)]).size:
        hint = "pass 0 and 1; weights are a payload, for a loss of your own."
        raise TokenTypeError(f"{label} holds {others[0]}, and not 0 and 1 alone.", why=_WHY, hint=hint)
    return marks != 0


def _marks(value: Any, label: str, tokens: int) -> NDArray[Any]:
    array = as_array(value, label, "bools or numbers", _WHY, _HINT)
    if array.dtype.kind not in "biuf":
        raise TokenTypeError(f"{label} is of type {array.dtype}, not of bools or numbers.", why=_WHY, hint=_HINT)
    if not np.isfinite(array).all():
        raise TokenTypeError(f"{label} has entries that are not finite.", why=_WHY, hint=_HINT)
    if array.shape != (tokens,):
        raise _misfit(f"{label} has shape {array.shape} for {count_of(tokens, 'token')}.")
    return array


def _misfit(what: str) -> PayloadError:
    return PayloadError(what, why="trainable has one value for every token of every sequence.", hint=_HINT)
