"""Exactness and speed on a GPU: python benchmarks/gpu.py [SECTION ...], all sections if none is named.

Prints a table, and keeps benchmarks/results/gpu-NAME.json up to date with all results so far and the versions of what
takes part: an error is a result. The exit status is 1 where there is an error, a difference that rounding does not
explain, or a goal that is missed. Without a GPU it says so, and measures nothing. fla, tilelang and flash-attn take
part where they are installed.

`operators`: every operator over a small tree, in float32 and bfloat16, against float64 on the CPU. `difference` is the
greatest of any token in its output and in its gradients, relative to that token's numbers. Kernels of flash attention,
of fla and of TileLang are for half precision: in float32 there is no flash attention, the gated delta rule is computed
in chunks, and sparse attention gathers its keys. Nothing here uses TF32, which torch leaves off.

`speed`: forward and backward of a dense model in bfloat16 over four batches, with the log-probabilities of every
sequence. It has the shape of one of 1.7B parameters, and 2.0B with a head of its own. Without sharing, rows are packed
with whole sequences, and attention is one causal call of flash attention; over the tree it is flex_attention or flash
attention. Model and compiled code are the same, and blocks keep their inputs alone, in all of them.
`row_seconds` are medians of what every row takes, and `seconds` is their sum. `auto` is not run by itself: it is each
row in the way that `attention="auto"` takes for it, which `auto_takes_flash` tells. (That is empty where there is no
choice; all ways are flex_attention then.) `speed_up` is the time without sharing by that with it, `compression` is
tokens in by tokens computed, `eta` the one by the other.

`models`: `tree_model.check` of that dense model, of one with gated delta rules and experts, and of one with latent
attention and an indexer, all with random weights, against the unpacked model on the same GPU; bfloat16 is compiled,
float32 is not. `own_rounding` is the difference of the unpacked model's outputs from those in float64. As much is
allowed: experts and keys that are chosen by a hair may be others. In bfloat16 that is a lot; a rewrite that is wrong
shows in float32, and a kernel that is wrong in `operators`.

How long it takes on an H200 is an estimate, which no run has confirmed: 7 minutes. `speed` has 180 s of rows, from
14 GFLOP for a token (its layers three times, once more for what is computed again, and the head) at 500 TFLOP/s, and
1.0 MFLOP for a pair of tokens at 300 TFLOP/s; a way over a batch is timed three times, but not again after 8 s. Nearly
all of the rest is compiling, guessed from a CPU: 50 s for `speed`, 90 s for `operators`, 100 s for `models`. After
7 minutes nothing more is begun.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from helpers.gpu_exactness import ALLOWED, Case, cases, greatest_difference
from helpers.gpu_trees import Batch, batches
from numpy.typing import NDArray
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from tree_compile import Plan, Row, Sample, TreeModel, losses, plan_rows, treecompile
from tree_compile.comparison import GRADIENT_ROUNDING
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.models.hybrid import Hybrid, HybridConfig
from tree_compile.models.sparse_mla import SparseMLA, SparseMLAConfig
from tree_compile.passes.flash import FlashGraph
from tree_compile.selfcheck import CheckReport

KERNELS = ("flex", "flash")
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "fla-core", "tilelang", "flash-attn", "tree_compile")
ALONE = 1 << 40
"""More tokens than two sequences have in common."""
LATEST = 420.0
"""Seconds after which nothing more is begun."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A line of the results.

    Attributes:
        of: the two names that it begins with.
        run: finds the rest of it.
    """

    of: dict[str, str]
    run: Callable[[], Result]


@dataclass(frozen=True)
class Sizes:
    """What is measured; tests measure less.

    Attributes:
        dense: of the dense model.
        hybrid: of the model with gated delta rules and experts.
        sparse: of the model with an indexer.
        tree_tokens: of the tree that operators are compared on.
        shrink: lengths of the batches are divided by it.
        rounds: how often a way over a batch is timed at most.
        seconds: of timing, after which it is not timed again.
        backend: of `treecompile`, for bfloat16.
    """

    dense: DenseConfig
    hybrid: HybridConfig
    sparse: SparseMLAConfig
    tree_tokens: int
    shrink: int
    rounds: int
    seconds: float
    backend: str = "inductor"


FULL = Sizes(
    DenseConfig(vocab_size=151_936, width=2_048, layers=28, heads=16, kv_heads=8, hidden=6_144, rope_base=1e6),
    HybridConfig(
        vocab_size=151_936, width=2_048, layers=4, heads=8, kv_heads=1, key_heads=16, value_heads=32, head_width=128,
        experts=8, experts_per_token=2, hidden=512,
    ),
    SparseMLAConfig(
        vocab_size=129_280, width=2_048, layers=4, heads=128, latent=512, rotary=64, chosen=64, index_heads=64,
        index_width=128, hidden=6_144,
    ),
    tree_tokens=1_000,
    shrink=1,
    rounds=3,
    seconds=8.0,
)  # fmt: skip


def operators(device: torch.device, sizes: Sizes) -> Iterator[Task]:
    """Differences of every operator from float64."""
    torch.manual_seed(0)
    for case in cases(device, sizes.tree_tokens):
        for dtype in case.dtypes:
            yield Task({"operator": case.name, "dtype": _name(dtype)}, partial(_operator, case, device, dtype))
        _free(device)


def _operator(case: Case, device: torch.device, dtype: torch.dtype) -> Result:
    difference = greatest_difference(case, device, dtype)
    return {"difference": difference, "ok": difference <= ALLOWED[dtype]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def taking(kernels: str) -> Iterator[list[bool]]:
    """Computes rows by these kernels, where there is a choice.

    Gives a list that grows with every row for which there is one: whether "auto" would take flash attention.
    """
    asked: list[bool] = []
    estimated = FlashGraph.is_faster

    def is_faster(graph: FlashGraph, row: Row) -> bool:
        asked.append(estimated(graph, row))
        return kernels == "flash"

    with mock.patch.object(FlashGraph, "is_faster", is_faster):
        yield asked


def models(device: torch.device, sizes: Sizes) -> Iterator[Task]:
    """What `check` finds of every model over a batch of short sequences."""
    made: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: Dense(sizes.dense),
        "gated delta rules and experts": lambda: Hybrid(sizes.hybrid),
        "latent attention and indexer": lambda: SparseMLA(sizes.sparse),
    }
    for name, dtype in itertools.product(made, ALLOWED):
        # As `speed` times it; what it compiles once more is found in inductor's cache.
        keeps = keeping_inputs_alone() if name == "dense" else nullcontext()
        with keeps:
            yield Task({"model": name, "dtype": _name(dtype)}, partial(_model, device, made[name], dtype, sizes))
        _free(device)


def keeping_inputs_alone() -> AbstractContextManager[Any]:
    """Compiled blocks keep their inputs for the backward pass, and compute all else again."""
    return functorch_config.patch(activation_memory_budget=0.0)


def _model(device: torch.device, make: Callable[[], nn.Module], dtype: torch.dtype, sizes: Sizes) -> Result:
    """Differences of outputs and gradients; those by flash attention are None where there is no choice."""
    model = _on(device, make, dtype)
    # Compiling everything once more would take as long as all else, and round no less.
    backend = "eager" if dtype == torch.float32 else sizes.backend
    tree_model, sequences = treecompile(model, min_shared_tokens=1, backend=backend), _short_sequences()
    found: Result = {"parameters": sum(part.numel() for part in model.parameters())}
    reports = []
    for kernels in KERNELS:
        with taking(kernels) as asked:
            report = tree_model.check(sequences)
        has_choice = kernels == "flex" or bool(asked)
        found[f"{kernels}_outputs"] = report.greatest_output_difference if has_choice else None
        found[f"{kernels}_gradients"] = report.greatest_gradient_difference if has_choice else None
        reports.append(report)
    rounding = _own_rounding(model, sequences, device)
    return {**found, "own_rounding": rounding, "ok": all(_is_close(report, rounding) for report in reports)}


def _is_close(report: CheckReport, own_rounding: float) -> bool:
    allowed = max(report.tolerance, own_rounding)
    gradients = report.greatest_gradient_difference or 0.0
    return report.greatest_output_difference <= allowed and gradients <= GRADIENT_ROUNDING * allowed


def _short_sequences() -> list[NDArray[np.int64]]:
    """Six of 240 tokens, of which they share 128: longer than the lists of the indexer, which has to leave some out."""
    return batches(256, 32)[2].sequences[:6]


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


def speed(device: torch.device, sizes: Sizes) -> Iterator[Task]:
    """Every batch without sharing, and over its tree by either kernels and by those that "auto" takes."""
    model = _on(device, lambda: Dense(sizes.dense), torch.bfloat16)
    tree_model = treecompile(model, min_shared_tokens=1, backend=sizes.backend)
    with keeping_inputs_alone():
        yield Task({"batch": "short ones", "way": "compiling"}, partial(_compile, tree_model, sizes))
        for batch in batches(sizes.dense.vocab_size, sizes.shrink):
            yield from _ways(tree_model, batch, device, sizes)


def _compile(tree_model: TreeModel, sizes: Sizes) -> Result:
    """Computes rows of several lengths by either kernels: a second length may compile once more."""
    began = time.perf_counter()
    for batch, kernels in itertools.product(batches(sizes.dense.vocab_size, 64)[2:], KERNELS):
        with taking(kernels):
            for row in plan_rows([Sample(tokens) for tokens in batch.sequences], batch.row_tokens, 1).rows:
                _step(tree_model, row)
    return {"seconds": time.perf_counter() - began}


@dataclass(frozen=True)
class Timed:
    """What a way over a batch takes.

    Attributes:
        row_seconds: of every row, the median of all rounds.
        rounds: how many there were.
        peak: the most memory that it holds, in bytes; 0 on the CPU.
        takes_flash: for every row whether "auto" would take flash attention; none where there is no choice.
    """

    row_seconds: list[float]
    rounds: int
    peak: int
    takes_flash: list[bool]

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return sum(self.row_seconds)


def _ways(tree_model: TreeModel, batch: Batch, device: torch.device, sizes: Sizes) -> Iterator[Task]:
    samples = [Sample(tokens) for tokens in batch.sequences]
    tree, alone = (plan_rows(samples, batch.row_tokens, least) for least in (1, ALONE))
    found: dict[str, Timed] = {}

    def timed(way: str, plan: Plan, kernels: str) -> Result:
        found[way] = _timed(tree_model, plan.rows, kernels, device, sizes)
        return _compared(plan, found[way], found.get("alone")) | {"goal": None, "ok": None}

    def auto() -> Result:
        by_row = _by_row(found["flex"], found["flash"])
        return _compared(tree, by_row, found["alone"]) | _goal(batch, tree, by_row, found["alone"])

    for way, plan, kernels in (("alone", alone, "flash"), ("flex", tree, "flex"), ("flash", tree, "flash")):
        yield Task({"batch": batch.name, "way": way}, partial(timed, way, plan, kernels))
    yield Task({"batch": batch.name, "way": "auto"}, auto)


def _timed(tree_model: TreeModel, rows: Sequence[Row], kernels: str, device: torch.device, sizes: Sizes) -> Timed:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with taking(kernels) as asked:
        rounds = _rounds(tree_model, rows, device, sizes)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return Timed([statistics.median(row) for row in zip(*rounds, strict=True)], len(rounds), peak, asked[: len(rows)])


def _rounds(tree_model: TreeModel, rows: Sequence[Row], device: torch.device, sizes: Sizes) -> list[list[float]]:
    """Seconds of every row, round by round; one in which something was compiled does not count."""
    found: list[list[float]] = []
    began = time.perf_counter()
    for _ in range(sizes.rounds + 1):
        if len(found) == sizes.rounds or (found and time.perf_counter() - began > sizes.seconds):
            break
        tree_model.zero_grad()
        compiled = _compiled_graphs()
        seconds = [_seconds(partial(_step, tree_model, row), device) for row in rows]
        if _compiled_graphs() == compiled:
            found.append(seconds)
    if not found:
        raise RuntimeError("something was compiled in every round")
    return found


def _compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _step(tree_model: TreeModel, row: Row) -> None:
    """Forward and backward of a row; gradients are added to those of the rows before it."""
    losses.sft(tree_model(row), normaliser="per_token").backward()


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _by_row(flex: Timed, flash: Timed) -> Timed:
    """Each row in the way that "auto" takes."""
    takes_flash = flex.takes_flash or [False] * len(flex.row_seconds)
    chosen = [flash if by_flash else flex for by_flash in takes_flash]
    seconds = [way.row_seconds[place] for place, way in enumerate(chosen)]
    return Timed(seconds, min(way.rounds for way in chosen), max(way.peak for way in chosen), flex.takes_flash)


def _compared(plan: Plan, timed: Timed, alone: Timed | None) -> Result:
    """The figures of a way; those that compare it are None where there are none without sharing."""
    compression = plan.input_tokens / plan.packed_tokens
    speed_up = None if alone is None else alone.seconds / timed.seconds
    return {
        "rows": len(timed.row_seconds), "rounds": timed.rounds, "seconds": timed.seconds,
        "tokens_per_second": plan.input_tokens / timed.seconds, "peak_gb": timed.peak / 1e9,
        "compression": compression, "speed_up": speed_up, "eta": None if speed_up is None else speed_up / compression,
        "row_seconds": timed.row_seconds, "auto_takes_flash": timed.takes_flash,
    }  # fmt: skip


def _goal(batch: Batch, plan: Plan, timed: Timed, alone: Timed) -> Result:
    speed_up, compression = alone.seconds / timed.seconds, plan.input_tokens / plan.packed_tokens
    reached = speed_up if batch.goal_is_speed else speed_up / compression
    return {"goal": batch.goal, "ok": None if batch.goal is None else reached >= batch.goal}


SECTIONS: dict[str, Callable[[torch.device, Sizes], Iterator[Task]]] = {
    "operators": operators, "speed": speed, "models": models,
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


def measure(sections: Iterable[str], device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Result]]:
    """The results of every section, as they come."""
    latest = time.perf_counter() + LATEST
    for section in sections:
        for task in SECTIONS[section](device, sizes):
            yield section, {**task.of, **(_outcome(task) if time.perf_counter() < latest else _NOT_BEGUN)}
        _free(device)


_NOT_BEGUN = {"error": f"not begun: {LATEST:.0f} s were over"}


def _outcome(task: Task) -> Result:
    try:
        return task.run()
    except Exception as error:  # the others are still worth measuring
        found = f"{type(error).__name__}: {error}".splitlines()[0]
    gc.collect()  # what did not fit into memory
    return {"error": found}


def has_failed(result: Result) -> bool:
    """Whether it is an error, a difference, or a goal that was missed."""
    return "error" in result or result.get("ok") is False


def line(result: Result, shown: Result) -> str:
    """A line of the table: two names, then what fits into columns, which lists do not.

    Args:
        result: with the names of the columns.
        shown: what stands in them.
    """
    first, second, *others = result
    widths = {name: max(len(name), 8) + 2 for name in others if not isinstance(result[name], list)}
    columns = (f"{_short(shown[name]):>{width}}" for name, width in widths.items())
    return f"{shown[first]:<31}{shown[second]:<10}{''.join(columns)}"


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "NO"}[value]
    if isinstance(value, float) and abs(value) < 1_000:
        return f"{value:.3g}"
    return value if isinstance(value, str) else f"{value:,.0f}"


def main() -> int:
    """Runs the sections and writes their results; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections",
        nargs="*",
        choices=[[], *SECTIONS],
        metavar="SECTION",
        help=f"of {', '.join(SECTIONS)}; all if left out",
    )
    sections = parser.parse_args().sections or list(SECTIONS)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU; nothing was measured")
        return 0
    return write(measure(sections, torch.device("cuda"), FULL), torch.cuda.get_device_name())


def write(results: Iterable[tuple[str, Result]], gpu: str) -> int:
    """Prints results and writes them, each as it comes.

    Args:
        results: with the section of each.
        gpu: its name.

    Returns:
        The exit status: 1 where a result has failed.
    """
    RESULTS.mkdir(exist_ok=True)
    path, began, header = RESULTS / f"gpu-{gpu.replace(' ', '-').lower()}.json", time.perf_counter(), ""
    written: dict[str, Any] = {"gpu": gpu, "versions": versions()}
    failed = 0
    for section, result in results:
        header = _show(result, header)
        written.setdefault(section, []).append(result)
        failed += has_failed(result)
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - began:.0f} s, {failed} failed; written to {path}")
    return int(failed > 0)


def _show(result: Result, header: str) -> str:
    """Prints a result under its header, which is printed where it differs from the one before; gives that."""
    names = line(result, {name: name for name in result})
    if names != header and "error" not in result:
        print(f"\n{names}")
        header = names
    print(line(result, result), flush=True)
    return header


if __name__ == "__main__":
    sys.exit(main())
