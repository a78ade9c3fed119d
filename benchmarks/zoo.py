"""Every causal language model that transformers ships, exact or refused: python benchmarks/zoo.py.

For each model type: builds a tiny random model (float64 where the model allows it), compiles it with backend="eager",
and compares outputs and all gradients with the unpacked model on a random tree of 7 sequences, which are longer than
every window of the model. One line per model type, and a summary. Each model is built in a process of its own.

    python benchmarks/zoo.py                   all model types
    python benchmarks/zoo.py llama mixtral     these alone
    python benchmarks/zoo.py --json zoo.json   writes the results as well
    python benchmarks/zoo.py --page docs/models.md --json zoo.json --from-json   writes the table from a former run
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tree_compile import TreeCompileError, treecompile
from tree_compile.selfcheck import CheckReport
from tree_compile.tiny import tiny_model

SECONDS = 300
MEMORY = 8 << 30
FLOAT32_INSIDE = 1e-5
"""Greatest relative difference that layers computed in float32 inside of a float64 model explain; the tests, which
compute all of a model in float64, allow none."""

OUTCOMES = ("exact", "refused", "differs", "cannot be built", "takes too long", "crashes")


@dataclass(frozen=True)
class Result:
    """What became of one model type.

    Attributes:
        model_type: transformers' name of the architecture.
        outcome: one of OUTCOMES.
        output, gradient: greatest relative differences, where it ran.
        error: class of the error, its first line, and its reason.
        where: the line of the model that the error names.
        seconds: time that it took.
        dtype: in which it was compared.
    """

    model_type: str
    outcome: str
    output: float | None = None
    gradient: float | None = None
    dtype: str = ""
    error: str = ""
    why: str = ""
    where: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.model_type:28} {self.outcome:16} {self.seconds:5.1f}s"]
        if self.output is not None and self.gradient is not None:
            parts.append(f"outputs {self.output:.1e}, gradients {self.gradient:.1e} ({self.dtype})")
        parts += [text for text in (self.error, self.where, self.why) if text]
        return "  ".join(parts)


def model_types() -> list[str]:
    """All model types with a causal language model, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def examine(model_type: str) -> Result:
    """Builds one model and compares it with its tree model."""
    try:
        model = _build(model_type)
    except Exception as error:
        return Result(model_type, "cannot be built", error=_first_line(error))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager", self_check=False)
    try:
        report = tree_model.check(_sequences(model))
    except TreeCompileError as error:
        return _refusal(model_type, error)
    return _compared(model_type, dtype, report)


def _build(model_type: str) -> nn.Module:
    model = tiny_model(model_type).eval()
    for dtype in (torch.float64, torch.float32):
        model = model.to(dtype)
        _choose_experts(model)
        try:
            with torch.no_grad():
                model(torch.arange(12)[None] % 5 + 3, use_cache=False)
        except Exception:
            if dtype == torch.float32:
                raise
        else:
            return model
    raise AssertionError


def _choose_experts(model: Any) -> None:
    """Both ways that transformers has of computing experts in one product; `grouped_mm` has no float64."""
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        double = next(model.parameters()).dtype == torch.float64
        model.set_experts_implementation("batched_mm" if double else "grouped_mm")


def _sequences(model: nn.Module) -> list[list[int]]:
    """A tree of 7 sequences of 20 to 60 tokens that branches at five depths, with one that is a prefix of another."""
    draw = random.Random(0)
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    tokens = lambda count: [draw.randrange(3, min(rows, 100)) for _ in range(count)]  # noqa: E731
    trunk, left, right = tokens(17), tokens(9), tokens(14)
    first = trunk + left + tokens(21)
    return [
        first,
        trunk + left + tokens(5) + (deep := tokens(11)),
        trunk + left + tokens(5) + deep[:4] + tokens(13),
        trunk + right + tokens(24),
        trunk + right[:6] + tokens(7),
        first[:29],
        tokens(33),
    ]


def _refusal(model_type: str, error: TreeCompileError) -> Result:
    name = f"{type(error).__name__}: {error.what.splitlines()[0]}"
    where = f"{_short(str(error.where))} `{error.where.code}`" if error.where else ""
    return Result(model_type, "refused", error=name, why=error.why, where=where)


def _short(place: str) -> str:
    _, found, rest = place.rpartition("transformers/")
    return rest if found else place


def _compared(model_type: str, dtype: str, report: CheckReport) -> Result:
    output, gradient = report.greatest_output_difference, report.greatest_gradient_difference or 0.0
    allowed = FLOAT32_INSIDE if dtype == "float64" else report.tolerance
    # A gradient is a sum of more terms than an output.
    exact = output < allowed and gradient < 10 * allowed
    worst = "" if exact else f"worst parameter: {report.worst_parameter}"
    return Result(model_type, "exact" if exact else "differs", output, gradient, dtype, why=worst)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# One process for each model type


def examine_apart(model_type: str, seconds: float) -> Result:
    """As `examine`, in a process of its own that gets `seconds`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, model_type))
    began = time.perf_counter()
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(seconds) else Result(model_type, "takes too long")
    except EOFError:
        result = Result(model_type, "crashes", error="the process ended")
    process.kill()
    process.join()
    return replace(result, seconds=round(time.perf_counter() - began, 1))


def _send(sender: Connection, model_type: str) -> None:
    torch.set_num_threads(1)
    # torch.export prints the whole graph where a capture fails.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    try:
        sender.send(examine(model_type))
    except Exception as error:
        sender.send(_failure(model_type, error))


def _failure(model_type: str, error: Exception) -> Result:
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return Result(model_type, "cannot be built", error=f"it needs more than {MEMORY >> 30} GB")
    return Result(model_type, "crashes", error=_first_line(error), where=_last_frame(error))


def _last_frame(error: BaseException) -> str:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno}"


# Reports


def summary(results: Sequence[Result]) -> str:
    """How many model types had which outcome."""
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])


def page(results: Sequence[Result]) -> str:
    """The table of all model types as a page of the documentation."""
    from transformers import __version__

    rows = "\n".join(f"| `{r.model_type}` | {r.outcome} | {_remark(r)} |" for r in results)
    return _PAGE.format(version=__version__, summary=summary(results), rows=rows)


_PAGE = """# Models

Written by `python benchmarks/zoo.py --page docs/models.md`, with transformers {version}: a tiny random model of every
type that has a causal language model there, compared with its tree model, outputs and gradients of all parameters.

{summary}.

*exact*: equal up to rounding, with the greatest relative difference of outputs and of gradients. Where it is more than
1e-9 for a float64 model, a part of the model computes in float32. *refused*: `treecompile` raises the error that is
named, with the line of the model that it is about. Encoders such as BERT are built with `is_decoder=True`, without
which they are not causal. *cannot be built*: transformers does not build a model of that type
from its own configuration, or needs another package for it.

| model type | outcome | remark |
|---|---|---|
{rows}
"""


def _remark(result: Result) -> str:
    if result.outcome == "exact":
        return f"{result.output:.0e}, {result.gradient:.0e}, {result.dtype}"
    text = ". ".join(part.rstrip(".") for part in (result.error, result.why) if part)
    if result.where:
        text += f": {result.where}"
    return text.replace("|", "\\|").replace("\n", " ")


def _run(names: Sequence[str], seconds: float, file: Path | None) -> list[Result]:
    import transformers

    transformers.logging.set_verbosity_error()
    results = []
    for name in names:
        results.append(examine_apart(name, seconds))
        print(results[-1], flush=True)
        if file is not None:
            file.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return results


def main() -> None:
    """Runs the comparison and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all of them if left out")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for one model (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--from-json", action="store_true", help="read the results of a former run from that file")
    parser.add_argument("--page", type=Path, help="file for the table, in Markdown")
    options = parser.parse_args()
    if options.from_json:
        results = [Result(**entry) for entry in json.loads(options.json.read_text())]
    else:
        results = _run(options.model_types or model_types(), options.seconds, options.json)
    if options.page:
        options.page.write_text(page(results))
    print(summary(results))


if __name__ == "__main__":
    main()
