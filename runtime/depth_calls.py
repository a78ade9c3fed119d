"""Rows -> the tables that fla's kernels read, for all segments of one depth in one call."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tree_compile.runtime.depths import depths_of, offsets_of, rows_of
from tree_compile.runtime.layout import END
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.transfers import send, stream_of

__all__ = ["CHUNK", "DepthCall", "DepthCalls", "Packed", "depth_calls"]

CHUNK = 64
"""Tokens in a chunk of the kernels for the gated delta rule."""


class Packed(NamedTuple):
    """Segments that lie one after the other, each cut into chunks of `CHUNK` tokens.

    Attributes:
        offsets: where each starts among their tokens, and where the last one ends: int64 [m + 1].
        chunks: for every chunk its segment, and its place in it: int64 [c, 2].
        chunk_offsets: where each starts among their chunks, and where the last one ends: int64 [m + 1].
    """

    offsets: Tensor
    chunks: Tensor
    chunk_offsets: Tensor


class DepthCall(NamedTuple):
    """The call for the segments of one depth.

    Attributes:
        tokens: of these segments.
        packed: these segments.
        offsets_on_cpu: `packed.offsets` on the CPU.
        parents: for each the place of its parent in the call of the depth above, int64 [m].
    """

    tokens: int
    packed: Packed
    offsets_on_cpu: Tensor
    parents: Tensor


class DepthCalls(NamedTuple):
    """The calls for a row, the roots first.

    Attributes:
        depths: the calls.
        packed: the segments of all calls, call by call.
        rows: row indices of the tokens, call by call, int64.
        places: for every segment of the row its place among those of all calls, int64 [S].
    """

    depths: list[DepthCall]
    packed: Packed
    rows: Tensor
    places: Tensor


def depth_calls(segments: Tensor, device: torch.device) -> DepthCalls:
    """The calls for a row, with what they read on `device`; `segments` as in `RowTree`."""
    return _cached_depth_calls(segments.numpy().tobytes(), device, stream_of(device))


# All layers of a model ask for the same.
@lru_cache(maxsize=4)
def _cached_depth_calls(segments: bytes, device: torch.device, _stream: int) -> DepthCalls:
    table = np.frombuffer(segments, np.int64).reshape(-1, 5)
    depths = depths_of(table[table[:, END] > 0])
    ranges = np.concatenate([depth.ranges for depth in depths])
    places = np.argsort(np.concatenate([depth.segments for depth in depths]))
    offsets = [offsets_of(depth.ranges) for depth in depths]
    packed = chain.from_iterable(map(_packed, [offsets_of(ranges), *offsets]))
    sent = iter(send([rows_of(ranges), places, *(depth.parents for depth in depths), *packed], device))
    rows_and_places, parents = (next(sent), next(sent)), [next(sent) for _ in depths]
    whole, *by_depth = map(Packed._make, zip(sent, sent, sent, strict=True))
    calls = [
        DepthCall(int(own[-1]), part, torch.from_numpy(own), above)
        for own, part, above in zip(offsets, by_depth, parents, strict=True)
    ]
    return DepthCalls(calls, whole, *rows_and_places)


def _packed(offsets: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The tables of `Packed`, from the first of them."""
    counts = -(-np.diff(offsets) // CHUNK)
    starts = np.append(0, np.cumsum(counts))
    segments = np.repeat(np.arange(len(counts)), counts)
    return offsets, np.stack([segments, np.arange(len(segments)) - starts[segments]], 1), starts
