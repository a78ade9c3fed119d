"""A rewritten graph -> the same with kernels of flash attention, where they can compute what it has."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from tree_compile.errors import KernelError
from tree_compile.passes.autocast import AUTOCAST_OFF
from tree_compile.passes.source import source_line
from tree_compile.runtime.attention import dtype_in_autocast, tree_attention
from tree_compile.runtime.attention_score import Score
from tree_compile.runtime.block_mask import tile_of
from tree_compile.runtime.flash_choice import flash_is_faster
from tree_compile.runtime.flash_forms import AttentionForm, Reason, is_cuda, why_not_flash
from tree_compile.runtime.row import Row

__all__ = ["FlashGraph", "KernelsOfGraph", "flash_graph", "kernels_of"]

_OPTIONS = frozenset(Score._fields) - {"scale"}


@dataclass(frozen=True)
class FlashGraph:
    """A graph that calls kernels of flash attention.

    Attributes:
        graph_module: the graph, with the parameters of the one that it was made from.
        heads: query heads of the first attention that is by these kernels.
        tile: rows of a tile of flex_attention in its place.
    """

    graph_module: fx.GraphModule
    heads: int
    tile: int

    def is_faster(self, row: Row) -> bool:
        """Whether the row is estimated to be faster with it than with flex_attention."""
        return flash_is_faster(row.segments, row.length + row.padding, self.heads, self.tile)


def flash_graph(graph_module: fx.GraphModule, require_all: bool) -> FlashGraph | None:
    """The graph with kernels of flash attention; None where it has no attention on CUDA that they can compute.

    Args:
        graph_module: a rewritten graph, which stays as it is.
        require_all: refuse a graph that has an attention that they cannot compute.

    Raises:
        KernelError: it has one, and `require_all` is True.
    """
    graph = copy.deepcopy(graph_module.graph)
    reasons = {node: why_not_flash(_form(node)) for node in _on_cuda(graph)}
    able = [node for node, reason in reasons.items() if reason is None]
    if require_all:
        _require_none(reasons)
    if not able:
        return None
    for node in able:
        node.kwargs = {**node.kwargs, "kernels": "flash"}
    heads, width = (int(_operand(able[0], 0).shape[dim]) for dim in (1, 3))
    made = fx.GraphModule(graph_module, graph, class_name=type(graph_module).__name__)
    return FlashGraph(made, heads, tile_of(width))


class KernelsOfGraph(NamedTuple):
    """What computes the attentions of a graph that are on CUDA.

    Attributes:
        flash: how many are by kernels of flash attention.
        flex: how many are by flex_attention.
        reasons: why flash attention cannot compute some of these, each once.
    """

    flash: int
    flex: int
    reasons: tuple[str, ...]


def kernels_of(graph_module: fx.GraphModule) -> KernelsOfGraph:
    """What computes the attentions of a rewritten graph."""
    nodes = _on_cuda(graph_module.graph)
    flex = [node for node in nodes if node.kwargs.get("kernels") != "flash"]
    found = [why_not_flash(_form(node)) for node in flex]
    reasons = dict.fromkeys(reason.why for reason in found if reason is not None)
    return KernelsOfGraph(len(nodes) - len(flex), len(flex), tuple(reasons))


def _on_cuda(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if _is_attention(node) and is_cuda(_operand(node, 0).device)]


def _is_attention(node: fx.Node) -> bool:
    return getattr(node.target, "__wrapped__", node.target) is tree_attention


def _operand(node: fx.Node, place: int) -> torch.Tensor:
    """What is known of query (0), key (1) or value (2)."""
    # A call with autocast switched off has the type of device before them.
    operands: Sequence[Any] = node.args[-6:]
    value: torch.Tensor = operands[place].meta["val"]
    return value


def _require_none(reasons: Mapping[fx.Node, Reason | None]) -> None:
    """Refuses the first attention with a reason."""
    for node, reason in reasons.items():
        if reason is not None:
            raise KernelError(
                "The kernels of flash attention cannot compute this attention.",
                where=source_line(node),
                why=f"{reason.why}.",
                hint=reason.hint,
            )


def _form(node: fx.Node) -> AttentionForm:
    query, value = _operand(node, 0), _operand(node, 2)
    width = max(int(query.shape[3]), int(value.shape[3]))
    return AttentionForm(query.device, _dtype(node, query), width, _OPTIONS & node.kwargs.keys())


def _dtype(node: fx.Node, query: torch.Tensor) -> torch.dtype:
    """What attention computes in: the dtype of autocast, unless the model has that off there."""
    return query.dtype if AUTOCAST_OFF in node.meta else dtype_in_autocast(query)
