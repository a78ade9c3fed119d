"""The planner against the published rule in plain Python, against the bound, and on real rollouts.

    python benchmarks/planner.py                  # everything, some five minutes
    python benchmarks/planner.py published speed  # two of its sections; --help names them

Times are those of the second of two plans of the same batch; the published rule is timed once, in the same run.
The batches come from ../shared/workloads.py beside the checkout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from helpers import exact_rows, published_rule

from tree_compile.runtime.bounds import packing_bounds
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planner import Planner
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.sequences import as_batch
from tree_compile.runtime.tree import build_prefix_tree

SHARED = Path(__file__).resolve().parents[2] / "shared"
sys.path.insert(0, str(SHARED))
# Rows over the bound that this project asks of itself, by family.
TARGETS = {
    "groups_32k": 1.045,
    "groups_131k": 1.02,
    "agent_trees": 1.045,
    "long_documents": 1.06,
    "preference_pairs": 1.003,
}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """A result and its milliseconds."""
    began = time.perf_counter()
    result = call()
    return result, 1000 * (time.perf_counter() - began)


def planned(sequences: Sequence[Any], row_tokens: int | None, **options: Any) -> tuple[Plan, float]:
    """A plan with the layout of all rows, and its milliseconds once warm."""

    def plan() -> Plan:
        found = plan_rows(sequences, row_tokens, **options)
        assert found.rows
        return found

    plan()
    return timed(plan)


def published_rows(sequences: Sequence[Any], row_tokens: int) -> tuple[list[published_rule.Bin], float, float]:
    """The rows of the published rule, and the milliseconds of its tree walk and of its packing."""
    plain = [array("i", tokens.astype(np.int32).tobytes()) for tokens in sequences]
    paths, walk = timed(lambda: published_rule.walk(plain, [len(s) for s in plain], 64))
    bins, packing = timed(lambda: published_rule.place(paths, published_rule.groups_of(paths), row_tokens))
    return bins, walk, packing


def published(workloads: Any) -> None:
    """The published table of 32 rollouts, and what this planner does with them."""
    sequences, row_tokens = workloads.seed_example()
    own = [2_000] * 16 + [12_000] * 8 + [7_000] * 8
    limits = [len(tokens) - count - 1 for tokens, count in zip(sequences, own, strict=True)]
    paths = published_rule.walk(sequences, limits, 64)
    print("in order  ", [row.tokens for row in published_rule.place_in_order(paths, row_tokens)])
    groups = [list(range(first, first + 8)) for first in range(0, 32, 8)]
    print("global    ", [row.tokens for row in published_rule.place(paths, groups, row_tokens)])
    trainable = [np.arange(len(s)) >= len(s) - count for s, count in zip(sequences, own, strict=True)]
    for share in ("context", "all"):
        plan, _ = planned(sequences, row_tokens, share=share, trainable=trainable if share == "context" else None)
        print(f"here, share={share!r:10}", [row.length for row in plan.rows], "bound", plan.row_bound, plan.token_bound)


def speed(workloads: Any) -> None:
    """Whole plans of a growing curriculum, against the published rule."""
    print("groups  sequences  ms here  ms walk + pack  times  rows here / rule / bound  rows over bound")
    for groups in (12, 48, 192, 768):
        sequences, row_tokens = workloads.curriculum(groups=groups)
        plan, here = planned(sequences, row_tokens)
        bins, walk, packing = published_rows(sequences, row_tokens)
        rows = f"{len(plan.rows)} / {len(bins)} / {plan.row_bound}"
        print(f"{groups:6d} {len(sequences):10,d} {here:8.0f} {walk:7.0f} + {packing:5.0f} "
              f"{(walk + packing) / here:6.1f}  {rows:>20s} {len(plan.rows) / plan.row_bound:12.4f}")  # fmt: skip


def growth(workloads: Any) -> None:
    """Plans of up to 100,000 leaves: milliseconds, and the exponent of a power law through them."""
    counts, times = [], []
    for groups in (1_562, 3_125, 6_250, 12_500):
        sequences, row_tokens = workloads._groups(0, groups, 8, 512, 300, 200, 8_192)
        _, construction = planned(sequences, row_tokens, plan_seconds=0)
        plan, whole = planned(sequences, row_tokens)
        counts.append(len(sequences))
        times.append(construction)
        numbers = f"{construction:7.0f} ms, improved {whole:7.0f} ms, {len(plan.rows):6,d} rows"
        print(f"{len(sequences):8,d} leaves: {numbers}, bound {plan.row_bound:6,d}")
    print(f"milliseconds grow as leaves to the power of {np.polyfit(np.log(counts), np.log(times), 1)[0]:.2f}")


def rows(workloads: Any) -> None:
    """Rows over the bound, mean of 12 seeds."""
    print("family            asked  here    0.3 s   rule    tokens over bound")
    for name, family in workloads.FAMILIES.items():
        ratios: dict[str, list[float]] = {"here": [], "longer": [], "rule": [], "tokens": []}
        for seed in range(12):
            sequences, row_tokens = family(seed)
            plan = plan_rows(sequences, row_tokens)
            longer = plan_rows(sequences, row_tokens, plan_seconds=0.3)
            ratios["here"].append(len(plan.rows) / plan.row_bound)
            ratios["longer"].append(len(longer.rows) / plan.row_bound)
            ratios["rule"].append(len(published_rows(sequences, row_tokens)[0]) / plan.row_bound)
            ratios["tokens"].append(plan.packed_tokens / plan.token_bound)
        mean = {key: statistics.mean(values) for key, values in ratios.items()}
        measured = "  ".join(f"{mean[key]:.4f}" for key in ("here", "longer", "rule", "tokens"))
        print(f"{name:17s} {TARGETS[name]:.3f}  {measured}")


def exact(workloads: Any) -> None:
    """Small cases solved by CP-SAT: how much of the distance is slack in the bound."""
    cases = {
        "groups_32k": lambda s: workloads._groups(s, 6, 8, 2_048, 1_500, 1_500, 32_768),
        "agent_trees": lambda s: workloads.agent_trees(s, groups=3, turns=5),
        "long_documents": lambda s: first_documents(workloads.long_documents(s), 9),
        "preference_pairs": lambda s: first_documents(workloads.preference_pairs(s), 20),
    }
    print("family            seeds  rows here  fewest  bound  (sums; fewest* where not proven in 20 s)")
    for name, make in cases.items():
        here, fewest, bound, proven = 0, 0, 0, True
        for seed in range(4):
            sequences, row_tokens = make(seed)
            plan = plan_rows(sequences, row_tokens)
            best, is_proven = fewest_rows(sequences, row_tokens, len(plan.rows))
            here, fewest, bound = here + len(plan.rows), fewest + best, bound + plan.row_bound
            proven &= is_proven
        print(f"{name:17s} {4:5d} {here:10d} {fewest:7d}{' ' if proven else '*'} {bound:5d}")


def first_documents(batch: tuple[list[Any], int], count: int) -> tuple[list[Any], int]:
    """The sequences of the first documents or prompts of a batch."""
    sequences, row_tokens = batch
    starts = [tokens[:16].tobytes() for tokens in sequences]
    chosen = set(list(dict.fromkeys(starts))[:count])
    return [tokens for tokens, start in zip(sequences, starts, strict=True) if start in chosen], row_tokens


def fewest_rows(sequences: Sequence[Any], row_tokens: int, known: int) -> tuple[int, bool]:
    """The fewest rows of any packing, and whether that was proven; `known` rows are enough."""
    from ortools.sat.python import cp_model

    tree = build_prefix_tree(as_batch(sequences))
    bound, fewest = packing_bounds(tree, row_tokens)[0], known
    for count in range(known - 1, bound - 1, -1):
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds, solver.parameters.num_workers = 20, 2
        status = solver.solve(exact_rows.rows_model(tree, row_tokens, count))
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return fewest, status == cp_model.INFEASIBLE
        fewest = count
    return fewest, True


def interleaved(workloads: Any) -> None:
    """The bad case of best fit decreasing."""
    sequences, row_tokens = workloads.interleaved_setups()
    paths = published_rule.walk(sequences, [len(s) for s in sequences], 1)
    rule = published_rule.place(paths, [list(range(len(paths)))], row_tokens)
    plan, milliseconds = planned(sequences, row_tokens, min_shared_tokens=1)
    print(f"rule {len(rule)} rows, here {len(plan.rows)} in {milliseconds:.0f} ms, bound {plan.row_bound}")


def rollouts(_: Any) -> None:
    """Real rollouts, as they stand and as one sequence per assistant turn."""
    data = np.load(SHARED / "data" / "airline_rollouts.npz")
    sequences = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])
    trainable = np.split(np.unpackbits(data["trainable"])[: len(data["tokens"])], np.cumsum(data["lengths"])[:-1])
    turns = [s[:end] for s, mask in zip(sequences, trainable, strict=True) for end in turn_ends(mask)]
    for name, batch in (("as they stand", sequences), ("per assistant turn", turns)):
        for row_tokens in (16_384, 32_768, 131_072):
            plan, milliseconds = planned(batch, row_tokens)
            print(f"{name:18s} {len(batch):6,d} sequences, rows of {row_tokens:7,d}: {len(plan.rows):3d} rows, bound "
                  f"{plan.row_bound:3d}, {plan.input_tokens:10,d} tokens in, {plan.packed_tokens:8,d} computed, "
                  f"{milliseconds:4.0f} ms")  # fmt: skip


def turn_ends(mask: Any) -> list[int]:
    """One past the last token of every run of trainable tokens."""
    return (np.flatnonzero(np.diff(np.append(mask, 0).astype(np.int8)) == -1) + 1).tolist()


def arrival(workloads: Any) -> None:
    """Rows that are given out while sequences still arrive, against a plan of all at once."""
    print("family            arrival   rows waiting  rows (early)  all at once  ms per sequence")
    for name in ("groups_32k", "agent_trees", "long_documents"):
        sequences, row_tokens = workloads.FAMILIES[name](0)
        at_once = len(plan_rows(sequences, row_tokens).rows)
        for order in ("in order", "shuffled"):
            ids = np.arange(len(sequences))
            ids = np.random.default_rng(0).permutation(ids) if order == "shuffled" else ids
            for waiting in (2, 8, 32):
                planner, began, found = Planner(row_tokens, rows_waiting=waiting), time.perf_counter(), []
                for i in ids:
                    found += planner.add(sequences[i])
                early = len(found)
                found += planner.flush()
                each = 1000 * (time.perf_counter() - began) / len(sequences)
                print(f"{name:17s} {order:9s} {waiting:12d} {len(found):6d} ({early:3d}) {at_once:11d} {each:12.2f}")


SECTIONS = {
    "published": published, "speed": speed, "growth": growth, "rows": rows, "exact": exact,
    "interleaved": interleaved, "rollouts": rollouts, "arrival": arrival,
}  # fmt: skip


def main() -> None:
    """Prints the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    chosen = parser.parse_args().sections or list(SECTIONS)
    unknown = sorted(set(chosen) - set(SECTIONS))
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    import workloads

    for name in chosen:
        print(f"\n== {name}: {SECTIONS[name].__doc__}")
        SECTIONS[name](workloads)


if __name__ == "__main__":
    main()
