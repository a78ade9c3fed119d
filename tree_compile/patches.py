"""A part of another library, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """`function` as what a class or a module `owner` calls `name`."""
    inherited, own = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
