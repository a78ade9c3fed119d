"""A tiny model whose one step is given, and what its refusal has to say."""

import linecache

import pytest
import torch
from torch import nn

from tree_compile import treecompile

VOCABULARY, WIDTH, HEADS, POSITIONS = 32, 8, 2, 64


class Tiny(nn.Module):
    """Embeds tokens, computes `step(model, x, ids)` on x [1, T, WIDTH], and returns logits."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gain = nn.Parameter(torch.randn(4))
        self.rows = nn.Parameter(torch.randn(POSITIONS, WIDTH))
        self.register_buffer("table", torch.randn(POSITIONS, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.step(self, self.embed(ids), ids))

    def heads(self, x):
        """Queries, keys and values [1, HEADS, T, WIDTH / HEADS]."""
        return [project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in self.project]


def merged(heads):
    return heads.transpose(1, 2).flatten(-2)


def causal(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def tree_model(model, self_check=False):
    """Without the self-check, so that a refusal is that of the proof."""
    return treecompile(model.double(), min_shared_tokens=1, backend="eager", self_check=self_check)


def require_refusal(model, error, code, why, file):
    """`error` itself, which names the line with `code` in `file`, the reason, and something to try."""
    with pytest.raises(error) as raised:
        tree_model(model).explain()
    found = raised.value
    assert type(found) is error
    assert found.where is not None
    assert found.where.file == file
    assert code in linecache.getline(file, found.where.line)
    assert found.where.code == linecache.getline(file, found.where.line).strip()
    assert why in found.why
    for part in (found.what, f"at {file}:{found.where.line}", f"why: {found.why}", f"try: {found.hint}"):
        assert part in str(found)
    assert found.hint


def named(cases):
    """Parameters with the name of their first entry, a function or a class."""
    return [pytest.param(*case, id=case[0].__name__) for case in cases]
