"""What if: the rows and tokens that batches would take, before one is committed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tree_compile.runtime.counts import a_kind, count_of
from tree_compile.runtime.options import MIN_SHARED_TOKENS, check_count
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.samples import batch_of
from tree_compile.runtime.sequences import Batch, Sequences, check_fits

__all__ = ["Estimate", "Estimates", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Sampled batches of one size, planned for one row length. Each tuple has one number per sample.

    Attributes:
        row_tokens: the greatest number of tokens in a row.
        groups: groups in a batch.
        sequences: sequences in it.
        input_tokens: tokens of its sequences.
        packed_tokens: tokens of its rows.
        rows: its rows.
        row_bounds: rows that no packing goes below.
    """

    row_tokens: int
    groups: int
    sequences: tuple[int, ...]
    input_tokens: tuple[int, ...]
    packed_tokens: tuple[int, ...]
    rows: tuple[int, ...]
    row_bounds: tuple[int, ...]

    @property
    def fill(self) -> float:
        """Tokens of all rows over the room in them."""
        return sum(self.packed_tokens) / (self.row_tokens * sum(self.rows))


class Estimates(tuple[Estimate, ...]):
    """Estimates for several sizes of a batch and lengths of a row; `str()` of it is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        head = ("row tokens", "groups", "sequences", "rows", "bound", "tokens computed", "computed / in", "fill")
        lines = [head, *map(_line, self)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _line(found: Estimate) -> tuple[str, ...]:
    share = sum(found.packed_tokens) / sum(found.input_tokens)
    sequences, rows, bounds, tokens = map(_spread, (found.sequences, found.rows, found.row_bounds, found.packed_tokens))
    return (
        f"{found.row_tokens:,}", f"{found.groups:,}", sequences, rows, bounds, tokens, f"{share:.3f}",
        f"{found.fill:.1%}",
    )  # fmt: skip


def _spread(values: tuple[int, ...]) -> str:
    """Mean, and least to greatest where they differ."""
    if min(values) == max(values):
        return f"{values[0]:,}"
    return f"{sum(values) / len(values):,.1f} ({min(values):,}-{max(values):,})"


def estimate(
    pool: Sequences,
    row_tokens: int | Sequence[int],
    *,
    groups: Sequence[Hashable] | None = None,
    group_counts: int | Sequence[int] | None = None,
    samples: int = 8,
    seed: int = 0,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
    objective: str = "rows",
    plan_attempts: int = 2_000,
) -> Estimates:
    """Plans batches that are drawn from a pool, for several lengths of a row and sizes of a batch.

    Args:
        pool: sequences of the past, as `plan_rows` takes them.
        row_tokens: the row lengths to try, or a single one.
        groups: the group of each sequence, such as its prompt; None makes every sequence a group.
        group_counts: groups in a batch (sequences, where `groups` is left out), each drawn whole, no two alike;
            None takes the whole pool once.
        samples: batches that are drawn for each size. All row lengths are tried on the same ones.
        seed: of the draws.
        min_shared_tokens: as in `plan_rows`.
        objective: as in `plan_rows`.
        plan_attempts: as in `plan_rows`.

    Raises:
        InputError: the sequences are not usable, or one is longer than a row.
        ValueError: `groups` has not one entry per sequence, a count is not between 1 and the number of groups, or
            another option has no meaning.
    """
    batch = batch_of(pool)
    members = _members(batch, groups)
    samples = check_count("samples", samples, 1)
    lengths = _counts("row_tokens", row_tokens)
    counts = [len(members)] if group_counts is None else _counts("group_counts", group_counts)
    if max(counts) > len(members):
        raise ValueError(
            f"group_counts is {counts}; it must be counts of at most the {len(members)} groups of the pool"
        )
    check_fits(batch.lengths, min(lengths))
    seed = check_count("seed", seed, 0)
    random, found = np.random.default_rng(seed), []
    for count in counts:
        drawn = [_draw(batch, members, count, random) for _ in range(1 if count == len(members) else samples)]
        for length in lengths:
            plans = [plan_rows(one, length, min_shared_tokens, objective, plan_attempts=plan_attempts) for one in drawn]
            sizes = [(p.sequences, p.input_tokens, p.packed_tokens, len(p.rows), p.row_bound) for p in plans]
            found.append(Estimate(length, count, *zip(*sizes, strict=True)))
    return Estimates(found)


def _counts(name: str, values: Any) -> list[int]:
    """One or more whole numbers of at least 1."""
    if isinstance(values, int | np.integer):
        values = [values]
    if not isinstance(values, Iterable) or not (counts := list(values)):
        raise ValueError(f"{name} is {values!r}; it must be a list of one or more whole numbers")
    return [check_count(name, count, 1) for count in counts]


def _members(batch: Batch, groups: Sequence[Hashable] | None) -> list[list[int]]:
    if groups is None:
        return [[sequence] for sequence in range(len(batch))]
    # Entries of a tensor are equal to themselves alone.
    names: Any = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ValueError(f"groups is {a_kind(groups)}; it must be a list of one group for each sequence")
    if len(names) != len(batch):
        entries = count_of(len(names), "entry", "entries")
        raise ValueError(f"groups has {entries}; it must have one for each of the {len(batch)} sequences")
    found: dict[Hashable, list[int]] = {}
    for sequence, group in enumerate(names):
        try:
            found.setdefault(group, []).append(sequence)
        except TypeError:
            raise ValueError(f"groups has entries such as {group!r}; they must be hashable") from None
    return list(found.values())


def _draw(batch: Batch, members: list[list[int]], count: int, random: np.random.Generator) -> Batch:
    chosen = sorted(random.choice(len(members), count, replace=False).tolist())
    return batch.of(sequence for group in chosen for sequence in members[group])
