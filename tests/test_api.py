"""The public surface: what goes in, what comes out, and what stays the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tree_compile import Plan, Sample, TreeModel, api, plan_rows, treecompile
from tree_compile.models.dense import Dense, DenseConfig
from tree_compile.tiny import tiny_model

SEQUENCES = [[3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 1, 5, 8], [3, 1, 4], [7, 7, 7, 7], [3, 1, 4, 1, 5, 8]]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Dense(DenseConfig(vocab_size=50, width=32, layers=2, heads=2, kv_heads=1, hidden=48)).double()


@pytest.fixture(scope="module")
def tree_model(model: nn.Module) -> TreeModel:
    return treecompile(model, min_shared_tokens=2, backend="eager")


def assert_exact(out: Any, model: nn.Module, sequences: list[list[int]] = SEQUENCES) -> None:
    for i, tokens in enumerate(sequences):
        assert torch.allclose(out.logits[i], model(torch.tensor([tokens]))[0], rtol=0, atol=1e-12)


class Returning(nn.Module):
    """A model that returns its logits in some other form."""

    def __init__(self, model: nn.Module, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, input_ids: Tensor) -> Any:
        return self.form(self.model(input_ids))


def test_output_i_is_what_the_model_returns_for_sequence_i(tree_model: TreeModel, model: nn.Module) -> None:
    out = tree_model(SEQUENCES)
    assert len(out) == len(SEQUENCES) == len(list(out))
    for i, tokens in enumerate(SEQUENCES):
        assert out[i].shape == (len(tokens), 50)
        assert torch.equal(out[i], out.logits[i])
    assert_exact(out, model)


def test_outputs_are_indexed_like_a_list(tree_model: TreeModel) -> None:
    out = tree_model(SEQUENCES)
    assert torch.equal(out[-1], out[4])
    assert [part.shape for part in out[1:3]] == [out[1].shape, out[2].shape]
    assert [part.shape for part in out.logits[::2]] == [out[i].shape for i in (0, 2, 4)]
    with pytest.raises(IndexError, match="there is no sequence 5"):
        out[5]


def test_outputs_of_a_row_are_found_by_their_numbers_and_from_the_end(tree_model: TreeModel) -> None:
    first, second = plan_rows([[3, 1], [4, 1], [5, 9], [2, 6]], 4, plan_attempts=0).rows
    assert (first.sequence_ids, second.sequence_ids) == ((0, 1), (2, 3))
    out = tree_model(second)
    assert torch.equal(out[-1], out[3])
    assert torch.equal(out.logits[-2], out[2])
    assert torch.equal(out[-1:][0], out[3])
    for sequence in (0, 4, -3):
        with pytest.raises(IndexError, match=f"there is no sequence {sequence} here, only 2, 3"):
            out[sequence]


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda logits: {"logits": logits, "doubled": 2 * logits}, lambda part: part["doubled"]),
        (lambda logits: (logits, 2 * logits), lambda part: part[1]),
        (lambda logits: [logits, None, 2 * logits], lambda part: part[2]),
    ],
)
def test_outputs_keep_the_form_that_the_model_returns(
    model: nn.Module, form: Callable[[Tensor], Any], read: Callable[[Any], Tensor]
) -> None:
    out = treecompile(Returning(model, form), min_shared_tokens=2, backend="eager")(SEQUENCES)
    assert type(out[0]) is type(form(torch.zeros(1)))
    assert torch.equal(read(out[1]), 2 * out.logits[1])
    assert_exact(out, model)


def test_transformers_outputs_keep_their_class() -> None:
    out = treecompile(tiny_model("llama"), backend="eager", forward_kwargs={"output_hidden_states": True})(SEQUENCES)
    assert type(out[0]).__name__ == "CausalLMOutputWithPast"
    assert out[1].logits.shape == (6, 128)
    assert [states.shape for states in out[1].hidden_states] == [(6, 64)] * 3


@pytest.mark.parametrize(
    "form",
    [
        torch.tensor,
        np.array,
        tuple,
        lambda tokens: np.array(tokens, np.uint16),
        lambda tokens: torch.tensor(tokens).int(),
    ],
)
def test_sequences_may_be_lists_arrays_or_tensors(tree_model: TreeModel, model: nn.Module, form: Any) -> None:
    assert_exact(tree_model([form(tokens) for tokens in SEQUENCES]), model)


def test_a_plan_and_its_rows_are_accepted(tree_model: TreeModel, model: nn.Module) -> None:
    plan = plan_rows(SEQUENCES, 8, min_shared_tokens=1)
    assert len(plan.rows) > 1
    assert_exact(tree_model(plan), model)
    for row in plan.rows:
        out = tree_model(row)
        assert len(out) == len(row.sequence_ids)
        for i in row.sequence_ids:
            assert torch.allclose(out.logits[i], model(torch.tensor([SEQUENCES[i]]))[0], rtol=0, atol=1e-6)


def test_parameters_are_the_original_objects(tree_model: TreeModel, model: nn.Module) -> None:
    assert [id(p) for p in tree_model.parameters()] == [id(p) for p in model.parameters()]
    assert tree_model.state_dict().keys() == model.state_dict().keys()
    tree_model(SEQUENCES)
    assert [id(p) for p in tree_model.parameters()] == [id(p) for p in model.parameters()]


def test_a_loaded_state_dict_is_used(model: nn.Module) -> None:
    mine, other = copy.deepcopy(model), copy.deepcopy(model)
    tree_model = treecompile(mine, min_shared_tokens=2, backend="eager")
    tree_model(SEQUENCES)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    tree_model.load_state_dict(other.state_dict())
    assert_exact(tree_model(SEQUENCES), other)


def test_a_replaced_parameter_is_used(model: nn.Module) -> None:
    mine = copy.deepcopy(model)
    tree_model = treecompile(mine, min_shared_tokens=2, backend="eager")
    tree_model(SEQUENCES)
    name, parameter = next(iter(mine.named_parameters()))
    owner = mine.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], nn.Parameter(parameter.detach() * 2))
    assert_exact(tree_model(SEQUENCES), mine)


def test_training_and_eval_mode_follow_the_model() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5)
    tree_model = treecompile(model, min_shared_tokens=2, backend="eager")
    tree_model.eval()
    assert not model.training
    first, second = tree_model(SEQUENCES).logits[0], tree_model(SEQUENCES).logits[0]
    assert torch.equal(first, second)
    tree_model.train()
    assert model.training
    assert not torch.equal(tree_model(SEQUENCES).logits[0], tree_model(SEQUENCES).logits[0])
    model.eval()
    assert torch.equal(tree_model(SEQUENCES).logits[0], first)


class Merging(nn.Linear):
    """Counts how often its mode is set, and changes what it holds with it, as adapters do."""

    times = 0

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        self.times += 1
        return super().train(mode)


def test_check_leaves_a_module_as_it_was_that_changes_with_its_mode() -> None:
    own = nn.Sequential(nn.Embedding(50, 8), Merging(8, 50)).train()
    assert treecompile(own, min_shared_tokens=2, backend="eager").check().ok
    assert own[1].training
    assert not own[1].merged


def test_mode_of_every_module_is_set_once() -> None:
    own = nn.Sequential(nn.Embedding(50, 8), Merging(8, 50))
    tree_model = treecompile(own, backend="eager").eval()
    assert own[1].times == 1
    assert {module.training for module in (tree_model, own, own[1])} == {False}


@pytest.mark.parametrize("name", ["index", "where", "mul", "embedding", "linear", "id", "sym_size_int"])
def test_payload_may_have_the_name_of_an_operation(name: str) -> None:
    class WithPayload(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, input_ids: Tensor, **payload: Tensor) -> Tensor:
            x = self.embed(input_ids) * torch.where(payload[name] > 0, 2.0, 1.0)[..., None]
            return self.head(x + self.embed.weight[payload[name]])

    model = WithPayload()
    inputs = {"input_ids": [[1, 2, 3, 4], [1, 2, 3, 5]], name: [[0, 0, 1, 0], [0, 1, 1, 0]]}
    out = treecompile(model, min_shared_tokens=1, backend="eager")(inputs)
    for sequence in range(2):
        values = [torch.tensor([values[sequence]]) for values in inputs.values()]
        torch.testing.assert_close(out[sequence], model(values[0], **{name: values[1]})[0])


def test_payloads_share_a_prefix_only_where_they_agree() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Dense(DenseConfig(vocab_size=50, width=32, layers=1, heads=2, kv_heads=1, hidden=48))
            self.types = nn.Embedding(2, 50)

        def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
            return self.inner(input_ids) + self.types(token_type_ids)

    model = Typed()
    tree_model = treecompile(model, min_shared_tokens=1, backend="eager")
    inputs = {"input_ids": [[1, 2, 3, 4], [1, 2, 3, 5]], "token_type_ids": [[0, 0, 1, 0], [0, 1, 1, 0]]}
    out = tree_model(inputs)
    assert tree_model.plan(inputs).packed_tokens == 7
    for i in range(2):
        alone = model(*(torch.tensor([values[i]]) for values in inputs.values()))[0]
        assert torch.allclose(out.logits[i], alone, atol=1e-5)


def test_loss_over_outputs_gives_gradients_in_the_original_parameters(tree_model: TreeModel, model: nn.Module) -> None:
    parameters = list(model.parameters())
    out = tree_model(SEQUENCES)
    found = torch.autograd.grad(sum(out.logits[i].square().sum() for i in range(len(SEQUENCES))), parameters)
    alone = [model(torch.tensor([tokens])) for tokens in SEQUENCES]
    expected = torch.autograd.grad(sum(logits.square().sum() for logits in alone), parameters)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_no_grad_builds_no_graph(tree_model: TreeModel) -> None:
    with torch.no_grad():
        assert not tree_model(SEQUENCES).logits[0].requires_grad


@pytest.mark.parametrize(
    ("option", "value"),
    [("row_tokens", 8), ("min_shared_tokens", 4), ("objective", "tokens"), ("pad_rows", True), ("plan_seconds", 0.0)],
)
def test_plan_uses_the_models_options(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, option: str, value: Any
) -> None:
    options = {
        "row_tokens": 10, "min_shared_tokens": 1, "objective": "rows", "pad_rows": False, "plan_seconds": 0.05,
        option: value,
    }  # fmt: skip
    given = []

    def planned(sequences: Any, **options: Any) -> Plan:
        given.append(options)
        return plan_rows(sequences, **options)

    monkeypatch.setattr(api, "plan_rows", planned)
    treecompile(model, **options).plan(SEQUENCES)
    assert given == [options]


def test_check_reports_outputs_and_gradients(tree_model: TreeModel) -> None:
    report = tree_model.check(SEQUENCES)
    assert report.ok
    assert report.input_tokens == 26
    assert "equal to the unpacked model" in str(report)
    assert tree_model.check().ok


def test_check_finds_a_wrong_result(tree_model: TreeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from tree_compile import pipeline

    right = pipeline.graph_inputs

    def wrong(row: Any, device: torch.device, **options: Any) -> tuple[Any, ...]:
        tokens, *plan = right(row, device, **options)
        return tokens.flip(1), *plan

    assert tree_model.check(SEQUENCES).ok
    monkeypatch.setattr(pipeline, "graph_inputs", wrong)
    report = tree_model.check(SEQUENCES)
    assert not report.ok
    assert "NOT EQUAL" in str(report)


def test_explain_names_each_attention_with_its_line(tree_model: TreeModel) -> None:
    tree_model(SEQUENCES)
    text = str(tree_model.explain())
    assert text.count("visible: k <= q") == 1
    assert "blocks.0.attention … blocks.1.attention (2 times)" in text
    assert text.count("dense.py:") >= 1
    assert "token ids below 50" in text


def test_a_first_call_without_gradients_captures_the_same_model() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.still, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            with torch.no_grad():
                still = self.still(x)
            return self.head(x + still)

    model = Stopped()
    tree_model = treecompile(model, min_shared_tokens=2, backend="eager")
    with torch.no_grad():
        tree_model(SEQUENCES)
    tree_model(SEQUENCES).logits[0].sum().backward()
    assert model.still.weight.grad is None
    assert model.embed.weight.grad is not None


def test_parameters_with_alike_names_are_kept_apart() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.w = nn.Embedding(50, 8), nn.Linear(8, 50), nn.Module()
            self.w.a, self.w__a = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.embed(input_ids) * self.w.a + self.w__a)

    model = Alike().double()
    assert_exact(treecompile(model, min_shared_tokens=2, backend="eager")(SEQUENCES), model)


@pytest.mark.parametrize("name", ["generate", "save_pretrained", "config", "device", "get_input_embeddings"])
def test_attribute_of_the_model_is_refused_with_the_place_where_it_is(name: str) -> None:
    tree_model = treecompile(tiny_model("llama"), backend="eager")
    with pytest.raises(AttributeError, match=rf"tree_model\.unpacked\.{name}$"):
        getattr(tree_model, name)
    assert getattr(tree_model.unpacked, name) is not None


def test_attribute_that_nothing_has_is_refused_as_of_every_module(tree_model: TreeModel) -> None:
    with pytest.raises(AttributeError, match=r"object has no attribute 'nothing'$"):
        _ = tree_model.nothing


def test_mode_is_that_of_the_model_however_it_is_set(tree_model: TreeModel) -> None:
    for set_mode in (tree_model.unpacked.train, tree_model.train, nn.ModuleList([tree_model]).train):
        for mode in (False, True):
            set_mode(mode)
            assert (tree_model.training, tree_model.unpacked.training) == (mode, mode)


@pytest.mark.parametrize("wrong", ["logits", (slice(None), -1), None, 1.0])
def test_output_by_something_else_than_a_number_is_refused_with_what_it_holds(
    tree_model: TreeModel, wrong: Any
) -> None:
    out = tree_model(SEQUENCES)
    for values in (out, out.logits, out.logprobs):
        with pytest.raises(TypeError, match=r"one value for every sequence, by its number.* out\.log\w+\[i\]"):
            values[wrong]


@pytest.mark.parametrize("number", [np.int64(1), torch.tensor(1)])
def test_output_is_found_by_numbers_of_any_kind(tree_model: TreeModel, number: Any) -> None:
    out = tree_model(SEQUENCES)
    assert torch.equal(out[number], out[1])
    assert torch.equal(out.logits[number], out[1])


def test_values_of_all_sequences_say_that_they_are_no_tensor(tree_model: TreeModel) -> None:
    logits = tree_model(SEQUENCES).logits
    for name in ("shape", "argmax", "backward"):
        with pytest.raises(AttributeError, match=rf"one value for every sequence, .* out\.logits\[i\]\.{name}"):
            getattr(logits, name)
    for call in (lambda: F.cross_entropy(logits, torch.tensor([1])), lambda: torch.softmax(logits, -1)):
        with pytest.raises(TypeError, match=r"one value for every sequence: call \w+ for one .*out\.logits\[i\]"):
            call()


def test_values_of_all_sequences_are_called_by_their_name(tree_model: TreeModel) -> None:
    out = tree_model([Sample([1, 2, 3], reward=1.0)])
    for values, name in ((out.payload("reward"), r"out\.payload\('reward'\)"), (out.entropy, r"out\.entropy")):
        with pytest.raises(AttributeError, match=rf"{name}\[i\]\.mean$"):
            _ = values.mean
        with pytest.raises(TypeError, match=rf"{name}\[i\]$"):
            torch.exp(values)
        with pytest.raises(TypeError, match=rf"{name}\[i\]\[:, -1\]"):
            _ = values[:, -1]


def test_values_of_one_row_are_gone_through_backwards(tree_model: TreeModel) -> None:
    plan = plan_rows(SEQUENCES, max(map(len, SEQUENCES)), min_shared_tokens=1)
    for row in plan.rows:
        out = tree_model(row)
        for found in (out, out.logits):
            for one, other in zip(reversed(found), reversed(list(found)), strict=True):
                assert torch.equal(one, other)


def test_outputs_count_what_they_hold(tree_model: TreeModel) -> None:
    assert repr(tree_model(SEQUENCES[:1])) == "TreeOutput(1 sequence, 1 tensor each)"
    assert repr(tree_model(SEQUENCES[:2])) == "TreeOutput(2 sequences, 1 tensor each)"


def test_explain_says_where_rows_have_no_states(tree_model: TreeModel) -> None:
    assert "no layer says" not in str(tree_model.explain())
    assert str(tree_model.explain(SEQUENCES)).endswith("no layer is known to carry a state: there is none in 1 row")


def test_explain_names_lines_of_installed_packages_from_the_package_on() -> None:
    text = str(treecompile(tiny_model("llama"), backend="eager").explain())
    assert "(transformers/models/llama/modeling_llama.py:" in text
    assert "site-packages" not in text
