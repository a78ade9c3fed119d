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
        state_bytes: bytes of a state that it carries along the tokens, one for every chunk of a row; 0 for none.
    """

    kind: str
    became: str
    where: SourceLine | None = None
    module: str = ""
    state_bytes: int = 0
