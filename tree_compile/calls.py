"""What a call of a tree model may hold, and what is refused with a hint."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

from torch import nn

from tree_compile.arguments import HINTS, unsupported
from tree_compile.errors import (
    CaptureError,
    PayloadError,
    SequenceTooLongError,
    TokenRangeError,
    UnsupportedArgumentError,
    WrappedModelError,
)
from tree_compile.passes.plan_inputs import PLAN_INPUTS, TREE_INPUTS, WINDOW_INPUT
from tree_compile.pipeline import Rewritten
from tree_compile.replay import Routing
from tree_compile.runtime.counts import count_of
from tree_compile.runtime.recordings import ROUTED
from tree_compile.runtime.row import Row
from tree_compile.runtime.tables import DENSE_ROW_TOKENS
from tree_compile.unpacked import PlainModel

_TAKEN = {"self", "torch", *PLAN_INPUTS, *TREE_INPUTS}
"""Names that the code of a graph has for something else than an input of the model."""


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Refuses payloads and constant keyword arguments that have no meaning on a list of sequences.

    Raises:
        UnsupportedArgumentError: names the argument and what to do instead.
    """
    for name, value in keywords.items():
        if name in HINTS and not (name == "use_cache" and value is False):
            raise unsupported(name)


def check_inputs(names: Sequence[str]) -> None:
    """Refuses names of inputs, tokens first, that have no meaning on a list of sequences or in the code of a graph.

    Raises:
        UnsupportedArgumentError: names the input and what to do instead.
    """
    # The tokens are passed by position, so that their name says nothing to the model.
    check_keywords(dict.fromkeys(names[1:]))
    for name in names:
        if name in _TAKEN or name.startswith(WINDOW_INPUT) or not str(name).isidentifier() or iskeyword(name):
            raise UnsupportedArgumentError(
                f"`{name}` cannot be the name of an input.",
                why="the graph of a tree model is Python code with its inputs as arguments, beside those that say how "
                "a row is laid out.",
                hint="give the argument another name in the model's forward.",
            )


def default_keywords(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments that every call of the model gets: `use_cache=False` where the model knows it."""
    parameters = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    known = "use_cache" in parameters or (passes_on and any(hasattr(config, "use_cache") for config in _configs(model)))
    return {"use_cache": False} if known else {}


def _configs(model: nn.Module) -> list[Any]:
    """The model's config, and that of its text part where it has one."""
    config: Any = getattr(model, "config", None)
    return [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]


def check_not_wrapped(model: Any) -> None:
    """Refuses models that are wrapped by something that must be outside of the tree model, or have no parameters yet.

    Raises:
        CaptureError: parameters are on the meta device.
        TypeError: `model` is not a module.
        WrappedModelError: names the wrapper, or plain tensors are in the place of parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"treecompile takes a torch.nn.Module, not {type(model).__name__}")
    for module in model.modules():
        wrapper = _wrapper(module)
        if wrapper:
            raise WrappedModelError(
                f"The model is already wrapped by {wrapper}.",
                why="its hooks would be captured, or left out, together with the model.",
                hint=_UNWRAPPED[wrapper],
            )
    if any(_is_no_parameter(parameter) for module in model.modules() for parameter in module._parameters.values()):
        raise _replaced_parameters()
    _check_parameters(model)


_FIRST = "compile the plain model first and wrap after that: "
_UNWRAPPED = {
    "DistributedDataParallel": f"{_FIRST}DistributedDataParallel(treecompile(model)).",
    "DataParallel": f"{_FIRST}DistributedDataParallel(treecompile(model)), with one process for every device.",
    "FullyShardedDataParallel": f"{_FIRST}fully_shard(treecompile(model)).",
    "fully_shard": f"{_FIRST}fully_shard(treecompile(model)).",
    "torch.compile": "pass the plain model: treecompile compiles it.",
    "treecompile": "use it as it is; the plain model is its attribute `unpacked`.",
}


def _wrapper(module: nn.Module) -> str:
    names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch")}
    known = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")
    found = next((name for name in known if name in names), "")
    if module._compiled_call_impl is not None:
        found = "OptimizedModule"
    if any(_is_of_fsdp1(module, parameter) for parameter in module._parameters.values()):
        found = "FullyShardedDataParallel"
    if (type(module).__module__, type(module).__name__) == ("tree_compile.api", "TreeModel"):
        found = "treecompile"
    return {"FSDPModule": "fully_shard", "OptimizedModule": "torch.compile"}.get(found, found)


def _is_of_fsdp1(module: nn.Module, parameter: Any) -> bool:
    """Whether it is flat, or a part of a flat one that stands in a parameter's place."""
    is_managed = getattr(module, "_is_fsdp_managed_module", False)
    return hasattr(parameter, "_is_flat_param") or (is_managed and _is_no_parameter(parameter))


def _is_no_parameter(parameter: Any) -> bool:
    return not isinstance(parameter, (nn.Parameter, type(None)))


def _replaced_parameters() -> WrappedModelError:
    return WrappedModelError(
        "Plain tensors stand in the place of the model's parameters, as torch.func.functional_call puts them there.",
        why="the graph of a tree model computes with the model's own parameters.",
        hint="call the tree model itself, and take torch.autograd.grad(loss, list(tree_model.parameters())).",
    )


def _check_parameters(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise _without_values(f"The buffer {name}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise _without_values(f"The parameter {name}")
        # By name: importing the class takes two seconds.
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise WrappedModelError(
                f"The parameter {name} is distributed (a DTensor).",
                why="the model is captured with the operations of one device.",
                hint="compile the plain model first and shard after that; explain() and check() need the plain model.",
            )


def _without_values(what: str) -> CaptureError:
    return CaptureError(
        f"{what} is on the meta device.",
        why="it has no values, so nothing can be computed or checked with it.",
        hint="load the weights first, for example with model.to_empty(device=…) and load_state_dict.",
    )


def check_row(row: Row, rewritten: Rewritten) -> None:
    """Refuses token ids that the model does not know, and sequences that its capture does not hold for.

    Raises:
        TokenRangeError, SequenceTooLongError.
    """
    if rewritten.vocabulary is not None:
        _check_tokens(row, rewritten.vocabulary)
    _check_limits(row, rewritten)
    _check_proof(row, rewritten)
    _check_memory(row, rewritten)


def check_recordings(rows: Sequence[Row], plain: PlainModel) -> None:
    """Refuses recorded experts that do not fit to the routers of the model.

    Raises:
        PayloadError: a recording has other numbers of layers or of experts per token than the routers, or an expert
            that they do not have.
        ReplayError: the routers cannot be made to choose recorded experts.
    """
    if ROUTED not in plain.input_names:
        return
    for row in rows:
        recorded = row.inputs[ROUTED]
        if recorded.shape[1:] != plain.routing.shape:
            raise _misfit(row, 0, f"has {list(recorded.shape[1:])} numbers for a token", plain.routing)
        at = int(recorded.reshape(len(recorded), -1).max(1).argmax())
        if recorded[at].max() >= plain.routing.experts:
            raise _misfit(row, at, f"holds expert {recorded[at].max()}", plain.routing)


def _misfit(row: Row, at: int, what: str, routing: Routing) -> PayloadError:
    layers, top_k = routing.shape
    return PayloadError(
        f"{ROUTED!r} of sample {_sequence_at(row, at)} {what}.",
        why=f"the model has {count_of(layers, 'router')}, and each chooses {top_k} of {routing.experts} experts.",
        hint=f"pass [tokens, {layers}, {top_k}], of numbers below {routing.experts}, for layers with a router.",
    )


def _sequence_at(row: Row, at: int) -> int:
    """A sequence that holds a token of the row."""
    return next(i for i in row.sequence_ids if any(start <= at < end for start, end in row.path_ranges(i)))


def _longest(row: Row) -> tuple[int, int]:
    """Number and length of the longest sequence."""
    place = int(row.sequence_length.argmax())
    return row.sequence_ids[place], int(row.sequence_length[place])


def _check_limits(row: Row, rewritten: Rewritten) -> None:
    sequence, longest = _longest(row)
    for limit in rewritten.limits:
        if longest > limit.tokens:
            raise SequenceTooLongError(
                f"Sequence {sequence} has {longest} tokens, and the model takes {limit.tokens} at the most.",
                where=limit.where,
                why="the model's code ends there.",
                hint="shorten the sequence, or raise the model's greatest number of positions; "
                "a branch on the number of tokens has to be written as tensor operations.",
            )


def _check_proof(row: Row, rewritten: Rewritten) -> None:
    sequence, longest = _longest(row)
    if rewritten.proved is not None and longest > rewritten.proved:
        raise SequenceTooLongError(
            f"Sequence {sequence} has {longest} tokens, and the model's masks are proved for {rewritten.proved}.",
            why="they were evaluated up to there, and are not made of plain comparisons of positions.",
            hint="shorten the sequence, or write the mask as comparisons of positions with constants.",
        )


def _check_memory(row: Row, rewritten: Rewritten) -> None:
    if rewritten.dense and len(row.tokens) > DENSE_ROW_TOKENS:
        raise SequenceTooLongError(
            f"A row has {len(row.tokens)} tokens, and this model's mask needs T x T numbers: "
            f"{DENSE_ROW_TOKENS} tokens at the most.",
            why="no closed form of the mask was found; explain() shows it.",
            hint=f"pass row_tokens={DENSE_ROW_TOKENS} or less.",
        )


def _check_tokens(row: Row, vocabulary: int) -> None:
    greatest = int(row.tokens.max())
    if greatest >= vocabulary:
        at = int(row.tokens.argmax())
        raise TokenRangeError(
            f"Token id {greatest} in sequence {_sequence_at(row, at)} is not below the vocabulary's {vocabulary}.",
            why="the model has no embedding for it.",
            hint="check that the tokenizer is the model's.",
        )
