"""Random batches for tests, and what a prefix tree and its rows are, in plain Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tree_compile.runtime.sequences import as_batch
from tree_compile.runtime.tree import PrefixTree, build_prefix_tree

ROOM = st.integers(0, 8)
"""Tokens of a row beside the longest sequence."""
ROOM_OR_NONE = st.one_of(st.none(), ROOM)

Path = tuple[Any, ...]
# A kept segment: where it starts, and the path down to its end.
Segment = tuple[int, Path]


@st.composite
def batches(draw: st.DrawFn, most: int = 10, longest: int = 8) -> list[list[int]]:
    """Sequences that grow out of cuts of earlier ones: duplicates, prefixes, one-token segments, several roots."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, most))):
        base = draw(st.sampled_from([[], *sequences]))
        kept = base[: draw(st.integers(0, len(base)))]
        tail = draw(st.lists(st.integers(0, 2), min_size=0 if kept else 1, max_size=longest))
        sequences.append(kept + tail)
    return sequences


def limit(sequences: Sequence[Any], room: int | None) -> int | None:
    """Tokens of a row that has so much room beside the longest sequence; None for no limit."""
    return None if room is None else max(map(len, sequences)) + room


def sequences_of(*runs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Sequences of runs (token, how often)."""
    return [[token for token, times in run for _ in range(times)] for run in runs]


def groups(count: int) -> list[Any]:
    """Sequences of 100 tokens in groups of 8 that share 70."""
    random = np.random.default_rng(0)
    return [np.append(np.full(70, group), random.integers(0, 9, 30)) for group in range(count) for _ in range(8)]


def tree_of(sequences: Sequence[Any], min_shared_tokens: int = 1) -> PrefixTree:
    """The prefix tree of some sequences."""
    return build_prefix_tree(as_batch(sequences), min_shared_tokens)


def leaves_by_row(tree: PrefixTree, leaf_row: Any) -> list[list[int]]:
    """The leaf segments of every row."""
    return [tree.leaves[leaf_row == row].tolist() for row in range(leaf_row.max() + 1)]


def segment_path(tree: PrefixTree, segment: int) -> list[int]:
    """A segment and all above it."""
    found = []
    while segment >= 0:
        found.append(segment)
        segment = int(tree.parent[segment])
    return found


def row_sizes(tree: PrefixTree, leaf_row: Any) -> list[int]:
    """Tokens of every row, by the segments on the paths of its leaves; no row is without leaves."""
    held = [{at for leaf in row for at in segment_path(tree, leaf)} for row in leaves_by_row(tree, leaf_row)]
    assert all(held)
    return [sum(int(tree.length[segment]) for segment in segments) for segments in held]


def tree_segments(sequences: Sequence[Path], min_shared_tokens: int) -> dict[Segment, Segment | None]:
    """The kept segments of the tree, each with the one above it.

    The published procedure: emit the longest run on which all active sequences agree, split the rest by the next
    token. Where a run that branches is too short, it stays with each of its branches instead.
    """
    found: dict[Segment, Segment | None] = {}
    todo: list[tuple[list[Path], int, int, Segment | None]] = [(list(set(sequences)), 0, 0, None)]
    while todo:
        active, start, end, above = todo.pop()
        while len({sequence[end] for sequence in active if len(sequence) > end}) == 1:
            end += 1
        branches: dict[Any, list[Path]] = {}
        for sequence in active:
            if len(sequence) > end:
                branches.setdefault(sequence[end], []).append(sequence)
        if not branches or end - start >= min_shared_tokens:
            segment = (start, max(active, key=len)[:end])
            found[segment] = above
            start, above = end, segment
        todo += [(branch, start, end, above) for branch in branches.values()]
    return found


def leaf_paths(segments: dict[Segment, Segment | None]) -> list[list[Segment]]:
    """For each segment without children, the segments from its root down to it."""
    inner = set(segments.values())
    paths = []
    for leaf in segments.keys() - inner:
        path: list[Segment] = []
        segment: Segment | None = leaf
        while segment is not None:
            path.append(segment)
            segment = segments[segment]
        paths.append(path[::-1])
    return paths


def fewest(segments: dict[Segment, Segment | None], row_tokens: int) -> tuple[int, int]:
    """The fewest rows, and the fewest tokens, of any packing: by trying every partition of the leaves."""
    sizes = [
        [row_size(row) for row in partition]
        for partition in partitions(leaf_paths(segments))
        if all(row_size(row) <= row_tokens for row in partition)
    ]
    return min(map(len, sizes)), min(map(sum, sizes))


def row_size(paths: list[list[Segment]]) -> int:
    """Tokens of a row that holds these paths."""
    return sum(len(path) - start for start, path in {segment for held in paths for segment in held})


def partitions(items: list[Any]) -> Iterator[list[list[Any]]]:
    """All ways to split a list into groups."""
    todo: list[tuple[int, list[list[Any]]]] = [(0, [])]
    while todo:
        at, groups = todo.pop()
        if at == len(items):
            yield groups
            continue
        for chosen in range(len(groups) + 1):
            grown = [list(group) for group in groups] + ([[]] if chosen == len(groups) else [])
            grown[chosen].append(items[at])
            todo.append((at + 1, grown))


def ancestors(parent: Sequence[int], token: int) -> set[int]:
    """A token and all tokens above it, by following parents."""
    found = set()
    while token >= 0:
        found.add(token)
        token = parent[token]
    return found


def chain(segments: int) -> list[Any]:
    """Sequences that leave a trunk one after the other: a tree as deep as it has leaves. Arrays of int16."""
    trunk, end = np.arange(2, segments + 2, dtype=np.int16), np.zeros(1, np.int16)
    return [np.append(trunk[:cut], end) for cut in range(1, segments)] + [trunk]


def ranges_touch(ranges: list[tuple[int, int]]) -> bool:
    """Whether a range begins where the one before it ends."""
    return any(first[1] == second[0] for first, second in pairwise(ranges))
