"""What a pass found."""

from __future__ import annotations

from dataclasses import dataclass

from tree_compile.errors import SourceLine


@dataclass(frozen=True)
class Finding:
    """One node that a pass looked for, and rewrote.

    Attributes:
        kind: what it is in the user's model, such as "attention" or "position table".
        became: what it was rewritten to.
        where: the user's line.
        module: dotted path of the module that it belongs to.
    """

    kind: str
    became: str
    where: SourceLine | None = None
    module: str = ""
