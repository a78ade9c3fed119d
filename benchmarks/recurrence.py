"""Recurrent ops over a tree against the same functions of transformers, sequence by sequence, on one CPU thread.

    python benchmarks/recurrence.py                    # all sections
    python benchmarks/recurrence.py speed conv depth   # some of them
    python benchmarks/recurrence.py depth --plot depth.svg

Forward and backward, float32, medians of rounds in turn of processor time. Both sides keep the memory that they free,
as under a caching allocator: else the system clears the tree's large tensors anew, which can take as long as the rest.

`speed`: 8,192 packed tokens, 4 heads. `ratio` is the time over the tree by the time of all sequences alone; `tokens` is
packed tokens by tokens of all sequences, which the ratio should not be above: `over_tokens`, the one by the other, is 1
or less where a token in the tree takes no longer than one alone. Where the function of transformers goes token by
token, one or two sequences alone are measured, and scaled up to all by their tokens.
`conv`: the compiled convolution over a tree by a plain F.conv1d over as many tokens in one sequence; at most 1.5.
`depth`: 8,192 tokens as one chain of segments at depth 1, 4, 16, 64, each with leaves beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers.timing import keep_freed_memory, seconds_in_turn
from torch import Tensor

from tree_compile.runtime.causal_convolution import causal_convolution
from tree_compile.runtime.linear_recurrence import delta_rule, state_space_scan
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.row import Row
from tree_compile.runtime.row_tree import RowTree, tree_of_segments
from tree_compile.runtime.selective_scan import selective_scan

HEADS, TOKENS = 4, 8_192
WIDTHS = (64, 128)
CONV_TARGET = 1.5
Spec = tuple[int, list["Spec"]]
Step = Callable[[], None]
Inputs = dict[str, Tensor]


def forests() -> dict[str, list[Spec]]:
    """The trees that the target is stated for."""
    return {
        "2048 -> 12 x 512": [(2048, [(512, [])] * 12)],
        "2048 -> 4 x (512 -> 8 x 128)": [(2048, [(512, [(128, [])] * 8)] * 4)],
        "256 -> 64 x (40 -> 3 x 28)": [(256, [(40, [(28, [])] * 3)] * 64)],
    }


def row_of(forest: list[Spec]) -> Row:
    """A row of random sequences that form the tree."""
    generator, sequences = torch.Generator().manual_seed(0), []
    stack: list[tuple[Spec, list[int]]] = [(spec, []) for spec in forest]
    while stack:
        (length, children), above = stack.pop()
        tokens = above + torch.randint(1 << 30, (length,), generator=generator).tolist()
        stack += [(child, tokens) for child in children]
        if not children:
            sequences.append(tokens)
    (row,) = plan_rows(sequences, min_shared_tokens=1).rows
    return row


def tree_of(row: Row) -> RowTree:
    """The row's tree as ops read it."""
    return tree_of_segments(row.segments, row.parent)


def paths_of(row: Row) -> list[Tensor]:
    """Row indices of every sequence."""
    return [torch.from_numpy(row.path(i)) for i in row.sequence_ids]


@dataclass(frozen=True)
class Op:
    """An op over trees, and the function of transformers that it stands for.

    Attributes:
        name: as printed.
        tree: takes inputs and the tree.
        alone: takes inputs of one sequence.
        inputs: makes the inputs of so many tokens for one width, tokens in dimension 1.
        most: so many sequences alone are measured, and scaled up to all by their tokens; None for all.
    """

    name: str
    tree: Callable[[Inputs, RowTree], Tensor]
    alone: Callable[[Inputs], Tensor]
    inputs: Callable[[int, int], Inputs]
    most: int | None = None


def ops() -> Iterator[Op]:
    """Those whose function transformers has."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.mamba import modeling_mamba as mamba
    from transformers.models.mamba2 import modeling_mamba2 as mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    yield Op(
        "gated delta rule",
        lambda x, tree: delta_rule(**x, tree=tree, normalize=True)[0],
        lambda x: qwen.torch_chunk_gated_delta_rule(*x.values(), use_qk_l2norm_in_kernel=True)[0],
        lambda tokens, width: delta_inputs(tokens, width, channels=False),
    )
    yield Op(
        "kimi delta attention",
        lambda x, tree: delta_rule(**x, tree=tree, normalize=True)[0],
        lambda x: kimi.chunk_kimi_delta_attention(*x.values(), use_qk_l2norm_in_kernel=True)[0],
        lambda tokens, width: delta_inputs(tokens, width, channels=True),
        most=2,
    )
    yield Op(
        "state space scan",
        lambda x, tree: state_space_scan(**x, tree=tree)[0],
        lambda x: mamba2.mamba2_chunk_scan(*(x[name] for name in x if name != "skip"), 256, D=x["skip"]),
        space_inputs,
    )
    yield Op(
        "selective scan",
        lambda x, tree: selective_scan(**x, tree=tree)[0],
        lambda x: (
            mamba.mamba_selective_scan(
                x["values"].mT, x["step"].mT, x["rate"], x["write"].mT, x["read"].mT, x["skip"]
            ).mT
        ),
        selective_inputs,
        most=1,
    )


def delta_inputs(tokens: int, width: int, channels: bool) -> Inputs:
    """Query, key, value, decay and beta."""
    query, key, value = (torch.randn(1, tokens, HEADS, width) for _ in range(3))
    decay = -F.softplus(torch.randn(1, tokens, HEADS, width) if channels else torch.randn(1, tokens, HEADS))
    return {"query": query, "key": key, "value": value, "decay": decay, "beta": torch.randn(1, tokens, HEADS).sigmoid()}


def space_inputs(tokens: int, width: int) -> Inputs:
    """Inputs of Mamba-2, with a state as wide as the heads."""
    return {
        "values": torch.randn(1, tokens, HEADS, width),
        "step": F.softplus(torch.randn(1, tokens, HEADS)),
        "rate": -torch.rand(HEADS),
        "write": torch.randn(1, tokens, 1, width),
        "read": torch.randn(1, tokens, 1, width),
        "skip": torch.randn(HEADS),
    }


def selective_inputs(tokens: int, width: int) -> Inputs:
    """Inputs of Mamba with as many channels as all heads have, and 16 numbers of state for each."""
    channels = HEADS * width
    return {
        "values": torch.randn(1, tokens, channels),
        "step": F.softplus(torch.randn(1, tokens, channels)),
        "rate": -torch.rand(channels, 16),
        "write": torch.randn(1, tokens, 16),
        "read": torch.randn(1, tokens, 16),
        "skip": torch.randn(channels),
    }


def tree_step(op: Op, inputs: Inputs, row: Row) -> Step:
    """Forward and backward of the row."""
    leaves, tree = {name: value.requires_grad_() for name, value in inputs.items()}, tree_of(row)

    def step() -> None:
        out = op.tree(leaves, tree)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    return step


def alone_step(op: Op, inputs: Inputs, row: Row) -> Step:
    """Forward and backward of every sequence alone."""
    alone = []
    for path in paths_of(row)[: op.most]:
        parts = ((name, value.detach()) for name, value in inputs.items())
        alone.append(
            {name: (value[:, path] if value.dim() > 2 else value.clone()).requires_grad_() for name, value in parts}
        )

    def step() -> None:
        for leaves in alone:
            out = op.alone(leaves)
            torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))

    return step


def medians(steps: list[Step], rounds: int) -> list[float]:
    """Seconds of each."""
    return [statistics.median(taken) for taken in seconds_in_turn(steps, rounds)]


def speed(rounds: int) -> Iterator[dict[str, Any]]:
    """Every op on every tree, with heads of 64 and of 128."""
    for op in ops():
        for width in WIDTHS:
            for name, forest in forests().items():
                row = row_of(forest)
                inputs = op.inputs(len(row.tokens), width)
                tree, alone = medians([tree_step(op, inputs, row), alone_step(op, inputs, row)], rounds)
                lengths = [len(path) for path in paths_of(row)]
                alone *= sum(lengths) / sum(lengths[: op.most])
                tokens = len(row.tokens) / sum(lengths)
                yield {
                    "op": op.name, "width": width, "tree": name, "tree_ms": tree * 1e3, "alone_ms": alone * 1e3,
                    "ratio": tree / alone, "tokens": tokens, "over_tokens": tree / alone / tokens,
                }  # fmt: skip


def conv(rounds: int) -> Iterator[dict[str, Any]]:
    """The compiled convolution, 1,024 channels, 4 wide, with SiLU."""
    compiled = torch.compile(
        lambda x, weight, bias, tree: F.silu(causal_convolution(x, weight, bias, tree)), dynamic=True, fullgraph=True
    )
    for name, forest in forests().items():
        row = row_of(forest)
        tree, tokens = tree_of(row), len(row.tokens)
        leaves = [torch.randn(1, tokens, 1024), torch.randn(1024, 4), torch.randn(1024)]
        leaves = [leaf.requires_grad_() for leaf in leaves]

        def over_tree(leaves: list[Tensor] = leaves, tree: RowTree = tree) -> None:
            out = compiled(*leaves, tree)
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        def plain(leaves: list[Tensor] = leaves, tokens: int = tokens) -> None:
            values, weight, bias = leaves
            out = F.silu(F.conv1d(values.mT, weight[:, None], bias, padding=3, groups=1024)[..., :tokens])
            torch.autograd.grad(out, leaves, torch.ones_like(out))

        over, alone = medians([over_tree, plain], rounds)
        yield {
            "tree": name, "tree_ms": over * 1e3, "plain_ms": alone * 1e3,
            "ratio": over / alone, "at_most": CONV_TARGET,
        }  # fmt: skip


def depth(rounds: int) -> Iterator[dict[str, Any]]:
    """The gated delta rule on a trunk of so many segments, with as many tokens in leaves beside it."""
    op = next(ops())
    for levels in (1, 4, 16, 64):
        length = TOKENS // (2 * levels)
        spec: Spec = (length, [(length, [])])
        for _ in range(levels - 1):
            spec = (length, [spec, (length, [])])
        row = row_of([spec])
        inputs = op.inputs(len(row.tokens), 64)
        (over,) = medians([tree_step(op, inputs, row)], rounds)
        yield {"depth": levels, "segments": len(row.segments), "tokens": len(row.tokens), "tree_ms": over * 1e3}


def plot(results: list[dict[str, Any]]) -> str:
    """Milliseconds by depth as an SVG."""
    most = max(result["tree_ms"] for result in results)
    bars = []
    for place, result in enumerate(results):
        height = 200 * result["tree_ms"] / most
        left = 40 + 90 * place
        bars.append(f'<rect x="{left}" y="{220 - height:.1f}" width="60" height="{height:.1f}" fill="#4477aa"/>')
        bars.append(f'<text x="{left}" y="{215 - height:.1f}">{result["tree_ms"]:.0f} ms</text>')
        bars.append(f'<text x="{left}" y="236">depth {result["depth"]}</text>')
    body = "".join(bars)
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="420" height="250" font-size="12">{body}</svg>'


SECTIONS = {"speed": speed, "conv": conv, "depth": depth}


def shown(result: dict[str, Any]) -> str:
    """One line."""
    numbers = (
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in result.items()
    )
    return "  ".join(numbers)


def main() -> None:
    """Measure the sections that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--plot", type=Path, help="where the plot of `depth` is written")
    arguments = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for section in arguments.sections or SECTIONS:
        results = []
        for result in SECTIONS[section](arguments.rounds):
            results.append(result)
            print(json.dumps({"section": section} | result) if arguments.json else shown(result), flush=True)
        if section == "depth" and arguments.plot:
            arguments.plot.write_text(plot(results))


if __name__ == "__main__":
    main()
