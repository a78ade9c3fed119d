"""Which calls of a variable-length attention kernel compute a row: integers only, from the table of segments.

Kernels align causal masks bottom-right, and a query of a call sees one run of keys. So the visible pairs are covered,
each once, by

- one causal call: every segment by itself;
- one call without a mask for each depth: what lies below a segment of that depth against the tokens of that segment.

A call has no query without a key and no key without a query: kernels differ in what they give for those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tree_compile.runtime.depths import depths_of, offsets_of, rows_of
from tree_compile.runtime.layout import END, START, SUBTREE_END
from tree_compile.runtime.sequences import IntArray
from tree_compile.runtime.transfers import stream_of, to_device

__all__ = ["Pairs", "Rows", "VarlenCall", "pairs_of_calls", "varlen_calls"]

Rows = slice | Tensor
"""Row indices: a slice where they are contiguous, so that nothing is gathered; else int32 on the device."""


class Pairs(NamedTuple):
    """The pairs of a call.

    Attributes:
        queries: first row and past the last one of each of its sequences, int64 [n, 2].
        keys: the same of the keys that these see.
        causal: whether a query sees no key after it; then both are the same.
    """

    queries: IntArray
    keys: IntArray
    causal: bool


@dataclass(frozen=True, eq=False)
class VarlenCall:
    """One call of a kernel: n sequences of queries, each with its own keys.

    Attributes:
        queries: rows of the queries, sequence after sequence.
        keys: rows of the keys.
        query_offsets: where each sequence starts among them, and where the last one ends: int32 [n + 1] on the device.
        key_offsets: the same for the keys.
        longest_query: queries of the longest sequence.
        longest_key: its keys.
        causal: whether a query sees no key after it.
    """

    queries: Rows
    keys: Rows
    query_offsets: Tensor
    key_offsets: Tensor
    longest_query: int
    longest_key: int
    causal: bool


def varlen_calls(segments: Tensor, device: torch.device) -> tuple[VarlenCall, ...]:
    """The calls that cover every visible pair once; the first is that of every token over its own segment.

    Args:
        segments: int64 [S, 5] on the CPU, as `tree_attention` takes it.
        device: that of the attention.
    """
    return _cached_calls(segments.numpy().tobytes(), device, stream_of(device))


def pairs_of_calls(table: IntArray) -> Iterator[Pairs]:
    """The pairs of each call, from a table int64 [S, 5]; entries of zeros at the end are skipped."""
    table = table[table[:, END] > 0]
    own = table[:, [START, END]]
    yield Pairs(own, own, True)
    for depth in depths_of(table):
        found = table[depth.segments]
        found = found[found[:, SUBTREE_END] > found[:, END]]
        if len(found):
            yield Pairs(found[:, [END, SUBTREE_END]], found[:, [START, END]], False)


# All layers of a model and both directions ask for the same few.
@lru_cache(maxsize=4)
def _cached_calls(segments: bytes, device: torch.device, _stream: int) -> tuple[VarlenCall, ...]:
    found = list(pairs_of_calls(np.frombuffer(segments, np.int64).reshape(-1, 5)))
    arrays = [array for pairs in found for side in pairs[:2] for array in (offsets_of(side), _gathered(side))]
    packed = to_device(np.concatenate(arrays, dtype=np.int32), device)
    parts = iter(packed.split([len(array) for array in arrays]))
    return tuple(_call(pairs, *(next(parts) for _ in range(4))) for pairs in found)


def _call(pairs: Pairs, query_offsets: Tensor, queries: Tensor, key_offsets: Tensor, keys: Tensor) -> VarlenCall:
    return VarlenCall(
        _rows(pairs.queries, queries),
        _rows(pairs.keys, keys),
        query_offsets,
        key_offsets,
        _longest(pairs.queries),
        _longest(pairs.keys),
        pairs.causal,
    )


def _longest(ranges: IntArray) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).max())


def _gathered(ranges: IntArray) -> IntArray:
    """Row indices of all ranges; none where they are one run."""
    if _is_one_run(ranges):
        return np.empty(0, np.int64)
    return rows_of(ranges)


def _rows(ranges: IntArray, gathered: Tensor) -> Rows:
    return slice(int(ranges[0, 0]), int(ranges[-1, 1])) if _is_one_run(ranges) else gathered


def _is_one_run(ranges: IntArray) -> bool:
    return bool((ranges[1:, 0] == ranges[:-1, 1]).all())
