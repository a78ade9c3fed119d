"""Masks whose constants are hidden: a window that only shows far down the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tree_compile import selfcheck, treecompile
from tree_compile.errors import SequenceTooLongError
from tree_compile.passes.static_values import FIRST_REACH
from tree_compile.selfcheck import CheckReport

Mask = Callable[[Tensor, Tensor, nn.Module], Tensor]

HIDDEN = {
    "a chunk by shifts": lambda q, k, _: q >> 9 == k >> 9,
    "a chunk by two divisions": lambda q, k, _: q // 32 // 16 == k // 32 // 16,
    "a window that is an alpha": lambda q, k, _: q < torch.add(k, 1, alpha=300),
    "a window that is a square": lambda q, k, model: q - k < model.side * model.side,
    "windows of two heads": lambda q, k, model: (q - k)[None] < model.windows[:, None, None],
}


class Masked(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.embed, self.head = mask, nn.Embedding(30, 16), nn.Linear(16, 30)
        self.register_buffer("side", torch.tensor(20))
        self.register_buffer("windows", torch.tensor([300, 700]))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).unflatten(-1, (2, 8)).transpose(1, 2)
        position = torch.arange(input_ids.shape[1])
        q, k = position[:, None], position[None, :]
        mixed = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=(k <= q) & self.mask(q, k, self))
        return self.head(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", HIDDEN)
def test_a_mask_with_a_hidden_constant_is_exact_beyond_it(name: str) -> None:
    model = Masked(HIDDEN[name]).double()
    trunk = torch.randint(0, 30, (700,)).tolist()
    sequences = [trunk + [1] * 80, trunk + [2] * 40]
    out = treecompile(model, backend="eager")(sequences)
    for i, tokens in enumerate(sequences):
        assert torch.allclose(out.logits[i], model(torch.tensor([tokens]))[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("shift", "checks"), [(11, 2), (9, 1)])
def test_graph_that_changes_for_longer_sequences_is_checked_again(
    shift: int, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(*args: Any) -> CheckReport:
        compared.append(args)
        return selfcheck_compare(*args)

    selfcheck_compare = selfcheck.compare
    monkeypatch.setattr(selfcheck, "compare", compare)
    tree_model = treecompile(Masked(lambda q, k, _: q >> shift == k >> shift).double(), backend="eager")
    tree_model([[1, 2, 3]])
    tree_model([[1] * (2 * FIRST_REACH + 8), [1] * 8])
    assert len(compared) == checks


def test_longer_sequences_are_proved_when_they_come() -> None:
    model = Masked(lambda q, k, _: q >> 11 == k >> 11).double()
    tree_model = treecompile(model, backend="eager")
    tree_model([[1, 2, 3]])
    assert "k <= q" in str(tree_model.explain())
    trunk = torch.randint(0, 30, (2 * FIRST_REACH,)).tolist()
    sequences = [trunk + [1] * 8, trunk + [2] * 4]
    out = tree_model(sequences)
    assert "2048" in str(tree_model.explain())
    for i, tokens in enumerate(sequences):
        assert torch.allclose(out.logits[i], model(torch.tensor([tokens]))[0], rtol=0, atol=1e-10)


BEYOND = {
    "a chunk by shifts": lambda q, k, _: q >> 14 == k >> 14,
    "a window in a filled tensor": lambda q, k, _: q - k < torch.full((), 9_000, dtype=torch.int64),
    "a window in a branch": lambda q, k, _: q - k < torch.where(k > 2, 9_000, 8_999),
    "a window added to a filled tensor": lambda q, k, _: q < k + torch.full_like(k, 9_000),
    "numbers that wrap": lambda q, k, _: k.to(torch.int16) <= q.to(torch.int16),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_mask_of_more_than_comparisons_ends_where_its_proof_ends(name: str) -> None:
    with pytest.raises(SequenceTooLongError, match="proved for"):
        treecompile(Masked(BEYOND[name]), backend="eager")([torch.zeros(9_000, dtype=torch.int64)])
