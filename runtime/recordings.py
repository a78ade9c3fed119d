"""Recorded choices of experts: checked, and numbered, so that tokens are shared where their choices agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tree_compile.errors import PayloadError
from tree_compile.runtime.sequences import IntArray, TokenArray

__all__ = ["ROUTED", "number_choices"]

ROUTED = "routed_experts"
"""The payload with the experts that routers chose; rollout engines call it so."""


def number_choices(recordings: Sequence[NDArray[Any]], first: int) -> tuple[list[TokenArray], IntArray]:
    """Numbers the choices of all tokens: equal numbers where all layers chose the same experts in the same order.

    Args:
        recordings: for each sample whole numbers, [len, layers, top_k].
        first: the number that errors give to the first sample.

    Returns:
        For each sample the numbers of its choices, int64 [len]; and the choices, int64 [choices, layers, top_k].

    Raises:
        PayloadError: recordings differ in shape, are not of whole numbers, or hold an expert below 0 or one twice.
    """
    for number, recorded in enumerate(recordings, first):
        _check(recorded, number, recordings[0].shape[1:], first)
    choices = np.concatenate(recordings).astype(np.int64, order="C")
    keys = choices.reshape(len(choices), -1).view(np.dtype((np.void, choices[0].nbytes)))
    _, places, numbers = np.unique(keys, return_index=True, return_inverse=True)
    ends = np.cumsum([len(recorded) for recorded in recordings])
    numbers = numbers.reshape(-1).astype(np.int64)
    return list(np.split(numbers, ends[:-1])), choices[places]


def _check(recorded: NDArray[Any], number: int, shape: tuple[int, ...], first: int) -> None:
    if recorded.ndim != 3 or recorded.dtype.kind not in "iu" or not recorded[0].size:
        raise _unusable(number, f"has shape {recorded.shape} and type {recorded.dtype}")
    if recorded.shape[1:] != shape:
        others = f"{list(shape)} for a token of sample {first}"
        raise _unusable(number, f"has {list(recorded.shape[1:])} numbers for a token, and {others}")
    # Engines that mark what they did not compute by -1 have the greatest number in types without a sign.
    is_wrong = (recorded < 0) | (recorded > np.iinfo(np.int64).max)
    if is_wrong.any():
        token, layer, place = np.argwhere(is_wrong)[0]
        raise _unusable(number, f"holds {recorded[token, layer, place]} at token {token}, layer {layer}")
    ordered = np.sort(recorded, axis=2)
    repeated = np.argwhere(ordered[..., 1:] == ordered[..., :-1])
    if len(repeated):
        token, layer, place = repeated[0]
        raise _unusable(number, f"holds expert {ordered[token, layer, place]} twice at token {token}, layer {layer}")


def _unusable(number: int, what: str) -> PayloadError:
    return PayloadError(
        f"{ROUTED!r} of sample {number} {what}.",
        why="it says to which experts the routers of the model send each token.",
        hint="pass whole numbers from 0, [tokens, layers with a router, experts per token]; a token that was not "
        "computed when they were recorded, such as the last one, gets any experts.",
    )
