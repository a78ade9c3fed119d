"""The dense decoder is an ordinary causal language model."""

import pytest
import torch

from tree_compile.models.dense import Dense, DenseConfig, rotate

SMALL = DenseConfig(vocab_size=50, width=32, layers=2, heads=4, kv_heads=2, hidden=48)


@pytest.fixture
def model() -> Dense:
    torch.manual_seed(0)
    return Dense(SMALL).double()


def test_logits_have_one_row_per_token(model):
    assert model(torch.zeros(3, 7, dtype=torch.int64)).shape == (3, 7, SMALL.vocab_size)


def test_changed_token_changes_only_itself_and_later_tokens(model):
    tokens = torch.randint(0, 50, (1, 20))
    other = tokens.clone()
    other[0, 11] = (other[0, 11] + 1) % 50
    change = (model(tokens) - model(other)).abs().amax(-1)[0]
    assert torch.all(change[:11] == 0)
    assert torch.all(change[11:] > 0)


def test_order_of_earlier_tokens_matters(model):
    tokens = torch.arange(10)[None]
    swapped = tokens[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])


def test_longer_sequence_keeps_the_logits_of_its_prefix(model):
    tokens = torch.randint(0, 50, (1, 20))
    torch.testing.assert_close(model(tokens)[:, :8], model(tokens[:, :8]))


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    angle = torch.arange(12, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3], dtype=torch.float64)
    query, key = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64).expand(2, 1, 1, 12, 4)
    query, key = rotate(query, angle.cos(), angle.sin()), rotate(key, angle.cos(), angle.sin())
    torch.testing.assert_close(query.norm(dim=-1), query.norm(dim=-1)[..., :1].expand(1, 1, 12))
    score = (query @ key.mT)[0, 0]
    torch.testing.assert_close(score[5, 3], score[9, 7])
    assert not torch.isclose(score[5, 3], score[5, 4])


def test_every_parameter_gets_a_gradient(model):
    model(torch.randint(0, 50, (2, 9))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("sizes", [{"width": 36, "heads": 4}, {"heads": 4, "kv_heads": 3}])
def test_sizes_that_do_not_divide_are_refused(sizes):
    with pytest.raises(ValueError, match="heads"):
        DenseConfig(**sizes)
