"""The fewest rows of a prefix tree by a solver: the measure of the bound, in `benchmarks/planner.py` and in tests."""

from __future__ import annotations

from typing import Any


def rows_model(tree: Any, row_tokens: int, count: int) -> Any:
    """A CP-SAT model that can be solved exactly where the tree fits into `count` rows.

    Args:
        tree: a `PrefixTree`.
        row_tokens: the greatest number of tokens in a row.
        count: rows.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    held = [[model.new_bool_var("") for _ in range(len(tree))] for _ in range(count)]
    for row in held:
        for segment, above in enumerate(tree.parent.tolist()):
            if above >= 0:
                model.add_implication(row[segment], row[above])
        model.add(sum(n * kept for n, kept in zip(tree.length.tolist(), row, strict=True)) <= row_tokens)
    for place, leaf in enumerate(tree.leaves.tolist()):
        # Rows are alike: leaf 0 is in the first one, leaf 1 in the first or second, and so on.
        model.add_exactly_one(row[leaf] for row in held[: place + 1])
    return model
