"""Models that are named on the command line."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tree_compile.errors import InputError, SourceLine

__all__ = ["load_target"]


def load_target(target: str, **overrides: Any) -> nn.Module:
    """Builds the model that `target` names.

    Args:
        target: "module:factory", where calling factory() gives an `nn.Module`, and the module may lie in the current
            directory; or the name of an architecture in transformers, of which a tiny random model is built.
        overrides: settings of the config, where an architecture is named.

    Raises:
        InputError: there is no such thing, or it does not give a module; says where the user's code failed.
    """
    if ":" not in target:
        from tree_compile.tiny import tiny_model

        return tiny_model(target, **overrides)
    model = _run(_factory(target), target)
    if not isinstance(model, nn.Module):
        raise InputError(f"{target} gave a {type(model).__name__}, not an nn.Module.", why=_WHY, hint=_HINT)
    return model


_HINT = 'give module:factory, where "from module import factory; factory()" makes an nn.Module.'
_WHY = "a model is made by calling the function that TARGET names."


def _factory(target: str) -> Callable[[], Any]:
    module_name, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    module = _run(lambda: importlib.import_module(module_name), module_name)
    factory = getattr(module, name, None)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise InputError(f"{module_name} has no function {name!r}.", why=_WHY, hint=_HINT)
    return factory


def _run(call: Callable[[], Any], name: str) -> Any:
    try:
        return call()
    except Exception as error:
        what, why = (
            f"{name} failed with {type(error).__name__}.",
            f"{str(error).rstrip('. ') or 'it does not say why'}.",
        )
        raise InputError(what, where=_last_line_outside(error), why=why, hint=_HINT) from error


def _last_line_outside(error: Exception) -> SourceLine | None:
    """The deepest line of the traceback that is the user's: not ours, not the import system's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        ours = Path(frame.filename) == Path(__file__) or frame.filename.startswith("<")
        if not ours and Path(frame.filename) != Path(importlib.__file__):
            return SourceLine(frame.filename, frame.lineno or 0, frame.line or "")
    return None
