"""Sequences -> prefix tree: which tokens are shared, as integers over segments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tree_compile.runtime.options import MIN_SHARED_TOKENS
from tree_compile.runtime.sequences import Batch, IntArray
from tree_compile.runtime.trie import depth_first_order

__all__ = ["PrefixTree", "build_prefix_tree", "parents_in_pre_order"]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The radix tree of a batch, as arrays over its S segments in depth-first pre-order.

    Of the children of a segment, the one with the most leaves comes first, so that the path of a sequence is
    made of at most 1 + log2(leaves) runs of neighbouring segments. The others keep the order of the batch.

    Attributes:
        start: position of the first token, which is the number of tokens above the segment. int64 [S].
        length: tokens in the segment. int64 [S].
        parent: the segment above, -1 at a root. int64 [S].
        subtree_end: one past the last segment below. int64 [S].
        source: a sequence that holds the segment. int64 [S].
        sequence_segment: the segment in which each sequence ends. int64 [number of sequences].
        sequence_length: tokens of each sequence. int64 [number of sequences].
    """

    start: IntArray
    length: IntArray
    parent: IntArray
    subtree_end: IntArray
    source: IntArray
    sequence_segment: IntArray
    sequence_length: IntArray

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> IntArray:
        """Tokens down to and including each segment, int64 [S]."""
        return self.start + self.length

    @property
    def tokens_below(self) -> IntArray:
        """Tokens of each segment and of all below it, int64 [S]."""
        return self._sum_below(self.length)

    @property
    def sequences_through(self) -> IntArray:
        """Sequences that go through each segment, int64 [S]."""
        return self._sum_below(np.bincount(self.sequence_segment, minlength=len(self)))

    def largest(self, most: int) -> IntArray:
        """The segments with the most tokens below them, in pre-order: with each of them comes its parent."""
        return np.sort(np.argsort(-self.tokens_below, kind="stable")[:most])

    def _sum_below(self, values: IntArray) -> IntArray:
        before = np.append(0, np.cumsum(values))
        return before[self.subtree_end] - before[:-1]

    @property
    def leaves(self) -> IntArray:
        """The segments without children, in pre-order."""
        return np.flatnonzero(self.subtree_end == np.arange(1, len(self) + 1))

    @property
    def sequence_leaf(self) -> IntArray:
        """For each sequence the first leaf at or below the segment in which it ends: a place in `leaves`."""
        return np.searchsorted(self.leaves, self.sequence_segment)


def build_prefix_tree(
    batch: Batch, min_shared_tokens: int = MIN_SHARED_TOKENS, limits: IntArray | None = None
) -> PrefixTree:
    """Finds the prefixes that sequences share, where all inputs of the batch agree.

    Args:
        batch: the sequences.
        min_shared_tokens: a shared segment with fewer tokens is not kept as a branch: each of its children gets
            its own copy of the tokens. 1 keeps every branch.
        limits: tokens at the start of each sequence that others may share, int64 [number of sequences]; None for all.
    """
    order, shared = depth_first_order(batch, batch.lengths if limits is None else limits)
    length = batch.lengths[order]
    # Any sequence that is a prefix of another is one of its successor in the order.
    is_leaf = np.append(shared[1:] < length[:-1], True)
    leaf_at = np.flatnonzero(is_leaf)
    nodes = _nodes(shared[leaf_at[:-1] + 1], length[leaf_at])
    first_id = order[_first_of_duplicates(shared, length)[leaf_at]]
    ends_in = np.empty_like(order)
    ends_in[order] = _end_nodes(nodes, length, is_leaf)
    nodes, moved = _in_batch_order(nodes, first_id)
    return _kept_tree(nodes, first_id, moved[ends_in], batch.lengths, min_shared_tokens)


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Segments in pre-order: node n holds the leaves from first_leaf[n] up to past_leaf[n], and ends at end[n]."""

    first_leaf: IntArray
    past_leaf: IntArray
    end: IntArray
    parent: IntArray
    subtree_end: IntArray

    @property
    def size(self) -> IntArray:
        """Nodes of the subtree."""
        return self.subtree_end - np.arange(len(self.subtree_end))

    @property
    def start(self) -> IntArray:
        return np.where(self.parent < 0, 0, self.end[self.parent])


def _first_of_duplicates(shared: IntArray, length: IntArray) -> IntArray:
    """For each place in the token order, the place of the first equal sequence."""
    return np.maximum.accumulate(np.where(shared < length, np.arange(len(length)), 0))


def _nodes(branch: IntArray, leaf_end: IntArray) -> _Nodes:
    """The tree over leaves in token order; `branch` holds the tokens shared by neighbouring leaves."""
    inner = _branches(branch.tolist())
    leaf = np.arange(len(leaf_end))
    first, past, end = np.concatenate([inner, np.stack([leaf, leaf + 1, leaf_end], axis=1)]).T
    order = np.lexsort((end, first))
    first, past, end = first[order], past[order], end[order]
    subtree_end = np.searchsorted(first, past)
    return _Nodes(first, past, end, parents_in_pre_order(subtree_end.tolist()), subtree_end)


def _branches(branch: list[int]) -> IntArray:
    """Every maximal range of leaves that share some tokens, as rows (first leaf, past leaf, tokens shared)."""
    found: list[tuple[int, int, int]] = []
    open_ranges: list[tuple[int, int]] = []
    for leaf, depth in enumerate([*branch, 0]):
        first = leaf
        while open_ranges and open_ranges[-1][1] > depth:
            first, end = open_ranges.pop()
            found.append((first, leaf + 1, end))
        if depth > 0 and not (open_ranges and open_ranges[-1][1] == depth):
            open_ranges.append((first, depth))
    return np.array(found, np.int64).reshape(-1, 3)


def parents_in_pre_order(subtree_end: list[int]) -> IntArray:
    """The node above each, -1 at a root, int64 [nodes]; `subtree_end` is one past the last node below each."""
    parent = np.full(len(subtree_end), -1, np.int64)
    path: list[int] = []
    for node in range(len(subtree_end)):
        while path and subtree_end[path[-1]] <= node:
            path.pop()
        if path:
            parent[node] = path[-1]
        path.append(node)
    return parent


def _end_nodes(nodes: _Nodes, length: IntArray, is_leaf: np.ndarray) -> IntArray:
    """The node in which each sequence ends, in token order.

    A sequence that is a prefix of its successor ends at or above the node of that successor, but below the last
    branch before it, so that all climbs together visit each node once.
    """
    leaf_node = np.flatnonzero(nodes.subtree_end == np.arange(1, len(nodes.end) + 1))[::-1].tolist()
    start, parent, tokens = nodes.start.tolist(), nodes.parent.tolist(), length.tolist()
    found = np.empty_like(length)
    following, node = iter(leaf_node), -1
    for k in range(len(tokens) - 1, -1, -1):
        if is_leaf[k]:
            node = next(following)
        while start[node] >= tokens[k]:
            node = parent[node]
        found[k] = node
    return found


def _in_batch_order(nodes: _Nodes, first_id: IntArray) -> tuple[_Nodes, IntArray]:
    """Puts the child with the most leaves first and the others in the order of the batch.

    Returns the nodes and the new place of each old one. `first_leaf` and `past_leaf` keep the old numbers.
    """
    count = nodes.past_leaf - nodes.first_leaf
    bounds = np.stack([nodes.first_leaf, nodes.past_leaf], axis=1).ravel()
    first = np.minimum.reduceat(np.append(first_id, 0), bounds)[::2]
    by_count = np.lexsort((first, -count, nodes.parent))
    follows = np.append(False, np.diff(nodes.parent[by_count]) == 0)
    rest = np.empty_like(follows)
    rest[by_count] = follows
    siblings = np.lexsort((first, rest, nodes.parent))
    place = _places(nodes, siblings)
    return _moved(nodes, place), place


def _places(nodes: _Nodes, siblings: IntArray) -> IntArray:
    """The place of every node in pre-order, where `siblings`, all nodes grouped by parent, says who comes first."""
    size, parent = nodes.size[siblings], nodes.parent[siblings]
    before = np.cumsum(size) - size
    offset = np.empty_like(before)
    offset[siblings] = before - before[np.searchsorted(parent, parent)]
    place = offset.tolist()
    for node, above in enumerate(nodes.parent.tolist()):
        if above >= 0:
            place[node] += place[above] + 1
    return np.array(place, np.int64)


def _moved(nodes: _Nodes, place: IntArray) -> _Nodes:
    old = np.argsort(place)
    parent = nodes.parent[old]
    return _Nodes(
        nodes.first_leaf[old],
        nodes.past_leaf[old],
        nodes.end[old],
        parent=np.where(parent < 0, -1, place[parent]),
        subtree_end=np.arange(len(old)) + nodes.size[old],
    )


def _kept_tree(
    nodes: _Nodes, first_id: IntArray, ends_in: IntArray, lengths: IntArray, min_shared_tokens: int
) -> PrefixTree:
    start, parent, kept = _push_down(nodes, min_shared_tokens)
    # The first child of a segment follows it, so what ended in a dropped segment now ends in the next kept one.
    before = np.append(0, np.cumsum(kept))
    return PrefixTree(
        start=start[kept],
        length=(nodes.end - start)[kept],
        parent=np.where(parent < 0, -1, before[parent])[kept],
        subtree_end=before[nodes.subtree_end][kept],
        source=first_id[nodes.first_leaf][kept],
        sequence_segment=before[ends_in],
        sequence_length=lengths,
    )


def _push_down(nodes: _Nodes, min_shared_tokens: int) -> tuple[IntArray, IntArray, np.ndarray]:
    """New start and parent of every node, and which nodes are kept."""
    start, parent, end = nodes.start.tolist(), nodes.parent.tolist(), nodes.end.tolist()
    inner = (nodes.subtree_end > np.arange(1, len(end) + 1)).tolist()
    kept = [True] * len(end)
    for node, above in enumerate(parent):
        if above >= 0 and not kept[above]:
            start[node], parent[node] = start[above], parent[above]
        kept[node] = not inner[node] or end[node] - start[node] >= min_shared_tokens
    return np.array(start, np.int64), np.array(parent, np.int64), np.array(kept)
