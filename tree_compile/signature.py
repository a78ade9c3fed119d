"""A call that the model's `forward` does not take is refused in terms of the call, before any line of it has run."""

from __future__ import annotations

import inspect

from tree_compile.arguments import HINTS
from tree_compile.errors import CaptureError, RefusedModelError
from tree_compile.passes.source import line_of_forward
from tree_compile.unpacked import PlainModel

_WHY = "a tree model calls forward with the token ids by position, and with payloads and forward_kwargs by name."


def wrong_call(plain: PlainModel) -> RefusedModelError | None:
    """The error for token ids or a required argument that `forward` cannot be given so; None where it can."""
    signature = inspect.signature(plain.model.forward)
    given = (*plain.input_names[1:], *plain.keywords)
    parameters = signature.parameters.values()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not by_position:
        return _error(plain, "takes no argument by position", "begin with the token ids: forward(self, input_ids, …).")
    if by_position[0].name in given and by_position[0].kind is not inspect.Parameter.POSITIONAL_ONLY:
        name = by_position[0].name
        return _error(plain, f"is given {name!r} twice", f"leave {name!r} out: it is the token ids.")
    for parameter in parameters:
        is_required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if is_required and parameter is not by_position[0] and parameter.name not in given:
            return _missing(plain, parameter.name)
    return None


def check_tokens(plain: PlainModel) -> None:
    """Refuses inputs without token ids, the first of which has the name of another argument of the model's forward.

    Raises:
        CaptureError: it has.
    """
    name = plain.input_names[0]
    if name in list(inspect.signature(plain.model.forward).parameters)[1:]:
        hint = f"name the token ids: model({{'input_ids': […], '{name}': […]}})."
        raise _error(plain, f"would be given {name!r} in the place of token ids", hint)


def _missing(plain: PlainModel, name: str) -> RefusedModelError:
    if name in HINTS:
        return _error(plain, f"needs the argument {name!r}", f"give it a default value, and {HINTS[name]}")
    hint = (
        "give it a default value, or pass it as a payload, "
        f"model({{'input_ids': […], '{name}': […]}}), or in forward_kwargs: "
        f"treecompile(model, forward_kwargs={{'{name}': …}})."
    )
    return _error(plain, f"needs the argument {name!r}", hint)


def _error(plain: PlainModel, what: str, hint: str) -> RefusedModelError:
    where = line_of_forward(plain.model)
    return CaptureError(f"The model's forward {what}.", where=where, why=_WHY, hint=hint)
