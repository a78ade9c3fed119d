"""The front door: `treecompile(model)`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tree_compile.arguments import MASK, by_position, check_payloads, unsupported
from tree_compile.calls import (
    check_inputs,
    check_keywords,
    check_not_wrapped,
    check_recordings,
    check_row,
    default_keywords,
)
from tree_compile.comparison import trained_parameters
from tree_compile.explain import Explanation, explain
from tree_compile.modes import evaluation, without_hooks_on_saved_tensors
from tree_compile.output import TreeOutput
from tree_compile.pipeline import CAPTURING
from tree_compile.programs import BACKENDS, Program, make_program, prove_further
from tree_compile.rehearsal import grow
from tree_compile.runtime.options import ATTENTION, MIN_SHARED_TOKENS, PLAN_SECONDS, check_choice, check_options
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows, warm_up
from tree_compile.runtime.row import Row
from tree_compile.runtime.sequences import TOKENS, Sequences, input_names
from tree_compile.selfcheck import CheckReport, check_program, compare, small_tree
from tree_compile.signature import check_tokens
from tree_compile.state import Entry, State, state_of
from tree_compile.unpacked import PlainModel
from tree_compile.watch import require_no_backward_hook

_Place = tuple[tuple[str, ...], tuple[bool, ...], tuple[Entry, ...]]
"""Names of the inputs, modes of the modules, and settings of torch: each has a program of its own."""


class TreeModel(nn.Module):
    """A causal language model that takes a list of sequences and computes every shared prefix once.

    Its parameters are the original objects and its state dict has the original keys. Made by `treecompile`.

    Args:
        model: the model.
        plan_options: keyword arguments of `plan_rows`.
        backend: one of BACKENDS.
        attention: one of ATTENTION.
        keywords: constant keyword arguments of every call of the model.
        self_check: compare with the unpacked model at the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        plan_options: Mapping[str, Any],
        *,
        backend: str,
        attention: str,
        keywords: Mapping[str, Any],
        self_check: bool,
    ) -> None:
        super().__init__()
        # The same dictionaries: parameters, buffers and modules are those of the model, now and later.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(model, name))
        object.__setattr__(self, "unpacked", model)
        self._plan_options = plan_options
        self._backend = backend
        self._attention = attention
        self._keywords = keywords
        self._self_check = self_check
        self._programs: dict[_Place, tuple[State, Program]] = {}
        # Threads that share a tree model: one of them captures, the others wait.
        self._making = threading.RLock()

    unpacked: nn.Module
    """The model itself, unchanged."""

    # Rows are chosen in plain Python, and their blocks are compiled already.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, sequences: Sequences | Row | Plan | None = None, *more: Any, **others: Any) -> TreeOutput:
        """Computes all sequences.

        Args:
            sequences: a list of sequences (tensors, arrays or lists of ints), or a dict of such lists for tokens with
                payloads, tokens first; or a `Row` or a `Plan`, then the output has the sequences that it holds. The
                model gets all of them as int64 `(1, T)`.
            *more: none is taken; the error says what to do instead.
            **others: nor are these.

        Returns:
            `out[i]`: what the model returns for sequence i, without the batch dimension: `[len_i, …]` for each of its
            tensors, such as logits `[len_i, vocabulary]`.

        Raises:
            InputError: the sequences are not usable.
            RefusedModelError: on the first call, the model cannot be proved exact on a prefix tree.
            SelfCheckError: on the first call, the rewritten model differs from the unpacked one.
            UnsupportedArgumentError: any other argument, an input whose name has no meaning on a list of sequences, or
                one that the model's forward does not take; or a sample's payload has the name of one that it takes.
            WrappedModelError: the model has been wrapped, compiled or distributed since `treecompile` took it.
            LostGradientError: the tree model has a backward hook; or torch's activation memory budget is below 1 and
                the model draws random numbers.
        """
        if others:
            raise unsupported(MASK if MASK in others else next(iter(others)))
        if more:
            raise by_position(self.unpacked)
        if sequences is None:
            raise TypeError("a tree model takes the sequences: model([tokens, …])")
        require_no_backward_hook(self, "", "torch looks for tensors in its output, and a TreeOutput is none.")
        rows = self._rows(sequences)
        check_payloads(rows[0].payload_names, self.unpacked)
        program = self._program(tuple(rows[0].inputs), rows)
        for row in rows:
            check_row(row, program.rewritten)
        return TreeOutput([program.run(row) for row in rows], program.rewritten.output_form)

    def plan(self, sequences: Sequences) -> Plan:
        """The rows in which `sequences` are computed.

        Raises:
            InputError: the sequences are not usable.
            UnsupportedArgumentError: the name of an input has no meaning on a list of sequences, or a sample's payload
                has the name of an argument of the model's forward.
        """
        if isinstance(sequences, Mapping):
            # Before the sequences: a padded batch is told what to leave out.
            check_inputs(input_names(sequences))
        plan = plan_rows(sequences, **self._plan_options)
        check_payloads(plan.rows[0].payload_names, self.unpacked)
        return plan

    def rows(self, samples: Sequences | Row | Plan) -> Iterator[TreeOutput]:
        """Computes a batch row by row: the outputs of one row at a time.

        With losses that are divided by what is counted over the whole batch, as those of `tree_compile.losses`, their
        gradients add up to that of the whole batch. A row is computed when its output is asked for, so errors come
        with the first one.

        It calls this module, and so goes around a DistributedDataParallel that holds it: gradients would not be
        reduced. Call that one with each of `ddp.module.plan(samples).rows` instead, as docs/training.md shows.

        Args:
            samples: as in `forward`.

        Raises:
            As `forward`.
        """
        for row in self._rows(samples):
            yield self(row)

    def explain(self, sequences: Sequences | None = None) -> Explanation:
        """What each mixing node of the model became, with the user's file and line; `str()` of it is a text.

        Args:
            sequences: as in `forward`; layers that carry a state are accounted for on their rows.

        Raises:
            InputError: the sequences are not usable.
            RefusedModelError: the model cannot be proved exact on a prefix tree.
            SelfCheckError: the rewritten model differs from the unpacked one.
            UnsupportedArgumentError: the name of an input has no meaning on a list of sequences, or forward takes no
                such argument.
            WrappedModelError: the model has been wrapped, compiled or distributed since `treecompile` took it.
        """
        rows = () if sequences is None else self.plan(sequences).rows
        return explain(self._program(self._last_inputs()), rows)

    def graph(self, stage: str = "rewritten") -> str:
        """The model's graph as Python code: "captured", "rewritten", or the name of a pass for the graph after it.

        Raises:
            RefusedModelError: the model cannot be proved exact on a prefix tree.
            SelfCheckError: the rewritten model differs from the unpacked one.
            UnsupportedArgumentError: the model's forward does not take an argument that it is given.
            ValueError: there is no such stage.
            WrappedModelError: the model has been wrapped, compiled or distributed since `treecompile` took it.
        """
        stages = self._program(self._last_inputs()).rewritten.trail.stages
        if stage not in stages:
            raise ValueError(f"there is no stage {stage!r}; there are {', '.join(map(repr, stages))}")
        return stages[stage]

    def check(self, sequences: Sequences | None = None) -> CheckReport:
        """Compares outputs and all gradients with the unpacked model, in eval mode.

        Args:
            sequences: what to compare on; a small random tree if left out.

        Raises:
            InputError: the sequences are not usable.
            RefusedModelError: the model cannot be proved exact on a prefix tree.
            SelfCheckError: on the first call in eval mode, the rewritten model differs from the unpacked one.
            UnsupportedArgumentError: the name of an input has no meaning on a list of sequences, or forward takes no
                such argument.
            WrappedModelError: the model has been wrapped, compiled or distributed since `treecompile` took it.
        """
        # Another thread must not read the modes meanwhile.
        with self._making, evaluation(self.unpacked):
            plan = self._random_plan() if sequences is None else self.plan(sequences)
            program = self._program(tuple(plan.rows[0].inputs), plan.rows)
            for row in plan.rows:
                check_row(row, program.rewritten)
            plain = self._plain(tuple(plan.rows[0].inputs))
            return compare(plain, plan, program.run, program, trained_parameters(self.unpacked))

    def train(self, mode: bool = True) -> TreeModel:
        """Sets the mode of the model, as `nn.Module.train`."""
        self.unpacked.train(mode)
        return self

    @property
    def training(self) -> bool:
        """The mode of the model itself, however it was set."""
        return self.unpacked.training

    @training.setter
    def training(self, mode: bool) -> None:
        # torch sets it for every module that is made, before there is a model.
        if "unpacked" in vars(self):
            self.unpacked.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            model = vars(self).get("unpacked")
            if model is None or not (name in vars(model) or hasattr(type(model), name)):
                raise
            raise AttributeError(f"{error}; it is one of the model's: tree_model.unpacked.{name}") from None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: programs hold compiled code, and are made again by the first call."""
        return {**{name: value for name, value in vars(self).items() if name != "_making"}, "_programs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_making": threading.RLock()})

    def _random_plan(self) -> Plan:
        names = self._last_inputs()
        return plan_rows(small_tree(self._program(names), self._plain(names)), min_shared_tokens=1)

    def _rows(self, sequences: Sequences | Row | Plan) -> tuple[Row, ...]:
        if isinstance(sequences, Row):
            return (sequences,)
        return sequences.rows if isinstance(sequences, Plan) else self.plan(sequences).rows

    def _plain(self, input_names: tuple[str, ...]) -> PlainModel:
        return PlainModel(self.unpacked, input_names, self._keywords)

    def _last_inputs(self) -> tuple[str, ...]:
        return next((names for names, *_ in reversed(self._programs)), (TOKENS,))

    def _program(self, input_names: tuple[str, ...], rows: Sequence[Row] = ()) -> Program:
        """The program for the model as it is now, and for the sequences of `rows`."""
        with self._making, without_hooks_on_saved_tensors():
            plain, longest = self._plain(input_names), _longest(rows)
            check_recordings(rows, plain)
            place = self._current(plain)
            if any(longest > limit.tokens for limit in self._programs[place][1].rewritten.limits):
                # A cache may have ended there, as long as the sequences that the model has seen.
                grow(plain, longest)
                place = self._current(plain)
            state, program = self._programs[place]
            self._programs[place] = state, self._made_sure(program, plain, rows)
            return self._programs[place][1]

    def _current(self, plain: PlainModel) -> _Place:
        """Where the program is for the state that the model is in; that of an earlier state gives way to it."""
        state = self._state()
        place = (plain.input_names, *state[:2])
        if place not in self._programs or self._programs[place][0] != state:
            self._programs.pop(place, None)
            program = self._make(plain)
            # The first calls of a model may fill caches.
            self._programs[place] = self._state(), program
        return place

    def _state(self) -> State:
        return state_of(self.unpacked, self._keywords)

    def _make(self, plain: PlainModel) -> Program:
        check_not_wrapped(plain.model)
        check_inputs(plain.input_names)
        check_tokens(plain)
        program = make_program(plain, self._backend, self._attention)
        return check_program(plain, program) if self._self_check else program

    def _made_sure(self, program: Program, plain: PlainModel, rows: Sequence[Row]) -> Program:
        """The program with what has to be proved or checked for the lengths of the sequences."""
        longest = _longest(rows)
        proved = program.rewritten.proved
        if proved is not None and longest > proved:
            program = prove_further(program, plain, self._backend, longest)
        # A capture assumes two tokens at least: code for one token alone is seen by the check only.
        has_to_be = self._self_check or any(int(row.sequence_length.min()) == 1 for row in rows)
        return check_program(plain, program) if has_to_be and not program.checked else program


def _longest(rows: Sequence[Row]) -> int:
    """Tokens of the longest sequence; 0 without rows."""
    return max((int(row.sequence_length.max()) for row in rows), default=0)


def _warm_up() -> None:
    """Loads the planner, which takes a second, or once on a machine compiles it, while the caller goes on."""
    # torch.export replaces builtins that numba reads; and a process that is forked meanwhile would find modules locked.
    with CAPTURING:
        warm_up()


def treecompile(
    model: nn.Module,
    row_tokens: int | None = None,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
    objective: str = "rows",
    backend: str = "inductor",
    *,
    attention: str = "auto",
    pad_rows: bool = False,
    plan_seconds: float = PLAN_SECONDS,
    forward_kwargs: Mapping[str, Any] | None = None,
    self_check: bool = True,
) -> TreeModel:
    """Makes a causal language model take a list of sequences and compute every shared token prefix once.

    How far rows are improved in `plan_seconds` depends on the clock: processes that call the model with the same
    sequences may compute different rows. Where they must not, plan once and send the plan, or pass what
    `plan_rows(…, plan_attempts=…)` returns.

    Args:
        model: a causal language model, written for one unpacked sequence: takes token ids int64 `(1, T)` as its first
            argument. It is not changed.
        row_tokens: greatest number of tokens in a row, which is one forward pass; None puts the whole list into one.
        min_shared_tokens: shared prefixes shorter than this are computed for each sequence.
        objective: "rows" for the fewest rows, "tokens" for the fewest tokens.
        backend: "inductor" compiles the rewritten model, "eager" runs it as it is.
        attention: what computes attention on CUDA; nothing elsewhere. "flex": flex_attention. "flash": kernels of flash
            attention; a model is refused where they cannot compute it. "auto": for each row what is estimated to be
            faster, and flex_attention wherever the others cannot. docs/gpu.md says what they can.
        pad_rows: pad every row to `row_tokens`.
        plan_seconds: how long rows are improved before a call; 0 takes the best construction.
        forward_kwargs: constant keyword arguments of every call of the model.
        self_check: compare with the unpacked model on a small random tree at the first call; False leaves that for the
            first call with a sequence of one token, for which the proof does not hold.

    Raises:
        CaptureError: a parameter is on the meta device.
        TypeError: `model` is not a module.
        UnsupportedArgumentError: a keyword argument has no meaning on a list of sequences.
        ValueError: an option has no meaning.
        WrappedModelError: the model is wrapped by DDP, FSDP, DataParallel or torch.compile, is a tree model already, or
            has distributed parameters.
    """
    check_not_wrapped(model)
    check_keywords(forward_kwargs or {})
    check_choice("backend", backend, BACKENDS)
    check_choice("attention", attention, ATTENTION)
    plan_options: dict[str, Any] = {
        "row_tokens": row_tokens,
        "min_shared_tokens": min_shared_tokens,
        "objective": objective,
        "pad_rows": pad_rows,
        "plan_seconds": plan_seconds,
    }
    check_options(**plan_options)
    keywords = {**default_keywords(model), **(forward_kwargs or {})}
    threading.Thread(target=_warm_up, daemon=True).start()
    return TreeModel(
        model, plan_options, backend=backend, attention=attention, keywords=keywords, self_check=self_check
    )
