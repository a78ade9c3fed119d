"""Exactness and speed on a GPU; by its arithmetic under 8 minutes on an H200, which no run has shown yet.

    python benchmarks/gpu.py            # all sections
    python benchmarks/gpu.py operators  # one of them

Prints a line for each result, and writes benchmarks/results/gpu-NAME.json with the versions of all that takes part.
Without a GPU it says so, and measures nothing. fla, tilelang and flash-attn take part where they are installed.

`operators`: every operator over a small tree, in float32 (without TF32) and bfloat16, against float64 on the CPU: the
greatest difference of its output and of its gradients, relative to the greatest number of each.
`models`: `tree_model.check` of a dense model of 1.7B parameters, of one with gated delta rules and experts, and of one
with latent attention and an indexer, all with random weights: against the unpacked model on the same GPU, in both
precisions. `own_rounding` is the difference of the unpacked model's outputs from those in float64: experts and keys
that are chosen by a hair may be others.
`speed`: forward and backward of the dense model in bfloat16 over four batches, with the log-probabilities of every
sequence, against the same without sharing: packed rows of whole sequences, one causal call of flash attention for all.
Blocks keep their inputs alone in both. `speed_up` is the time without sharing by that with it, `compression` is tokens
in by tokens computed, `eta` the one by the other.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.gpu_exactness import cases, greatest_difference
from helpers.gpu_trees import Batch, batches
from numpy.typing import NDArray
from torch import nn
from torch._functorch import config as functorch_config

from tree_compile import Plan, Row, Sample, TreeModel, losses, plan_rows, treecompile
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.models.hybrid import Hybrid, HybridConfig
from tree_compile.models.sparse_mla import SparseMLA, SparseMLAConfig

DTYPES = (torch.float32, torch.bfloat16)
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "fla-core", "tilelang", "flash-attn", "tree_compile")
ALONE = 1 << 40
"""More tokens than two sequences have in common."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured; tests measure less.

    Attributes:
        dense: of the dense model.
        hybrid: of the model with gated delta rules and experts.
        sparse: of the model with an indexer.
        tree_tokens: of the tree that operators are compared on.
        shrink: lengths of the batches are divided by it.
        rounds: steps that are timed of each batch, after two rows that compile.
        backend: of `treecompile`.
    """

    dense: DenseConfig
    hybrid: HybridConfig
    sparse: SparseMLAConfig
    tree_tokens: int
    shrink: int
    rounds: int
    backend: str = "inductor"


FULL = Sizes(
    DenseConfig(vocab_size=151_936, width=2_048, layers=28, heads=16, kv_heads=8, hidden=6_144, rope_base=1e6),
    HybridConfig(
        vocab_size=151_936, width=2_048, layers=8, heads=8, kv_heads=1, key_heads=16, value_heads=32, head_width=128,
        experts=32, experts_per_token=8, hidden=512,
    ),
    SparseMLAConfig(
        vocab_size=129_280, width=2_048, layers=4, heads=32, latent=512, rotary=64, chosen=64, index_heads=64,
        index_width=128, hidden=6_144,
    ),
    tree_tokens=700,
    shrink=1,
    rounds=1,
)  # fmt: skip


def operators(device: torch.device, sizes: Sizes) -> Iterator[Result]:
    """Differences of every operator from float64."""
    for case in cases(device, sizes.tree_tokens):
        differences = {str(dtype)[6:]: _difference(case, device, dtype) for dtype in DTYPES}
        yield {"operator": case.name, **differences}


def _difference(case: Any, device: torch.device, dtype: torch.dtype) -> float | str:
    try:
        return greatest_difference(case, device, dtype)
    except Exception as error:  # the others are still worth measuring
        return f"{type(error).__name__}: {error}".splitlines()[0]


def models(device: torch.device, sizes: Sizes) -> Iterator[Result]:
    """What `check` finds of every model over a batch of short sequences."""
    made: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: Dense(sizes.dense),
        "gated delta rules and experts": lambda: Hybrid(sizes.hybrid),
        "latent attention and indexer": lambda: SparseMLA(sizes.sparse),
    }
    sequences = batches(256, 32)[2].sequences[:6]
    for name, dtype in itertools.product(made, DTYPES):
        model = _on(device, made[name], dtype)
        report = treecompile(model, min_shared_tokens=1, backend=sizes.backend).check(sequences)
        yield {
            "model": name, "dtype": str(dtype)[6:], "parameters": sum(part.numel() for part in model.parameters()),
            "outputs": report.greatest_output_difference, "gradients": report.greatest_gradient_difference,
            "own_rounding": _own_rounding(model, sequences, device),
        }  # fmt: skip
        del model
        _free(device)


@torch.no_grad()
def _own_rounding(model: nn.Module, sequences: Sequence[NDArray[np.int64]], device: torch.device) -> float:
    """The greatest difference of the outputs from those in float64, where `model` is left, by the greatest of them."""
    ids = [torch.from_numpy(tokens)[None].to(device) for tokens in sequences]
    found = [model(tokens).double() for tokens in ids]
    model.double()
    expected = [model(tokens) for tokens in ids]
    gaps = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(gaps).max())


def _on(device: torch.device, make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with device:
        return make().to(dtype)


def _free(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def speed(device: torch.device, sizes: Sizes) -> Iterator[Result]:
    """Both ways for every batch."""
    model = _on(device, lambda: Dense(sizes.dense), torch.bfloat16)
    shared = treecompile(model, min_shared_tokens=1, backend=sizes.backend)
    alone = treecompile(model, min_shared_tokens=ALONE, backend=sizes.backend, attention="flash")
    with functorch_config.patch(activation_memory_budget=0.0):
        for batch in batches(sizes.dense.vocab_size, sizes.shrink):
            samples = [Sample(tokens) for tokens in batch.sequences]
            plans = [plan_rows(samples, batch.row_tokens, least) for least in (1, ALONE)]
            ways = [_measured(tree, plan, device, sizes) for tree, plan in zip((shared, alone), plans, strict=True)]
            yield _compared(batch, plans, ways)


def _measured(tree_model: TreeModel, plan: Plan, device: torch.device, sizes: Sizes) -> Result:
    """Seconds of a step, as the median, and the most memory that it holds, in bytes."""
    _step(tree_model, [*plan.rows, *plan.rows][:2])  # a second length compiles once more
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [_seconds(lambda: _step(tree_model, plan.rows), device) for _ in range(sizes.rounds)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"seconds": statistics.median(seconds), "peak_bytes": peak, "rows": len(plan.rows)}


def _step(tree_model: TreeModel, rows: Sequence[Row]) -> None:
    """Row by row, gradients added up."""
    tree_model.zero_grad()
    for row in rows:
        losses.sft(tree_model(row), normaliser="per_token").backward()


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _compared(batch: Batch, plans: list[Plan], ways: list[Result]) -> Result:
    shared, alone = ways
    speed_up, compression = alone["seconds"] / shared["seconds"], plans[0].input_tokens / plans[0].packed_tokens
    reached = speed_up if batch.goal_is_speed else speed_up / compression
    return {
        "batch": batch.name, "tokens": plans[0].input_tokens, "compression": compression, "speed_up": speed_up,
        "eta": speed_up / compression, "tokens_per_second": plans[0].input_tokens / shared["seconds"],
        "tree": shared, "without_sharing": alone, "goal": batch.goal,
        "goal_reached": None if batch.goal is None else reached >= batch.goal,
    }  # fmt: skip


SECTIONS: dict[str, Callable[[torch.device, Sizes], Iterator[Result]]] = {
    "operators": operators, "models": models, "speed": speed,
}  # fmt: skip


def versions() -> dict[str, str | None]:
    """Of the packages that take part; None for one that is not installed."""
    found: dict[str, str | None] = {"cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def measure(sections: list[str], device: torch.device, sizes: Sizes) -> Mapping[str, Any]:
    """Prints the results of every section as they come, and gives all of them."""
    found: dict[str, Any] = {}
    for section in sections:
        found[section] = []
        for result in SECTIONS[section](device, sizes):
            print(section, *(f" {name} {_short(value)}" for name, value in result.items()), flush=True)
            found[section].append(result)
        _free(device)
    return found


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Runs the sections and writes their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="all if left out")
    sections = parser.parse_args().sections or list(SECTIONS)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU; nothing was measured")
        return
    began, name = time.perf_counter(), torch.cuda.get_device_name()
    results = measure(sections, torch.device("cuda"), FULL)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu-{name.replace(' ', '-').lower()}.json"
    path.write_text(json.dumps({"gpu": name, "versions": versions(), **results}, indent=2) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - began:.0f} s; written to {path}")


if __name__ == "__main__":
    main()
