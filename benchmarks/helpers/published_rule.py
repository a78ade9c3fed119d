"""The published packing rule in plain Python: the measure of `benchmarks/planner.py`, not used by the product.

The prefix tree is made by emitting the longest run on which all active sequences agree and splitting by the next
token; leaves go group by group, the most expensive group first, into the row that they leave the least room in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = Sequence[int]
Path = tuple[tuple[int, int], ...]


@dataclass
class Bin:
    """A row: the segments in it and the leaves."""

    leaves: list[int] = field(default_factory=list)
    segments: set[int] = field(default_factory=set)
    tokens: int = 0

    def added(self, path: Path) -> int:
        """Tokens that a leaf adds."""
        return sum(length for segment, length in path if segment not in self.segments)

    def add(self, leaf: int, path: Path) -> None:
        """Puts a leaf in."""
        self.tokens += self.added(path)
        self.segments.update(segment for segment, _ in path)
        self.leaves.append(leaf)


def walk(sequences: Sequence[Tokens], limits: Sequence[int], min_shared_tokens: int) -> list[Path]:
    """The segments (number, tokens) on the path of each sequence; tokens from `limits` on are its own."""
    paths: list[list[tuple[int, int]]] = [[] for _ in sequences]
    todo, segments = [(list(range(len(sequences))), 0, 0)], 0
    while todo:
        active, start, at = todo.pop()
        end = _agreed(sequences, limits, active, at)
        if len(active) == 1:
            paths[active[0]].append((segments, len(sequences[active[0]]) - start))
            segments += 1
            continue
        if end - start >= min_shared_tokens:
            for sequence in active:
                paths[sequence].append((segments, end - start))
            segments, start = segments + 1, end
        branches: dict[int, list[int]] = {}
        for sequence in active:
            own = end >= limits[sequence]
            branches.setdefault(-1 - sequence if own else int(sequences[sequence][end]), []).append(sequence)
        todo += [(branch, start, end) for branch in branches.values()]
    return [tuple(path) for path in paths]


def _agreed(sequences: Sequence[Tokens], limits: Sequence[int], active: list[int], at: int) -> int:
    """One past the last position up to which all active sequences agree."""
    first, end = sequences[active[0]], min(limits[sequence] for sequence in active)
    for sequence in active[1:]:
        other, place = sequences[sequence], at
        while place < end and first[place] == other[place]:
            place += 1
        end = place
    return end


def place(paths: Sequence[Path], groups: Sequence[Sequence[int]], row_tokens: int) -> list[Bin]:
    """Best fit decreasing over the true marginal cost."""
    ordered = sorted(groups, key=lambda group: max(sum(n for _, n in paths[leaf]) for leaf in group), reverse=True)
    bins: list[Bin] = []
    for leaf in (leaf for group in ordered for leaf in group):
        best, best_left = None, row_tokens + 1
        for candidate in bins:
            left = row_tokens - candidate.tokens - candidate.added(paths[leaf])
            if 0 <= left < best_left:
                best, best_left = candidate, left
        if best is None:
            best = Bin()
            bins.append(best)
        best.add(leaf, paths[leaf])
    return bins


def place_in_order(paths: Sequence[Path], row_tokens: int) -> list[Bin]:
    """The older rule: one row at a time in the order of arrival, never back to an earlier one."""
    bins = [Bin()]
    for leaf, path in enumerate(paths):
        if bins[-1].tokens + bins[-1].added(path) > row_tokens:
            bins.append(Bin())
        bins[-1].add(leaf, path)
    return bins


def groups_of(paths: Sequence[Path]) -> list[list[int]]:
    """The subtrees below what all sequences share, in the order of arrival."""
    trunk = len({path[0] for path in paths}) == 1 and len(paths[0]) > 1
    found: dict[tuple[int, int], list[int]] = {}
    for leaf, path in enumerate(paths):
        found.setdefault(path[1 if trunk and len(path) > 1 else 0], []).append(leaf)
    return list(found.values())
