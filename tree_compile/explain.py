"""A readable account of what became of a model."""

from __future__ import annotations

from dataclasses import dataclass

from tree_compile.errors import SourceLine
from tree_compile.passes.finding import Finding
from tree_compile.programs import Program


@dataclass(frozen=True)
class Explanation:
    """What every mixing node of the user's model became.

    Attributes:
        findings: one for each, in the order of the model.
        limits: longest sequence and its line, for each limit that the capture found.
        vocabulary: number of token ids, or None.
        blocks: number of blocks, and how many of them have code of their own.
    """

    findings: tuple[Finding, ...]
    limits: tuple[tuple[int, SourceLine | None], ...]
    vocabulary: int | None
    blocks: tuple[int, int]

    def __str__(self) -> str:
        lines = [_finding_text(finding) for finding in self.findings]
        lines += [f"at most {tokens} tokens in a sequence{_at(where)}" for tokens, where in self.limits]
        if self.vocabulary is not None:
            lines.append(f"token ids below {self.vocabulary}")
        lines.append(f"{self.blocks[0]} blocks, {self.blocks[1]} of them with code of their own")
        lines.append("every other operation is proved to work token by token")
        return "\n".join(lines)


def _finding_text(finding: Finding) -> str:
    place = f" in {finding.module}" if finding.module else ""
    return f"{finding.kind}{place}{_at(finding.where)}\n    -> {finding.became}"


def _at(where: SourceLine | None) -> str:
    return f"  ({where})" if where is not None else ""


def explain(program: Program) -> Explanation:
    """Collects what all passes found."""
    findings = tuple(program.rewritten.trail.findings)
    limits = tuple((limit.tokens, limit.where) for limit in program.rewritten.limits)
    blocks = (len(program.blocks.blocks), program.blocks.distinct)
    return Explanation(findings, limits, program.rewritten.vocabulary, blocks)
