"""Captures a model, written for one unpacked sequence, as a graph whose number of tokens T is free."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import sys
import traceback
import types
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import _trace as export_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.proxy import TracerBase
from torch.utils import _pytree as pytree

from tree_compile.comparison import tensors_of
from tree_compile.errors import (
    CaptureError,
    ControlFlowError,
    LengthDependentError,
    SourceLine,
    TreeCompileError,
    UnsupportedArgumentError,
    UnsupportedOutputError,
)
from tree_compile.foreign import capturable
from tree_compile.guards import ShortLengths, branches_on_one_token, length_limit
from tree_compile.known_mixers import kept_whole
from tree_compile.passes.limits import LengthLimit
from tree_compile.passes.source import (
    frame_of_the_model,
    is_users,
    line_of_code,
    line_of_forward,
    line_of_trace,
    source_line,
)
from tree_compile.patches import replaced
from tree_compile.questions import answered_as_outside
from tree_compile.signature import wrong_call
from tree_compile.swallowed import nothing_swallowed
from tree_compile.trials import same_at
from tree_compile.unpacked import PlainModel, own_random_numbers
from tree_compile.watch import watching


@dataclass(frozen=True)
class OutputForm:
    """How the model's output is put together from the graph's flat results.

    Attributes:
        spec: the pytree of the output.
        constants: the leaves that are not tensors, by their place among all leaves.
    """

    spec: pytree.TreeSpec
    constants: Mapping[int, Any]

    def build(self, tensors: Sequence[Any]) -> Any:
        """The model's output with `tensors` as its tensor leaves, in order."""
        remaining = iter(tensors)
        leaves = [
            self.constants[place] if place in self.constants else next(remaining)
            for place in range(self.spec.num_leaves)
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def logits_place(self, count: int) -> int | None:
        """Which of `count` tensors has the logits: the first, or of an output with names that of the name `logits`.

        Returns:
            None where none of the names is that of logits.
        """
        places = self._places(count)
        if isinstance(places, _Place | list) or type(places) is tuple:
            return 0
        found = _entry(places, "logits")
        return found if isinstance(found, _Place) else None

    def router_places(self, count: int) -> tuple[int, ...]:
        """Which of `count` tensors have the logits of a router: those of the entry or attribute `router_logits`."""
        leaves = pytree.tree_leaves(_entry(self._places(count), "router_logits"))
        return tuple(place for place in leaves if isinstance(place, _Place))

    def _places(self, count: int) -> Any:
        """The output with places among `count` tensors for the tensors."""
        return self.build([_Place(place) for place in range(count)])


def _entry(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


class _Place(int):
    """A tensor's place, which no constant of an output is taken for."""


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph_module: the graph; placeholders are the inputs, each int64 `(1, T)`; parameters are the model's own
            objects under the model's own names; returns the flat tuple of the output's tensors.
        output_form: how to rebuild the model's output.
        limit: the longest sequence that the capture holds for; None where it holds for all.
        example_tokens: tokens of the sequence that it was captured with.
        short: the lengths for which it has to be compared with the model; None where there are none.
        control_flow: what has to be raised, unless something more telling is found: the code depends on T.
    """

    graph_module: fx.GraphModule
    output_form: OutputForm
    limit: LengthLimit | None
    example_tokens: int
    short: ShortLengths | None = None
    control_flow: ControlFlowError | None = None


@dataclass
class _Seen:
    output_form: OutputForm | None = None


class _Flat(nn.Module):
    """Calls the model and flattens what it returns."""

    def __init__(self, plain: PlainModel) -> None:
        super().__init__()
        self.model = plain.model
        self.plain = plain
        # An object of its own: torch.export undoes changes to attributes, lists and dicts of a module.
        self.seen = _Seen()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        output = self.plain(values)
        leaves, spec = pytree.tree_flatten(output)
        constants = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        self.seen.output_form = OutputForm(spec, constants)
        return tuple(tensors_of(output))


def capture(plain: PlainModel, example: tuple[Tensor, ...], *, compares: bool = True) -> Captured:
    """Captures a model in the mode (training or not) that its modules are in.

    Args:
        plain: the model.
        example: inputs int64 `(1, T)`, with a T that no dimension of the model's parameters has.
        compares: whether graph and model may be compared at single lengths; not where a call of the model leaves
            something behind, which is refused later.

    Raises:
        CaptureError: torch.export cannot trace the model.
        ControlFlowError: the model's Python code needs one T, or the values of tensors.
        LengthDependentError: the model spaces numbers evenly over the number of tokens.
        LostGradientError: the model changes gradients in a way that a graph does not keep.
        TokenMixingError: a recurrent layer carries a state from token to token.
        UnsupportedArgumentError: the model's forward does not take an argument that it is given.
        UnsupportedOutputError: the output holds something else than tensors and plain constants.
    """
    flat = _Flat(plain)
    program = _export(flat, example)
    output_form = flat.seen.output_form
    assert output_form is not None
    _require_plain_constants(output_form, plain.model)
    with _quiet():
        exported = program.module(check_guards=False)
    _require_computed(exported, plain.model)
    tokens = example[0].shape[1]
    same = partial(same_at, plain, exported) if compares else _unknown
    limit, short, control_flow = length_limit(program._guards_code, program.graph, tokens, same)
    # Where they differ at other lengths too, it is no branch: the self-check tells what it is.
    if short is None and same(1) is False and same(tokens):
        control_flow = control_flow or branches_on_one_token(line_of_forward(plain.model))
    graph_module = _under_own_names(exported, plain.input_names)
    return Captured(graph_module, output_form, limit, tokens, short, control_flow)


def _unknown(_tokens: int) -> bool | None:
    return None


def _export(flat: _Flat, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    dynamic = {"values": tuple({1: torch.export.Dim.DYNAMIC} for _ in example)}
    fixed: list[SourceLine] = []
    detached: list[SourceLine] = []
    try:
        with (
            _quiet(), _lines_of_the_model(fixed), _lines_of_data(detached), capturable(flat.model),
            kept_whole(flat.model), watching(flat.model), own_random_numbers(flat.plain.device),
            answered_as_outside(), nothing_swallowed(),
        ):  # fmt: skip
            return torch.export.export(flat, example, dynamic_shapes=dynamic, strict=False)
    except TreeCompileError:
        raise
    except Exception as error:
        given = (*flat.plain.input_names[1:], *flat.plain.keywords)
        misfit = wrong_call(flat.plain) if isinstance(error, TypeError) else None
        raise misfit or _misfit_argument(error, given) or _explained(error, fixed, detached) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides export's own warnings and its prints of graphs: what matters is raised as an error of ours."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), replaced(export_trace, "print", lambda *_args, **_kwargs: None):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


@contextlib.contextmanager
def _lines_of_the_model(fixed: list[SourceLine]) -> Iterator[None]:
    """Nodes and guards keep the line of the model that they come from, also where that is not in a `forward`.

    `fixed` gets the lines that need T to be one number.
    """
    log_guard = ShapeEnv._log_guard

    def frame_of_guard(_environment: ShapeEnv) -> types.FrameType | None:
        return frame_of_the_model(sys._getframe(1))

    def note(environment: ShapeEnv, prefix: str, guard: Any, *rest: Any, **others: Any) -> None:
        if isinstance(guard, sympy.Eq) and (line := line_of_code(sys._getframe(1))) is not None:
            fixed.append(line)
        log_guard(environment, prefix, guard, *rest, **others)

    with (
        replaced(ShapeEnv, "_get_user_frame", frame_of_guard),
        replaced(ShapeEnv, "_log_guard", note),
        replaced(TracerBase, "_filter_traceback_frames", _frames_of_the_model),
    ):
        yield


@contextlib.contextmanager
def _lines_of_data(lines: list[SourceLine]) -> Iterator[None]:
    """`lines` gets the lines of the model that take the `.data` of a tensor."""
    data: Any = vars(torch._C.TensorBase)["data"]

    def get(tensor: Tensor) -> Tensor:
        caller = sys._getframe(2)  # the one before is that of the replacement
        if is_users(caller.f_code.co_filename) and (line := line_of_code(caller)) is not None:
            lines.append(line)
        return data.__get__(tensor)

    with replaced(Tensor, "data", property(get, data.__set__)):
        yield


def _frames_of_the_model(_tracer: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
    inside = itertools.dropwhile(lambda frame: frame.name != "forward", frames)
    kept = [frame for frame in inside if frame.name == "forward" or is_users(frame.filename)]
    return traceback.StackSummary.from_list(kept)


def _explained(error: Exception, fixed: Sequence[SourceLine], detached: Sequence[SourceLine]) -> Exception:
    text = str(error)
    if isinstance(error, TypeError) and "unhashable" in text and "SymInt" in text:
        return _keyed_by_length(_line_of_error(error))
    if "fake tensor in the exported program" in text:
        return _lost_value(detached[-1] if detached else None)
    if "specialized it" in text and fixed and _SPACED.search(fixed[-1].code):
        return _spaced_by_length(fixed[-1])
    if isinstance(error, (RuntimeError, ValueError)) and "specialized it" in text:
        return _control_flow("the number of tokens", fixed[-1] if fixed else None)
    if isinstance(error, (RuntimeError, ValueError)) and "data-dependent" in text:
        return _control_flow("the values of tensors", line_of_trace(text) or _line_of_error(error))
    first_line, *_ = [*text.strip().splitlines(), ""]
    return CaptureError(
        f"torch.export could not capture the model: {type(error).__name__}: {first_line}",
        where=_line_of_error(error),
        why="the model has to be traced as one graph with a free number of tokens.",
        hint="run torch.export.export(model, (ids,), strict=False) alone to see the whole message.",
    )


_SPACED = re.compile(r"\b(lin|log)space\(")


def _spaced_by_length(where: SourceLine) -> LengthDependentError:
    return LengthDependentError(
        "The model spaces numbers evenly over the number of tokens.",
        where=where,
        why="the number at a token changes with the tokens after it, so sequences cannot share a prefix.",
        hint="take steps of one size, such as torch.arange(T) * step.",
    )


def _keyed_by_length(where: SourceLine | None) -> ControlFlowError:
    return ControlFlowError(
        "The model uses the number of tokens as a key.",
        where=where,
        why="a captured graph has a free number of tokens, for which a dict or a set holds nothing.",
        hint="register one buffer for the longest sequence, and take its first rows: self.table[:T].",
    )


_MISFIT = re.compile(r"(unexpected keyword argument|multiple values for (keyword )?argument) '(?P<name>\w+)'$")


def _misfit_argument(error: Exception, given: Collection[str]) -> UnsupportedArgumentError | None:
    """What a TypeError says of an argument that is `given` to the model's forward; None for any other error."""
    found = _MISFIT.search(str(error)) if isinstance(error, TypeError) else None
    if found is None or found["name"] not in given:
        return None
    return UnsupportedArgumentError(
        f"The model cannot take the argument `{found['name']}`: {found[0]}.",
        why="payloads and forward_kwargs are keyword arguments of the model's forward, and the tokens are its first.",
        hint="leave it out, or add it to forward.",
    )


def _lost_value(where: SourceLine | None) -> CaptureError:
    return CaptureError(
        "A value that the model computes was lost in the capture.",
        where=where,
        why="torch.export takes it for a constant.",
        hint="leave torch.func and .data out of the model's forward: x.detach() for x.data.",
    )


def _control_flow(what: str, where: SourceLine | None) -> ControlFlowError:
    return ControlFlowError(
        f"The model's Python code depends on {what}.",
        where=where,
        why="a captured graph takes one way through the code, for all sequences of a row at once.",
        hint="write it as tensor operations, such as torch.where, or move it out of the model's forward; a loop over "
        "tokens as an op over the tree (docs/recurrence.md: mixer, register_mixer).",
    )


def _line_of_error(error: BaseException) -> SourceLine | None:
    return line_of_trace("".join(traceback.format_tb(error.__traceback__)))


def _require_plain_constants(form: OutputForm, model: nn.Module) -> None:
    for constant in form.constants.values():
        if isinstance(constant, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise UnsupportedOutputError(
                f"The model returns a {type(constant).__name__}, a number that it makes from its number of tokens.",
                where=line_of_forward(model),
                why="a row has many sequences, and a captured graph returns tensors and plain constants.",
                hint="leave it out of the output: len(out[i]) tells the number of tokens of sequence i.",
            )
        if constant is not None and not isinstance(constant, (bool, int, float, str)):
            raise UnsupportedOutputError(
                f"The model returns a {type(constant).__name__}, which is neither a tensor nor a plain constant.",
                where=line_of_forward(model),
                why="it cannot be split into one part for every sequence.",
                hint="return tensors, in tuples, lists, dicts or a ModelOutput; a cache is switched off with "
                "forward_kwargs={'use_cache': False}.",
            )


def _require_computed(exported: fx.GraphModule, model: nn.Module) -> None:
    for node in exported.graph.output_node().all_input_nodes:
        if node.op == "get_attr":
            name = str(node.target).removeprefix("model.")
            raise UnsupportedOutputError(
                f"The model returns its parameter, buffer or constant {name!r} as it is.",
                where=line_of_forward(model),
                why="it is not one value for every token.",
                hint="leave it out of the output; it is an attribute of the model, also outside of a call.",
            )


def _under_own_names(exported: fx.GraphModule, input_names: Sequence[str]) -> fx.GraphModule:
    """The exported graph with the model's own names for its parameters, buffers and inputs."""
    graph = fx.Graph()
    attributes: dict[str, Any] = {}
    copies: dict[fx.Node, fx.Node] = {}
    names = iter(input_names)
    for node in exported.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda old: copies[old]))
            continue
        if node.op == "placeholder":
            # The graph makes the names of its nodes: one that an input has is given to no other node.
            copies[node] = graph.placeholder(next(names))
            copies[node].meta = dict(node.meta)
            continue
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        if node.op == "get_attr":
            target = str(node.target)
            copies[node].target = target.removeprefix("model.")
            attributes[str(copies[node].target)] = _real(node, attrgetter(target)(exported))
    return fx.GraphModule(attributes, graph, class_name="Captured")


def _real(node: fx.Node, value: Any) -> Any:
    if isinstance(value, FakeTensor):
        raise _lost_value(next((line for user in node.users if (line := source_line(user))), None))
    return value
