"""Sequences -> plan: all stages, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tree_compile.runtime.contexts import shared_limits
from tree_compile.runtime.layout import lay_out
from tree_compile.runtime.options import MIN_SHARED_TOKENS, PLAN_SECONDS, check_options
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.rows import pack_rows
from tree_compile.runtime.samples import batch_of
from tree_compile.runtime.sequences import Sequences, TokenSequence
from tree_compile.runtime.tree import build_prefix_tree

__all__ = ["plan_rows", "warm_up"]


def plan_rows(
    sequences: Sequences,
    row_tokens: int | None = None,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
    objective: str = "rows",
    pad_rows: bool = False,
    *,
    share: str = "all",
    trainable: Iterable[TokenSequence] | None = None,
    plan_seconds: float = PLAN_SECONDS,
    plan_attempts: int | None = None,
) -> Plan:
    """Plans the rows in which a batch of sequences is computed.

    How far rows are improved in `plan_seconds` depends on the clock, so that two processes that plan the same batch may
    get different rows. Plan once and send the plan, or use `plan_attempts`, where all have to compute the same rows.

    Args:
        sequences: a list of sequences, or a dict of such lists for tokens with payloads: see `as_batch`. Arrays and
            CPU tensors are not copied: they have to stay as they are until the tokens of the rows have been read.
        row_tokens: the greatest number of tokens in a row; None puts the whole batch in one row.
        min_shared_tokens: shared segments with fewer tokens are copied to their children instead.
        objective: "rows" for the fewest rows, then the fewest tokens; "tokens" for the fewest tokens, then even rows.
        pad_rows: fill every row up to `row_tokens` with tokens that nobody reads.
        share: "all" shares every common prefix; "context" shares it up to, and without, the token before the first
            trainable one, so that each sequence has its own copy of all that a loss reads.
        trainable: for `share="context"`, per sequence one bool or number per token, not 0 where it is trained on; left
            out for samples, which have their own.
        plan_seconds: how long rows are improved; 0 takes the best construction.
        plan_attempts: improve for so many attempts instead, which gives the same rows on every machine.

    Raises:
        InputError: the sequences are not usable; `as_batch` and `pack_rows` list the cases. Or `trainable` is not.
        ValueError: an option has no meaning.
    """
    options = check_options(row_tokens, min_shared_tokens, objective, pad_rows, plan_seconds, plan_attempts, share)
    batch = batch_of(sequences)
    limits = shared_limits(batch, share, trainable)
    tree = build_prefix_tree(batch, options.min_shared_tokens, limits)
    leaf_row, bounds = pack_rows(tree, options.row_tokens, options.objective, options.budget)
    return Plan(batch, tree, lay_out(tree, leaf_row), options.row_tokens, options.pad_rows, *bounds)


def warm_up() -> None:
    """Loads what numba has compiled, or compiles it when it is first used on a machine, so that no step waits."""
    for dtype in (np.int64, np.int32):
        # The best construction is above the bound, so that rows are reopened.
        sequences = [np.array([first] * 3 + [last] * 2, dtype) for first in range(3) for last in (7, 8, 9)]
        plan_rows(sequences, 8, 1, plan_attempts=1).with_sequences(sequences)
