"""tree_attention as an op: schema, fake results, export, compilation, checkpointing, memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.runtime.trees import random_forest, row_tensors, segment_table
from tree_compile.runtime.attention import tree_attention

OP = torch.ops.tree_compile.tree_attention.default


def row(tokens: int, seed: int = 0, longest: int = 20) -> tuple[Tensor, ...]:
    """query, key, value, segments, position, subtree_end of a random tree."""
    generator = torch.Generator().manual_seed(seed)
    table = segment_table(random_forest(random.Random(seed), tokens, longest))
    length = int(table[:, 2].max())
    shapes = [(1, 6, length, 8), (1, 2, length, 8), (1, 2, length, 4)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    return *inputs, table, *row_tensors(table, length)


def arguments(**changes: object) -> list[object]:
    query, key, value, table, _, _ = row(40)
    values: dict[str, object] = {"query": query, "key": key, "value": value, "segments": table, "sinks": None}
    values |= {"key_bias": None, "pair_bias": None, "scale": 0.3, "window": 0, "chunk": 0, "softcap": 0.0}
    return list((values | changes).values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sinks": torch.randn(6, dtype=torch.float64, requires_grad=True)},
        {"window": 5, "chunk": 9, "softcap": 2.0, "key_bias": torch.zeros(1, 46, dtype=torch.float64)},
    ],
    ids=["plain", "sinks", "all"],
)
def test_op_passes_the_library_checks(changes: dict[str, object]) -> None:
    if "key_bias" in changes:
        changes = changes | {"key_bias": torch.zeros(1, row(40)[0].shape[2], dtype=torch.float64)}
    torch.library.opcheck(OP, tuple(arguments(**changes)))


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_results_have_the_strides_and_dtypes_of_real_ones(layout: str, dtype: torch.dtype) -> None:
    values = arguments(sinks=torch.randn(6, dtype=torch.float64))
    for index in (0, 1, 2, 4):
        values[index] = values[index].detach().to(dtype)
    if layout == "tokens_first":
        values[:3] = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in values[:3]]
    out, lse = OP(*values)
    backward_values = [torch.randn_like(out), *values[:3], out, lse, *values[3:]]
    backward = torch.ops.tree_compile.tree_attention_backward.default
    real = [out, lse, *backward(*backward_values)]
    with torch._subclasses.FakeTensorMode() as mode:
        faked = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in values]
        faked_back = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in backward_values]
        fake = [*OP(*faked), *backward(*faked_back)]
    for left, right in zip(real, fake, strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)


@pytest.mark.parametrize("options", [{}, {"window": 7, "softcap": 2.0}], ids=str)
def test_compiled_graph_serves_new_trees_and_lengths(options: dict[str, object]) -> None:
    def model(query: Tensor, *rest: Tensor) -> Tensor:
        out = tree_attention(2 * query, *rest, scale=0.3, **options)
        return out.transpose(1, 2).flatten(2).sin().sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    compiled(*row(40, seed=100))
    compiled(*row(300, seed=101))
    compilations = counter.frame_count
    for seed, tokens in enumerate((3, 70, 500, 41, 130)):
        inputs = row(tokens, seed)
        found, expected = compiled(*inputs), model(*inputs)
        gradients = torch.autograd.grad(found, inputs[:3])
        for left, right in zip(gradients, torch.autograd.grad(expected, inputs[:3]), strict=True):
            assert torch.equal(left, right)
        assert torch.equal(found, expected)
    assert counter.frame_count == compilations


def test_export_keeps_the_op_and_its_backward() -> None:
    class Model(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return tree_attention(*inputs, scale=0.3).sin().sum()

    inputs = row(40)
    exported = torch.export.export(Model(), inputs, strict=False)
    assert [node.target for node in exported.graph.nodes].count(OP) == 1
    found = torch.autograd.grad(exported.module()(*inputs), inputs[:3])
    expected = torch.autograd.grad(Model()(*inputs), inputs[:3])
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointed_attention_has_the_same_gradients(compiled: bool) -> None:
    def layer(*inputs: Tensor) -> Tensor:
        return tree_attention(inputs[0].sin(), *inputs[1:], scale=0.3, window=30).sum()

    def saved(*inputs: Tensor) -> Tensor:
        return checkpoint(layer, *inputs, use_reentrant=False)

    inputs = row(60)
    function = torch.compile(saved, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else saved
    found = torch.autograd.grad(function(*inputs), inputs[:3])
    expected = torch.autograd.grad(layer(*inputs), inputs[:3])
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left, right)


def test_inputs_are_not_written_to() -> None:
    values = arguments(sinks=torch.randn(6, dtype=torch.float64, requires_grad=True), window=3)
    before = [value.clone() if isinstance(value, Tensor) else value for value in values]
    out, _ = OP(*values)
    grad = torch.randn_like(out)
    upper = grad.clone()
    torch.autograd.grad(out, [*values[:3], values[4]], grad)
    assert torch.equal(grad, upper)
    for value, copy in zip(values, before, strict=True):
        assert torch.equal(value, copy) if isinstance(value, Tensor) else value == copy


def test_second_derivative_is_refused() -> None:
    inputs = row(20)
    out = tree_attention(*inputs, scale=0.3)
    (first,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        torch.autograd.grad(first.sum(), inputs[:1])


def test_memory_stays_far_below_the_square_of_the_row() -> None:
    tokens, steps = 32_768, [{}, {"window": 512}]
    arguments = [str(tokens), *(json.dumps(options) for options in steps)]
    command = [sys.executable, "-m", "tests.runtime.attention_memory", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    # Not even one bit for each pair of rows.
    assert int(result.stdout) < tokens * tokens // 8
