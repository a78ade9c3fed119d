"""From a captured model to a rewritten one: the passes in their order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tree_compile.arguments import LOSS_HINT
from tree_compile.capture import Captured, OutputForm, capture
from tree_compile.errors import CaptureError, RefusedModelError, TokenMixingError, TreeCompileError, UnknownOpError
from tree_compile.foreign import without_gradients_of_embeddings
from tree_compile.forks import free_in_forks
from tree_compile.guards import ShortLengths
from tree_compile.inputs import graph_inputs
from tree_compile.passes.attention import RewriteAttention
from tree_compile.passes.autocast import KeepAutocastOff
from tree_compile.passes.batch_norm import RefuseBatchNorm
from tree_compile.passes.convolutions import RewriteConvolutions
from tree_compile.passes.draws import draws
from tree_compile.passes.functional import Functionalize
from tree_compile.passes.grad_modes import InlineGradModes
from tree_compile.passes.limits import LengthLimit, position_limit, vocabulary_size
from tree_compile.passes.made_by_shape import MakeByShape
from tree_compile.passes.mixers import RewriteMixers
from tree_compile.passes.plan_inputs import (
    RowTables,
    add_plan_inputs,
    reads_tree,
    remove_tree_inputs,
    window_inputs,
)
from tree_compile.passes.positions import RewritePositions
from tree_compile.passes.runner import Pass, Trail, run_pass
from tree_compile.passes.shapes import shape_of
from tree_compile.passes.static_values import FIRST_REACH, StaticValues, find_static_values
from tree_compile.passes.token_axis import ProveTokenAxis
from tree_compile.passes.window_attention import RewriteWindowAttention
from tree_compile.passes.windows import RewriteWindows, RewriteWindowSizes
from tree_compile.rehearsal import example_of, longer_example, rehearse
from tree_compile.runtime.row import Row
from tree_compile.short_lengths import same_when_short
from tree_compile.unpacked import PlainModel, own_autocast_cache

CAPTURING = threading.RLock()
"""Held by what changes torch for a while, and by the thread that loads the planner.

A capture takes it before the lock of `patches`. So does a fork, whose hooks run in the reverse order of their
registration: `patches` is imported, and its lock registered, before this one.
"""
free_in_forks(CAPTURING)
_LONGEST_EXAMPLE = 4_096
_LOG = logging.getLogger(__name__)


class MostKept(NamedTuple):
    """How many `keys` indexers keep at most, and how many `choices` of the graph would keep more."""

    keys: int
    choices: int


@dataclass(frozen=True)
class Rewritten:
    """A model that takes rows.

    Attributes:
        graph_module: takes the inputs, each `(1, T)`, then plan_segments, plan_position, plan_subtree_end and
            plan_length; returns the flat tuple of the output's tensors in the layout of the row.
        output_form: how to rebuild the model's output.
        batched: for every tensor of the output, whether it has a batch dimension of one before its tokens.
        vocabulary: number of token ids, or None where the graph does not tell.
        limits: limits on the length of a sequence, the tightest first.
        short: the lengths for which it has to be compared with the model; None where there are none.
        example_tokens: tokens of the sequence that it was captured with.
        proved: number of tokens up to which static values were evaluated; None where that settles them for all.
        dense: whether a mask without a closed form is written out as T x T.
        carries_state: whether a layer carries a state along the tokens; then those of TREE_INPUTS follow.
        windows: the fields of `WindowTables` that follow then, each with the tokens of its windows.
        dtypes: the floating-point dtypes that it or the captured graph computes in.
        random: whether it draws random numbers, as active dropout does.
        trail: what the passes did.
        most_kept: set where indexers keep fewer keys than in the model.
    """

    graph_module: fx.GraphModule
    output_form: OutputForm
    batched: tuple[bool, ...]
    vocabulary: int | None
    limits: tuple[LengthLimit, ...]
    short: ShortLengths | None
    example_tokens: int
    proved: int | None
    dense: bool
    carries_state: bool
    windows: tuple[tuple[int, str], ...]
    dtypes: frozenset[torch.dtype]
    random: bool
    trail: Trail
    most_kept: MostKept | None = None

    @property
    def logits_place(self) -> int | None:
        """Which tensor of the output has the logits; None where it has names, and none of them is that of logits."""
        return self.output_form.logits_place(len(self.batched))

    @property
    def router_places(self) -> tuple[int, ...]:
        """Which tensors of the output have the logits of routers."""
        return self.output_form.router_places(len(self.batched))

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer chooses what tokens see."""
        return any(finding.kind == "indexer" for finding in self.trail.findings)

    def inputs(self, row: Row, device: torch.device) -> tuple[Any, ...]:
        """The arguments of the graph for one row."""
        return graph_inputs(row, device, carries_state=self.carries_state, windows=self.windows)

    def without_batch(self, tensors: Sequence[Tensor], left_out: int | None = None) -> list[Tensor]:
        """The graph's results, or the model's, without their batch dimension of size one.

        Args:
            tensors: the results.
            left_out: place of one that is not among them; None where they are all there.
        """
        batched = [batch for place, batch in enumerate(self.batched) if place != left_out]
        return [tensor[0] if batch else tensor for tensor, batch in zip(tensors, batched, strict=True)]


def rewrite_model(plain: PlainModel, reach: int = FIRST_REACH, example_tokens: int = 0) -> Rewritten:
    """Captures and rewrites a model in the mode that it is in, for sequences of up to `reach` tokens at least.

    Args:
        plain: the model.
        reach: as in `rewrite`.
        example_tokens: captures it with a sequence of so many tokens, and compares it at no length; 0 for a few dozen
            tokens, or more where it pools windows of more.

    Raises:
        RefusedModelError: the model cannot be proved exact on a prefix tree.
    """
    mode = "train" if plain.model.training else "eval"
    _LOG.info("capturing and rewriting %s in %s mode", type(plain.model).__name__, mode)
    # Gradients are on, so that a first call without them captures the same graph as any other. One capture at a time:
    # torch.export and what is switched for it are global.
    with CAPTURING, torch.inference_mode(False), torch.enable_grad(), own_autocast_cache():
        with without_gradients_of_embeddings(plain.model):
            rehearsal = rehearse(plain)
        with _unless_more_telling(rehearsal.error):
            is_sound = rehearsal.error is None
            if example_tokens:
                return rewrite(_captured(plain, example_of(plain, example_tokens), is_sound), reach)
            return _rewrite_one_of(plain, _captures(plain, rehearsal.example, is_sound), reach)


def _captured(plain: PlainModel, example: tuple[Tensor, ...], is_sound: bool) -> Captured:
    with without_gradients_of_embeddings(plain.model):
        return capture(plain, example, compares=is_sound)


def _captures(plain: PlainModel, example: tuple[Tensor, ...], is_sound: bool) -> list[Captured]:
    """The model as captured with an example, and behind it with longer ones, where the example has no window yet."""
    found = [_captured(plain, example, is_sound)]
    while (limit := found[-1].limit) is not None and limit.has_floor_division and limit.tokens < _LONGEST_EXAMPLE:
        try:
            longer = _captured(plain, example_of(plain, longer_example(plain, limit.tokens)), is_sound)
        except RefusedModelError:
            break
        if longer.limit is not None and longer.limit.tokens <= limit.tokens:
            break
        found.append(longer)
    return found


def _rewrite_one_of(plain: PlainModel, captures: list[Captured], reach: int) -> Rewritten:
    """The last one that can be proved: it holds for the longest sequences."""
    errors = []
    for captured in reversed(captures):
        try:
            with _unless_more_telling(captured.control_flow):
                rewritten = rewrite(captured, reach)
            if rewritten.short is not None and (rewritten.random or not same_when_short(plain, rewritten)):
                raise rewritten.short.error
        except RefusedModelError as error:
            errors.append(error)
        else:
            return rewritten
    raise errors[0]


@contextmanager
def _unless_more_telling(error: RefusedModelError | None) -> Iterator[None]:
    """Raises `error` after what is done under it, which may break for the same reason, or be refused for a better one.

    A graph that is not the model's may break a pass in any way.
    """
    try:
        yield
    except Exception as found:
        is_telling = isinstance(found, RefusedModelError) and type(found) is not CaptureError
        if error is None or is_telling:
            raise
    if error is not None:
        raise error


def rewrite(captured: Captured, reach: int = FIRST_REACH) -> Rewritten:
    """Rewrites a captured graph in place, for sequences of up to `reach` tokens at least.

    Raises:
        RefusedModelError: the model cannot be proved exact on a prefix tree.
    """
    with _loss_told(captured.graph_module), _failure_refused():
        return _rewrite(captured, reach)


@contextmanager
def _failure_refused() -> Iterator[None]:
    """A pass that fails has met a graph that it does not expect: one more that is not proved."""
    try:
        yield
    except TreeCompileError:
        raise
    except Exception as error:
        raise CaptureError(
            f"The model could not be rewritten: {type(error).__name__}: {error}",
            why="its graph has a form that tree_compile does not expect. That is a defect of tree_compile, or of an op "
            "or a rule that you registered.",
            hint="if you registered none, please report the model with this traceback.",
        ) from error


@contextmanager
def _loss_told(graph_module: fx.GraphModule) -> Iterator[None]:
    """A model that is refused and returns one number, such as its loss, is told where a loss is computed."""
    has_number = any(not shape_of(result) for result in _results(graph_module.graph))
    try:
        yield
    except (TokenMixingError, UnknownOpError) as error:
        if not has_number:
            raise
        hint = (
            f"if this makes a loss: return the logits alone, and {LOSS_HINT}; "
            "one that balances experts: return `router_logits` of each layer for losses.load_balancing(out, top_k=…)."
        )
        raise type(error)(error.what, where=error.where, why=error.why, hint=hint) from error.__cause__


def _rewrite(captured: Captured, reach: int) -> Rewritten:
    graph_module, trail = captured.graph_module, Trail()
    trail.note("captured", graph_module)
    # The model's own, too: a softmax in float32 is gone from a rewritten graph, and its rounding is the model's.
    dtypes = _dtypes(graph_module.graph)
    _run_passes(graph_module, (InlineGradModes(), RefuseBatchNorm(), Functionalize(), MakeByShape()), trail)
    longest = captured.limit.tokens if captured.limit is not None else None
    statics = find_static_values(graph_module, longest, reach)
    limits, vocabulary = _limits(captured, statics), vocabulary_size(graph_module.graph)
    add_plan_inputs(graph_module)
    tables = RowTables(graph_module, statics)
    _run_passes(graph_module, _passes_for_rows(statics, tables), trail)
    random = any(draws(node) for node in graph_module.graph.nodes)
    _run_passes(graph_module, (KeepAutocastOff(),), trail)
    carries_state = _without_unread_tree(graph_module)
    trail.note("rewritten", graph_module)
    return Rewritten(
        graph_module=graph_module,
        output_form=captured.output_form,
        batched=_batched(graph_module.graph),
        vocabulary=vocabulary,
        limits=limits,
        short=captured.short,
        example_tokens=captured.example_tokens,
        proved=statics.proved_length,
        dense=tables.has_pairs,
        carries_state=carries_state,
        windows=window_inputs(graph_module.graph),
        dtypes=dtypes | _dtypes(graph_module.graph),
        random=random,
        trail=trail,
    )


def _run_passes(graph_module: fx.GraphModule, passes: Iterable[Pass], trail: Trail) -> None:
    for graph_pass in passes:
        run_pass(graph_module, graph_pass, trail)


def _passes_for_rows(statics: StaticValues, tables: RowTables) -> tuple[Pass, ...]:
    """What makes a graph of one sequence one that takes rows, and proves that it keeps sequences apart."""
    return (
        RewriteWindows(statics),
        RewriteWindowAttention(statics, tables),
        RewriteAttention(statics, tables),
        RewriteMixers(),
        RewriteConvolutions(statics),
        RewritePositions(statics, tables),
        RewriteWindowSizes(),
        ProveTokenAxis(),
    )


def _without_unread_tree(graph_module: fx.GraphModule) -> bool:
    """Whether a layer reads the row's tree; takes its inputs out of the graph where none does."""
    if reads_tree(graph_module.graph):
        return True
    remove_tree_inputs(graph_module.graph)
    return False


def _dtypes(graph: fx.Graph) -> frozenset[torch.dtype]:
    values = (node.meta.get("val") for node in graph.nodes)
    return frozenset(value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _batched(graph: fx.Graph) -> tuple[bool, ...]:
    return tuple(shape_of(result)[0] == 1 for result in _results(graph))


def _results(graph: fx.Graph) -> Sequence[fx.Node]:
    results: Any = graph.output_node().args[0]
    return tuple(results)


def _limits(captured: Captured, statics: StaticValues) -> tuple[LengthLimit, ...]:
    found = (captured.limit, position_limit(statics))
    return tuple(sorted((limit for limit in found if limit is not None), key=lambda limit: limit.tokens))
