"""The command line: `treecompile demo`, `check`, `explain` and `pack`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tree_compile.errors import TreeCompileError
from tree_compile.runtime.options import ATTENTION, DEMO_ROW_TOKENS, MIN_SHARED_TOKENS, OBJECTIVES, PLAN_SECONDS

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from tree_compile.demo import DemoReport
    from tree_compile.grpo_demo import GrpoReport
    from tree_compile.rollouts import Tokenizer

__all__ = ["main"]

_FAILED, _WRONG, _INTERRUPTED = 1, 2, 130
_TARGET_HELP = "module:factory, a function that returns an nn.Module; or an architecture in transformers, such as llama"
_ROLLOUTS_HELP = 'JSON lines with "tokens" or "messages", or a .npz or .parquet file of token ids'
_TOKENIZER_HELP = "tokenizers JSON; bytes if left out"
_DEMO_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: the words after the program's name; those of the process if None.

    Returns:
        The exit status: 0; 1 where a comparison found a difference, or the output was closed before its end; 2 after an
        error; 130 after Ctrl-C.

    Raises:
        SystemExit: after `--help` and `--version`, with status 0, and for words that make no command, with status 2.
    """
    options = _options(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough of it; the interpreter must not complain when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        else:
            _say_error(error)
        return _WRONG


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The words as options of their command, whose usage is shown where one is unknown."""
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _say_error(error: Exception) -> None:
    text = str(error) if isinstance(error, TreeCompileError) else f"{type(error).__name__}: {error}"
    print(f"treecompile: error: {text}", file=sys.stderr)
    if not isinstance(error, TreeCompileError):
        print("  try: --traceback shows where it was raised", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    from tree_compile import __version__

    parser = argparse.ArgumentParser(prog="treecompile", description="Computes every shared token prefix once.")
    parser.add_argument("--version", action="version", version=f"treecompile {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--traceback", action="store_true", help="show where an error was raised")
    _add_demo(commands, common)
    _add_check(commands, common)
    _add_explain(commands, common)
    _add_pack(commands, common)
    return parser


def _add_demo(commands: Any, common: argparse.ArgumentParser) -> None:
    text = "Trains a small model on rollouts, on rows of shared prefixes and unpacked, and compares both."
    demo = commands.add_parser("demo", parents=[common], help="train a small model both ways", description=text)
    demo.add_argument("--rollouts", type=Path, metavar="FILE", help=f"{_ROLLOUTS_HELP}; bundled ones if left out")
    demo.add_argument("--tokenizer", type=Path, metavar="FILE", help=_TOKENIZER_HELP)
    demo.add_argument("--steps", type=_at_least(2), metavar="N", help="training steps (default: 3; with --grpo 300)")
    help_text = f"most tokens in a row (default: {DEMO_ROW_TOKENS})"
    demo.add_argument("--row-tokens", type=_at_least(1), metavar="N", help=help_text)
    help_text = (
        "instead, train a small model on rewards for its own samples; takes none of the options above but --steps"
    )
    demo.add_argument("--grpo", action="store_true", help=help_text)
    help_text = "with --grpo: also draw rewards and tokens as a PNG (needs matplotlib)"
    demo.add_argument("--plot", type=Path, metavar="OUT", help=help_text)
    demo.set_defaults(run=_demo, parser=demo)


def _add_check(commands: Any, common: argparse.ArgumentParser) -> None:
    text = "Compares outputs and gradients with those of the unpacked model."
    check = commands.add_parser("check", parents=[common], help="compare a model with itself", description=text)
    check.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    check.add_argument("--rollouts", type=Path, metavar="FILE", help=f"{_ROLLOUTS_HELP}; a random tree if left out")
    check.add_argument("--tokenizer", type=Path, metavar="FILE", help=_TOKENIZER_HELP)
    help_text = "inductor (default), or eager: without compiling, which takes minutes for some models"
    check.add_argument("--backend", choices=("inductor", "eager"), default="inductor", help=help_text)
    _add_attention(check)
    check.set_defaults(run=_check, parser=check)


def _add_explain(commands: Any, common: argparse.ArgumentParser) -> None:
    text = "Says what each part of a model that mixes tokens becomes."
    explain = commands.add_parser("explain", parents=[common], help="say what a model becomes", description=text)
    explain.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    _add_attention(explain)
    explain.set_defaults(run=_explain, parser=explain)


def _add_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--attention", choices=ATTENTION, default="auto", help="what computes it on CUDA: docs/gpu.md")


def _add_pack(commands: Any, common: argparse.ArgumentParser) -> None:
    text = "Plans the rows of a file of sequences, and shows them."
    pack = commands.add_parser("pack", parents=[common], help="plan the rows of a file", description=text)
    pack.add_argument("file", type=Path, metavar="FILE", help=_ROLLOUTS_HELP)
    pack.add_argument("--row-tokens", type=_at_least(1), metavar="N", help="most tokens in a row; one row if left out")
    help_text = f"shared segments with fewer tokens are copied (default: {MIN_SHARED_TOKENS})"
    pack.add_argument("--min-shared-tokens", type=_at_least(1), default=MIN_SHARED_TOKENS, metavar="N", help=help_text)
    help_text = "what there should be few of (default: rows)"
    pack.add_argument("--objective", choices=OBJECTIVES, default="rows", help=help_text)
    help_text = f"how long rows are improved (default: {PLAN_SECONDS})"
    pack.add_argument("--plan-seconds", type=_seconds, default=PLAN_SECONDS, metavar="S", help=help_text)
    pack.add_argument("--tokenizer", type=Path, metavar="FILE", help=_TOKENIZER_HELP)
    pack.add_argument("--html", type=Path, metavar="OUT", help="also write the plan as a page for the browser")
    pack.add_argument("--save", type=Path, metavar="OUT", help="also write the plan, which Plan.load reads")
    pack.set_defaults(run=_pack, parser=pack)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _demo(options: argparse.Namespace) -> int:
    if options.grpo:
        return _grpo_demo(options)
    from tree_compile.demo import run_demo
    from tree_compile.rollouts import BUNDLED, read_rollouts

    if options.plot:
        options.parser.error("--plot is of --grpo alone")
    tokenizer = _tokenizer(options)
    rollouts = read_rollouts(options.rollouts or BUNDLED, tokenizer)
    vocabulary = max(tokenizer.vocabulary, *(int(rollout.tokens.max()) + 1 for rollout in rollouts))
    with _progress() as progress:
        report = run_demo(rollouts, vocabulary, options.steps or _DEMO_STEPS, options.row_tokens, progress)
    if options.json:
        _print_json(dataclasses.asdict(report) | {name: getattr(report, name) for name in _DERIVED})
    else:
        _print_tables(_demo_table(report), _loss_table(report))
    return 0 if report.ok else _FAILED


_DERIVED = ("speed_up", "ideal_speed_up", "ok")


def _grpo_demo(options: argparse.Namespace) -> int:
    import torch

    from tree_compile.grpo_demo import STEPS, plot, run_grpo_demo
    from tree_compile.pack import check_output

    if options.rollouts or options.tokenizer or options.row_tokens:
        options.parser.error("--grpo makes its own samples: it takes no --rollouts, --tokenizer or --row-tokens")
    if options.plot:
        check_output(options.plot)
        if importlib.util.find_spec("matplotlib") is None:
            options.parser.error("--plot needs matplotlib: pip install matplotlib")
    torch.set_num_threads(1)  # in a model this small several threads wait for each other
    with _progress() as progress:
        report = run_grpo_demo(options.steps or STEPS, progress)
    if options.json:
        _print_json(dataclasses.asdict(report) | {name: getattr(report, name) for name in _GRPO_DERIVED})
    else:
        _print_tables(_grpo_table(report))
    if options.plot:
        plot(report, options.plot)
    return 0 if report.ok else _FAILED


_GRPO_DERIVED = ("first_reward", "last_reward", "tokens_saved", "ok")


def _check(options: argparse.Namespace) -> int:
    from tree_compile.api import treecompile
    from tree_compile.rollouts import read_rollouts
    from tree_compile.stages import narrated
    from tree_compile.targets import load_target

    tokenizer = _tokenizer(options)
    sequences = None
    if options.rollouts:
        sequences = [rollout.tokens for rollout in read_rollouts(options.rollouts, tokenizer)]
    with _progress() as progress, narrated(progress, f"check {options.target}"):
        settings = {"vocab_size": tokenizer.vocabulary} if sequences else {}
        model = load_target(options.target, **settings)
        report = treecompile(model, backend=options.backend, attention=options.attention).check(sequences)
    if options.json:
        _print_json(dataclasses.asdict(report) | {"gradient_tolerance": report.gradient_tolerance, "ok": report.ok})
    else:
        print(report)
    return 0 if report.ok else _FAILED


def _explain(options: argparse.Namespace) -> int:
    from tree_compile.api import treecompile
    from tree_compile.stages import narrated
    from tree_compile.targets import load_target

    with _progress() as progress, narrated(progress, f"explain {options.target}"):
        model = load_target(options.target)
        explanation = treecompile(model, backend="eager", attention=options.attention).explain()
    if options.json:
        _print_json(dataclasses.asdict(explanation))
    else:
        print(explanation)
    return 0


def _pack(options: argparse.Namespace) -> int:
    from tree_compile.pack import check_output, pack_file

    for path in filter(None, (options.save, options.html)):
        check_output(path)
    report = pack_file(
        options.file,
        _tokenizer(options),
        row_tokens=options.row_tokens,
        min_shared_tokens=options.min_shared_tokens,
        objective=options.objective,
        plan_seconds=options.plan_seconds,
    )
    if options.save:
        report.plan.save(options.save)
    if options.html:
        options.html.write_text(report.plan.to_html(), encoding="utf-8")
    if options.json:
        _print_json(report.numbers())
    else:
        print(report)
    return 0


def _tokenizer(options: argparse.Namespace) -> Tokenizer:
    from tree_compile.rollouts import byte_tokenizer, file_tokenizer

    return file_tokenizer(options.tokenizer) if options.tokenizer else byte_tokenizer()


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from tree_compile.stages import Stages

    console = Console(stderr=True)
    if not console.is_terminal:
        return Stages(console=console)
    return Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_tables(*tables: Table) -> None:
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)


def _demo_table(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table(title=f"{report.sequences} rollouts, a decoder of {report.parameters:,} parameters")
    for column in ("", "unpacked", "tree"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("tokens in", f"{report.input_tokens:,}", f"{report.input_tokens:,}")
    table.add_row("tokens computed", f"{report.input_tokens:,}", f"{report.packed_tokens:,}")
    table.add_row("forward passes (rows)", f"{report.sequences}", f"{report.rows} (at least {report.row_bound})")
    table.add_row("time per step", f"{report.unpacked_seconds:.2f} s", f"{report.packed_seconds:.2f} s")
    table.add_row("speed-up", "", f"{report.speed_up:.2f}")
    table.add_row("speed-up, ideal by tokens", "", f"{report.ideal_speed_up:.2f}")
    table.add_row("compiling, once", "", f"{report.compile_seconds:.1f} s")
    table.add_row("greatest difference of logits", "", f"{report.logit_difference:.1e}")
    table.add_row("greatest difference of gradients", "", f"{report.gradient_difference:.1e}")
    verdict = "equal" if report.ok else "NOT EQUAL"
    table.caption = f"{verdict} within {report.tolerance:.0e} of the greatest value"
    if report.is_above_ideal:
        table.caption += (
            "\nthe speed-up is above the ideal: the machine was busy with something else, or the sequences are so "
        )
        table.caption += "short that calls cost more than tokens"
    return table


def _grpo_table(report: GrpoReport) -> Table:
    from rich.table import Table

    table = Table(title=f"GRPO, {len(report.rewards)} steps on a model's own samples", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("mean reward, first step", f"{report.first_reward:.2f}")
    table.add_row("mean reward, last steps", f"{report.last_reward:.2f}")
    table.add_row("tokens of all samples", f"{sum(report.unpacked_tokens):,}")
    table.add_row("tokens computed", f"{sum(report.packed_tokens):,}")
    table.add_row("tokens of samples per token computed", f"{report.tokens_saved:.1f}")
    table.add_row("greatest difference of the first step's gradients", f"{report.gradient_difference:.1e}")
    table.caption = report.verdict
    return table


def _loss_table(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table(title="loss at each step")
    for column in ("step", "unpacked", "tree"):
        table.add_column(column, justify="right")
    for step, (unpacked, packed) in enumerate(zip(report.unpacked_losses, report.packed_losses, strict=True), start=1):
        table.add_row(str(step), f"{unpacked:.5f}", f"{packed:.5f}")
    return table
