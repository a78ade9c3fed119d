"""Rows -> the tree of a row, as ops that carry a state along the tokens read it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tree_compile.runtime.depths import depth_of_each
from tree_compile.runtime.layout import END, PARENT, START
from tree_compile.runtime.regroup import regroup
from tree_compile.runtime.sequences import IntArray

__all__ = [
    "CHUNK",
    "READ_ON_HOST",
    "RowTree",
    "by_first_chunk",
    "in_chunks",
    "in_row",
    "last_chunks",
    "require_row",
    "row_or_chains",
    "tree_of_chains",
    "tree_of_segments",
    "with_values_on_padding",
]

CHUNK = 32
"""Tokens of a chunk. Every segment starts a chunk of its own, so that its state can start from that of its parent."""

READ_ON_HOST = frozenset({"chunk_parent", "segments"})
"""Fields of a `RowTree` that are on the CPU, whatever the device of the row."""


class RowTree(NamedTuple):
    """The tree of a row of T tokens, by token and by chunk.

    Chunks are ordered by level, the number of chunks above them, so that a level is one slice; in a level those that
    others follow come first.

    Attributes:
        parent: row index of the token before each token, int64 [T]; -1 at roots and on padding.
        chunk_tokens: row index of every token of every chunk, int64 [n * CHUNK]; T where a chunk is shorter.
        chunk_place: where each token is among `chunk_tokens`, int64 [T]; n * CHUNK for padding, which is in no chunk.
        chunk_parent: the chunk whose final state a chunk starts from, -1 at a root, int64 [n] on the CPU.
        segments: int64 [S, 5] on the CPU, columns as in `Layout`; entries of zeros at the end are skipped.
    """

    parent: Tensor
    chunk_tokens: Tensor
    chunk_place: Tensor
    chunk_parent: Tensor
    segments: Tensor

    def to(self, device: torch.device) -> RowTree:
        """The same with what kernels read on `device`."""
        sent = {name: tensor.to(device) for name, tensor in self._asdict().items() if name not in READ_ON_HOST}
        return self._replace(**sent)


def tree_of_segments(segments: IntArray, parent: IntArray, least: int = 1) -> RowTree:
    """The tree of a row, on the CPU.

    Args:
        segments: int64 [S, 5], columns as in `Layout`.
        parent: int64 [T], as in `Row`.
        least: smallest size of every array: compiled code wants 2 or more, so a row of one token is padded.
    """
    length = segments[:, END] - segments[:, START]
    count = -(-length // CHUNK)
    first = np.cumsum(count) - count
    owner = np.repeat(np.arange(len(segments)), count)
    piece = np.arange(len(owner)) - first[owner]
    parents, starts = segments[owner, PARENT], segments[owner, START] + CHUNK * piece
    above = np.where(parents < 0, -1, first[parents] + count[parents] - 1)
    above = np.where(piece > 0, np.arange(len(owner)) - 1, above)
    ends = np.minimum(starts + CHUNK, segments[owner, END])
    tokens = max(len(parent), least)
    chunks = _chunks(starts, ends, above, tokens, max(least, len(owner)))
    padded = np.pad(parent, (0, tokens - len(parent)), constant_values=-1)
    table = np.pad(segments, ((0, max(0, least - len(segments))), (0, 0)))
    return RowTree(torch.from_numpy(padded), *chunks, torch.from_numpy(table))


def tree_of_chains(sequences: int, length: int, device: torch.device) -> RowTree:
    """The tree of `sequences` unpacked sequences of `length` tokens each, one after the other."""
    first = np.arange(sequences) * length
    starts = first[:, None] + np.arange(0, length, CHUNK)
    ends = np.minimum(starts + CHUNK, first[:, None] + length)
    above = np.arange(starts.size).reshape(starts.shape) - 1
    above[:, 0] = -1
    parent = np.arange(-1, sequences * length - 1)
    parent[first] = -1
    past, none = first + length, np.zeros_like(first)
    tokens, place, chunk_parent = _chunks(starts.ravel(), ends.ravel(), above.ravel(), len(parent), starts.size)
    segments = torch.from_numpy(np.stack([first, past, past, none - 1, none], axis=1))
    return RowTree(torch.from_numpy(parent), tokens, place, chunk_parent, segments).to(device)


def row_or_chains(tree: RowTree | None, name: str, values: Tensor) -> RowTree:
    """The tree that an op reads: `tree`, or where there is none that of the sequences of a batch.

    Args:
        tree: that of a row.
        name: what the op calls `values`.
        values: [B, T, …].

    Raises:
        ValueError: there are no tokens, a batch of rows, or another number of tokens than in the tree.
    """
    batch, length = values.shape[:2]
    if batch * length == 0:
        raise ValueError(f"no tokens: {name} is {tuple(values.shape)}")
    if tree is None:
        return tree_of_chains(batch, length, values.device)
    require_row(tree, name, values)
    return tree


def require_row(tree: RowTree, name: str, values: Tensor) -> None:
    """Refuses values [B, T, …] that are not one row, or not as long as that of the tree.

    Raises:
        ValueError: they are not.
    """
    batch, length = values.shape[:2]
    if batch != 1:
        raise ValueError(f"a batch of {batch} over one tree; {name} must be one row, [1, T, …]")
    if length != len(tree.parent):
        raise ValueError(f"{name} has {length} tokens, and the row of the tree {len(tree.parent)}")


def in_chunks(values: Tensor, tree: RowTree) -> Tensor:
    """[B, T, H, D] -> [n, H, CHUNK, D], with zeros where a chunk has no token."""
    heads, width = values.shape[-2:]
    by_chunk, by_row = _places(tree, heads)
    return regroup(values.reshape(-1, width), by_chunk, by_row).view(-1, heads, CHUNK, width)


def in_row(values: Tensor, tree: RowTree, batch: int) -> Tensor:
    """[n, H, CHUNK, D] -> [B, T, H, D]: the inverse of `in_chunks`, with zeros for padding."""
    heads, width = values.shape[1], values.shape[-1]
    by_chunk, by_row = _places(tree, heads)
    return regroup(values.reshape(-1, width), by_row, by_chunk).view(batch, -1, heads, width)


def _places(tree: RowTree, heads: int) -> tuple[Tensor, Tensor]:
    """Indices of (token, head) in the order of (chunk, head, token), and the other way round."""
    head = torch.arange(heads, device=tree.parent.device)
    by_chunk = tree.chunk_tokens.view(-1, 1, CHUNK) * heads + head[:, None]
    chunk, at = tree.chunk_place // CHUNK, tree.chunk_place % CHUNK
    by_row = (chunk[:, None] * heads + head) * CHUNK + at[:, None]
    return by_chunk.flatten(), by_row.flatten()


def with_values_on_padding(out: Tensor, values: Tensor, tree: RowTree | None) -> Tensor:
    """`out` [B, T, …] with `values`, of the same shape and dtype, for tokens of the row that are in no segment."""
    if tree is None:
        return out
    is_padding = tree.chunk_place >= tree.chunk_tokens.shape[0]
    # Zeros there could become NaN in a norm after this, and NaN times a gradient of 0 is NaN.
    return torch.where(is_padding.view(-1, *[1] * (out.dim() - 2)), values, out)


def by_first_chunk(states: Tensor, tree: RowTree) -> Tensor:
    """States [roots, …] of the roots in the order of the row -> in the order of their first chunks.

    Raises:
        ValueError: there are more or fewer states than roots.
    """
    roots = int((tree.chunk_parent < 0).sum())
    if len(states) != roots:
        raise ValueError(f"initial_state has {len(states)} states; it must have one for each of {roots} roots")
    starts = tree.chunk_tokens.view(-1, CHUNK)[: len(states), 0]
    # The first argsort gives the roots in the order of the row; its own argsort is the place of each root there.
    return states[starts.argsort().argsort()]


def last_chunks(tree: RowTree) -> Tensor:
    """The chunk of the last token of every segment, int64 [S]."""
    ends = tree.segments[:, END]
    return tree.chunk_place[ends[ends > 0].to(tree.chunk_place.device) - 1] // CHUNK


def _chunks(starts: IntArray, ends: IntArray, above: IntArray, tokens: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, place and parent of chunks of the ranges from `starts` up to `ends`, of which each follows `above`."""
    order, parent = _by_level(above)
    table = np.full((room, CHUNK), tokens, np.int64)
    index = starts[order, None] + np.arange(CHUNK)
    table[: len(order)] = np.where(index < ends[order, None], index, tokens)
    place = np.full(tokens + 1, room * CHUNK, np.int64)
    place[table.ravel()] = np.arange(room * CHUNK)
    parents = np.full(room, len(order) - 1, np.int64)
    parents[: len(order)] = parent
    return torch.from_numpy(table.ravel()), torch.from_numpy(place[:-1]), torch.from_numpy(parents)


def _by_level(above: IntArray) -> tuple[IntArray, IntArray]:
    """The order of chunks by level, and for each in that order the place of the one above it."""
    is_last = np.ones(len(above), np.int64)
    is_last[above[above >= 0]] = 0
    order = np.lexsort((is_last, np.array(depth_of_each(above))))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return order, np.where(above[order] < 0, -1, place[above[order]])
