"""What depends on the number of tokens, or on the values of tokens, is refused."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from transformers.utils.import_utils import is_torchdynamo_compiling

from tests.errors.refusal import POSITIONS, Tiny, causal, merged, named, require_refusal, tree_model
from tree_compile.errors import (
    CaptureError,
    ControlFlowError,
    LengthDependentError,
    LostGradientError,
    SequenceTooLongError,
    TokenMixingError,
)
from tree_compile.trials import same_at
from tree_compile.unpacked import PlainModel

# Python code that needs one length, or the tokens


def branch_on_length(model, x, ids):
    if ids.shape[1] > 16:
        x = x * 2
    return x


def branch_on_parity(model, x, ids):
    if ids.shape[1] % 2:
        x = x * 2
    return x


def loop_over_tokens(model, x, ids):
    for _ in range(ids.shape[1]):
        x = x + 1
    return x


def loop_over_chunks(model, x, ids):
    for _ in range(ids.shape[1] // 16):
        x = x + 1
    return x


def list_of_tokens(model, x, ids):
    return torch.stack([token * 2 for token in x[0]])[None]


def length_as_a_float(model, x, ids):
    return x * float(ids.shape[1])


def length_in_an_option(model, x, ids):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=ids.shape[1] * 1e-3)


def branch_on_values(model, x, ids):
    if x.sum() > 0:
        return x
    return -x


def branch_on_a_token(model, x, ids):
    if ids[0, 0] == 1:
        return x
    return -x


ONE_LENGTH = [
    (branch_on_length, "if ids.shape[1] > 16", "no one T"),
    (branch_on_parity, "if ids.shape[1] % 2", "no one T"),
    (loop_over_tokens, "range(ids.shape[1])", "one way through the code"),
    (loop_over_chunks, "range(ids.shape[1] // 16)", "no one T"),
    (list_of_tokens, "for token in x[0]", "one way through the code"),
    (length_as_a_float, "float(ids.shape[1])", "one way through the code"),
    (length_in_an_option, "eps=ids.shape[1]", "no one T"),
    (branch_on_values, "if x.sum() > 0", "one way through the code"),
    (branch_on_a_token, "if ids[0, 0] == 1", "one way through the code"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(ONE_LENGTH))
def test_control_flow_is_refused(step, code, why):
    require_refusal(Tiny(step), ControlFlowError, code, why, __file__)


# A branch that the model hides from a capture


def outside_of_a_capture(model, x, ids):
    return x * 2 if not torch.compiler.is_compiling() and (ids == 31).any() else x


def outside_of_an_export(model, x, ids):
    return x if torch.compiler.is_exporting() or not (ids == 31).any() else x * 2


def asked_by_an_old_name(model, x, ids):
    return x if torch._dynamo.is_compiling() or not (ids == 31).any() else x * 2


def asked_by_transformers(model, x, ids):
    return x if is_torchdynamo_compiling() or not (ids == 31).any() else x * 2


def in_a_try(model, x, ids):
    try:
        if (ids == 31).any():
            return x * 2
    except Exception:
        pass
    return x


def with_errors_suppressed(model, x, ids):
    with contextlib.suppress(RuntimeError):
        return x * ids.max().item() if ids.max().item() > 30 else x
    return x


def choice_in_a_try(model, x, ids):
    try:
        return x + torch.where(ids == 31)[0].tolist()[0]
    except Exception:
        return x


HIDDEN = [
    (outside_of_a_capture, "is_compiling()", "one way through the code"),
    (outside_of_an_export, "is_exporting()", "one way through the code"),
    (asked_by_an_old_name, "is_compiling()", "one way through the code"),
    (asked_by_transformers, "is_torchdynamo_compiling()", "one way through the code"),
    (in_a_try, "if (ids == 31).any()", "one way through the code"),
    (with_errors_suppressed, "ids.max().item() > 30", "one way through the code"),
    (choice_in_a_try, "torch.where(ids == 31)", "one way through the code"),
]


@pytest.mark.parametrize(("step", "code", "why"), named(HIDDEN))
def test_branch_that_is_hidden_from_a_capture_is_refused(step, code, why):
    require_refusal(Tiny(step), ControlFlowError, code, why, __file__)


def doubled_in_a_capture(model, x, ids):
    return x * 2 if torch.compiler.is_compiling() else x


def test_branch_for_captures_is_that_of_the_unpacked_model():
    assert tree_model(Tiny(doubled_in_a_capture)).check().ok


def hook_in_a_try(model, x, ids):
    with contextlib.suppress(Exception):
        x = x * 1
        x.register_hook(lambda gradient: gradient * 2)
    return x


def test_refusal_that_the_model_catches_is_raised():
    why = "torch.export drops the hook"
    require_refusal(Tiny(hook_in_a_try), LostGradientError, "x.register_hook", why, __file__)


def test_control_flow_on_values_prints_nothing(capfd):
    with pytest.raises(ControlFlowError):
        tree_model(Tiny(branch_on_values)).explain()
    assert capfd.readouterr() == ("", "")


# A branch at some lengths that shows on certain tokens, or in gradients alone


def detached(x, ids):
    return x.detach() + x * 0


def doubled_at_a_token(x, ids):
    return torch.where((ids == 19)[..., None], x * 2, x)


def doubled_at_first_tokens(x, ids):
    return torch.where((ids < 2)[..., None], x * 2, x)


LENGTHS = {
    "one": lambda tokens: tokens == 1,
    "one alone": lambda tokens: tokens == 16,
    "few": lambda tokens: tokens < 10,
}


def require_refusal_at(name, branch):
    model = Tiny(lambda model, x, ids: branch(x, ids) if LENGTHS[name](x.shape[1]) else x)
    model.embed = torch.nn.Embedding(5000, model.embed.embedding_dim)
    with pytest.raises(ControlFlowError, match="number of tokens T: it assumed"):
        tree_model(model).explain()


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("branch", [detached, doubled_at_a_token, doubled_at_first_tokens])
def test_branch_at_some_lengths_is_refused_whatever_it_shows_on(name, branch):
    require_refusal_at(name, branch)


@pytest.mark.parametrize("name", LENGTHS)
def test_branch_of_a_layer_that_is_zero_at_first_is_refused(name):
    extra = torch.nn.Linear(8, 8).double()
    torch.nn.init.zeros_(extra.weight)
    torch.nn.init.zeros_(extra.bias)
    model = Tiny(lambda model, x, ids: x + model.extra(x) if LENGTHS[name](x.shape[1]) else x)
    model.extra = extra
    with pytest.raises(ControlFlowError, match="number of tokens T: it assumed"):
        tree_model(model).explain()


class WithPayload(Tiny):
    def forward(self, ids, kinds):
        x = self.embed(ids)
        branch = torch.where((kinds == 3)[..., None], x * 2, x)
        return self.head(branch if ids.shape[1] < 10 else x)


def test_branch_that_shows_on_certain_payloads_is_refused():
    with pytest.raises(ControlFlowError, match="it assumed T >= 10"):
        tree_model(WithPayload(None))({"ids": [[1] * 12, [1, 2]], "kinds": [[0] * 12, [0, 0]]})


def same_by_another_way(x, ids):
    return x * 2 / 2


@pytest.mark.parametrize("name", LENGTHS)
def test_branch_that_computes_the_same_is_exact(name):
    model = Tiny(lambda model, x, ids: same_by_another_way(x, ids) if LENGTHS[name](x.shape[1]) else x)
    assert tree_model(model).check().ok


def takes_two_tokens(model, x, ids):
    if ids.shape[1] < 2:
        raise ValueError("too short")
    return x * 2


def takes_four_tokens(model, x, ids):
    assert ids.shape[1] >= 4
    return x * 2


def takes_four_tokens_and_branches(model, x, ids):
    assert ids.shape[1] >= 4
    return x * 2 if ids.shape[1] > 6 else x


@pytest.mark.parametrize("takes", [takes_two_tokens, takes_four_tokens])
def test_model_that_takes_no_short_sequences_is_exact_on_others(takes):
    assert tree_model(Tiny(takes)).check([[1, 2, 3, 6], [1, 2, 3, 4, 5]]).ok


def test_branch_beside_lengths_that_are_not_taken_is_refused():
    with pytest.raises(ControlFlowError, match="it assumed T >="):
        tree_model(Tiny(takes_four_tokens_and_branches))([[1, 2, 3, 4, 5]])


def longer_than_a_limit(model, x, ids):
    return x * 2 if ids.shape[1] > 48 else x


def test_branch_above_all_lengths_of_the_call_is_a_limit():
    model = tree_model(Tiny(longer_than_a_limit))
    assert model.check([[1] * 48, [2] * 7]).ok
    with pytest.raises(SequenceTooLongError) as raised:
        model([[2], [1] * 49])
    assert "Sequence 1 has 49 tokens" in raised.value.what
    assert raised.value.where.code == "return x * 2 if ids.shape[1] > 48 else x"


# The number of tokens as a value


def divided_by_length(model, x, ids):
    return x / ids.shape[1]


def filled_with_length(model, x, ids):
    return x + torch.full_like(x, ids.shape[1])


def row_of_the_length(model, x, ids):
    return x + model.rows[ids.shape[1]]


def rows_up_to_the_length(model, x, ids):
    return x + model.rows[ids.shape[1] : ids.shape[1] + 1]


def features_moved_by_length(model, x, ids):
    return x.roll(ids.shape[1], -1)


def pattern_repeated_to_the_length(model, x, ids):
    pattern = model.gain.repeat(x.shape[1])[None, :, None]
    return (x.repeat(1, 4, 1) + pattern).view(1, 4, -1, x.shape[-1]).sum(1)


def all_tokens_for_every_token(model, x, ids):
    return x.repeat(1, x.shape[1], 1)


def every_token_length_times(model, x, ids):
    return x.repeat_interleave(x.shape[1], 1)


USED = [
    (divided_by_length, "x / ids.shape[1]", "uses the number of tokens as a value"),
    (filled_with_length, "torch.full_like", "uses the number of tokens as a value"),
    (row_of_the_length, "model.rows[ids.shape[1]]", "uses the number of tokens as a value"),
    (rows_up_to_the_length, "model.rows[", "uses the number of tokens as a value"),
    (features_moved_by_length, "x.roll", "uses the number of tokens as a value"),
    (pattern_repeated_to_the_length, "model.gain.repeat", "as often as there are tokens"),
    (all_tokens_for_every_token, "x.repeat", "as often as there are tokens"),
    (every_token_length_times, "x.repeat_interleave", "uses the number of tokens as a value"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "why"), named(USED))
def test_number_of_tokens_as_a_value_is_refused(step, code, why):
    require_refusal(Tiny(step), TokenMixingError, code, why, __file__)


def tensor_of_the_length(model, x, ids):
    return x * torch.tensor(1 / ids.shape[1])


def mean_of_positions(model, x, ids):
    return x + torch.arange(x.shape[1], dtype=x.dtype).mean()


def positions_from_the_end(model, x, ids):
    return x + model.rows[torch.arange(x.shape[1] - 1, -1, -1)]


def flipped_positions(model, x, ids):
    return x + model.rows[torch.arange(x.shape[1]).flip(0)]


def share_of_the_length(model, x, ids):
    return x * (torch.arange(x.shape[1]) / x.shape[1])[:, None]


def last_rows_of_a_table(model, x, ids):
    return x + model.table[POSITIONS - x.shape[1] :]


def other_positions_at_one_length(model, x, ids):
    stretch = torch.where(torch.tensor(x.shape[1]) * 3 == 300, 2.0, 1.0)
    return x * (torch.arange(x.shape[1]) * stretch)[:, None]


def other_positions_at_every_97th_length(model, x, ids):
    position = torch.arange(x.shape[1])
    return x * (position + (position.max() % 97 == 50).long())[:, None]


CHANGES = [
    (other_positions_at_one_length, "torch.arange(x.shape[1])"),
    (other_positions_at_every_97th_length, "position.max()"),
    (tensor_of_the_length, "torch.tensor(1 / ids.shape[1])"),
    (mean_of_positions, "torch.arange"),
    (positions_from_the_end, "torch.arange"),
    (flipped_positions, ".flip(0)"),
    (share_of_the_length, "torch.arange"),
    (last_rows_of_a_table, "model.table["),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code"), named(CHANGES))
def test_value_that_changes_with_the_length_is_refused(step, code):
    require_refusal(Tiny(step), LengthDependentError, code, "cannot share a prefix", __file__)


# Positions


def slice_of_a_parameter(model, x, ids):
    return x + model.rows[: x.shape[1]]


def part_of_a_parameter(model, x, ids):
    return x + model.rows.narrow(0, 0, x.shape[1])


def slice_of_computed_rows(model, x, ids):
    return x + model.project[0](model.rows)[: x.shape[1]]


def slice_of_a_buffer(model, x, ids):
    return x + model.table[: x.shape[1]]


def rows_of_a_parameter(model, x, ids):
    return x + model.rows[torch.arange(x.shape[1])]


def rows_of_a_buffer(model, x, ids):
    return x + model.table[torch.arange(x.shape[1])]


def embedding_of_positions(model, x, ids):
    return x + torch.nn.functional.embedding(torch.arange(x.shape[1]), model.rows)


def positions_by_cumulative_sum(model, x, ids):
    return x + model.rows[torch.ones(x.shape[1], dtype=torch.int64).cumsum(0) - 1]


def positions_by_ones_like_the_tokens(model, x, ids):
    return x + model.rows[torch.ones_like(ids).cumsum(-1) - 1]


POSITION_TABLES = [
    slice_of_a_parameter,
    part_of_a_parameter,
    slice_of_computed_rows,
    slice_of_a_buffer,
    rows_of_a_parameter,
    rows_of_a_buffer,
    embedding_of_positions,
]


@pytest.mark.parametrize("step", [*POSITION_TABLES, positions_by_cumulative_sum, positions_by_ones_like_the_tokens])
def test_positions_are_exact(step):
    assert tree_model(Tiny(step)).check().ok


@pytest.mark.parametrize("step", POSITION_TABLES)
def test_sequence_longer_than_the_positions_is_refused(step):
    model = tree_model(Tiny(step))
    assert model([[1] * POSITIONS])[0].shape[0] == POSITIONS
    with pytest.raises(SequenceTooLongError, match=f"Sequence 1 has {POSITIONS + 1} tokens"):
        model([[1] * 3, [2] * (POSITIONS + 1)])


def shifted_slice(model, x, ids):
    return x + model.rows[2 : x.shape[1] + 2]


def shifted_part_of_a_buffer(model, x, ids):
    return x + model.table.narrow(0, 2, x.shape[1])


@pytest.mark.parametrize("step", [shifted_slice, shifted_part_of_a_buffer])
def test_positions_that_do_not_begin_at_the_first_row_are_exact(step):
    model = tree_model(Tiny(step))
    assert model.check([[1] * (POSITIONS - 2), [1, 2, 3], [1, 2, 4]]).ok
    with pytest.raises(SequenceTooLongError, match=f"takes {POSITIONS - 2} at the most"):
        model([[1] * (POSITIONS - 1)])


def slice_from_the_length_on(model, x, ids):
    return x + model.rows[x.shape[1] : 2 * x.shape[1]]


def test_rows_from_the_length_on_are_refused():
    require_refusal(Tiny(slice_from_the_length_on), TokenMixingError, "model.rows[x", "as many parts", __file__)


def positions_by_counting_tokens(model, x, ids):
    return x + model.rows[(ids >= 0).cumsum(1) - 1]


def test_positions_counted_from_tokens_are_refused():
    step = Tiny(positions_by_counting_tokens)
    require_refusal(step, TokenMixingError, "cumsum", "accumulates along the tokens", __file__)


def test_model_that_torch_export_cannot_trace_is_refused():
    def unknown_attribute(model, x, ids):
        return x + model.nothing

    require_refusal(Tiny(unknown_attribute), CaptureError, "model.nothing", "traced as one graph", __file__)


# A buffer with as many rows as the sequence has tokens


def sliced_mask(model, x, ids):
    tokens = x.shape[1]
    query, key, value = model.heads(x)
    mask = model.mask[:tokens, :tokens]
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def branch_at_one_length(model, x, ids):
    return x * 2 if x.shape[1] == 16 else x


@pytest.mark.parametrize("rows", [16, 64])
def test_sequence_as_long_as_a_sliced_mask_is_exact(rows):
    model = Tiny(sliced_mask)
    model.register_buffer("mask", causal(rows))
    tree = tree_model(model)
    ids = torch.arange(rows) % 7
    torch.testing.assert_close(tree([ids, ids[:5]])[0], model(ids[None])[0])
    with pytest.raises(SequenceTooLongError, match=f"takes {rows} at the most"):
        tree([torch.arange(rows + 1) % 7])


def test_branch_at_one_length_is_refused():
    require_refusal(Tiny(branch_at_one_length), ControlFlowError, "x.shape[1] == 16", "no one T", __file__)


def test_branch_at_one_greater_length_is_a_limit():
    model = Tiny(lambda model, x, ids: x * 2 if x.shape[1] == 50 else x)
    tree = tree_model(model)
    assert len(tree([[1] * 49])) == 1
    with pytest.raises(SequenceTooLongError, match="takes 49 at the most"):
        tree([[1] * 50])


# Caches and tables that end


def rows_of_pairs_of_tokens(model, x, ids):
    return x + model.rows[torch.arange(x.shape[1]) // 2]


def rows_by_an_embedding(model, x, ids):
    return x + torch.nn.functional.embedding((torch.arange(x.shape[1]) // 2)[None], model.rows)


def rows_from_a_later_one(model, x, ids):
    return x + model.rows[torch.arange(x.shape[1]) * 2 % 80 + 3]


@pytest.mark.parametrize(
    ("step", "longest"), [(rows_of_pairs_of_tokens, 128), (rows_by_an_embedding, 128), (rows_from_a_later_one, 31)]
)
def test_sequence_whose_computed_positions_have_no_row_is_refused(step, longest):
    tree = tree_model(Tiny(step))
    assert len(tree([[1] * longest])[0]) == longest
    with pytest.raises(SequenceTooLongError, match=f"takes {longest} at the most"):
        tree([[1] * (longest + 1)])


def cache_that_grows(model, x, ids):
    tokens = x.shape[1]
    if getattr(model, "cache", None) is None or model.cache.shape[0] < tokens:
        model.cache = torch.arange(tokens, dtype=x.dtype)[:, None]
    return x + model.cache[:tokens]


def test_cache_that_grows_with_the_sequences_is_exact():
    tree = tree_model(Tiny(cache_that_grows))
    for tokens in (3, 60, 100, 90, 300):
        sequences = [[1] * tokens, [1] * (tokens - 1) + [2]]
        for own, logits in zip(sequences, tree(sequences), strict=True):
            torch.testing.assert_close(logits, tree.unpacked(torch.tensor([own]))[0])
    assert tree.unpacked.cache.shape[0] == 512


# Where graph and model are compared at one length


def writes_and_takes_rows(model, x, ids):
    model.table.mul_(0.9)
    return x + model.rows[: x.shape[1]] + model.table[0]


def test_comparison_at_one_length_leaves_buffers_as_they_were():
    model = Tiny(writes_and_takes_rows).double()
    before = model.table.clone()
    with pytest.raises(TokenMixingError):
        tree_model(model).explain()
    assert torch.equal(model.table, before)


class TwoOutputs(torch.nn.Module):
    def forward(self, ids):
        return ids * 0.5, ids * 0.0 - torch.inf


def fails(ids):
    raise KeyError(ids.shape[1])


@pytest.mark.parametrize(
    ("graph", "is_same"),
    [
        (lambda ids: (ids * 0.5, ids * 0.0 - torch.inf), True),
        (lambda ids: (ids * 0.5, ids * 0.0), False),
        (lambda ids: (ids * 0.51, ids * 0.0 - torch.inf), False),
        (lambda ids: (ids[:, :3] * 0.5, ids * 0.0 - torch.inf), False),
        (lambda ids: (ids * 0.5,), False),
        (fails, False),
    ],
)
def test_graph_that_is_another_at_one_length_is_told_from_the_model(graph, is_same):
    plain = PlainModel(TwoOutputs(), ("ids",), {})
    assert same_at(plain, graph, 5) is is_same
