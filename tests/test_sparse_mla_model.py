"""The sparse MLA decoder is an ordinary causal language model."""

import pytest
import torch

from tree_compile.models.sparse_mla import SparseMLA, SparseMLAConfig

SMALL = SparseMLAConfig(vocab_size=50, width=32, layers=3, latent=16, rotary=8, chosen=6, index_width=16, hidden=48)


@pytest.fixture
def model() -> SparseMLA:
    torch.manual_seed(0)
    model = SparseMLA(SMALL).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_logits_have_one_row_per_token(model):
    assert model(torch.zeros(3, 7, dtype=torch.int64)).shape == (3, 7, SMALL.vocab_size)


def test_every_second_block_has_an_indexer(model):
    assert [block.indexer is not None for block in model.blocks] == [True, False, True]


def test_changed_token_changes_only_itself_and_later_tokens(model):
    tokens = torch.randint(0, 50, (1, 40))
    other = tokens.clone()
    other[0, 21] = (other[0, 21] + 1) % 50
    change = (model(tokens) - model(other)).abs().amax(-1)[0]
    assert torch.all(change[:21] == 0)
    assert change[21] > 0


def test_longer_sequence_keeps_the_logits_of_its_prefix(model):
    tokens = torch.randint(0, 50, (1, 50))
    torch.testing.assert_close(model(tokens)[:, :30], model(tokens[:, :30]))


def test_sequences_of_a_batch_are_apart(model):
    tokens = torch.randint(0, 50, (2, 30))
    torch.testing.assert_close(model(tokens)[1], model(tokens[1:])[0])


def test_fewer_chosen_keys_change_the_logits(model):
    tokens = torch.randint(0, 50, (1, 30))
    few = model(tokens)
    for block in model.blocks:
        if block.indexer is not None:
            block.indexer.config = SparseMLAConfig(**{**vars(SMALL), "chosen": 30})
    change = (model(tokens) - few).abs().amax(-1)[0]
    assert torch.all(change[:6] < 1e-12)
    assert torch.all(change[6:] > 0)
