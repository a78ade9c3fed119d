"""Attention over a token's nearest ancestors and over entries, each of which pools a window of its ancestors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tree_compile.runtime.layout import END, PARENT, START
from tree_compile.runtime.sparse_attention import sparse_attention
from tree_compile.runtime.topk_index import BUDGET, check_scored, highest, index_scores, told_of, write_chosen
from tree_compile.runtime.transfers import READS_ON_HOST

__all__ = [
    "all_entries",
    "entries_before",
    "first_entries",
    "later_entries",
    "nearest_rows",
    "tokens_of_windows",
    "topk_entries",
    "window_attention",
]


# Entries


def tokens_of_windows(values: Tensor, dim: int, tokens: Tensor) -> Tensor:
    """The tokens of every window, one window after the other: dimension `dim` of T becomes E * m.

    Args:
        values: a value for every token along `dim`.
        dim: the dimension.
        tokens: int64 [E, m], as in `WindowTables`.
    """
    return values.index_select(dim, tokens.flatten())


def later_entries(values: Tensor, dim: int) -> Tensor:  # noqa: ARG001
    """The values of the entries that have one before them, each at its own place; the other places hold any value."""
    return values


def entries_before(values: Tensor, dim: int, previous: Tensor) -> Tensor:
    """For every entry the value, along `dim`, of the entry before it; where there is none, any value.

    `previous` is int64 [E], as in `WindowTables`.
    """
    return values.index_select(dim, previous.clamp(min=0))


def first_entries(first: Tensor | float, later: Tensor, dim: int, previous: Tensor) -> Tensor:
    """`first` where an entry has none before it on its path, and `later` elsewhere; entries lie along `dim`.

    A number takes the dtype of `later`, as the value of a pad does.
    """
    shape = [1] * later.dim()
    shape[dim] = -1
    if not isinstance(first, Tensor):
        first = torch.full((), first, dtype=later.dtype, device=later.device)
    return torch.where((previous >= 0).view(shape), later, first)


# What a token sees


def nearest_rows(segments: Tensor, position: Tensor, window: int) -> Tensor:
    """Each token and the tokens before it, the nearest first: row indices int32 [T, window], -1 where there is none.

    Args:
        segments: int64 [S, 5] on the CPU, as `tree_attention` takes them.
        position: int64 [T], index of each token in its own sequence.
        window: how many tokens, the token itself among them.
    """
    return _nearest_op(segments, position, window)


@torch.library.custom_op("tree_compile::nearest_rows", mutates_args=(), tags=READS_ON_HOST)
def _nearest_op(segments: Tensor, position: Tensor, window: int) -> Tensor:
    rows = len(position)
    table = segments[segments[:, END] > 0]
    parent = torch.arange(-1, rows - 1)
    above = table[:, PARENT]
    parent[table[:, START]] = torch.where(above < 0, -1, table[above, END] - 1)
    parent[int(table[-1, END]) :] = -1
    parent = torch.cat([parent, parent.new_full((1,), -1)]).to(position.device)  # the last is that of no token
    found = [torch.arange(rows, device=position.device)]
    for _ in range(window - 1):
        found.append(parent[found[-1]])
    return torch.stack(found, 1).to(torch.int32)


@_nearest_op.register_fake
def _(_segments: Tensor, position: Tensor, window: int) -> Tensor:
    return position.new_empty((position.shape[0], window), dtype=torch.int32)


def all_entries(path: Tensor, last: Tensor) -> Tensor:
    """All entries that each token sees: int32 [1, T, n], -1 behind them.

    Args:
        path: int64 [E, n], as in `WindowTables`.
        last: int64 [T], as in `WindowTables`.
    """
    seen = path.index_select(0, last.clamp(min=0)).masked_fill((last < 0)[:, None], -1)
    return seen[None].to(torch.int32)


def topk_entries(
    query: Tensor, key: Tensor, weights: Tensor, segments: Tensor, ranges: Tensor, last: Tensor, k: int
) -> Tensor:
    """The `k` entries that score highest among those that each token sees; entries of other paths are never scored.

    The score of token t and entry e is `sum_h weights[t, h] * relu(query[t, h] . key[e])`: the products are in the
    dtype of `query`, the sum is in that of `weights`, also under autocast.

    Args:
        query: [1, T, H, D], floating point.
        key: [1, E, D], in the dtype of `query`.
        weights: [1, T, H], floating point.
        segments: int64 [S, 5] on the CPU, as `tree_attention` takes them.
        ranges: int64 [S, 2] on the CPU, as in `WindowTables`.
        last: int64 [T], as in `WindowTables`.
        k: how many to keep.

    Returns:
        int32 [1, T, k]: entries, ascending in each query; -1 behind the last where there are fewer. Among scores that
        are equal up to rounding the earlier entry goes first, and NaN scores highest. Nothing is differentiated
        through it.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or `k` is below 1.
    """
    _check_topk(query, key, weights, segments, ranges, last)
    check_scored(query, key, weights, k)
    with torch.autocast(query.device.type, enabled=False):  # which reaches into the op
        return _topk_op(query.detach(), key.detach(), weights.detach(), segments, ranges, last, k)


def _check_topk(query: Tensor, key: Tensor, weights: Tensor, segments: Tensor, ranges: Tensor, last: Tensor) -> None:
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(weights.shape)}, {tuple(last.shape)}"
    if query.dim() != 4 or query.shape[0] != 1 or weights.shape != query.shape[:3] or last.shape != query.shape[1:2]:
        raise ValueError(f"query, weights and last must be [1, T, H, D], [1, T, H] and [T]: {shapes}")
    if key.dim() != 3 or key.shape[0] != 1 or key.shape[2] != query.shape[3]:
        raise ValueError(f"query and key must be [1, T, H, D] and [1, E, D]: {shapes}")
    if segments.device.type != "cpu" or ranges.device.type != "cpu" or len(ranges) != len(segments):
        raise ValueError("segments and ranges must be on the CPU, which reads them, and have a line for each segment")


@torch.library.custom_op("tree_compile::topk_entries", mutates_args=(), tags=READS_ON_HOST)
def _topk_op(
    query: Tensor, key: Tensor, weights: Tensor, segments: Tensor, ranges: Tensor, last: Tensor, k: int
) -> Tensor:
    kept = last.new_full((1, len(last), k), -1, dtype=torch.int32)
    places = told_of(kept)
    for start, end, on_path in _paths(segments, ranges):
        entries = on_path.to(last.device)
        at_once = max(1, BUDGET // (query.shape[2] * max(len(entries), 1)))
        for first in range(start, end, at_once):
            rows = slice(first, min(end, first + at_once))
            visible = entries <= last[rows, None]
            if len(entries) > k:
                scores = index_scores(query[0, rows], key[0].index_select(0, entries), weights[0, rows])
                visible = visible & highest(scores.masked_fill_(~visible, -torch.inf), k)
            write_chosen(kept[0, rows], visible, entries.to(kept.dtype))
            if places is not None:
                numbers = torch.arange(len(entries), device=kept.device, dtype=kept.dtype)
                write_chosen(places[rows], visible, numbers)
    return kept


@_topk_op.register_fake
def _(
    _query: Tensor, _key: Tensor, _weights: Tensor, _segments: Tensor, _ranges: Tensor, last: Tensor, k: int
) -> Tensor:
    return last.new_empty((1, last.shape[0], k), dtype=torch.int32)


def _paths(segments: Tensor, ranges: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Rows [start, end) of every segment, and the entries that the tokens on the path to its end close, int64 [n]."""
    paths: list[np.ndarray] = []
    for (start, end, _, parent, _), (first, past) in zip(segments.tolist(), ranges.tolist(), strict=True):
        own = np.arange(first, past)
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 and end > 0 else own)
        if end > 0:
            yield start, end, torch.from_numpy(paths[-1])


# Attention


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    entry_key: Tensor,
    entry_value: Tensor,
    rows: Tensor,
    entries: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every token over some tokens and some entries, in one softmax.

    Args:
        query: [1, Hq, T, D], floating point.
        key: [1, Hk, T, D]; Hq is a multiple of Hk, query head h reads key head h // (Hq // Hk).
        value: [1, Hk, T, Dv].
        entry_key: [1, Hk, E, D].
        entry_value: [1, Hk, E, Dv].
        rows: int32 [T, n], the tokens that each token sees; -1 is nothing.
        entries: int32 [1, T, m], the entries that each token sees; -1 is nothing.
        scale: factor on q.k.
        sinks: [Hq], one more logit per head in the softmax's denominator; receives a gradient.

    Returns:
        [1, Hq, T, Dv] in the dtype of `query`.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(key, value, entry_key, entry_value, rows, entries)
    behind = torch.where(entries < 0, entries, entries + key.shape[2])
    indices = torch.cat([rows[None], behind], 2)
    keys = torch.cat([key, entry_key], 2)
    values = keys if value is key and entry_value is entry_key else torch.cat([value, entry_value], 2)
    return sparse_attention(query, keys, values, indices, scale=scale, sinks=sinks)


def _check(key: Tensor, value: Tensor, entry_key: Tensor, entry_value: Tensor, rows: Tensor, entries: Tensor) -> None:
    """What `sparse_attention` cannot check once tokens and entries are joined."""
    shapes = f"{tuple(key.shape)}, {tuple(value.shape)}, {tuple(entry_key.shape)}, {tuple(entry_value.shape)}"
    if key.dim() != 4 or key.shape[:3] != value.shape[:3] or entry_key.shape[:3] != entry_value.shape[:3]:
        raise ValueError(f"keys and values do not fit: {shapes}")
    if (
        key.shape[:2] != entry_key.shape[:2]
        or key.shape[3] != entry_key.shape[3]
        or value.shape[3] != entry_value.shape[3]
    ):
        raise ValueError(f"tokens and entries do not fit: {shapes}")
    if rows.dim() != 2 or entries.dim() != 3 or entries.shape[:2] != (1, len(rows)):
        raise ValueError(
            f"rows and entries must be [T, n] and [1, T, m], not {tuple(rows.shape)}, {tuple(entries.shape)}"
        )
