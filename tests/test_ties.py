"""The unpacked model is compared as if it took the earliest of equal scores."""

import pytest
import torch

from tests.differential.test_sparse import VOCABULARY, mistral_large4
from tests.differential.trees import random_sequences
from tree_compile import ties, treecompile
from tree_compile.errors import SelfCheckError
from tree_compile.models.compressed import Compressed, CompressedConfig
from tree_compile.models.sparse_mla import SparseMLA, SparseMLAConfig
from tree_compile.runtime import topk_index
from tree_compile.ties import EarliestOfEquals
from tree_compile.tiny import tiny_model


def test_earliest_of_equal_scores_is_taken():
    scores = torch.zeros(1, 40, 40)
    with EarliestOfEquals(40):
        ways = (scores.topk(3), torch.topk(scores, 3, dim=-1), torch.topk(input=scores, k=3))
        for found in (*ways, torch.topk(scores, 3, -1, True, False)):
            assert bool((found.indices == torch.arange(3)).all())
            assert bool((found.values == 0).all())


def test_earliest_of_equal_windows_is_taken():
    with EarliestOfEquals(41, windows=[5]):
        assert bool((torch.zeros(1, 41, 8).topk(3).indices == torch.arange(3)).all())


@pytest.mark.parametrize(("shape", "tokens"), [((40, 8), 40), ((1, 40, 8), 30), ((1, 40, 8), 40)])
def test_other_selections_are_those_of_torch(shape, tokens):
    scores = torch.randint(0, 2, shape).float()
    with EarliestOfEquals(tokens):
        found = scores.topk(3)
    assert torch.equal(found.indices, scores.topk(3).indices)


def test_model_whose_scores_are_all_equal_is_equal_to_the_unpacked_model():
    model = tiny_model("deepseek_v32", index_n_heads=32, experts_implementation="batched_mm").eval()
    for name, parameter in model.named_parameters():
        if "weights_proj" in name:
            torch.nn.init.zeros_(parameter)
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
    assert tree_model.check(random_sequences(1, VOCABULARY)).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_model_with_equal_keys_is_equal_to_the_unpacked_model(dtype):
    """The first layer has no positions, so that a token which comes again has the same key; the second uses its choice.

    The products of such keys are rounded by where they stand.
    """
    model = mistral_large4(index_topk=16, no_rope_layers=[0, 1, 1, 1]).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    sequences = [[token % 20 for token in sequence] for sequence in random_sequences(1, VOCABULARY)]
    report = treecompile(model, min_shared_tokens=1, backend="eager").check(sequences)
    assert report.ok
    assert report.ties > 20


HALF = {
    "sparse_mla": lambda: SparseMLA(SparseMLAConfig(vocab_size=VOCABULARY)),
    "compressed": lambda: Compressed(CompressedConfig(vocab_size=VOCABULARY)),
    "deepseek_v32": lambda: tied(index_n_heads=32),
    "glm_moe_dsa": lambda: tiny_model("glm_moe_dsa", index_n_heads=32, experts_implementation="batched_mm"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", HALF)
def test_model_in_half_precision_is_equal_to_the_unpacked_model(name, autocast):
    """Scores that are rounded so coarsely put other keys among the highest, which changes outputs by far more."""
    torch.manual_seed(0)
    model = HALF[name]().eval().to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = treecompile(model, min_shared_tokens=1, backend="eager").check()
    assert report.ok
    assert report.greatest_output_difference < report.tolerance / 2


@pytest.mark.parametrize(("name", "autocast"), [("glm4_moe", True), ("qwen2_moe", False), ("deepseek_v4", True)])
def test_experts_that_are_chosen_by_a_hair_are_those_of_the_tree_model_in_the_first_call(name, autocast):
    model = tiny_model(name).eval().to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        treecompile(model, min_shared_tokens=1, backend="eager").explain()


def test_experts_that_score_equally_are_not_taken_for_keys_where_there_are_as_many_as_tokens():
    """A sequence of the first call has four tokens."""
    model = tied(index_n_heads=32, index_topk=8, num_local_experts=4, n_group=1, topk_group=1)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            torch.nn.init.zeros_(layer.mlp.gate.weight)
            layer.mlp.gate.e_score_correction_bias.zero_()
    assert treecompile(model, backend="eager").explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_not_the_best_are_caught_by_the_first_call(dtype, monkeypatch):
    def worst(scores, k, *_others, **_named):
        return topk_index.topk_told(-scores, k)

    monkeypatch.setattr(ties, "topk_told", worst)
    with pytest.raises(SelfCheckError, match="differ on a small random tree"):
        treecompile(tiny_model("qwen2_moe").eval().to(dtype), backend="eager").explain()


def test_choice_of_the_tree_model_is_taken_where_no_key_that_it_leaves_out_scores_higher():
    scores = torch.tensor([[[0.0, -torch.inf, -torch.inf], [1.0, 2.0, -torch.inf], [3.0, 1.0, 3.0 - 1e-3]]])
    right = torch.tensor([[0], [1], [2]])
    router, wrong = torch.zeros(3, 2, dtype=torch.int64), torch.tensor([[0], [0], [0]])
    with EarliestOfEquals(3, made=[router, wrong, right], rounding=1e-3):
        found = scores.topk(1)
        assert found.indices.flatten().tolist() == [0, 1, 2]
        assert torch.equal(found.values, scores.gather(-1, found.indices))
        assert scores.topk(1).indices.flatten().tolist() == [0, 1, 0]  # there is none left
    for not_taken in (wrong, torch.tensor([[0], [1], [-1]]), torch.tensor([[0], [1], [3]])):
        with EarliestOfEquals(3, made=[not_taken], rounding=1e-3):
            assert scores.topk(1).indices.flatten().tolist() == [0, 1, 0]


def test_choice_that_leaves_out_a_higher_score_for_equal_ones_is_not_taken():
    scores = torch.tensor([[[9.0, -torch.inf, -torch.inf], [9.0, 5.0, -torch.inf], [10.0, 5.0, 5.0]]])
    for made, taken in (([[0, -1], [0, 1], [1, 2]], [0, 1]), ([[0, -1], [0, 1], [0, 2]], [0, 2])):
        with EarliestOfEquals(3, made=[torch.tensor(made)], rounding=1e-3):
            assert sorted(scores.topk(2).indices[0, 2].tolist()) == taken


def test_model_whose_scores_are_equal_is_refused_where_the_highest_is_left_out(monkeypatch):
    def first_of_all(scores, k):
        above, equal = topk_index.above_and_at_last(scores, k)
        return (above | equal) & ((above | equal).cumsum(-1) <= k)

    monkeypatch.setattr(topk_index, "highest", first_of_all)
    with pytest.raises(SelfCheckError, match="differ on a small random tree"):
        treecompile(tied(index_n_heads=1).double(), backend="eager").explain()


def test_choices_of_fewer_keys_than_are_asked_for_are_filled_up():
    scores = torch.tensor([[[0.0, -torch.inf, -torch.inf], [1.0, 2.0, -torch.inf], [3.0, 1.0, 2.0]]])
    with EarliestOfEquals(3, made=[torch.tensor([[0, -1], [1, 0], [2, 0]])]):
        assert scores.topk(2).indices.tolist() == [[[0, 1], [1, 0], [0, 2]]]


def tied(**config):
    return tiny_model("deepseek_v32", experts_implementation="batched_mm", **config).eval()


def test_report_counts_the_choices_among_equal_scores():
    model = tied(index_n_heads=1)
    sequences = random_sequences(1, VOCABULARY)
    report = treecompile(model, min_shared_tokens=1, backend="eager").check(sequences)
    assert report.ties > 0
    assert f"{report.ties:,} choices among equal scores: the same keys in both models" in str(report)


def test_only_choices_that_could_have_been_others_are_counted():
    scores = torch.tensor([[[3.0, 2.0, 2.0, 1.0], [2.0, 2.0, 1.0, 0.0], [3.0, 2.0, -torch.inf, -torch.inf]]] * 2)
    scores = torch.cat([scores, scores[:, :1]], 1)
    with EarliestOfEquals(4) as chosen:
        scores.topk(2)
        scores.topk(3)
        scores.topk(4)
    assert chosen.ties == 4


def test_report_of_a_model_without_an_indexer_says_nothing_of_equal_scores():
    report = treecompile(tiny_model("llama"), backend="eager").check()
    assert report.ties is None
    assert "equal scores" not in str(report)


def test_explain_says_which_of_equal_scores_is_taken():
    assert "of equal scores the earliest" in str(treecompile(tied(), backend="eager").explain())
