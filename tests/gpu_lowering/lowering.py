"""Lowers functions of tensors on a pretended GPU, forward and backward, and compiles their Triton kernels for it.

It shows that AOTAutograd and inductor lower what the product calls, with a row length that is known only when it runs;
that Triton and ptxas make a binary for sm_90 of every kernel; and how much shared memory that binary asks for. It does
not show what a GPU computes, the rounding of tensor cores, races, or any time: no kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.runtime.triton_heuristics as heuristics
from pretended_gpu import DEVICE
from torch import Tensor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tree_compile.blocks import _inductor

__all__ = ["Inputs", "Lowered", "graph_of", "lowered", "lowered_as_traced", "on_gpu"]

Inputs = Callable[[int], Sequence[Tensor]]
"""Makes the inputs of a row from its number of tokens."""


@dataclass
class Kernel:
    """A Triton kernel.

    Attributes:
        name: as inductor calls it.
        is_backward: whether it belongs to a backward pass.
        shared_bytes: what its first configuration that compiles asks of the shared memory of a block.
        binary_bytes: size of its binary; 0 where none compiles.
        errors: those of the configurations before it.
    """

    name: str
    is_backward: bool
    shared_bytes: int = 0
    binary_bytes: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class Lowered:
    """What a function became.

    Attributes:
        kernels: in the order in which they were made.
        compilations: of the function, for all of its rows.
        inputs: of its last graph, sizes among them.
    """

    kernels: list[Kernel] = field(default_factory=list)
    compilations: int = 0
    inputs: list[str] = field(default_factory=list)


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = False) -> Tensor:
    """A fake tensor on the pretended GPU."""
    return torch.empty(*shape, dtype=dtype, device=DEVICE, requires_grad=trained)


def graph_of(function: Callable[..., Any], tensors: Sequence[str], **options: float) -> torch.fx.GraphModule:
    """A graph that calls a function with tensors; its options are literals there, as in those of the product."""
    graph = torch.fx.Graph()
    arguments = {name: graph.placeholder(name) for name in tensors}
    graph.output(graph.call_function(function, (), arguments | options))
    return torch.fx.GraphModule({}, graph)


def lowered(function: Callable[..., Tensor], inputs: Inputs, rows: Sequence[int]) -> dict[str, Any]:
    """Compiles a function as the product compiles blocks, for rows of some lengths one after the other."""
    found = Lowered()

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
            _inductor(graph, examples)
        found.compilations += 1
        found.inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        # Its outputs are fake, too, and a launch would not make them.
        return graph.forward

    torch._dynamo.reset()
    _collect_kernels(found.kernels)
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for tokens in rows:
        with FakeTensorMode():
            compiled(*inputs(tokens))
    return asdict(found)


def lowered_as_traced(step: Callable[..., Any], inputs: Inputs, tokens: int) -> dict[str, Any]:
    """Compiles all operations that a function runs for one row, those of its own backward pass among them."""
    found = Lowered(compilations=1)
    _collect_kernels(found.kernels)
    with FakeTensorMode():
        made = inputs(tokens)
        # What writes in place is made functional, as inductor expects: for others it has stand-ins at best.
        traced = torch.func.functionalize(make_fx(step)(*made))
        graph = make_fx(traced, decomposition_table=select_decomp_table())(*made)
        found.inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        compile_fx_inner(graph, made)
    return asdict(found)


def _collect_kernels(kernels: list[Kernel]) -> None:
    heuristics.CachingAutotuner.precompile = lambda tuner, *_, **__: kernels.append(_compiled(tuner))


def _compiled(tuner: Any) -> Kernel:
    kernel = Kernel(tuner.fn.__name__, V.graph.is_backward)
    for configuration in tuner.configs:
        try:
            made = tuner._precompile_config(configuration).kernel
        except Exception as error:  # as inductor goes on with the others
            kernel.errors.append(f"{type(error).__name__}: {error}"[:300])
        else:
            kernel.shared_bytes, kernel.binary_bytes = made.metadata.shared, len(made.asm["cubin"])
            break
    return kernel
