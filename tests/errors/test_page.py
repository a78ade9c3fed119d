"""The examples on the page of refusals are what it says."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.errors.refusal import WIDTH, Tiny, merged, tree_model
from tree_compile import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "refusals.md"
ROW = re.compile(r"^\| `(?P<refused>[^`]+)` \| `(?P<error>\w+)` \| [^|]+ \| (?P<instead>[^|]*)\|$", re.MULTILINE)
ROWS = [match.group("refused", "error", "instead") for match in ROW.finditer(PAGE.read_text("utf-8"))]
INSTEAD = {code for *_, last in ROWS for code in re.findall(r"^`([^`]+)` *$", last)}


class Example(Tiny):
    """A model whose one step is the code of an example."""

    def __init__(self, code):
        super().__init__(Example.compute)
        self.code = code
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH, 4))

    def compute(self, x, ids):
        query, key, value = self.heads(x)
        names = {"torch": torch, "F": F, "x": x, "ids": ids, "T": x.shape[1], "width": WIDTH, "table": self.rows}
        names |= {"query": query, "key": key, "value": value, "lstm": self.lstm, "kernel": self.kernel}
        names["hidden"] = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        result = eval(self.code, names)
        return x + (merged(result) if result.dim() == 4 else result)


def test_page_has_examples():
    assert len(ROWS) > 25
    assert len(INSTEAD) > 15


@pytest.mark.parametrize(("code", "error"), [row[:2] for row in ROWS])
def test_example_is_refused_with_the_error_of_the_page(code, error):
    with pytest.raises(getattr(errors, error)) as raised:
        tree_model(Example(code)).explain()
    assert type(raised.value).__name__ == error


@pytest.mark.parametrize("code", sorted(INSTEAD))
def test_what_the_page_says_instead_is_exact(code):
    report = tree_model(Example(code)).check()
    assert report.greatest_output_difference < 1e-12
    assert report.greatest_gradient_difference < 1e-9
