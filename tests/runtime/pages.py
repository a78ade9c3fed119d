"""Runs the examples of a documentation page."""

import doctest
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def run_page(name: str) -> int:
    """The number of examples that a page has, all of which were right."""
    text = "\n".join("" if line.startswith("```") else line for line in (DOCS / name).read_text().splitlines())
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    result = doctest.DocTestRunner().run(test)
    assert result.failed == 0, f"{result.failed} examples of {name} are wrong; the captured output shows them"
    return result.attempted
