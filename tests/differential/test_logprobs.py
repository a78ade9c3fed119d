"""Log-probabilities and entropies, and their gradients, are those of the unpacked model's logits."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from tests.differential.comparison import Result, gradient_difference, output_difference, run
from tests.differential.double import InDouble
from tests.differential.trees import deep_sequences, random_sequences
from tree_compile import Plan, Sample, TreeModel, plan_rows, treecompile
from tree_compile.changes import Marks
from tree_compile.errors import OutputError, PayloadError, StaleOutputError, TokenRangeError, TokenTypeError
from tree_compile.runtime import next_tokens
from tree_compile.tiny import tiny_model

TOLERANCE = 1e-9
VOCABULARY = 128
SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3], [7], [1, 2, 3, 6]]


class Own(nn.Module):
    """An attention, and a head that is given."""

    def __init__(self, logits_of: Callable[[Own, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(VOCABULARY, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head, self.down, self.up = nn.Linear(16, VOCABULARY), nn.Linear(16, 2), nn.Linear(2, VOCABULARY)
        self.gain = nn.Parameter(torch.rand(VOCABULARY, 1) + 0.5)
        self.logits_of = logits_of

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        query, key, value = (project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in self.mix)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.logits_of(self, x + mixed.transpose(1, 2).flatten(2), ids)


def with_adapter(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
    return model.head(x) + 0.5 * model.up(model.down(x))


def with_scaled_weight(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
    return x @ (model.gain * model.head.weight).T + model.head.bias


def without_some_tokens(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
    return model.head(x).masked_fill(torch.arange(VOCABULARY) % 7 == 6, -torch.inf)


def with_a_size(model: Own, x: Tensor, ids: Tensor) -> Tensor:
    return model.head(x).view(1, ids.shape[1], -1)


def with_a_part_that_is_not_trained(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
    return model.head(x) + model.up(model.down(x)).detach()


def not_by_a_product(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
    return model.head(x) + x.mean(-1, keepdim=True).exp()


def with_rows_that_are_chosen(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
    chosen = torch.where(x[0, :, 0] > 0)[0]
    return model.head(x)[0].index_add(0, chosen, model.up(model.down(x[0][chosen])))[None]


def family(model_type: str, **settings: object) -> Callable[[], nn.Module]:
    return lambda: tiny_model(model_type, **settings)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": family("llama", tie_word_embeddings=False),
    "llama with tied weights": family("llama", tie_word_embeddings=True),
    "cohere2 with a scale": family("cohere2", logit_scale=0.3),
    "gemma2 with a softcap": family("gemma2", final_logit_softcapping=2.0),
    "gpt2": family("gpt2"),
    "qwen3_next": family("qwen3_next", experts_implementation="batched_mm"),
    "a head with an adapter": lambda: Own(with_adapter),
    "a head whose weight is computed": lambda: Own(with_scaled_weight),
    "a head that rules tokens out": lambda: Own(without_some_tokens),
    "a head with a part that is not trained": lambda: Own(with_a_part_that_is_not_trained),
    "a head that reads the number of tokens": lambda: Own(with_a_size),
    "no head": lambda: Own(not_by_a_product),
    "rows that are chosen beside a product": lambda: Own(with_rows_that_are_chosen),
}
HEADLESS = {"no head", "rows that are chosen beside a product"}


@cache
def tree_model_of(name: str) -> TreeModel:
    torch.manual_seed(0)
    with InDouble():
        tree_model = treecompile(MODELS[name]().double(), backend="eager")
        tree_model([[1, 2, 3]])
    return tree_model


def plain(model: nn.Module, sequence: Sequence[int], temperature: float = 1.0) -> Tensor:
    """log softmax over all logits of the unpacked model, for every token but the first."""
    out = model(torch.tensor([sequence]))
    logits = out if isinstance(out, Tensor) else out.logits
    return (logits[0, :-1] / temperature).log_softmax(-1)


def plain_logprobs(model: nn.Module, sequence: Sequence[int], temperature: float = 1.0) -> Tensor:
    return plain(model, sequence, temperature).gather(1, torch.tensor(sequence[1:], dtype=torch.int64)[:, None])[:, 0]


def plain_entropy(model: nn.Module, sequence: Sequence[int], temperature: float = 1.0) -> Tensor:
    return entropy_of(plain(model, sequence, temperature))


def entropy_of(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)


def require_equal(expected: Result, found: Result) -> None:
    assert output_difference(expected, found) < TOLERANCE
    assert gradient_difference(expected, found) < TOLERANCE


def flat(*parts: Sequence[Tensor]) -> list[Tensor]:
    """Those of one element at least: a sequence of one token has no log-probability."""
    return [part for own in parts for part in own if part.numel()]


TREES: dict[str, tuple[list[list[int]], int | None]] = {
    "a random tree": (random_sequences(1, VOCABULARY - 2), None),
    "a random tree in several rows": (random_sequences(2, VOCABULARY - 2), 80),
    "a trunk with leaves at depth 8": (deep_sequences(3, VOCABULARY - 2), None),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tree", TREES)
def test_logprobs_and_entropies_equal_those_of_the_unpacked_model(name, tree, monkeypatch) -> None:
    sequences, row_tokens = TREES[tree]
    if name == "a head that rules tokens out":
        sequences = [[token - token % 7 for token in sequence] for sequence in sequences]
    monkeypatch.setattr(next_tokens, "_BUDGET", 7 * 8 * VOCABULARY)
    tree_model, plan = tree_model_of(name), plan_rows(sequences, row_tokens, min_shared_tokens=1)
    model = tree_model.unpacked

    def packed() -> list[Tensor]:
        out = tree_model(plan)
        return flat(out.entropy, out.logprobs)

    with InDouble():
        expected = run(
            model, lambda: flat(*([of(model, s) for s in sequences] for of in (plain_entropy, plain_logprobs)))
        )
        require_equal(expected, run(model, packed))
        assert output_difference(expected, run(model, lambda: flat(*without_rewrite(model, plan)))) > 100 * TOLERANCE


def without_rewrite(model: nn.Module, plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """The packed rows as if each were one sequence."""
    found = []
    for i in range(plan.sequences):
        row = plan.rows[plan.row_of(i)]
        path = torch.from_numpy(row.path(i))
        logprobs = model(torch.from_numpy(row.tokens)[None])
        logprobs = (logprobs if isinstance(logprobs, Tensor) else logprobs.logits)[0, path[:-1]].log_softmax(-1)
        labels = torch.from_numpy(row.tokens)[path[1:]][:, None]
        found.append((entropy_of(logprobs), logprobs.gather(1, labels)[:, 0]))
    return [entropy for entropy, _ in found], [own for _, own in found]


@pytest.mark.parametrize("name", MODELS)
def test_only_a_head_that_stands_alone_is_cut_off(name) -> None:
    out = tree_model_of(name)(SEQUENCES)
    assert hasattr(out, "hidden") is (name not in HEADLESS)
    if name in HEADLESS:
        with pytest.raises(OutputError, match="states before the logits"):
            _ = out.hidden
    else:
        assert [len(states) for states in out.hidden] == [len(sequence) for sequence in SEQUENCES]


def test_states_before_the_head_give_the_logits() -> None:
    tree_model = tree_model_of("llama")
    with InDouble():
        out = tree_model(SEQUENCES)
        for states, logits in zip(out.hidden, out.logits, strict=True):
            torch.testing.assert_close(tree_model.unpacked.lm_head(states), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_states_that_are_looked_at_first_keep_their_gradients(first) -> None:
    model = tree_model_of("llama").unpacked
    with InDouble():
        expected = run(model, lambda: flat(tree_model_of("llama")(SEQUENCES).logprobs))
        out = tree_model_of("llama")(SEQUENCES)
        with first():
            assert len(out.hidden[0]) == 5
            assert len(out.logits[0]) == 5
        require_equal(expected, run(model, lambda: flat(out.logprobs)))


def test_hook_on_a_parameter_of_the_head_is_called_once() -> None:
    tree_model = tree_model_of("a head with an adapter")
    weight = tree_model.unpacked.head.weight
    weight.grad = None
    tree_model(SEQUENCES).logprobs[0].sum().backward()
    before, weight.grad = weight.grad.clone(), None
    with_hook = weight.register_hook(lambda gradient: 2 * gradient)
    tree_model(SEQUENCES).logprobs[0].sum().backward()
    with_hook.remove()
    torch.testing.assert_close(weight.grad, 2 * before)


def test_gradients_in_half_precision_are_added_up_in_float32(monkeypatch) -> None:
    monkeypatch.setattr(next_tokens, "_BUDGET", 8 * 4 * VOCABULARY)
    torch.manual_seed(0)
    model = Own(with_adapter).bfloat16()
    tree_model = treecompile(model, backend="eager", self_check=False)
    sequence = torch.randint(VOCABULARY, (2_000,)).tolist()
    exact = Own(with_adapter).double()
    exact.load_state_dict(model.state_dict())
    plain_logprobs(exact, sequence).sum().backward()
    tree_model([sequence]).logprobs[0].sum().backward()
    found, expected = model.head.weight.grad.double(), exact.head.weight.grad
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_temperature_divides_the_logits() -> None:
    tree_model = tree_model_of("gemma2 with a softcap")
    model, sequences = tree_model.unpacked, random_sequences(4, VOCABULARY)

    def packed() -> list[Tensor]:
        cold = tree_model(sequences).at_temperature(0.3)
        return flat(cold.logprobs, cold.entropy)

    with InDouble():
        of = (plain_logprobs, plain_entropy)
        expected = run(model, lambda: flat(*([form(model, s, 0.3) for s in sequences] for form in of)))
        require_equal(expected, run(model, packed))


def test_likeliest_tokens_are_those_of_the_unpacked_model() -> None:
    tree_model = tree_model_of("llama")
    model, sequences = tree_model.unpacked, [s for s in random_sequences(5, VOCABULARY) if len(s) > 1]
    with InDouble():
        best = [plain(model, sequence).topk(3).indices for sequence in sequences]
        for found, expected in zip(tree_model(sequences).topk(3), best, strict=True):
            assert torch.equal(found.tokens, expected)
        expected = run(model, lambda: [plain(model, s).topk(3).values for s in sequences])
        require_equal(expected, run(model, lambda: [top.logprobs for top in tree_model(sequences).topk(3)]))


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_labels_of_every_sequence_have_their_own_logprobs(shape) -> None:
    tree_model = tree_model_of("llama")
    model, sequences = tree_model.unpacked, [s for s in random_sequences(6, VOCABULARY) if len(s) > 1]
    labels = [torch.randint(VOCABULARY, (len(sequence) - 1, *shape)) for sequence in sequences]

    def alone() -> list[Tensor]:
        pairs = zip(sequences, labels, strict=True)
        return [
            plain(model, s).gather(1, own.flatten(1) if shape else own[:, None]).view(own.shape) for s, own in pairs
        ]

    with InDouble():
        require_equal(run(model, alone), run(model, lambda: list(tree_model(sequences).logprobs_of(labels))))


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([[1, 2]], PayloadError, "no labels for sequence 1"),
        ({0: [1, 2]}, PayloadError, "no labels for sequence 1"),
        ([[1, 2], [1, 2]], PayloadError, r"labels of sequence 1 have shape \(2,\)"),
        ([[1, 2], [1.0]], PayloadError, "type float64"),
        ([[1, 2], torch.ones(1, dtype=torch.bfloat16)], PayloadError, "type float64"),
        ([[1, 2], [[1], [1, 2]]], TokenTypeError, "labels of sequence 1 is not a flat list"),
        ([[1, 2], [-100]], TokenRangeError, "labels of sequence 1 reach from -100"),
        ([[1, VOCABULARY], [1]], TokenRangeError, "labels of sequence 0"),
        ([np.array([1, 2**64 - 1], np.uint64), [1]], TokenRangeError, "reach from 1 to 18446744073709551615"),
        (None, PayloadError, "no labels for sequence 0"),
        ({(1, 2), (1,)}, PayloadError, "no labels for sequence 0"),
    ],
)
def test_labels_that_do_not_fit_are_named(labels, error, message) -> None:
    with pytest.raises(error, match=message):
        tree_model_of("llama")([[1, 2, 3], [1, 4]]).logprobs_of(labels)


def test_labels_may_be_filled_again_after_the_call() -> None:
    out, labels = tree_model_of("llama")([[1, 2, 3]]), torch.tensor([4, 5])
    found, expected = out.logprobs_of([labels]), out.logprobs_of([[4, 5]])
    labels.fill_(7)
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize(
    "temperature",
    [0, -1.0, float("inf"), float("nan"), None, "0.5", [0.5], torch.ones(2), 10**400],
    ids=lambda temperature: repr(temperature)[:9],
)
def test_temperature_is_above_zero(temperature) -> None:
    with pytest.raises(ValueError, match="a number above 0"):
        tree_model_of("llama")(SEQUENCES).at_temperature(temperature)


def test_temperature_that_is_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature requires a gradient"):
        tree_model_of("llama")(SEQUENCES).at_temperature(torch.tensor(0.5, requires_grad=True))


@pytest.mark.parametrize("k", [0, VOCABULARY + 1, True, 2.0, "2", None])
def test_likeliest_tokens_are_no_more_than_there_are_logits(k) -> None:
    with pytest.raises(ValueError, match="between 1 and the number of logits, 128"):
        tree_model_of("llama")(SEQUENCES).topk(k)


@pytest.mark.parametrize("ask", ["logits", "logprobs", "entropy"])
def test_what_is_computed_later_keeps_the_gradients_of_the_call(ask) -> None:
    tree_model = tree_model_of("llama")
    out = tree_model(SEQUENCES)
    with torch.no_grad():
        assert getattr(out, ask)[0].requires_grad
    with torch.no_grad():
        out = tree_model(SEQUENCES)
    assert not getattr(out, ask)[0].requires_grad


@pytest.mark.parametrize("ask", ["logits", "logprobs", "entropy"])
def test_what_is_computed_later_keeps_the_autocast_of_the_call(ask) -> None:
    tree_model = treecompile(
        tiny_model("llama", num_hidden_layers=1), backend="eager", self_check=False, min_shared_tokens=1
    )
    with torch.autocast("cpu", torch.bfloat16):
        now, later = tree_model(SEQUENCES), tree_model(SEQUENCES)
        expected = getattr(now, ask)[0]
    torch.testing.assert_close(getattr(later, ask)[0], expected, rtol=0, atol=0)
    exact = getattr(tree_model(SEQUENCES), ask)[0]
    assert bool((exact - expected).abs().max() > 1e-5)


@pytest.mark.parametrize("ask", ["logits", "logprobs", "entropy"])
def test_what_is_asked_after_a_step_of_the_optimizer_is_refused(ask) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    tree_model = treecompile(model, backend="eager", self_check=False, min_shared_tokens=1)
    out = tree_model(SEQUENCES)
    with torch.no_grad():
        model.lm_head.weight += 1
    with pytest.raises(StaleOutputError, match=r"before optimizer\.step"):
        getattr(out, ask)[0]


def replaced_storage(model: nn.Module, _out: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 2


def fused_step(model: nn.Module, out: Any) -> None:
    out.logits[1].sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def own_step(model: nn.Module, out: Any) -> None:
    out.logits[1].sum().backward()
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


def clipped_through_data(model: nn.Module, _out: Any) -> None:
    model.lm_head.weight.data.clamp_(-0.05, 0.05)


def states_through_data(_model: nn.Module, out: Any) -> None:
    out.hidden[0].data.mul_(2)


def changed_states(_model: nn.Module, out: Any) -> None:
    with torch.no_grad():
        out.hidden[0].mul_(2)


def frozen(model: nn.Module, _out: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


CHANGES = [frozen, replaced_storage, fused_step, own_step, clipped_through_data, changed_states, states_through_data]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("asked_before", ["logprobs", None])
def test_no_change_of_the_head_goes_unseen(change, asked_before) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    tree_model = treecompile(model, backend="eager", self_check=False, min_shared_tokens=1)
    out = tree_model([[1, 2, 3]] if change in (changed_states, states_through_data) else SEQUENCES)
    if asked_before:
        assert out.logprobs[0].requires_grad
    change(model, out)
    with pytest.raises(StaleOutputError, match=r"before optimizer\.step"):
        out.entropy[0]


class WithoutHead(nn.Module):
    """Logits that are no product of states and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 30)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).tanh()


@pytest.mark.parametrize("sequences", [[[1, 2, 3]], [[1, 2, 3], [1, 2, 4]]])
def test_logits_of_a_model_without_a_head_that_are_changed_are_not_those_of_losses(sequences) -> None:
    tree_model = treecompile(WithoutHead(), backend="eager", min_shared_tokens=1)
    expected = tree_model(sequences).logprobs[0]
    out = tree_model(sequences)
    with torch.no_grad():
        out.logits[0].div_(2)
    if len(sequences) == 1:  # a view of the row's
        with pytest.raises(StaleOutputError, match="changed in place"):
            out.logprobs[0]
    else:
        torch.testing.assert_close(out.logprobs[0], expected)


@pytest.mark.parametrize(
    "ask",
    [
        lambda out: out.logits,
        lambda out: out.hidden,
        lambda out: out.logprobs,
        lambda out: out.trained_logprobs,
        lambda out: out.entropy,
        lambda out: out.topk(2),
        lambda out: out.logprobs_of([sequence[1:] for sequence in SEQUENCES]),
    ],
)
def test_head_is_compared_with_that_of_the_call_once_for_what_is_asked_of_a_row(ask, monkeypatch) -> None:
    plan = plan_rows(list(map(Sample, SEQUENCES)), 6, min_shared_tokens=1)
    out, compared, are_unchanged = tree_model_of("llama")(plan), [], Marks.are_unchanged
    monkeypatch.setattr(Marks, "are_unchanged", lambda marks: compared.append(marks) or are_unchanged(marks))
    assert len(list(ask(out))) == len(SEQUENCES)
    assert len(compared) == len(plan.rows) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.bool])
@pytest.mark.parametrize("size", [3, 8])
def test_change_through_data_is_seen_in_every_type(dtype: torch.dtype, size: int) -> None:
    table = torch.zeros(size + 1, 3, dtype=dtype)
    for tensor in (table, table[1:], table.T, table[:0]):
        marks = Marks([tensor])
        assert marks.are_unchanged()
        if tensor.numel():
            tensor.data[-1, -1] = 1
            assert not marks.are_unchanged()
            tensor.data[-1, -1] = 0


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "signs": torch.neg,
    "doubled": lambda weight: weight * 2,
    "halved": lambda weight: weight / 2,
    "rows turned around": lambda weight: weight.flip(0),
    "neighbours exchanged": lambda weight: weight.unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "parts exchanged": lambda weight: weight.roll(len(weight) // 2, 0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("name", ALIKE)
def test_changes_of_many_numbers_that_are_alike_are_seen(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1::2] = -weight[::2]  # as many of both signs
    for tensor in (weight, weight[:64, :64]):
        marks = Marks([tensor])
        tensor.data.copy_(ALIKE[name](tensor.clone()))
        assert not marks.are_unchanged()


def test_dropout_with_autocast_switched_off_is_drawn_once() -> None:
    def dropped(model: Own, x: Tensor, _ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.dropout(model.head(x.float()), 0.5, model.training)

    tree_model = treecompile(Own(dropped), backend="eager", self_check=False, min_shared_tokens=1)
    with torch.autocast("cpu", torch.bfloat16):
        out = tree_model([[1, 2, 3, 4]])
    expected = out.logits[0][:-1].log_softmax(-1).gather(1, torch.tensor([[2], [3], [4]]))[:, 0]
    torch.testing.assert_close(out.logprobs[0], expected)


def test_logits_that_are_wider_than_the_states_keep_their_type() -> None:
    torch.manual_seed(0)
    tree_model = treecompile(Own(lambda model, x, _ids: model.head(x).double()), backend="eager", min_shared_tokens=1)
    model = tree_model.unpacked
    expected = run(model, lambda: flat(*([of(model, s) for s in SEQUENCES] for of in (plain_entropy, plain_logprobs))))

    def packed() -> list[Tensor]:
        out = tree_model(SEQUENCES)
        return flat(out.entropy, out.logprobs)

    found = run(model, packed)
    assert {part.dtype for part in packed()} == {torch.float64}
    assert output_difference(expected, found) < 1e-6
    # That of the keys' bias is the rounding of 0.
    for name in ("head.weight", "embed.weight"):
        torch.testing.assert_close(found.gradients[name], expected.gradients[name])


class FewLogits(Own):
    """Has logits for the first token ids alone."""

    def __init__(self) -> None:
        super().__init__(lambda model, x, _ids: model.head(x))
        self.head = nn.Linear(16, 100)


def test_token_without_a_logit_is_refused_where_it_is_predicted() -> None:
    tree_model = treecompile(FewLogits(), backend="eager", min_shared_tokens=1)
    sequences = [[1, 2, 3], [1, 120, 4, 5], [110, 2]]
    out = tree_model([Sample(tokens, [0, 0, 1, 1][: len(tokens)]) for tokens in sequences])
    with pytest.raises(TokenRangeError, match="Sequence 1 holds the token id 120, which has no log-probability"):
        _ = out.logprobs
    for logits, tokens, entropy, best, own in zip(
        out.logits, sequences, out.entropy, out.topk(2), out.trained_logprobs, strict=True
    ):
        logprobs = logits[:-1].log_softmax(-1)
        torch.testing.assert_close(entropy, entropy_of(logprobs))
        torch.testing.assert_close(best.logprobs, logprobs.topk(2).values)
        torch.testing.assert_close(own, logprobs[range(1, len(tokens) - 1), tokens[2:]])


Named = namedtuple("Named", ["loss", "scores"])


@pytest.mark.parametrize(
    "output",
    [
        lambda x: BaseModelOutput(last_hidden_state=x),
        lambda x: {"loss": None, "scores": x},
        lambda x: {"logits": (x, x)},
        lambda x: {"logits": 0, "scores": x},
        lambda x: Named(None, x),
    ],
)
def test_output_with_names_has_the_logits_of_that_name_alone(output: Callable[[Tensor], Any]) -> None:
    tree_model = treecompile(Own(lambda model, x, _ids: output(model.head(x))), backend="eager")
    out = tree_model(SEQUENCES)
    for ask in ("logits", "logprobs", "entropy"):
        with pytest.raises(OutputError, match="none of its names is `logits`"):
            getattr(out, ask)
    for ask in (lambda: out.topk(1), lambda: out.logprobs_of(SEQUENCES)):
        with pytest.raises(OutputError, match="none of its names is `logits`"):
            ask()
    assert not hasattr(out, "logits")
    assert out[0] is not None


@pytest.mark.parametrize("kind", [tuple, list])
def test_output_without_names_has_its_first_tensor_as_logits(kind: type) -> None:
    tree_model = treecompile(Own(lambda model, x, _ids: kind([None, model.head(x), x])), backend="eager")
    out = tree_model(SEQUENCES)
    assert torch.equal(out.logits[0], out[0][1])


def test_output_without_logits_is_told() -> None:
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).unflatten(-1, (2, 2))

    with pytest.raises(OutputError, match="has no logits"):
        _ = treecompile(Count(), backend="eager")(SEQUENCES).logprobs
