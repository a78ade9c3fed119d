"""From a captured model to a rewritten one: the passes in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tree_compile.capture import Captured, OutputForm, capture
from tree_compile.errors import CaptureError, RefusedModelError
from tree_compile.foreign import without_gradients_of_embeddings
from tree_compile.passes.attention import RewriteAttention
from tree_compile.passes.autocast import KeepAutocastOff
from tree_compile.passes.batch_norm import RefuseBatchNorm
from tree_compile.passes.convolutions import RewriteConvolutions
from tree_compile.passes.draws import draws
from tree_compile.passes.functional import Functionalize
from tree_compile.passes.grad_modes import InlineGradModes
from tree_compile.passes.limits import LengthLimit, position_limit, vocabulary_size
from tree_compile.passes.mixers import RewriteMixers
from tree_compile.passes.plan_inputs import RowTables, add_plan_inputs, reads_tree, remove_tree_inputs
from tree_compile.passes.positions import RewritePositions
from tree_compile.passes.runner import Trail, readable, run_pass
from tree_compile.passes.shapes import shape_of
from tree_compile.passes.static_values import FIRST_REACH, StaticValues, find_static_values
from tree_compile.passes.token_axis import ProveTokenAxis
from tree_compile.rehearsal import rehearse
from tree_compile.unpacked import Unpacked, own_autocast_cache

CAPTURING = threading.RLock()


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
        proved: number of tokens up to which static values were evaluated; None where that settles them for all.
        dense: whether a mask without a closed form is written out as T x T.
        carries_state: whether a layer carries a state along the tokens; then those of TREE_INPUTS follow.
        dtypes: the floating-point dtypes that it computes in.
        random: whether it draws random numbers, as active dropout does.
        trail: what the passes did.
    """

    graph_module: fx.GraphModule
    output_form: OutputForm
    batched: tuple[bool, ...]
    vocabulary: int | None
    limits: tuple[LengthLimit, ...]
    proved: int | None
    dense: bool
    carries_state: bool
    dtypes: frozenset[torch.dtype]
    random: bool
    trail: Trail


def rewrite_model(unpacked: Unpacked, reach: int = FIRST_REACH) -> Rewritten:
    """Captures and rewrites a model in the mode that it is in, for sequences of up to `reach` tokens at least.

    Raises:
        RefusedModelError: the model cannot be proved exact on a prefix tree.
    """
    # Gradients are on, so that a first call without them captures the same graph as any other. One capture at a time:
    # torch.export and what is switched for it are global.
    with CAPTURING, torch.inference_mode(False), torch.enable_grad(), own_autocast_cache():
        with without_gradients_of_embeddings(unpacked.model):
            rehearsal = rehearse(unpacked)
        with _unless_more_telling(rehearsal.error):
            with without_gradients_of_embeddings(unpacked.model):
                captured = capture(unpacked, rehearsal.example)
            with _unless_more_telling(captured.control_flow):
                return rewrite(captured, reach)


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
    graph_module, trail = captured.graph_module, Trail()
    trail.stages["captured"] = readable(graph_module)
    run_pass(graph_module, InlineGradModes(), trail)
    run_pass(graph_module, RefuseBatchNorm(), trail)
    run_pass(graph_module, Functionalize(), trail)
    longest = captured.limit.tokens if captured.limit is not None else None
    statics = find_static_values(graph_module, longest, reach)
    limits = _limits(captured, statics)
    vocabulary = vocabulary_size(graph_module.graph)
    add_plan_inputs(graph_module)
    tables = RowTables(graph_module, statics)
    for graph_pass in (
        RewriteAttention(statics, tables),
        RewriteMixers(),
        RewriteConvolutions(),
        RewritePositions(statics, tables),
        ProveTokenAxis(),
    ):
        run_pass(graph_module, graph_pass, trail)
    random = any(draws(node) for node in graph_module.graph.nodes)
    run_pass(graph_module, KeepAutocastOff(), trail)
    carries_state = reads_tree(graph_module.graph)
    if not carries_state:
        remove_tree_inputs(graph_module.graph)
        graph_module.recompile()
    trail.stages["rewritten"] = readable(graph_module)
    return Rewritten(
        graph_module=graph_module,
        output_form=captured.output_form,
        batched=_batched(graph_module.graph),
        vocabulary=vocabulary,
        limits=limits,
        proved=statics.proved_length,
        dense=tables.has_pairs,
        carries_state=carries_state,
        dtypes=_dtypes(graph_module.graph),
        random=random,
        trail=trail,
    )


def _dtypes(graph: fx.Graph) -> frozenset[torch.dtype]:
    values = (node.meta.get("val") for node in graph.nodes)
    return frozenset(value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _batched(graph: fx.Graph) -> tuple[bool, ...]:
    results: Any = graph.output_node().args[0]
    return tuple(shape_of(result)[0] == 1 for result in results)


def _limits(captured: Captured, statics: StaticValues) -> tuple[LengthLimit, ...]:
    found = (captured.limit, position_limit(statics))
    return tuple(sorted((limit for limit in found if limit is not None), key=lambda limit: limit.tokens))
