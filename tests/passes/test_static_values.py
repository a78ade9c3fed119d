"""Static values: tables over positions are gathered, whatever computed them, and refused where they change with T."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tree_compile import treecompile
from tree_compile.errors import LengthDependentError, SequenceTooLongError

WIDTH, LIMIT = 8, 48
TREE = [[1, 2, 3, 4, *range(5, 5 + extra), 9] for extra in (3, 12, 22, 19)]
"""More tokens in a row than LIMIT, and fewer in every sequence."""


class Model(nn.Module):
    """Embeds, adds `table(model, tokens)` [T, WIDTH], attends causally, and predicts."""

    def __init__(self, table):
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.places = nn.Embedding(LIMIT, WIDTH)
        self.head = nn.Linear(WIDTH, 32)
        self.table = table
        self.register_buffer("numbers", torch.arange(LIMIT)[None])
        self.register_buffer("rows", torch.randn(LIMIT, WIDTH))
        self.register_buffer("kinds", torch.zeros(1, LIMIT, dtype=torch.long))
        self.register_buffer("triangle", torch.ones(LIMIT, LIMIT, dtype=torch.bool).tril())

    def forward(self, input_ids):
        hidden = self.embed(input_ids) + self.table(self, input_ids.shape[1])
        heads = hidden[:, None]
        return self.head(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[:, 0])


def compiled(table):
    return treecompile(Model(table).double(), backend="eager", min_shared_tokens=1, self_check=False)


def sines(tokens):
    return torch.arange(tokens, dtype=torch.float64)[:, None] * torch.linspace(0.1, 1, WIDTH, dtype=torch.float64)


def written_in_place(_model, tokens):
    table = torch.zeros(tokens, WIDTH, dtype=torch.float64)
    table[..., 0::2] = sines(tokens)[:, 0::2].sin()
    table[..., 1::2] = sines(tokens)[:, 1::2].cos()
    return table


EXACT = {
    "computed": lambda _model, tokens: sines(tokens).cos(),
    "written in place": written_in_place,
    "rows of an embedding": lambda model, tokens: model.places(model.numbers[:, :tokens]),
    "kinds that are all the same": lambda model, tokens: model.places(model.kinds[:, :tokens]),
    "a size that looks like another": lambda model, tokens: model.rows[: LIMIT - max(0, LIMIT - tokens)],
}


@pytest.mark.parametrize("name", EXACT)
def test_table_over_positions_is_exact_in_a_row_longer_than_any_sequence(name):
    assert compiled(EXACT[name]).check(TREE).ok


def test_table_that_says_the_same_for_the_first_positions_alone_is_exact_beyond_them():
    def growing(_model, tokens):
        return (torch.log(torch.arange(tokens) + 1) / math.log(2_000)).clamp(min=1).double()[:, None].expand(-1, WIDTH)

    long = torch.randint(0, 32, (2_100,)).tolist()
    tree, sequences = compiled(growing), [[*long, 1, 2], [*long[:9], 3]]
    for own, logits in zip(sequences, tree(sequences), strict=True):
        torch.testing.assert_close(logits, tree.unpacked(torch.tensor([own]))[0])


def test_table_that_is_switched_at_a_length_is_refused():
    with pytest.raises(LengthDependentError):
        compiled(lambda _model, tokens: sines(tokens) * (torch.arange(tokens).max() > 14)).check(TREE)


def test_sequence_longer_than_a_buffer_is_refused():
    model = compiled(EXACT["rows of an embedding"])
    with pytest.raises(SequenceTooLongError):
        model([[1] * (LIMIT + 1)])


def test_mask_cut_from_a_buffer_is_read_by_its_values():
    class Masked(Model):
        def forward(self, input_ids):
            heads, tokens = self.embed(input_ids)[:, None], input_ids.shape[1]
            mask = self.triangle[:tokens, :tokens]
            return self.head(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)[:, 0])

    model = treecompile(Masked(None).double(), backend="eager", min_shared_tokens=1)
    assert model.check(TREE).ok
    assert "k <= q" in str(model.explain())


def test_dtype_of_another_tensor_is_not_its_values():
    def table(_model, tokens):
        return torch.arange(tokens)[:, None].type_as(sines(tokens)) * 0.1

    assert compiled(table).check(TREE).ok
