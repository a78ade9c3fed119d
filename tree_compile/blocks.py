"""Splits a rewritten graph at the model's decoder blocks, which share compiled code where they are alike."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from tree_compile.errors import LostGradientError
from tree_compile.heads import ProgramHead
from tree_compile.passes.draws import draws
from tree_compile.passes.head import Head
from tree_compile.passes.mixers import runs_kernels
from tree_compile.passes.shapes import is_size, is_tensor, shape_of, size_expression, token_symbol
from tree_compile.patches import replaced
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.mixers import MIXERS

Function = Callable[..., tuple[Any, ...]]
_LOG = logging.getLogger(__name__)
_INDEXED = re.compile(r"^(?P<list>.*?[^.\d][^.]*)\.(?P<index>\d+)$")


@dataclass(frozen=True)
class Section:
    """A run of nodes of the graph that is called as one function.

    Attributes:
        graph: takes the attributes, then the inputs; returns a tuple.
        attributes: paths of the parameters and buffers that it takes.
        inputs: names of the values of the whole graph that it takes.
        outputs: names of the values that it returns.
    """

    graph: fx.Graph
    attributes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Block(nn.Module):
    """One section with its own parameters and buffers; a place to wrap with `checkpoint` or `fully_shard`."""

    def __init__(self, function: Function, section: Section, source: fx.GraphModule) -> None:
        super().__init__()
        self.function = function
        self._names = [f"tensor_{place}" for place in range(len(section.attributes))]
        for name, path in zip(self._names, section.attributes, strict=True):
            _register(self, name, attrgetter(path)(source))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Calls the section's function on its own attributes and `inputs`."""
        return self.function(*self.attributes(), *inputs)

    def attributes(self) -> list[Tensor]:
        """Its parameters and buffers, in the order in which the function takes them."""
        return [getattr(self, name) for name in self._names]


class Blocks(nn.Module):
    """A rewritten graph as a chain of blocks: inputs of the graph -> its outputs, and what its head takes.

    With a head, the last block is that head, which `forward` leaves out.

    Attributes:
        blocks: all of them.
        head: where the last one is the head; None without one.
        distinct: how many have code of their own.
    """

    def __init__(
        self, graph_module: fx.GraphModule, compiler: Callable[[fx.GraphModule], Function], head: Head | None = None
    ) -> None:
        super().__init__()
        sections = split(graph_module.graph, head)
        self._input_names = [str(node.target) for node in graph_module.graph.nodes if node.op == "placeholder"]
        taken = sections[-1].inputs if head is not None else ()
        results = [node.name for node in _output_nodes(graph_module.graph) if head is None or node is not head.logits]
        self._output_names = [*results, *taken]
        self._wiring = [(section.inputs, section.outputs) for section in sections]
        self._done = _done_with(self._wiring, set(self._output_names))
        functions: dict[Hashable, Function] = {}
        self.blocks = nn.ModuleList()
        for section in sections:
            form = canonical(section.graph)
            if form not in functions:
                functions[form] = compiler(_module_of(section))
            self.blocks.append(Block(functions[form], section, graph_module))
        self.distinct = len(functions)
        self.head: ProgramHead | None = None
        if head is not None:
            plain, compiled_head = Block(_module_of(sections[-1]), sections[-1], graph_module), self.blocks[-1]
            assert isinstance(compiled_head, Block)
            is_batched = len(shape_of(head.hidden)) == 3, len(shape_of(head.logits)) == 3
            vocabulary, dtype = int(shape_of(head.logits)[-1]), head.logits.meta["val"].dtype
            self.head = ProgramHead(compiled_head, plain, taken.index(head.hidden.name), is_batched, vocabulary, dtype)

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:
        """Runs the blocks in order, but for a head; values that no later block takes are let go.

        Returns:
            The outputs of the graph; with a head, those without the logits, and then the arguments of the head.
        """
        values = dict(zip(self._input_names, inputs, strict=True))
        count = len(self.blocks) - (self.head is not None)
        for block, (names, outputs), done in zip(self.blocks[:count], self._wiring, self._done, strict=False):
            values.update(zip(outputs, block(*(values[name] for name in names)), strict=True))
            for name in done:
                del values[name]
        return tuple(values[name] for name in self._output_names)


def _module_of(section: Section) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), section.graph, class_name="Section")


def _done_with(wiring: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], kept: set[str]) -> list[list[str]]:
    """For every block the values that no later one takes."""
    last_use = {name: place for place, (names, _) in enumerate(wiring) for name in names}
    return [
        [name for name in names if last_use[name] == place and name not in kept]
        for place, (names, _) in enumerate(wiring)
    ]


def split(graph: fx.Graph, head: Head | None = None) -> list[Section]:
    """The sections of a graph: what comes before the decoder blocks, every block, what comes after, the head."""
    of_head = [] if head is None else list(head.nodes)
    outside = set(graph.nodes).difference(of_head)
    labels = _labels([node for node in graph.nodes if node.op == "call_function" and node in outside])
    runs: list[tuple[str, list[fx.Node]]] = []
    for node, label in labels.items():
        if not runs or runs[-1][0] != label:
            runs.append((label, []))
        runs[-1][1].append(node)
    results = set(_output_nodes(graph))
    return [
        _section(graph, nodes, results) for nodes in [*(nodes for _, nodes in runs), *([of_head] if of_head else [])]
    ]


def _labels(body: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """The decoder block of every operation, "" for none; helpers between two blocks go with the first."""
    own = {node: _block_path(node) for node in body}
    lists = Counter(path.rpartition(".")[0] for path in own.values() if path)
    wanted = lists.most_common(1)[0][0] if lists else None
    own = {node: path if path.rpartition(".")[0] == wanted else "" for node, path in own.items()}
    last = max((place for place, node in enumerate(body) if own[node]), default=-1)
    labels: dict[fx.Node, str] = {}
    current = ""
    for place, node in enumerate(body):
        current = own[node] or (current if place < last else "")
        labels[node] = current
    return labels


def _block_path(node: fx.Node) -> str:
    """Path of the outermost module of a list that the node was captured in."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if _INDEXED.match(path):
            return str(path)
    return ""


def _output_nodes(graph: fx.Graph) -> list[fx.Node]:
    results: Any = graph.output_node().args[0]
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _section(graph: fx.Graph, nodes: Sequence[fx.Node], results: set[fx.Node]) -> Section:
    inside = set(nodes)
    taken = [
        source for source in dict.fromkeys(s for node in nodes for s in node.all_input_nodes) if source not in inside
    ]
    attributes = [source for source in taken if source.op == "get_attr"]
    inputs = [source for source in taken if source.op != "get_attr"]
    outputs = [node for node in nodes if node in results or any(user not in inside for user in node.users)]
    section, copies = fx.Graph(), {}
    for place, source in enumerate((*attributes, *inputs)):
        copies[source] = section.placeholder(f"{'weight' if source.op == 'get_attr' else 'value'}_{place}")
        copies[source].meta = dict(source.meta)
    inputs = _derive_sizes(graph, section, copies, inputs)
    for node in nodes:
        copies[node] = section.node_copy(node, lambda source: copies[source])
    section.output(tuple(copies[node] for node in outputs))
    names = tuple(str(s.target) if s.op == "placeholder" else s.name for s in inputs)
    return Section(section, tuple(str(a.target) for a in attributes), names, tuple(o.name for o in outputs))


def _derive_sizes(
    graph: fx.Graph, section: fx.Graph, copies: dict[fx.Node, fx.Node], inputs: list[fx.Node]
) -> list[fx.Node]:
    """A section reads T off a tensor that it takes anyway, so that no number crosses between sections."""
    symbol = token_symbol(graph)
    sizes = [node for node in inputs if is_size(node) and size_expression(node.meta["val"]) == symbol]
    carrier = _carrier(inputs, symbol)
    if carrier is None:
        return inputs
    for node in sizes:
        placeholder = copies[node]
        copies[node] = section.call_function(torch.ops.aten.sym_size.int, (copies[carrier[0]], carrier[1]))
        section.erase_node(placeholder)
    return [node for node in inputs if node not in sizes]


def _carrier(inputs: list[fx.Node], symbol: Any) -> tuple[fx.Node, int] | None:
    """An input of the section, and its dimension of size T."""
    for node in inputs:
        if node.op == "call_function" and is_tensor(node):
            for dim, size in enumerate(shape_of(node)):
                if size_expression(size) == symbol:
                    return node, dim
    return None


def canonical(graph: fx.Graph) -> Hashable:
    """A graph as data that is equal for graphs that differ in names only."""
    places: dict[fx.Node, int] = {}
    rows = []
    for node in graph.nodes:
        places[node] = len(places)
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: f"%{places[source]}")
        rows.append((node.op, str(node.target) if node.op == "call_function" else "", repr(arguments)))
    return tuple(rows)


def _register(module: nn.Module, name: str, tensor: Any) -> None:
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor, persistent=False)


def compiled(section: fx.GraphModule) -> Function:
    """Compiles a section for any number of tokens; kernels of recurrent layers run between compiled parts."""
    function = torch.compile(section, backend=_inductor, dynamic=True, fullgraph=not _runs_kernels(section.graph))
    return _without_budget(function) if any(map(draws, section.graph.nodes)) else function


def _without_budget(function: Function) -> Function:
    """A compiled function that draws random numbers; torch draws others where it computes activations again."""

    def run(*inputs: Any) -> tuple[Any, ...]:
        from torch._functorch import config

        if config.activation_memory_budget < 1:
            raise LostGradientError(
                "The model draws random numbers, and torch._functorch.config.activation_memory_budget is "
                f"{config.activation_memory_budget}.",
                why="what is computed again in the backward pass may draw others: gradients of another dropout.",
                hint="set the budget to 1, or dropout to 0.",
            )
        return function(*inputs)

    return run


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Sequences of a row share what is saved for a backward pass, so the pass of one must leave it to the others."""
    from torch._functorch import config
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
    from torch._inductor.compile_fx import compile_fx

    _LOG.info("compiling %s", count_of(len(graph.graph.nodes), "operation"))
    fill_in = ViewAndMutationMeta.__post_init__

    def donate_nothing(meta: ViewAndMutationMeta) -> None:
        # A backward pass takes None, which is left here by the configuration, for some.
        meta.bw_donated_idxs = []
        fill_in(meta)

    with config.patch(donated_buffer=False), replaced(ViewAndMutationMeta, "__post_init__", donate_nothing):
        return compile_fx(graph, inputs)


def _runs_kernels(graph: fx.Graph) -> bool:
    calls = [(getattr(node.target, "__wrapped__", node.target), node) for node in graph.nodes]
    mixers = [(MIXERS.get(getattr(op, "__name__", "")), op, node) for op, node in calls]
    return any(found is not None and found.op is op and runs_kernels(found, node.kwargs) for found, op, node in mixers)


def as_it_is(section: fx.GraphModule) -> Function:
    """Runs a section uncompiled."""
    return section
