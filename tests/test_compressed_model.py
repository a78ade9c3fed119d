"""The decoder with compressed attention is an ordinary causal language model."""

from dataclasses import replace

import pytest
import torch

from tree_compile.models.compressed import Compressed, CompressedConfig

SMALL = CompressedConfig(
    vocab_size=50, width=32, layers=3, heads=2, head_width=16, sliding_window=5, large_window=8, index_heads=4,
    entries_per_token=2, hidden=48,
)  # fmt: skip


def model_of(config: CompressedConfig) -> Compressed:
    torch.manual_seed(0)
    model = Compressed(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def model() -> Compressed:
    return model_of(SMALL)


def change_between(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The greatest difference at every token of the one sequence."""
    return (first - second).abs().amax(-1)[0]


@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 8, 9])
def test_logits_have_one_row_per_token(model, tokens):
    assert model(torch.zeros(3, tokens, dtype=torch.int64)).shape == (3, tokens, SMALL.vocab_size)


def test_changed_token_changes_only_itself_and_later_tokens(model):
    tokens = torch.randint(0, 50, (1, 40))
    other = tokens.clone()
    other[0, 21] = (other[0, 21] + 1) % 50
    change = change_between(model(tokens), model(other))
    assert torch.all(change[:21] == 0)
    assert change[21] > 0


def test_longer_sequence_keeps_the_logits_of_its_prefix(model):
    tokens = torch.randint(0, 50, (1, 50))
    torch.testing.assert_close(model(tokens)[:, :30], model(tokens[:, :30]))


def test_sequences_of_a_batch_are_apart(model):
    tokens = torch.randint(0, 50, (2, 30))
    torch.testing.assert_close(model(tokens)[1], model(tokens[1:])[0])


def test_a_token_behind_the_sliding_window_is_seen_through_entries(model):
    only_near = model_of(replace(SMALL, layers=1))
    tokens = torch.randint(0, 50, (1, 40))
    other = tokens.clone()
    other[0, 2] = (other[0, 2] + 1) % 50
    assert change_between(only_near(tokens), only_near(other))[20] == 0
    assert change_between(model(tokens), model(other))[20] > 0


def test_fewer_chosen_entries_change_the_logits_where_there_are_more(model):
    tokens = torch.randint(0, 50, (1, 30))
    change = change_between(model(tokens), model_of(replace(SMALL, entries_per_token=7))(tokens))
    assert torch.all(change[:11] < 1e-12)
    assert torch.all(change[11:] > 0)
