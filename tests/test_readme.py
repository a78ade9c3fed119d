"""What the README shows works, and what it links to is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_examples_in_the_readme_run_and_are_equal():
    example = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL))
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "615 tokens in, 231 computed" in done.stdout
    assert "equal to the unpacked model" in done.stdout
    assert "231 computed, 1 row, bound 1" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_error_is_on_the_page_of_refusals():
    from tree_compile import errors

    text = (ROOT / "docs" / "refusals.md").read_text("utf-8")
    assert [name for name in errors.__all__ if name != "SourceLine" and f"`{name}`" not in text] == []


def test_commands_in_the_readme_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = set(re.findall(r"^    make ([a-z]+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= shown <= targets
