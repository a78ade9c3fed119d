"""Static values: what depends on T, constants and buffers alone, and what such a value means.

A static value is classified by its values at several numbers of tokens, never by the operations that made it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from tree_compile.passes.draws import draws
from tree_compile.passes.lengths import changed_at_some_length, is_prefix, same_steps, say_the_same, that_may_change
from tree_compile.passes.nodes import ancestors, arguments, is_number_of_tokens
from tree_compile.passes.operators import SAME_ROWS
from tree_compile.passes.probing import probe
from tree_compile.passes.shapes import Extent, extent, is_tensor, shape_of, token_symbol, window_beside_tokens

GREATEST_PAIR = 8_200
"""Greatest T at which a value with two token dimensions is evaluated: 67 MB as booleans."""
GREATEST_TABLE = 1 << 21
FIRST_REACH = 1_024
"""Greatest T that a first classification holds for, at least; `find_static_values` can be asked for more."""


@dataclass(frozen=True)
class Fixed:
    """The same `value` at every T; no dimension mentions T."""

    value: Tensor


@dataclass(frozen=True)
class Fill:
    """The same for all tokens: `value`, with token dimensions of size one."""

    value: Tensor


@dataclass(frozen=True)
class Table:
    """f(t) along `dim`: the value at a token depends on its position alone.

    `first` is set where the value is the integer `first + t`; `greatest` is the greatest absolute value that was seen.
    """

    dim: int
    first: int | None = None
    greatest: float = 0.0


@dataclass(frozen=True)
class Drifting:
    """f(t) + c(T) along `dim`: a table, up to a number for all tokens that changes with T.

    A bias per key may be one, counted from the end of the sequence: softmax does not see c. `greatest` is the greatest
    absolute value that was seen.
    """

    dim: int
    greatest: float = 0.0


@dataclass(frozen=True)
class Pair:
    """f(q, k): dimension -2 is the query, -1 the key. `samples` are its values at growing T."""

    samples: tuple[Tensor, ...]


@dataclass(frozen=True)
class WindowTable:
    """f(w) along `dim`, of size T // `window`: the value at a window depends on its number in the sequence alone."""

    dim: int
    window: int


@dataclass(frozen=True)
class WindowPair:
    """f(q, w): dimension -2 is the query, -1 the window of `window` tokens. `samples` are its values at growing T."""

    window: int
    samples: tuple[Tensor, ...]


@dataclass(frozen=True)
class Numbering:
    """A value over several entries per token; it can only number rows, which the token-axis proof decides."""


@dataclass(frozen=True)
class LengthDependent:
    """The value at a token changes with T, or cannot be told not to; `hint` says what to try."""

    why: str
    hint: str = "for a rotary embedding that switches on the sequence's length (longrope, dynamic), choose a fixed one"


Kind = Fixed | Fill | Table | Drifting | Pair | WindowTable | WindowPair | Numbering | LengthDependent


@dataclass(frozen=True)
class StaticValues:
    """The static part of a graph.

    Attributes:
        nodes: every static node.
        kinds: what each static tensor means that a node outside the static part uses.
        proved_length: greatest number of tokens that the classification holds for, None for no limit.
        longest: greatest number of tokens that the graph holds for, None for no limit.
    """

    nodes: frozenset[fx.Node]
    kinds: Mapping[fx.Node, Kind]
    proved_length: int | None
    longest: int | None = None


def find_static_values(
    graph_module: fx.GraphModule, longest: int | None = None, reach: int = FIRST_REACH
) -> StaticValues:
    """Finds and classifies the static values of a captured graph (without in-place operations).

    Args:
        graph_module: the graph. The shapes of static values that only look as if they depended on T in some other way
            are written as what they are.
        longest: the greatest T that the graph holds for; None where there is no limit.
        reach: the T up to which values are evaluated at least, whichever constants occur in the graph.
    """
    symbol = token_symbol(graph_module.graph)
    nodes = static_nodes(graph_module)
    frontier = _shared_frontier(graph_module.graph, nodes, symbol)
    wide = {node for node in frontier if sum(extent(size, symbol) != Extent() for size in shape_of(node)) > 1}
    may_change = that_may_change(graph_module.graph, nodes, symbol)
    search = _Search(graph_module, nodes, symbol, may_change, longest, reach)
    kinds: dict[fx.Node, Kind] = {}
    for group, greatest in ((wide, GREATEST_PAIR), (frontier - wide, GREATEST_TABLE)):
        kinds |= search.kinds_of(group, greatest)
    ordered = {node: kinds[node] for node in graph_module.graph.nodes if node in kinds}
    return StaticValues(frozenset(nodes), ordered, min(search.proved, default=None), longest)


@dataclass
class _Search:
    """What static nodes mean, group by group; `proved` gets the greatest T for which that is known."""

    graph_module: fx.GraphModule
    nodes: set[fx.Node]
    symbol: sympy.Symbol
    may_change: set[fx.Node]
    longest: int | None
    reach: int
    proved: list[int] = field(default_factory=list)

    def kinds_of(self, group: set[fx.Node], greatest: int) -> dict[fx.Node, Kind]:
        """The kinds of nodes that are evaluated at T up to `greatest`."""
        most = min(greatest, self.longest or greatest)
        found, tokens = probe(self.graph_module, self.nodes, group, most, self.reach)
        values = (samples[tokens] for samples in found.values() if tokens in samples)
        if group and tokens != self.longest and not self._is_settled(group, values, tokens, greatest):
            self.proved.append(tokens)
        kinds: dict[fx.Node, Kind] = {}
        for node in group:
            _write_shape(node, found[node], self.symbol)
            kinds[node] = _classify(node, list(found[node].values()), self.symbol)
        return kinds | self._changing(kinds, found, tokens)

    def _is_settled(self, group: set[fx.Node], values: Iterable[Tensor], tokens: int, greatest: int) -> bool:
        """Whether pair tables that have these `values` at the greatest T say the same at every T."""
        if tokens != GREATEST_PAIR or greatest != GREATEST_PAIR:
            return False
        return not any(map(_still_grows, values)) and say_the_same(self.graph_module, ancestors(group), tokens)

    def _changing(
        self, kinds: Mapping[fx.Node, Kind], found: Mapping[fx.Node, Mapping[int, Tensor]], tokens: int
    ) -> dict[fx.Node, Kind]:
        """The nodes that looked the same at all T that were tried, and say something else at another."""
        settled = (Numbering, LengthDependent)
        unsure = {
            node: found[node][tokens]
            for node, kind in kinds.items()
            if node in self.may_change and not isinstance(kind, settled)
        }
        if not unsure:
            return {}
        self.proved.append(min(tokens, self.reach))
        drifting = {node for node in unsure if isinstance(kinds[node], Drifting)}
        changed = changed_at_some_length(self.graph_module, self.nodes, unsure, drifting, self.proved[-1])
        return dict.fromkeys(changed, LengthDependent(_CHANGES))


def static_nodes(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that depend on T, constants and buffers alone."""
    static: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            is_static = not isinstance(attrgetter(str(node.target))(graph_module), nn.Parameter)
        elif node.op == "call_function":
            is_static = is_number_of_tokens(node) or (
                all(source in static for source in node.all_input_nodes) and not draws(node)
            )
        else:
            is_static = False
        if is_static:
            static.add(node)
    return static


def _frontier(graph: fx.Graph, static: set[fx.Node]) -> set[fx.Node]:
    return {
        node
        for node in graph.nodes
        if node in static
        and node.op == "call_function"
        and is_tensor(node)
        and any(user not in static for user in node.users)
    }


def _shared_frontier(graph: fx.Graph, static: set[fx.Node], symbol: Any) -> set[fx.Node]:
    """The frontier, once the reshaping that every layer does for itself is taken out of `static`.

    Every layer unsqueezes the same rotary table: what is gathered should be the table, once.
    """
    while True:
        frontier = _frontier(graph, static)
        reshaping = {
            node
            for node in frontier
            if (static.isdisjoint(node.users) and _reshapes_a_table(node, symbol)) or _joins_windows(node, symbol)
        }
        if not reshaping:
            return frontier
        static -= reshaping


def _joins_windows(node: fx.Node, symbol: Any) -> bool:
    """Whether it is a mask over tokens and windows, or a copy of one: what it means its two parts say."""
    is_joined = node.target in _JOINED and bool(shape_of(node))
    return is_joined and window_beside_tokens(shape_of(node)[-1], symbol) > 0


_JOINED = (torch.ops.aten.cat.default, *SAME_ROWS)


def _reshapes_a_table(node: fx.Node, symbol: Any) -> bool:
    """Whether `node` is a view of a table f(t) that is a table again, with all its tokens."""
    if node.target not in (torch.ops.aten.unsqueeze.default, torch.ops.aten.slice.Tensor):
        return False
    source: Any = node.args[0]
    before, after = ([extent(size, symbol) for size in shape_of(value)] for value in (source, node))
    is_table = all(found.count(Extent(1)) == 1 and found.count(Extent()) == len(found) - 1 for found in (before, after))
    if source.op != "call_function" or not is_table:
        return False
    is_unsqueezed = node.target is torch.ops.aten.unsqueeze.default
    return is_unsqueezed or arguments(node)["dim"] % len(before) != before.index(Extent(1))


def _still_grows(table: Tensor) -> bool:
    """Whether a table has numbers in its second half that are beyond all in its first, so that it may go on so."""
    if table.dtype == torch.bool:
        return False
    first = table[
        tuple(slice(size // 2) if dim >= table.dim() - 2 else slice(None) for dim, size in enumerate(table.shape))
    ]
    finite, before = (numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for numbers in (table, first))
    return bool((finite.amax() > before.amax()) | (finite.amin() < before.amin()))


# Meaning


_CHANGES = "its value at a token changes with the number of tokens that follow"


def _write_shape(node: fx.Node, samples: Mapping[int, Tensor], symbol: Any) -> None:
    """Sizes such as `2048 - max(0, 2048 - T)` are T, or one number, for every T that was tried."""
    written = {
        dim: size
        for dim, expression in enumerate(shape_of(node))
        if extent(expression, symbol) is None and samples
        if (size := _plain_size(node.graph, {at: value.shape[dim] for at, value in samples.items()})) is not None
    }
    if written:
        node.meta["val"] = node.meta["val"].new_empty([written.get(d, size) for d, size in enumerate(shape_of(node))])


def _plain_size(graph: fx.Graph, sizes: Mapping[int, int]) -> Any:
    if all(size == tokens for tokens, size in sizes.items()):
        return next(node for node in graph.nodes if node.op == "placeholder").meta["val"].shape[1]
    return next(iter(sizes.values())) if len(set(sizes.values())) == 1 else None


def _classify(node: fx.Node, samples: Sequence[Tensor], symbol: Any) -> Kind:
    extents = [extent(size, symbol) for size in shape_of(node)]
    if any(found is None or found.factor > 1 or found.fewer for found in extents):
        return Numbering()
    windows = {dim: found.window for dim, found in enumerate(extents) if found and found.factor}
    dims = list(windows)
    if not samples or not all(is_prefix(a, b, dims) for a, b in itertools.pairwise(samples)):
        # At the smallest T there may be no window.
        some = [sample for sample in samples if sample.numel()]
        if len(dims) == 1 and len(some) > 2 and _drifts(some, dims[0]):
            return Drifting(dims[0], _greatest(samples))
        return LengthDependent(_CHANGES)
    last = samples[-1]
    if not dims:
        return Fixed(last)
    if not last.numel():
        return Numbering()
    if all(bool((last == last.narrow(dim, 0, 1)).all()) for dim in dims):
        return Fill(functools.reduce(lambda value, dim: value.narrow(dim, 0, 1), dims, last))
    if len(dims) == 1:
        return _table(samples, dims[0], windows[dims[0]])
    if dims == [len(extents) - 2, len(extents) - 1] and not windows[dims[0]]:
        window = windows[dims[1]]
        return WindowPair(window, tuple(samples)) if window else Pair(tuple(samples))
    return LengthDependent(
        "it has token dimensions that are not the last two, as those of a mask are",
        hint="compute attention scores, and their masks, as [batch, heads, query, key]",
    )


def _table(samples: Sequence[Tensor], dim: int, window: int) -> Kind:
    if window:
        return WindowTable(dim, window)
    return Table(dim, _first_of_range(samples[-1], dim), _greatest(samples))


def _drifts(samples: Sequence[Tensor], dim: int) -> bool:
    """Whether every sample, less its value at the first token, is a prefix of the next, up to rounding."""
    if not samples[0].is_floating_point() or not all(bool(sample.isfinite().all()) for sample in samples):
        return False
    return all(same_steps(smaller, larger, dim) for smaller, larger in itertools.pairwise(samples))


def _greatest(samples: Sequence[Tensor]) -> float:
    some = (sample for sample in samples if sample.numel())
    return max(float((sample if sample.dtype == torch.bool else sample.abs()).max()) for sample in some)


def _first_of_range(value: Tensor, dim: int) -> int | None:
    """n where `value` is the integers n, n + 1, … along `dim` and has no other dimension of size above one."""
    if value.dtype not in (torch.int32, torch.int64) or value.numel() != value.shape[dim]:
        return None
    flat = value.flatten()
    first = int(flat[0])
    numbers = torch.arange(first, first + len(flat), device=flat.device, dtype=flat.dtype)
    return first if torch.equal(flat, numbers) else None
