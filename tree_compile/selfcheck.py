"""Compares a tree model with the unpacked model, sequence by sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from tree_compile.comparison import (
    GRADIENT_ROUNDING,
    gap,
    gradients_of,
    relative,
    relative_difference,
    rounding_of_zero,
    smallest_parameters,
    tensors_of,
    tolerance,
    trained_parameters,
    weights_of,
)
from tree_compile.errors import CaptureError, SelfCheckError
from tree_compile.failures import of_the_model_alone
from tree_compile.fewer_keys import keeping_at_most
from tree_compile.foreign import plain_checkpoints
from tree_compile.modes import evaluation, without_dropout
from tree_compile.output import TreeOutput
from tree_compile.programs import Program, make_program
from tree_compile.replay import Routing
from tree_compile.row_result import RowResult
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows
from tree_compile.runtime.recordings import ROUTED
from tree_compile.runtime.row import Row
from tree_compile.runtime.samples import Sample
from tree_compile.runtime.sequences import Sequences
from tree_compile.runtime.topk_index import recorded_choices
from tree_compile.ties import choices_of, telling_of_experts, ties_of
from tree_compile.unpacked import PlainModel, own_autocast_cache

_LOG = logging.getLogger(__name__)
_TO_CHOOSE_FROM = 64
"""Tokens to choose from: with many more, some two scores would be equal up to rounding."""
_MOST_KEPT = 12
"""Keys that an indexer keeps of them at most, so that it leaves some out, windows of four tokens among them."""


@dataclass(frozen=True)
class CheckReport:
    """How far the tree model is from the unpacked model.

    Attributes:
        greatest_output_difference: over all outputs, each tensor of an output relative to its greatest number.
        greatest_gradient_difference: over all parameters, each relative to its greatest gradient, or to what may be the
            rounding of 0 beside the others; None where no gradients were compared.
        tolerance: what is allowed for outputs.
        worst_parameter: the parameter with the greatest difference of gradients.
        input_tokens, packed_tokens, rows: of the sequences that were compared.
        ties: how often an indexer of the unpacked model chose among equal scores; None where there is no indexer.
    """

    greatest_output_difference: float
    greatest_gradient_difference: float | None
    tolerance: float
    worst_parameter: str
    input_tokens: int
    packed_tokens: int
    rows: int
    ties: int | None = None

    @property
    def gradient_tolerance(self) -> float:
        """What is allowed for gradients."""
        return GRADIENT_ROUNDING * self.tolerance

    @property
    def outputs_ok(self) -> bool:
        """Whether the outputs are within their tolerance."""
        return self.greatest_output_difference <= self.tolerance

    @property
    def ok(self) -> bool:
        """Whether outputs and gradients are within their tolerances."""
        return self.outputs_ok and (self.greatest_gradient_difference or 0.0) <= self.gradient_tolerance

    def __str__(self) -> str:
        difference, allowed = "greatest relative difference", "where rounding allows"
        verdict = ("equal", "up to rounding") if self.ok else ("NOT EQUAL", "by more than rounding")
        lines = [
            " to the unpacked model, ".join(verdict),
            f"  outputs:   {difference} {self.greatest_output_difference:.1e}, {allowed} {self.tolerance:.0e}",
        ]
        if self.greatest_gradient_difference is not None:
            where = f" ({self.worst_parameter})" if self.worst_parameter else ""
            found = f"{self.greatest_gradient_difference:.1e}{where}"
            lines.append(f"  gradients: {difference} {found}, {allowed} {self.gradient_tolerance:.0e}")
        if self.ties is not None:
            lines.append(f"  {count_of(self.ties, 'choice')} among equal scores: the same keys in both models")
        tokens = f"{count_of(self.input_tokens, 'token')} in, {self.packed_tokens:,} computed"
        lines.append(f"  {tokens}, {count_of(self.rows, 'row')}")
        return "\n".join(lines)


def compare(
    plain: PlainModel, plan: Plan, run: Callable[[Row], RowResult], program: Program,
    parameters: Mapping[str, nn.Parameter],
) -> CheckReport:  # fmt: skip
    """Runs the sequences of `plan` through `run` and, one by one, through the model.

    The loss of the gradients gives every output of every sequence a random weight of its own, so that the gradient
    of a shared token must be the sum over its sequences. Gradients of `parameters` are compared.
    """
    what = f"{count_of(plan.sequences, 'sequence')}, {count_of(plan.input_tokens, 'token')}"
    with torch.inference_mode(False), torch.set_grad_enabled(bool(parameters)), own_autocast_cache():
        _LOG.info("comparing %s: packed", what)
        packed, weights = _packed_side(plan, run, program, parameters)
        _LOG.info("comparing %s: unpacked", what)
        alone = _unpacked_side(plain, plan, program, weights, parameters, packed.choices)
    dtypes = program.rewritten.dtypes
    worst, gradient_difference = _worst_gradient_of(packed, alone, dtypes)
    return CheckReport(
        relative_difference(packed.outputs, alone.outputs), gradient_difference, tolerance(dtypes), worst,
        plan.input_tokens, plan.packed_tokens, len(plan.rows), alone.ties,
    )  # fmt: skip


def _worst_gradient_of(packed: _Side, alone: _Side, dtypes: Collection[torch.dtype]) -> tuple[str, float | None]:
    """As `worst_gradient`; None where neither side's outputs depend on the parameters."""
    expected = alone.gradients or {name: torch.zeros_like(found) for name, found in packed.gradients.items()}
    return worst_gradient(packed.gradients, expected, dtypes) if expected else ("", None)


@dataclass
class _Side:
    """Outputs of every sequence, the gradients of the loss, the choices of each row, and those among equal scores."""

    outputs: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    choices: list[list[Tensor]] = field(default_factory=list)
    ties: int | None = None


def _packed_side(
    plan: Plan, run: Callable[[Row], RowResult], program: Program, parameters: Mapping[str, nn.Parameter]
) -> tuple[_Side, list[list[Tensor]]]:
    """The tree model's side, and the weights of its outputs in the loss."""
    results, choices = [], []
    for row in plan.rows:
        with recorded_choices() as made:
            results.append(run(row))
        choices.append(made)
    packed = TreeOutput(results, program.rewritten.output_form)
    parts = [tensors_of(packed[sequence]) for sequence in range(plan.sequences)]
    weights = weights_of(parts)
    gradients = gradients_of(parts, weights, parameters)
    return _Side([[part.detach() for part in own] for own in parts], gradients, choices), weights


def _unpacked_side(
    plain: PlainModel,
    plan: Plan,
    program: Program,
    weights: Sequence[Sequence[Tensor]],
    parameters: Mapping[str, nn.Parameter],
    choices: Sequence[Sequence[Tensor]],
) -> _Side:
    side = _Side(ties=0 if program.rewritten.has_indexer else None)
    for sequence, own_weights in enumerate(weights):
        inputs = _sequence_inputs(plan, sequence, plain.input_names, program.device)
        row = plan.row_of(sequence)
        path = torch.from_numpy(plan.rows[row].path(sequence)).to(program.device)
        made = [own[path] for own in choices_of(plan.rows[row], choices[row])]
        chooses = ties_of(program.rewritten, inputs[0].shape[1], made)
        with plain_checkpoints(plain.model), chooses as found, of_the_model_alone():
            parts = program.rewritten.without_batch(tensors_of(plain(inputs)))
        if found is not None and side.ties is not None:
            side.ties += found.ties
            _require_same_choices(program, found.fewer, inputs[0].shape[1])
        side.outputs.append([part.detach() for part in parts])
        for name, gradient in gradients_of([parts], [own_weights], parameters).items():
            side.gradients[name] = side.gradients[name] + gradient if name in side.gradients else gradient
    return side


def _require_same_choices(program: Program, fewer: int, tokens: int) -> None:
    """Refuses a comparison in which the model kept fewer keys elsewhere than the graph: in a router, or nowhere."""
    kept = program.rewritten.most_kept
    if kept is not None and fewer != (kept.choices if tokens > _TO_CHOOSE_FROM else 0):
        raise _OtherChoices


class _OtherChoices(Exception):
    """The unpacked model does not keep fewer keys just where the graph does."""


def _sequence_inputs(plan: Plan, sequence: int, names: Sequence[str], device: torch.device) -> list[Tensor]:
    row = plan.rows[plan.row_of(sequence)]
    path = row.path(sequence)
    return [torch.from_numpy(row.inputs[name][path].astype(np.int64))[None].to(device) for name in names]


def worst_gradient(
    packed: Mapping[str, Tensor], unpacked: Mapping[str, Tensor], dtypes: Collection[torch.dtype] = ()
) -> tuple[str, float]:
    """The parameter whose gradient differs most, as `relative` says; and by how much."""
    gaps = [gap(packed.get(name, torch.zeros_like(gradient)), gradient) for name, gradient in unpacked.items()]
    found = dict(zip(unpacked, relative(gaps, rounding_of_zero(dtypes)), strict=True))
    worst = max(found, key=found.__getitem__, default="")
    return (worst, found[worst]) if found.get(worst) else ("", 0.0)


# The check of the first call


def check_program(plain: PlainModel, program: Program) -> Program:
    """The program, once it has been compared with the model in the mode that the model is in.

    One that draws random numbers is compared without dropout, or in eval mode where it draws then too.

    Raises:
        RefusedModelError: in eval mode, the model cannot be proved exact on a prefix tree.
        SelfCheckError: they differ by more than rounding.
    """
    if not program.rewritten.random:
        self_check(plain, program)
    elif not _checked_without_dropout(plain, program.attention):
        with evaluation(plain.model):
            self_check(plain, make_program(plain, "eager", program.attention))
    return replace(program, checked=True)


def _checked_without_dropout(plain: PlainModel, attention: str) -> bool:
    """Checks what the model does in its own mode; False where it draws random numbers without dropout too."""
    with without_dropout():
        calm = make_program(plain, "eager", attention)
        if not calm.rewritten.random:
            self_check(plain, calm)
    return not calm.rewritten.random


def self_check(plain: PlainModel, program: Program) -> None:
    """Runs a small random tree through the rewritten graph, with either kernels, and through the model.

    Indexers keep fewer keys in both: those of real models keep more than the tree has.

    Raises:
        SelfCheckError: they differ by more than rounding.
    """
    for own in (program, *([] if program.flash is None else [program.flash.program])):
        report = _report_of_small_tree(plain, own)
        if not report.ok:
            raise _differs(report)
    if report.ties:
        _LOG.warning(
            "An indexer of %s chose among equal scores %d times in the comparison of the first call. The tree model "
            "takes the earliest key; the model called by hand may take others: docs/sparse_attention.md.",
            type(plain.model).__name__, report.ties,
        )  # fmt: skip


def _report_of_small_tree(plain: PlainModel, program: Program) -> CheckReport:
    plan = plan_rows(small_tree(program, plain), min_shared_tokens=1)
    parameters = smallest_parameters(trained_parameters(plain.model))
    program = replace(program, rewritten=telling_of_experts(program.rewritten))
    if program.rewritten.has_indexer:
        fewer = replace(program, rewritten=keeping_at_most(program.rewritten, _MOST_KEPT))
        # A model may rely on the number that it asked for.
        with suppress(CaptureError, _OtherChoices):
            return compare(plain, plan, fewer.run_uncompiled, fewer, parameters)
    return compare(plain, plan, program.run_uncompiled, program, parameters)


def _differs(report: CheckReport) -> SelfCheckError:
    part, found, allowed = "", report.greatest_output_difference, report.tolerance
    if report.outputs_ok:
        part, allowed = f" in the gradient of {report.worst_parameter}", report.gradient_tolerance
        found = report.greatest_gradient_difference or 0.0
    return SelfCheckError(
        f"The rewritten model and the unpacked model differ on a small random tree{part}: "
        f"by {found:.1e} relative, where rounding allows {allowed:.0e}.",
        why="a rewrite is wrong for this model; its results cannot be trusted.",
        hint="if the model has an op or a rule that you registered, compare it with what it stands for; else please "
        "report the model. self_check=False turns this check off.",
    )


def small_tree(program: Program, plain: PlainModel) -> Sequences:
    """A few dozen random tokens as a tree; more where an indexer might choose among them.

    It has branches at several depths, segments of one token, a sequence that is a prefix of another, and two roots.
    """
    first = 9 + (_TO_CHOOSE_FROM if program.rewritten.has_indexer else 0)
    vocabulary = program.rewritten.vocabulary or 2
    random = np.random.default_rng(0)
    trunk, branch, *tails = (random.integers(0, vocabulary, count).tolist() for count in (first, 5, 1, 4, 7, 3))
    paths = [trunk + branch + tails[0], trunk + branch + tails[1], trunk + tails[2], trunk[:4], tails[3], trunk[:1]]
    limit = max(1, min((limit.tokens for limit in program.rewritten.limits), default=1 << 30))
    tokens = [path[:limit] for path in paths]
    if ROUTED in plain.input_names:
        return _with_experts(tokens, plain.routing, random)
    names = enumerate(plain.input_names)
    return {name: tokens if place == 0 else [[0] * len(t) for t in tokens] for place, name in names}


def _with_experts(sequences: Sequence[Sequence[int]], routing: Routing, random: np.random.Generator) -> list[Sample]:
    """Sequences with random experts, which are the same where sequences share tokens."""
    layers, top_k = routing.shape
    choices = random.random((97, layers, routing.experts)).argsort(-1)[..., :top_k]
    places = [(7 * np.arange(len(tokens)) + tokens) % len(choices) for tokens in sequences]
    return [Sample(tokens, routed_experts=choices[own]) for tokens, own in zip(sequences, places, strict=True)]
