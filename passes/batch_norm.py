"""Batch normalization is refused before anything else, since it also writes to its buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from tree_compile.errors import TokenMixingError
from tree_compile.passes.finding import Finding
from tree_compile.passes.nodes import arguments
from tree_compile.passes.source import source_line


@dataclass(frozen=True)
class RefuseBatchNorm:
    """Raises TokenMixingError where a batch normalization is in training mode."""

    name: str = field(default="batch norm", init=False)

    def __call__(self, graph_module: fx.GraphModule) -> tuple[Finding, ...]:
        for node in graph_module.graph.nodes:
            if "batch_norm" in str(node.target) and node.op == "call_function" and arguments(node).get("training"):
                raise TokenMixingError(
                    "BatchNorm in training mode normalizes over the tokens of the batch.",
                    where=source_line(node),
                    why="its statistics would count a shared token once, and mix all sequences of a row.",
                    hint="use LayerNorm or RMSNorm, or put the BatchNorm modules into eval mode.",
                )
        return ()
