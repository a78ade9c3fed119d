"""What a model returns has to be one value for every token."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.errors.refusal import VOCABULARY, WIDTH, named, require_refusal, tree_model
from tree_compile.errors import LengthDependentError, TokenMixingError, UnsupportedOutputError


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, ids):
        return self.head(self.embed(ids))


class LastLogits(Base):
    def forward(self, ids):
        return self.logits(ids)[:, -1:]


class LastToken(Base):
    def forward(self, ids):
        return self.logits(ids)[:, -1]


class MeanLoss(Base):
    def forward(self, ids):
        return self.logits(ids).logsumexp(-1).mean()


class LossBesideLogits(Base):
    def forward(self, ids):
        logits = self.logits(ids)
        return {"loss": logits.square().mean(), "logits": logits}


class Penalty(Base):
    def forward(self, ids):
        return self.logits(ids), self.head.weight.square().sum()


class Cache(Base):
    def forward(self, ids):
        key = self.embed(ids).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.logits(ids), ((key, key),)


class FeaturesFirst(Base):
    def forward(self, ids):
        return self.logits(ids).mT


class Ranks(Base):
    def forward(self, ids):
        return self.logits(ids), ids[0].argsort()


NOT_PER_TOKEN = [
    (LastLogits, "[:, -1:]", "cuts or shifts the tokens"),
    (LastToken, "[:, -1]", "one token out of all"),
    (MeanLoss, ".mean()", "reduces along the tokens"),
    (LossBesideLogits, ".mean()", "reduces along the tokens"),
    (Penalty, "self.head.weight.square().sum()", "not one value for every token"),
    (Cache, "transpose(1, 2)", "not one value for every token"),
    (FeaturesFirst, "self.logits(ids).mT", "not one value for every token"),
    (Ranks, "argsort()", "not one value for every token"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "code", "why"), named(NOT_PER_TOKEN))
def test_output_that_is_not_per_token_is_refused(model, code, why):
    require_refusal(model(), TokenMixingError, code, why, __file__)


class LengthAsATensor(Base):
    def forward(self, ids):
        return self.logits(ids), torch.tensor(ids.shape[1])


def test_length_as_an_output_is_refused():
    code = "torch.tensor(ids.shape[1])"
    require_refusal(LengthAsATensor(), LengthDependentError, code, "cannot share a prefix", __file__)


class Sparse(Base):
    def forward(self, ids):
        return self.logits(ids).to_sparse()


def test_sparse_output_is_refused():
    with pytest.raises(UnsupportedOutputError, match="a sparse, nested or quantized tensor"):
        tree_model(Sparse()).explain()


class State:
    """A cache of an own class, as transformers has."""


class OwnCache(Base):
    def forward(self, ids):
        return self.logits(ids), State()


class LengthAsANumber(Base):
    def forward(self, ids):
        return self.logits(ids), ids.shape[1]


class Names(Base):
    def forward(self, ids):
        return SimpleNamespace(logits=self.logits(ids))


class Kind(Base):
    def forward(self, ids):
        return self.logits(ids), torch.float32


KINDS = [(OwnCache, "State"), (LengthAsANumber, "SymInt"), (Names, "SimpleNamespace"), (Kind, "dtype")]


@pytest.mark.parametrize(("model", "kind"), KINDS)
def test_output_that_is_neither_tensor_nor_constant_is_refused(model, kind):
    with pytest.raises(UnsupportedOutputError) as raised:
        tree_model(model()).explain()
    assert f"returns a {kind}" in raised.value.what
    assert raised.value.where.code == "def forward(self, ids):"
    assert ("len(out[i])" if kind == "SymInt" else "use_cache") in raised.value.hint


class Weight(Base):
    def forward(self, ids):
        return self.logits(ids), self.head.weight


class Buffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(3))

    def forward(self, ids):
        return {"logits": self.logits(ids), "table": self.table}


@pytest.mark.parametrize("model", [Weight, Buffer])
def test_parameter_or_buffer_as_an_output_is_refused_with_the_line_of_forward(model):
    require_refusal(model(), UnsupportedOutputError, "def forward", "not one value for every token", __file__)
