"""What a pass found: every candidate node once, rewritten or missed, with its reason and the user's line."""

from __future__ import annotations

from dataclasses import dataclass

from tree_compile.errors import SourceLine


@dataclass(frozen=True)
class Finding:
    """One candidate node of one pass.

    Attributes:
        node: name of the node in the captured graph.
        kind: what it is in the user's model, such as "attention" or "position table".
        became: what it was rewritten to, or why it was left alone.
        where: the user's line.
        module: dotted path of the module that it belongs to.
        rewritten: False when the node was left as it was.
    """

    node: str
    kind: str
    became: str
    where: SourceLine | None = None
    module: str = ""
    rewritten: bool = True


@dataclass(frozen=True)
class PassReport:
    """All findings of one pass, in graph order."""

    name: str
    findings: tuple[Finding, ...]
