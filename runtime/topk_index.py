"""Which ancestors an indexer keeps for every query: scored against its own path alone, in blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from tree_compile.runtime.transfers import READS_ON_HOST

__all__ = [
    "BUDGET",
    "above_and_at_last",
    "check_scored",
    "highest",
    "index_scores",
    "recorded_choices",
    "takes_highest",
    "told_of",
    "topk_told",
    "tree_topk_index",
    "write_chosen",
]

BLOCK = 16
"""Queries of one segment that are scored together against what stands above all of them."""

BUDGET = 1 << 22
"""Scores of all heads, or numbers of gathered queries, that exist at a time."""

ROUNDING = 16
"""Scores are equal where they differ by so many units in the last place, or less; those of float32 at the widest.

Repeated keys among 400 tokens, 32 and 64 heads: 99 of 100 differ by no more than 8, the others by up to 13.
"""

CANCELLED = 64
"""How often greater numbers a score is taken to be added up from, at the most, than it is."""


class _Block(NamedTuple):
    """Query rows [start, end) of one segment, and how many rows stand above the first of them on its path."""

    start: int
    end: int
    above: int


def tree_topk_index(query: Tensor, key: Tensor, weights: Tensor, segments: Tensor, k: int) -> Tensor:
    """The `k` ancestors, itself included, that score highest for every token; no other token is ever scored.

    The score of query row t and key row s is `sum_h weights[t, h] * relu(query[t, h] . key[s])`, the lightning indexer
    of DeepSeek-V3.2 (arXiv 2512.02556): the products are in the dtype of `query`, the sum is in that of `weights`, also
    under autocast. Where no more than `k` can be seen all are kept, and none is scored. Beside inputs and result there
    are never more numbers than 4 * 2^22, `BLOCK` for every token, and `BLOCK` * (4 + D) for every token of the longest
    path: no T x T.

    Args:
        query: [1, T, H, D], floating point.
        key: [1, T, D], in the dtype of `query`.
        weights: [1, T, H], floating point.
        segments: int64 on the CPU, [S, 5], as `tree_attention` takes them.
        k: how many to keep.

    Returns:
        int32 [1, T, k]: row numbers, ascending in each query; -1 behind the last where there are fewer. Among scores
        that are equal up to rounding (`above_and_at_last`) the earlier token goes first, and NaN scores highest.
        Nothing is differentiated through it. A padding row keeps nothing.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or `k` is below 1.
    """
    _check(query, key, weights, segments)
    check_scored(query, key, weights, k)
    with torch.autocast(query.device.type, enabled=False):  # which reaches into the op
        return topk_index_op(query.detach(), key.detach(), weights.detach(), segments, k)


def _check(query: Tensor, key: Tensor, weights: Tensor, segments: Tensor) -> None:
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(weights.shape)}"
    if (
        query.dim() != 4
        or query.shape[0] != 1
        or key.shape != (1, query.shape[1], query.shape[3])
        or weights.shape != query.shape[:3]
    ):
        raise ValueError(f"query, key and weights must be [1, T, H, D], [1, T, D] and [1, T, H], not {shapes}")
    if segments.device.type != "cpu":
        raise ValueError(f"segments must be on the CPU, which reads them, and not on {segments.device}")


def check_scored(query: Tensor, key: Tensor, weights: Tensor, k: int) -> None:
    """Refuses dtypes, and numbers to keep, that no index can be made from.

    Raises:
        ValueError: they are not floating point, query and key differ, or nothing is to be kept.
    """
    dtypes = query.dtype, key.dtype, weights.dtype
    if query.dtype != key.dtype or not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"query and key must be of one floating dtype, and weights of one, not {dtypes}")
    if k < 1:
        raise ValueError(f"k must be 1 or more, not {k}")


@torch.library.custom_op("tree_compile::topk_index", mutates_args=(), tags=READS_ON_HOST)
def topk_index_op(query: Tensor, key: Tensor, weights: Tensor, segments: Tensor, k: int) -> Tensor:
    """`tree_topk_index` of tensors without gradients."""
    query, key, weights = query[0], key[0], weights[0]
    kept = query.new_full((1, len(query), k), -1, dtype=torch.int32)
    places = told_of(kept)
    blocks = list(_blocks(segments))
    near = _scores_in_blocks(query, key, weights, _scored(blocks, k))
    path = torch.zeros(max(above + end - start for start, end, above in blocks), dtype=torch.int64)
    for start, end, count in blocks:
        rows, above = slice(start, end), path[:count]
        path[count : count + end - start] = torch.arange(start, end)
        visible = _visible(count, end - start, key.device)
        if count + end - start > k:
            far = index_scores(query[rows], key.index_select(0, above.to(key.device)), weights[rows])
            scores = torch.cat([far, near[rows, : end - start]], 1)
            visible = highest(scores.masked_fill_(~visible, -torch.inf), k) & visible
        keys = path[: count + end - start].to(key.device, torch.int32)
        write_chosen(kept[0, rows], visible, keys)
        if places is not None:
            write_chosen(places[rows], visible, torch.arange(len(keys), device=keys.device, dtype=keys.dtype))
    return kept


@topk_index_op.register_fake
def _(query: Tensor, _key: Tensor, _weights: Tensor, _segments: Tensor, k: int) -> Tensor:
    return query.new_empty((1, query.shape[1], k), dtype=torch.int32)


def _blocks(segments: Tensor) -> Iterator[_Block]:
    """All rows in order, block by block; no block leaves its segment."""
    for start, end, _, _, position in segments.tolist():
        for row in range(start, end, BLOCK):
            yield _Block(row, min(end, row + BLOCK), position + row - start)


def _visible(above: int, own: int, device: torch.device) -> Tensor:
    """bool [own, above + own]: a query of a block sees all that is above it, and its own block causally."""
    return torch.ones(own, above + own, dtype=torch.bool, device=device).tril(above)


def index_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Scores [n, m] of query [n, H, D] with weights [n, H] and key [m, D], for as many keys at a time as fit."""
    heads = query.flatten(0, 1)
    parts = [
        _weighed(torch.relu_(heads @ some.T).view(*weights.shape, -1), weights)
        for some in key.split(max(1, BUDGET // len(heads)))
    ]
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]


def _weighed(scores: Tensor, weights: Tensor) -> Tensor:
    """The sum over heads [n, m] of scores [n, H, m], in the dtype of `weights`."""
    return torch.bmm(weights.unsqueeze(1), scores.to(weights.dtype)).squeeze(1)


def _scores_in_blocks(query: Tensor, key: Tensor, weights: Tensor, blocks: Tensor) -> Tensor:
    """Scores [T, BLOCK] of every row of `blocks` with the rows of its own block that it sees; 0 elsewhere.

    All queries at the same place in their blocks see equally many rows, so no pair is scored in vain.
    """
    near = weights.new_zeros(len(query), BLOCK)
    starts, sizes = blocks.to(query.device).unbind(1)
    for place in range(BLOCK):
        for some in starts[sizes > place].split(max(1, BUDGET // max(query[0].numel(), BLOCK * key.shape[1]))):
            rows, own = some + place, some[:, None] + torch.arange(place + 1, device=query.device)
            scores = torch.relu_(torch.bmm(query[rows], key[own].mT))
            near[rows, : place + 1] = _weighed(scores, weights[rows])
    return near


def _scored(blocks: Sequence[_Block], k: int) -> Tensor:
    """First row and number of rows of every block in which some query sees more than `k` rows: int64 [blocks, 2]."""
    scored = [(start, end - start) for start, end, above in blocks if above + end - start > k]
    return torch.tensor(scored, dtype=torch.int64).view(-1, 2)


def highest(scores: Tensor, k: int) -> Tensor:
    """bool [..., m]: the `k` highest scores of each row, the first ones among equals."""
    above, equal = above_and_at_last(scores, k)
    wanted = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= wanted))


def above_and_at_last(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Which scores are higher than the `k`-th highest of their row, and which are equal to it: bool [..., m] each.

    Equal up to rounding: a product rounds by where it stands in a matrix, so the scores of two equal keys differ in
    their last places. These are places of the `k`-th score. As weights of either sign can add up to nearly nothing,
    they are those of the middle one of the `k` where that is greater, up to `CANCELLED` times as great.
    """
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    kept = scores.topk(k).values
    last, middle = kept[..., -1:], kept[..., k // 2, None].abs()
    size = torch.maximum(last.abs(), middle.clamp(max=CANCELLED * last.abs()))
    units = ROUNDING * min(torch.finfo(scores.dtype).eps, torch.finfo(torch.float32).eps)
    rounding = units * size.masked_fill(size.isinf(), 0)
    above = scores > last + rounding
    return above, (scores >= last - rounding) & ~above


_RECORDING: ContextVar[list[Tensor] | None] = ContextVar("_RECORDING", default=None)


@contextmanager
def recorded_choices() -> Iterator[list[Tensor]]:
    """What is chosen while it lasts, one tensor for every call of an op that chooses: int [T, k].

    Of every query the places of its keys, or entries, among those of its own path, with -1 behind them; of every token
    its experts, where `topk_told` chooses.
    """
    found: list[Tensor] = []
    before = _RECORDING.set(found)
    try:
        yield found
    finally:
        _RECORDING.reset(before)


def takes_highest(scores: Tensor, dim: int, largest: bool) -> bool:
    """Whether a `topk` with these arguments takes the highest scores of each row."""
    return largest and dim in (-1, scores.dim() - 1)


def topk_told(
    scores: Tensor, k: int, dim: int = -1, largest: bool = True, *others: bool, **named: bool
) -> tuple[Tensor, Tensor]:
    """`aten.topk`, which tells what it chooses; for routers of experts, in a graph that is not compiled."""
    found: tuple[Tensor, Tensor] = torch.ops.aten.topk.default(scores, k, dim, largest, *others, **named)
    recording = _RECORDING.get()
    if recording is not None and takes_highest(scores, dim, largest):
        recording.append(found[1].flatten(0, -2))
    return found


def told_of(kept: Tensor) -> Tensor | None:
    """Where places are to be written for a result [1, T, k], if they are recorded."""
    recording = _RECORDING.get()
    if recording is None:
        return None
    recording.append(kept[0].clone())
    return recording[-1]


def write_chosen(kept: Tensor, chosen: Tensor, keys: Tensor) -> None:
    """Writes the chosen `keys` [m] of each row of `chosen` [n, m] to the front of `kept` [n, k]."""
    rows, columns = chosen.nonzero(as_tuple=True)
    place = chosen.cumsum(1)[rows, columns] - 1
    kept[rows, place] = keys[columns]
