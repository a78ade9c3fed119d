"""The hybrid decoder is an ordinary causal language model."""

from dataclasses import replace

import pytest
import torch

from tree_compile.models.hybrid import Hybrid, HybridConfig

SMALL = HybridConfig(vocab_size=50, width=32, layers=4, head_width=8, hidden=24)


@pytest.fixture
def model() -> Hybrid:
    return random_model(SMALL).double()


def random_model(config: HybridConfig) -> Hybrid:
    torch.manual_seed(0)
    model = Hybrid(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_logits_have_one_row_per_token(model):
    assert model(torch.zeros(3, 7, dtype=torch.int64)).shape == (3, 7, SMALL.vocab_size)


def test_every_fourth_block_has_attention(model):
    assert [block.has_attention for block in model.blocks] == [False, False, False, True]


def test_changed_token_changes_only_itself_and_later_tokens(model):
    tokens = torch.randint(0, 50, (1, 90))
    other = tokens.clone()
    other[0, 41] = (other[0, 41] + 1) % 50
    change = (model(tokens) - model(other)).abs().amax(-1)[0]
    assert torch.all(change[:41] == 0)
    assert torch.all(change[41:] > 0)


def test_longer_sequence_keeps_the_logits_of_its_prefix(model):
    tokens = torch.randint(0, 50, (1, 100))
    torch.testing.assert_close(model(tokens)[:, :70], model(tokens[:, :70]))


def test_half_precision_by_autocast_is_within_its_rounding():
    # A token goes to all experts: rounding may send it to other ones.
    model, tokens = random_model(replace(SMALL, experts_per_token=SMALL.experts)), torch.randint(0, 50, (1, 40))
    wanted = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        difference = model(tokens).float() - wanted
    assert difference.abs().max() < 5e-2 * wanted.abs().max()


def test_sequences_of_a_batch_are_apart(model):
    tokens = torch.randint(0, 50, (2, 40))
    torch.testing.assert_close(model(tokens)[1], model(tokens[1:])[0])


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 value_heads are not a multiple of 2 key_heads"):
        HybridConfig(value_heads=3)
    with pytest.raises(ValueError, match="5 of 4 experts"):
        HybridConfig(experts_per_token=5)
