"""What pools windows of tokens is refused where entries mix, or where a token sees what comes after it."""

import pytest
import torch
import torch.nn.functional as F

from tests.errors.refusal import WIDTH, Tiny, merged, named, require_refusal, tree_model
from tree_compile import short_lengths
from tree_compile.errors import ControlFlowError, TokenMixingError

M = 4


def entries_of(x):
    windows = x.shape[1] // M
    return x[:, : windows * M].view(1, windows, M, WIDTH).mean(2)


def closed(x):
    token, entry = torch.arange(x.shape[1]), torch.arange(x.shape[1] // M)
    return entry < (token[:, None] + 1) // M


def near(x, window=5):
    token = torch.arange(x.shape[1])
    distance = token[:, None] - token
    return (distance >= 0) & (distance < window)


def attend(model, x, entries, seen, tokens=None):
    query, key, value = model.heads(x)
    key, value = (torch.cat([own, entries.unflatten(-1, (2, -1)).transpose(1, 2)], 2) for own in (key, value))
    seen = seen if seen.dim() == 3 else seen[None]
    mask = torch.cat([(near(x) if tokens is None else tokens)[None], seen], -1)
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def index_scores(model, x):
    key = entries_of(model.project[0](x))
    query = torch.stack([project(x) for project in model.project], 2)
    return ((query @ key.mT[:, None]).relu() * x[..., :3, None]).sum(2)


def best_of(scores):
    return scores.topk(min(2, scores.shape[-1]))


def best_entries(model, x):
    return best_of(index_scores(model, x).masked_fill(~closed(x), -torch.inf))


def shown(x, best):
    """Whether the indices `best` name an entry: [1, T, T // M]."""
    return torch.zeros(1, x.shape[1], x.shape[1] // M, dtype=torch.bool).scatter(-1, best, True)


def chosen(model, x):
    return shown(x, best_entries(model, x).indices) & closed(x)


# What is exact


def all_entries(model, x, ids):
    return x + attend(model, x, entries_of(x), closed(x))


def entry_before(model, x, ids):
    entries = entries_of(x)
    shifted = torch.zeros_like(entries)
    shifted[:, 1:] = entries[:, :-1]
    return x + attend(model, x, entries + 2 * shifted, closed(x))


def entry_before_by_cat(model, x, ids):
    entries = entries_of(x)
    before = torch.cat([model.project[0].bias.expand(1, 1, WIDTH), entries[:, :-1]], 1)
    return x + attend(model, x, entries * before, closed(x))


def difference_of_entries(model, x, ids):
    entries = entries_of(x)
    differences = F.pad(entries[:, 1:] - entries[:, :-1], (0, 0, 1, 0), value=2.0)
    return x + attend(model, x, differences[:, : entries.shape[1]], closed(x))


def entry_before_by_pad(model, x, ids):
    entries = entries_of(x)
    before = F.pad(entries, (0, 0, 1, 0), value=3.0)[:, : entries.shape[1]]
    return x + attend(model, x, entries + before, closed(x))


def entry_before_by_pad_of_ids(model, x, ids):
    windows = x.shape[1] // M
    first_of_window = ids[:, : windows * M].view(1, windows, M)[..., 0]
    before = model.embed(F.pad(first_of_window, (1, 0), value=3)[:, :windows])
    return x + attend(model, x, entries_of(x) + before, closed(x))


def entry_before_by_pad_of_truths(model, x, ids):
    entries = entries_of(x)
    before = F.pad(entries > 0, (0, 0, 1, 0), value=True)[:, : entries.shape[1]]
    return x + attend(model, x, entries.masked_fill(before, 0.5), closed(x))


def softmax_of_one_dimension(model, x, ids):
    return x * model.gain.softmax(0)[0]


@pytest.mark.parametrize(
    "step",
    [
        all_entries,
        entry_before,
        entry_before_by_cat,
        difference_of_entries,
        entry_before_by_pad,
        entry_before_by_pad_of_ids,
        entry_before_by_pad_of_truths,
        softmax_of_one_dimension,
    ],
)
def test_entries_and_the_entries_before_them_are_exact(step):
    model = Tiny(step)
    tree = tree_model(model)
    trunk = [at % 5 for at in range(23)]
    sequences = [trunk, *(trunk[:at] + [7, 8, 9, 10, 11][: at % 6] for at in range(10, 23)), [3], trunk[:6]]
    for sequence, logits in zip(sequences, tree(sequences), strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([sequence]))[0], rtol=0, atol=1e-12)


def test_a_copy_of_a_joined_mask_is_read():
    def step(model, x, ids):
        return x + attend_by(model, x, torch.cat([near(x), closed(x)], -1).contiguous())

    tree_model(Tiny(step)).explain()


# Entries that mix


def mean_of_entries(model, x, ids):
    entries = entries_of(x)
    return x + attend(model, x, entries - entries.mean(1, keepdim=True), closed(x))


def sum_of_entries_so_far(model, x, ids):
    return x + attend(model, x, entries_of(x).cumsum(1), closed(x))


def entries_among_themselves(model, x, ids):
    entries = entries_of(x)
    return x + attend(model, x, (entries @ entries.mT).softmax(-1) @ entries, closed(x))


def first_entry_for_all(model, x, ids):
    entries = entries_of(x)
    return x + attend(model, x, entries + entries[:, :1], closed(x))


def entry_after(model, x, ids):
    entries = entries_of(x)
    return x + attend(model, x, F.pad(entries[:, 1:], (0, 0, 0, 1)), closed(x))


def entry_after_by_writing(model, x, ids):
    entries = entries_of(x)
    shifted = torch.zeros_like(entries)
    shifted[:, :-1] = entries[:, 1:]
    return x + attend(model, x, shifted, closed(x))


def entries_for_their_tokens(model, x, ids):
    spread = entries_of(x).repeat_interleave(M, 1)
    return x + F.pad(spread, (0, 0, 0, x.shape[1] - spread.shape[1]))


def windows_of_another_start(model, x, ids):
    windows = x.shape[1] // M
    pooled = x[:, x.shape[1] - windows * M :].view(1, windows, M, WIDTH).mean(2)
    return x + attend(model, x, pooled, closed(x))


MIXING = [
    (mean_of_entries, "entries.mean(1, keepdim=True)", "reduces along"),
    (sum_of_entries_so_far, "entries_of(x).cumsum(1)", "accumulates along"),
    (entries_among_themselves, "entries @ entries.mT", "relates every token to every other"),
    (first_entry_for_all, "entries[:, :1]", "cuts or shifts"),
    (entry_after, "F.pad(entries[:, 1:], (0, 0, 0, 1))", "shifts or extends"),
    (entry_after_by_writing, "torch.zeros_like(entries)", "some of the tokens only"),
    (entries_for_their_tokens, "F.pad(spread", "uses the number of tokens"),
    (windows_of_another_start, "x[:, x.shape[1] - windows * M :]", "cuts or shifts"),
]


@pytest.mark.parametrize(("step", "code", "why"), named(MIXING))
def test_entries_that_mix_are_refused(step, code, why):
    require_refusal(Tiny(step), TokenMixingError, code, why, __file__)


# Entries that are not closed, and other forms


def own_window_as_well(model, x, ids):
    token, entry = torch.arange(x.shape[1]), torch.arange(x.shape[1] // M)
    return x + attend(model, x, entries_of(x), entry <= token[:, None] // M)


def every_entry(model, x, ids):
    return x + attend(model, x, entries_of(x), torch.ones_like(closed(x)))


def chosen_from_all(model, x, ids):
    best = best_of(index_scores(model, x)).indices
    seen = shown(x, best) & closed(x)
    return x + attend(model, x, entries_of(x), seen)


def chosen_and_not_closed(model, x, ids):
    scores = index_scores(model, x).masked_fill(~closed(x), -torch.inf)
    best = best_of(scores).indices
    seen = shown(x, best)
    return x + attend(model, x, entries_of(x), seen)


def chosen_from_the_nearest(model, x, ids):
    number = torch.arange(x.shape[1] // M)
    too_old = number < (torch.arange(x.shape[1])[:, None] + 1) // M - 3
    scores = index_scores(model, x).masked_fill(too_old, -torch.inf).masked_fill(~closed(x), -torch.inf)
    best = best_of(scores).indices
    seen = shown(x, best) & closed(x)
    return x + attend(model, x, entries_of(x), seen)


def below_threshold(model, x, threshold):
    windows = x.shape[1] // M
    best = best_entries(model, x).indices
    index = torch.where(best >= threshold[None, :, None], windows, best)
    return torch.zeros(1, x.shape[1], windows + 1, dtype=torch.bool).scatter(-1, index, True)[..., :windows]


def chosen_below_a_clamped_threshold(model, x, ids):
    threshold = ((torch.arange(x.shape[1]) + 1) // M).clamp(max=7)
    return x + attend(model, x, entries_of(x), below_threshold(model, x, threshold))


def attend_by(model, x, mask):
    query, key, value = model.heads(x)
    key, value = (
        torch.cat([own, entries_of(own.transpose(1, 2).flatten(2)).unflatten(-1, (2, -1)).transpose(1, 2)], 2)
        for own in (key, value)
    )
    return merged(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def joined_mask_as_bias(model, x, ids):
    return x + attend_by(model, x, torch.cat([near(x), closed(x)], -1)[None].to(x.dtype))


def joined_bias_as_mask(model, x, ids):
    bias = torch.cat([part.to(x.dtype).masked_fill(~part, -torch.inf) for part in (near(x), closed(x))], -1)
    return x + attend_by(model, x, bias.bool())


def chosen_mask_as_bias(model, x, ids):
    tokens = torch.zeros_like(near(x), dtype=x.dtype).masked_fill(~near(x), -torch.inf)
    return x + attend_by(model, x, torch.cat([tokens[None], chosen(model, x).to(x.dtype)], -1))


def promoted_mask(model, x, ids):
    tokens = torch.zeros_like(near(x), dtype=x.dtype).masked_fill(~near(x), -torch.inf)
    return x + attend_by(model, x, torch.cat([tokens, closed(x)], -1))


def chosen_for_some_tokens(model, x, ids):
    best = best_entries(model, x).indices
    seen = shown(x, best[:, :1]) & closed(x)
    return x + attend(model, x, entries_of(x), seen)


def chosen_or_closed_by_a_sum(model, x, ids):
    return attend_by(model, x, torch.cat([near(x)[None], chosen(model, x) + closed(x)], -1))


def chosen_by_narrow_numbers(model, x, ids):
    best = best_entries(model, x).indices
    seen = shown(x, best.to(torch.uint8).long())
    return attend_by(model, x, torch.cat([near(x)[None], seen & closed(x)], -1))


def biases(x):
    """Of the tokens that are near and of the entries that are closed."""
    return [torch.zeros_like(seen(x), dtype=x.dtype).masked_fill(~seen(x), -1e5) for seen in (near, closed)]


def chosen_bias_as_truth(model, x, ids):
    bias = torch.full_like(index_scores(model, x), -torch.inf).scatter(-1, best_entries(model, x).indices, 0.0)
    return x + attend(model, x, entries_of(x), torch.logical_and(bias, closed(x)))


def zeros_as_truth(model, x, ids):
    nothing = torch.logical_not(torch.logical_not(torch.zeros_like(index_scores(model, x))))
    return x + attend(model, x, entries_of(x), nothing & closed(x))


def chosen_as_bias_where_closed(model, x, ids):
    seen = torch.where(closed(x), chosen(model, x), -torch.inf)
    return x + attend_by(model, x, torch.cat([biases(x)[0][None], seen], -1))


def chosen_plus_bias(model, x, ids):
    tokens, entries = biases(x)
    return x + attend_by(model, x, torch.cat([tokens[None], chosen(model, x) + entries], -1))


def joined_bias_in_eight_bits(model, x, ids):
    return x + attend_by(model, x, torch.cat(biases(x), -1).to(torch.int8).to(x.dtype))


def keys_in_whole_numbers(model, x, ids):
    query, key, value = model.heads(x)
    key, value = (
        torch.cat([own, entries_of(own.transpose(1, 2).flatten(2)).unflatten(-1, (2, -1)).transpose(1, 2)], 2)
        for own in (key, value)
    )
    mask = torch.cat([near(x), closed(x)], -1)
    return x + merged(F.scaled_dot_product_attention(query, key.int().to(x.dtype), value, attn_mask=mask))


def heads_mixed_with_features(model, x, ids):
    entries = entries_of(x).unflatten(-1, (2, -1)).transpose(1, 2)
    both = torch.cat([model.heads(x)[1], entries], 2)
    key = both[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 2, -1, WIDTH)
    query, mask = model.heads(x)[0].repeat(1, 1, 1, 2), torch.cat([near(x), closed(x)], -1)
    return x + merged(F.scaled_dot_product_attention(query, key, key, attn_mask=mask))[..., :WIDTH]


def chosen_where_others_are_nan(model, x, ids):
    best = best_of(index_scores(model, x).masked_fill(~closed(x), torch.nan)).indices
    seen = shown(x, best) & closed(x)
    return x + attend(model, x, entries_of(x), seen)


def scores_of_the_choice_as_values(model, x, ids):
    best = best_entries(model, x)
    seen = shown(x, best.indices) & closed(x)
    return x + attend(model, x, entries_of(x), seen) + best.values[..., :1].relu()


def as_many_as_a_tenth(model, x, ids):
    scores = index_scores(model, x).masked_fill(~closed(x), -torch.inf)
    best = scores.topk(min((x.shape[1] + 9) // 10, x.shape[1] // M)).indices
    seen = shown(x, best) & closed(x)
    return x + attend(model, x, entries_of(x), seen)


def first_head_for_all(model, x, ids):
    query = model.heads(x)[0].repeat(1, 2, 1, 1)
    entries = entries_of(x).unflatten(-1, (2, -1)).transpose(1, 2)
    both = torch.cat([model.heads(x)[1], entries], 2)
    key = both[:, :, None][:, :1].expand(-1, -1, 4, -1, -1).reshape(1, 4, -1, WIDTH // 2)
    mask = torch.cat([near(x), closed(x)], -1)
    return x + merged(F.scaled_dot_product_attention(query, key, key, attn_mask=mask))[..., :WIDTH]


def all_tokens_as_well(model, x, ids):
    return x + attend(model, x, entries_of(x), closed(x), near(x, window=1 << 20))


FORMS = [
    (own_window_as_well, "whose windows end at it or before it"),
    (every_entry, "whose windows end behind it"),
    (chosen_from_all, "chooses among entries whose windows end behind"),
    (chosen_and_not_closed, "whose windows end behind it"),
    (chosen_from_the_nearest, "sees other entries"),
    (chosen_below_a_clamped_threshold, "entries that its index drops"),
    (joined_mask_as_bias, "between truth and numbers"),
    (joined_bias_as_mask, "between truth and numbers"),
    (chosen_mask_as_bias, "is used as a number"),
    (promoted_mask, "between truth and numbers"),
    (chosen_for_some_tokens, "that the list of chosen keys has none for"),
    (chosen_or_closed_by_a_sum, "are added as numbers"),
    (chosen_by_narrow_numbers, "of its index of entries is not known"),
    (chosen_bias_as_truth, "hides the keys of a list"),
    (zeros_as_truth, "aten::zeros_like of its mask over entries is not known"),
    (chosen_as_bias_where_closed, "is used as a number"),
    (chosen_plus_bias, "is used as a number"),
    (joined_bias_in_eight_bits, "numbers that are not the same"),
    (keys_in_whole_numbers, "not tokens and entries, joined right before"),
    (heads_mixed_with_features, "not tokens and entries, joined right before"),
    (chosen_where_others_are_nan, "still may be chosen"),
    (scores_of_the_choice_as_values, "that its indexer chooses by"),
    (as_many_as_a_tenth, "its indexer chooses Min"),
    (first_head_for_all, "not tokens and entries, joined right before"),
    (all_tokens_as_well, "a window of tokens and no others"),
]


@pytest.mark.parametrize(("step", "why"), named(FORMS))
def test_attention_to_entries_that_are_not_closed_is_refused(step, why):
    require_refusal(Tiny(step), TokenMixingError, "scaled_dot_product_attention", why, __file__)


def chosen_and_closed(model, x, ids):
    return x + attend(model, x, entries_of(x), chosen(model, x))


def chosen_below_the_threshold(model, x, ids):
    threshold = (torch.arange(x.shape[1]) + 1) // M
    return x + attend(model, x, entries_of(x), below_threshold(model, x, threshold))


@pytest.mark.parametrize("step", [chosen_and_closed, chosen_below_the_threshold])
def test_entries_that_an_indexer_chose_are_exact(step):
    model = Tiny(step)
    tree = tree_model(model)
    sequences = [[at % 6 for at in range(30)], [at % 6 for at in range(17)] + [9] * 12]
    for sequence, logits in zip(sequences, tree(sequences), strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([sequence]))[0], rtol=0, atol=1e-12)


# Lengths below those of the captured way


def another_way_when_short(model, x, ids):
    if x.shape[1] // M < 2:
        return x * 2
    return x + attend(model, x, entries_of(x), closed(x))


def test_code_that_takes_another_way_for_short_sequences_is_refused():
    require_refusal(Tiny(another_way_when_short), ControlFlowError, "x.shape[1] // M < 2", "no one T", __file__)


def the_same_when_short(model, x, ids):
    if x.shape[1] < 20:
        return x + x
    return x * 2


def test_code_that_computes_the_same_for_short_sequences_is_accepted():
    model = Tiny(the_same_when_short)
    for sequence, logits in zip([[1], [2] * 25, [2] * 10], tree_model(model)([[1], [2] * 25, [2] * 10]), strict=True):
        torch.testing.assert_close(logits, model(torch.tensor([sequence]))[0], rtol=0, atol=1e-12)


def test_a_fault_in_the_comparison_is_not_taken_for_the_models(monkeypatch):
    def fail(*_args, **_kwargs):
        raise LookupError("ours")

    monkeypatch.setattr(short_lengths, "plan_rows", fail)
    with pytest.raises(LookupError, match="ours"):
        tree_model(Tiny(the_same_when_short)).explain()
