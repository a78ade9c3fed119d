"""One training step on real rollouts, on the tree and unpacked.

    python benchmarks/training.py            # the rollouts of ../shared/data
    python benchmarks/training.py --rounds 5 --backend inductor

Prints the speed-up beside the ideal, tokens in / tokens computed, as the median of rounds in turn on one thread;
a first round, in which both models compile, is left out.
The step is forward, next-token loss of every sequence, backward and an AdamW step. Both models keep the memory that
they free, as under a caching allocator: else the system clears every large tensor's pages anew, which can take as long
as the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from helpers.timing import keep_freed_memory, seconds_in_turn
from torch import Tensor, nn

from tree_compile import treecompile
from tree_compile.models.dense import Dense, DenseConfig

ROLLOUTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "airline_rollouts.npz"


def rollouts(path: Path, tasks: int, trials: int) -> list[np.ndarray]:
    """Token ids of the first `trials` trials of the first `tasks` tasks."""
    data = np.load(path)
    starts = np.concatenate([[0], np.cumsum(data["lengths"])])
    chosen = np.flatnonzero((data["task"] < tasks) & (data["trial"] < trials))
    return [data["tokens"][starts[i] : starts[i + 1]].astype(np.int64) for i in chosen]


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Sum over the tokens of one sequence."""
    return F.cross_entropy(logits[:-1], tokens[1:], reduction="sum")


def unpacked_step(model: nn.Module, sequences: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Sequence by sequence, gradients accumulated."""
    optimizer.zero_grad()
    count, total = sum(len(tokens) - 1 for tokens in sequences), 0.0
    for tokens in sequences:
        loss = next_token_loss(model(tokens[None])[0], tokens) / count
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total


def tree_step(tree_model: nn.Module, sequences: list[Tensor], optimizer: torch.optim.Optimizer) -> float:
    """Row by row, gradients accumulated; planning is part of the step."""
    optimizer.zero_grad()
    count, total = sum(len(tokens) - 1 for tokens in sequences), 0.0
    for row in tree_model.plan(sequences).rows:
        out = tree_model(row)
        loss = sum(next_token_loss(out.logits[i], sequences[i]) for i in row.sequence_ids) / count
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    return total


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=Path, default=ROLLOUTS)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=16_384, help="0 for one row; that takes 20 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sequences = [torch.from_numpy(tokens) for tokens in rollouts(options.rollouts, options.tasks, options.trials)]
    config = DenseConfig(vocab_size=4096, width=256, layers=4, heads=4, kv_heads=4, hidden=1024)
    model, twin = Dense(config), Dense(config)
    twin.load_state_dict(model.state_dict())
    tree_model = treecompile(model, options.row_tokens or None, backend=options.backend)
    plan = tree_model.plan(sequences)
    unpacked = torch.compile(twin, dynamic=True) if options.backend == "inductor" else twin
    optimizers = {
        "tree": torch.optim.AdamW(model.parameters(), 1e-3),
        "unpacked": torch.optim.AdamW(twin.parameters(), 1e-3),
    }
    losses: dict[str, float] = {}

    def over_tree() -> None:
        losses["tree"] = tree_step(tree_model, sequences, optimizers["tree"])

    def alone() -> None:
        losses["unpacked"] = unpacked_step(unpacked, sequences, optimizers["unpacked"])

    times = seconds_in_turn([over_tree, alone], options.rounds, time.perf_counter)
    report(options, plan, dict(zip(("tree", "unpacked"), times, strict=True)), losses)


def report(options: argparse.Namespace, plan: object, times: dict[str, list[float]], losses: dict[str, float]) -> None:
    """Prints the figures of a run."""
    median = {name: statistics.median(values) for name, values in times.items()}
    speedup = statistics.median(u / t for u, t in zip(times["unpacked"], times["tree"], strict=True))
    ideal = plan.input_tokens / plan.packed_tokens
    figures = {
        "backend": options.backend, "rounds": options.rounds, "tokens_in": plan.input_tokens,
        "tokens_computed": plan.packed_tokens, "rows": len(plan.rows), "seconds_tree": median["tree"],
        "seconds_unpacked": median["unpacked"], "speedup": speedup, "ideal": ideal, "share_of_ideal": speedup / ideal,
        "loss_tree": losses["tree"], "loss_unpacked": losses["unpacked"],
    }  # fmt: skip
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:20s} {value:,.4f}" if isinstance(value, float) else f"{name:20s} {value}")


if __name__ == "__main__":
    main()
