"""Computes tree attention by the kernels that torch.compile writes for a GPU, in the Triton interpreter on the CPU.

Run with TRITON_INTERPRET=1, which Triton reads when it is loaded. Prints one JSON object: for every case the greatest
relative differences of the output and the gradients of query, key, value and, where the case has them, sinks from those
of the dense definition in float64; in the case "mask of one sequence" the kernels take the tree for one.

It shows that the generated code of flex_attention, mask and scores included, computes what the definition says. It does
not show what the compiler for a GPU makes of that code: the rounding of tensor cores, and races, least of all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch._functorch.config
import torch._inductor.runtime.triton_heuristics as heuristics
import triton.language as tl
import triton.runtime.interpreter
from interpreter_loops import counted
from lowering import graph_of, on_gpu
from torch import Tensor
from torch._inductor.runtime.triton_helpers import libdevice
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import TensorHandle

from tests.runtime.attention_reference import tree_attention_reference
from tests.runtime.trees import Spec, random_forest, row_tensors, segment_table
from tree_compile.blocks import _inductor
from tree_compile.runtime.attention import tree_attention

CASES: dict[str, tuple[int, bool, dict[str, float]]] = {
    # query heads for one key head, whether they have sinks, options
    "tree": (1, False, {}),
    "window": (1, False, {"window": 40}),
    "softcap": (1, False, {"softcap": 1.5}),
    "grouped queries": (2, False, {}),
    "sinks": (2, True, {}),
}
WITH_A_FULL_TILE = [(140, [(130, []), (20, [])])]
"""Tokens 128 to 255 all see tokens 0 to 127. The interpreter takes seconds for every tile."""
WIDTH = 16
SCALE = 0.4
PADDING = 5
NAMES = ("query", "key", "value", "segments", "position", "subtree_end")
TRAINED = (*NAMES[:3], "sinks")

Row = dict[str, Tensor]
Attend = Callable[[Row], Tensor]
Compiled = Callable[..., tuple[Tensor, ...]]


def prepare_interpreter() -> None:
    """Runs kernels in the interpreter, on tensors of the CPU; what is not written to memory shows."""
    heuristics.CachingAutotuner.precompile = lambda *_, **__: None
    heuristics.CachingAutotuner.run = interpreted
    triton.runtime.interpreter.range = counted  # what `tl.range` of a reduction becomes there
    libdevice.tanh = tanh
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    ).fill_(float("nan"))


def interpreted(tuner: Any, *arguments: Any, stream: int) -> None:
    """Launches a kernel in its last configuration, which has the largest blocks, and the interpreter the fewest."""
    configuration, names = tuner.configs[-1], tuner.fn.arg_names
    tuner.fn.fn.__globals__["range"] = counted
    names = [name for name in names if name not in configuration.kwargs]
    values = dict(zip([*names, *tuner.inductor_meta.get("extra_launcher_args", ())], arguments, strict=True))
    grid = heuristics.GridExpr.from_meta(tuner.inductor_meta, configuration).eval_slow(values)
    tuner.fn[grid](*arguments[: len(names)], **configuration.kwargs)


def tanh(values: tl.tensor) -> tl.tensor:
    """That of CUDA's library, which the interpreter has no functions of."""
    return tl.tensor(TensorHandle(np.tanh(values.handle.data), values.handle.dtype), values.type)


def compiled_attention(heads: int, has_sinks: bool, options: dict[str, float]) -> Attend:
    """`tree_attention` as it is compiled for a GPU and any row."""
    made: list[tuple[Compiled, list[torch.fx.Node]]] = []

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        inputs = graph.graph.find_nodes(op="placeholder")
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            made.append((_inductor(graph, examples), inputs))
        return graph.forward

    torch._dynamo.reset()
    names = [*NAMES, "sinks"] if has_sinks else NAMES
    function = graph_of(tree_attention, names, scale=SCALE, **options)
    with FakeTensorMode():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=True)(*fake_inputs(heads, has_sinks))
    ((compiled, inputs),) = made
    return lambda row: compiled(*arguments_of(row, inputs))[0]


def fake_inputs(heads: int, has_sinks: bool) -> list[Tensor]:
    """Those of a row of some length."""
    trained = [on_gpu(1, count, 200, WIDTH, dtype=torch.float32, trained=True) for count in (heads, 1, 1)]
    tree = [torch.empty(9, 5, dtype=torch.int64), *(on_gpu(200, dtype=torch.int64) for _ in range(2))]
    return [*trained, *tree, *([on_gpu(heads, dtype=torch.float32, trained=True)] if has_sinks else [])]


def arguments_of(row: Row, inputs: Sequence[torch.fx.Node]) -> list[Any]:
    """What a compiled graph takes for a row: tensors, and the sizes that it has symbols for."""
    values: dict[str, Any] = {f"l_{name}_": tensor for name, tensor in row.items()}
    for node in inputs:
        if node.name in values:
            sizes = zip(node.meta["example_value"].shape, row[node.name[2:-1]].shape, strict=True)
            values |= {str(symbol): size for symbol, size in sizes}
    return [values[node.name] for node in inputs]


def row_of(forest: list[Spec], heads: int, has_sinks: bool) -> Row:
    """Random tensors for a tree, with padding behind it."""
    table = segment_table(forest)
    tokens = int(table[:, 2].max()) + PADDING
    made = [torch.randn(1, count, tokens, WIDTH) for count in (heads, 1, 1)]
    row = dict(zip(NAMES, [*made, table, *row_tensors(table, tokens)], strict=True))
    return row | {"sinks": torch.randn(heads)} if has_sinks else row


def with_causal_mask(row: Row) -> Row:
    """The same row as if it was one sequence."""
    tokens = row["query"].shape[2]
    table = torch.tensor([[0, tokens - PADDING, tokens - PADDING, -1, 0], [0] * 5])
    return row | dict(zip(NAMES[3:], [table, *row_tensors(table, tokens)], strict=True))


def results(attend: Attend, row: Row, dtype: torch.dtype, weight: Tensor) -> list[Tensor]:
    """The output, and the gradients of query, key, value and sinks."""
    leaves = {name: row[name].to(dtype).requires_grad_() for name in TRAINED if name in row}
    out = attend(row | leaves)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), weight.to(dtype))]


def differences(attend: Attend, row: Row, options: dict[str, float], expected_row: Row | None = None) -> list[float]:
    """Of every result, relative to the greatest number of the definition's."""

    def definition(row: Row) -> Tensor:
        tensors = (row[name] for name in NAMES[:4])
        return tree_attention_reference(*tensors, sinks=row.get("sinks"), scale=SCALE, **options)

    weight = torch.randn_like(row["query"])
    found = results(attend, row, torch.float32, weight)
    expected = results(definition, expected_row or row, torch.float64, weight)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


def compared() -> dict[str, list[float]]:
    """The differences in every case."""
    found = {}
    for seed, (name, (heads, has_sinks, options)) in enumerate(CASES.items()):
        attend, forest = compiled_attention(heads, has_sinks, options), random_forest(random.Random(seed), 150, 30)
        row = row_of(forest, heads, has_sinks)
        found[name] = differences(attend, row, options)
        if name == "tree":
            found["full tile"] = differences(attend, row_of(WITH_A_FULL_TILE, heads, has_sinks), options)
            found["mask of one sequence"] = differences(attend, with_causal_mask(row), options, row)
    return found


def main() -> None:
    """Compares every case."""
    torch.manual_seed(0)
    prepare_interpreter()
    print(json.dumps(compared()))


if __name__ == "__main__":
    main()
