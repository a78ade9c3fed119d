"""Operations that mix tokens, or whose effect on tokens is not known, are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.errors.refusal import WIDTH, Tiny, named, require_refusal, tree_model
from tree_compile.errors import TokenMixingError, UnknownOpError

# Along the tokens


def mean_pooling(model, x, ids):
    return x + x.mean(1, keepdim=True)


def max_pooling(model, x, ids):
    return x + x.amax(1, keepdim=True)


def adaptive_pooling(model, x, ids):
    return x + F.adaptive_avg_pool1d(x.mT, 1).mT


def first_token_for_all(model, x, ids):
    return x + x[:, :1]


def one_token_for_all(model, x, ids):
    return x + x[:, 0, None]


def shift_that_keeps_another(model, x, ids):
    return F.pad(x[:, 1:], (0, 0, 1, 0))


def shift_by_two(model, x, ids):
    return F.pad(x, (0, 0, 2, -2))


def shift_that_repeats(model, x, ids):
    return F.pad(x, (0, 0, 1, -1), value=1.0)


def shift_with_a_vector_in_front(model, x, ids):
    return torch.cat([torch.ones_like(x[:, :1]), x[:, :-1]], 1)


def shift_whose_padding_is_read(model, x, ids):
    padded = F.pad(x, (0, 0, 1, 0))
    return padded[:, :-1] + padded[:, 1:]


def shift_by_roll(model, x, ids):
    return x.roll(1, 1)


def shift_by_writing(model, x, ids):
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return shifted


def previous_token(model, x, ids):
    return x * (ids == ids.roll(1, 1))[..., None]


def flip(model, x, ids):
    return x.flip(1)


def cumulative_sum(model, x, ids):
    return x.cumsum(1)


def cumulative_greatest(model, x, ids):
    return x.cummax(1).values


def sort(model, x, ids):
    return x.sort(1).values


def ranks(model, x, ids):
    order = x[0, :, 0].argsort()
    return x + order[None, :, None]


def sorted_beside_unsorted(model, x, ids):
    return x + x[0, :, 0].sort().values[None, :, None]


def greatest_tokens(model, x, ids):
    return x + x.topk(2, 1).values.sum(1, keepdim=True)


def softmax_over_tokens(model, x, ids):
    return x.softmax(1)


def unit_length_over_tokens(model, x, ids):
    return F.normalize(x, dim=1)


def centred_over_tokens(model, x, ids):
    return x - x.mean(1, keepdim=True)


def spread_over_tokens(model, x, ids):
    return x / (1 + x.std(1, keepdim=True))


def every_token_with_every_other(model, x, ids):
    return (x @ x.mT) @ x


def average_of_the_past(model, x, ids):
    weights = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return weights @ x


def pairs_by_einsum(model, x, ids):
    return torch.einsum("btd,bsd,bse->bte", x, x, x)


def sum_by_einsum(model, x, ids):
    return x + torch.einsum("btd,de->be", x, model.project[0].weight)[:, None]


def linear_attention(model, x, ids):
    query, key, value = model.heads(x)
    state = key.mT @ value
    return (query @ state).transpose(1, 2).flatten(-2)


def causal_convolution_over_channels(model, x, ids):
    padded = F.pad(x.mT, (3, 0))
    return F.conv1d(padded, torch.ones(WIDTH, WIDTH, 4, dtype=x.dtype)).mT


def dilated_convolution(model, x, ids):
    padded = F.pad(x.mT, (6, 0))
    return F.conv1d(padded, torch.ones(WIDTH, 1, 4, dtype=x.dtype), dilation=2, groups=WIDTH).mT


def convolution_that_looks_ahead(model, x, ids):
    return F.conv1d(x.mT, torch.ones(WIDTH, 1, 4, dtype=x.dtype), padding=3, groups=WIDTH)[..., 1 : x.shape[1] + 1].mT


def padded_convolution(x):
    return F.conv1d(x.mT, torch.ones(WIDTH, 1, 4, dtype=x.dtype), padding=3, groups=WIDTH)


def convolution_in_parts(model, x, ids):
    return torch.cat([part[..., : x.shape[1]] for part in padded_convolution(x).split(4, 1)], 1).mT


def convolution_in_chunks(model, x, ids):
    return padded_convolution(x).chunk(2, 1)[0][..., : x.shape[1]].mT.repeat(1, 1, 2)


def convolution_by_its_flip(model, x, ids):
    both = padded_convolution(x)
    return (both * both.flip(2))[..., : x.shape[1]].mT


def convolution_by_its_places(model, x, ids):
    return (padded_convolution(x) * torch.arange(x.shape[1] + 3))[..., : x.shape[1]].mT


def convolution_with_dropout(model, x, ids):
    return F.dropout(padded_convolution(x), 0.5)[..., : x.shape[1]].mT


def convolution_padded_on_both_sides(model, x, ids):
    return F.conv1d(x.mT, torch.ones(WIDTH, 1, 3, dtype=x.dtype), padding="same", groups=WIDTH).mT


def convolution(model, x, ids):
    return F.conv1d(x.mT, torch.ones(WIDTH, 1, 3, dtype=x.dtype), padding=1, groups=WIDTH).mT


def every_other_token(model, x, ids):
    return F.conv1d(x.mT, model.project[0].weight[:, :, None], stride=2).mT


def tokens_as_features(model, x, ids):
    return (x[0] @ model.rows.T[:, : x.shape[1]])[None] @ x


def count_of_a_token(model, x, ids):
    return x + (ids == 1).sum()


def histogram(model, x, ids):
    return x + torch.bincount(ids[0], minlength=32)[ids][..., None]


def greatest_token(model, x, ids):
    return x * ids.max().item()


def counted_gradient(model, x, ids):
    return x + F.embedding(ids, model.rows, scale_grad_by_freq=True)


def token_by_place(model, x, ids):
    return x + model.rows[None].gather(2, (ids % WIDTH)[..., None])


def write_for_the_first_token(model, x, ids):
    return x.scatter(2, torch.zeros(1, 1, 1, dtype=torch.int64), 1.0)


def mistaken_inverse(model, x, ids):
    order = ids[0].argsort()
    inverse = torch.empty_like(order)
    inverse[order] = order
    return x[0][order][inverse][None]


def mask_of_the_loss(model, x, ids):
    return x[:, ids[0] > 1].mean(1, keepdim=True) + x


ALONG = "along the tokens"
PLACES = [
    (mean_pooling, "x.mean(1", f"reduces {ALONG}"),
    (max_pooling, "x.amax(1", f"reduces {ALONG}"),
    (first_token_for_all, "x[:, :1]", "cuts or shifts the tokens"),
    (one_token_for_all, "x[:, 0, None]", "takes one token out of all"),
    (shift_that_keeps_another, "F.pad(x[:, 1:]", "cuts or shifts the tokens"),
    (shift_by_two, "F.pad(x, ", "shifts or extends the tokens"),
    (shift_that_repeats, "F.pad(x, ", "shifts or extends the tokens"),
    (shift_with_a_vector_in_front, "torch.cat", "cuts or shifts the tokens"),
    (shift_whose_padding_is_read, "F.pad(x, ", "shifts or extends the tokens"),
    (shift_by_roll, "x.roll(1, 1)", f"shifts {ALONG}"),
    (shift_by_writing, "shifted[:, 1:] = ", "cuts or shifts the tokens"),
    (previous_token, "ids.roll(1, 1)", f"shifts {ALONG}"),
    (flip, "x.flip(1)", f"reverses the order {ALONG}"),
    (cumulative_sum, "x.cumsum(1)", f"accumulates {ALONG}"),
    (cumulative_greatest, "x.cummax(1)", f"accumulates {ALONG}"),
    (sort, "x.sort(1)", "sorts the tokens"),
    (ranks, "order[None, :, None]", "computes with numbers of rows"),
    (sorted_beside_unsorted, "x[0, :, 0].sort()", "in the order of"),
    (greatest_tokens, "x.topk(2, 1)", f"selects {ALONG}"),
    (softmax_over_tokens, "x.softmax(1)", f"takes a softmax {ALONG}"),
    (unit_length_over_tokens, "F.normalize(x, dim=1)", f"reduces {ALONG}"),
    (centred_over_tokens, "x.mean(1", f"reduces {ALONG}"),
    (spread_over_tokens, "x.std(1", f"reduces {ALONG}"),
    (every_token_with_every_other, "(x @ x.mT)", "relates every token to every other"),
    (average_of_the_past, "torch.ones(x.shape[1], x.shape[1]", "relates every token to every other"),
    (pairs_by_einsum, "torch.einsum", "sums over the tokens"),
    (sum_by_einsum, "torch.einsum", "sums over the tokens"),
    (linear_attention, "key.mT @ value", "sums over the tokens"),
    (causal_convolution_over_channels, "F.pad(x.mT, (3, 0))", "shifts or extends the tokens"),
    (dilated_convolution, "F.pad(x.mT, (6, 0))", "shifts or extends the tokens"),
    (convolution_that_looks_ahead, "F.conv1d", "mixes neighbouring tokens"),
    *(
        (step, "F.conv1d", "mixes neighbouring tokens")
        for step in (
            convolution_in_parts, convolution_in_chunks, convolution_by_its_flip, convolution_by_its_places,
            convolution_with_dropout, convolution_padded_on_both_sides, convolution,
        )
    ),
    (every_other_token, "F.conv1d", "do not fit to the tokens"),
    (tokens_as_features, "model.rows.T", "relates every token to every other"),
    (count_of_a_token, "(ids == 1).sum()", f"reduces {ALONG}"),
    (histogram, "torch.bincount", "counts over the tokens"),
    (greatest_token, "ids.max().item()", f"reduces {ALONG}"),
    (counted_gradient, "scale_grad_by_freq=True", "how often a token occurs"),
    (token_by_place, "gather(2", "some of the tokens only"),
    (write_for_the_first_token, "x.scatter(2", "some of the tokens only"),
    (mistaken_inverse, "inverse[order] = order", "may belong to other tokens"),
    (mask_of_the_loss, "x[:, ids[0] > 1]", "by a mask"),
]  # fmt: skip


def number_of_a_buffer(model, x, ids):
    return x * model.table[0, 0].item()


def number_from_a_buffer(model, x, ids):
    return x * (2 * model.table.sum().item() + 1)


@pytest.mark.parametrize("step", [number_of_a_buffer, number_from_a_buffer])
def test_number_that_is_read_from_a_tensor_is_refused(step):
    code, why = "return x * ", "knows only of the tensor"
    require_refusal(Tiny(step), TokenMixingError, code, why, __file__)


@pytest.mark.parametrize(("step", "code", "why"), named(PLACES))
def test_operation_that_mixes_tokens_is_refused(step, code, why):
    require_refusal(Tiny(step), TokenMixingError, code, why, __file__)


# Modules


class Recurrent(Tiny):
    def __init__(self, kind):
        super().__init__(lambda model, x, ids: model.layer(x)[0])
        self.layer = kind(WIDTH, WIDTH, batch_first=True)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layer_is_refused(kind):
    require_refusal(Recurrent(kind), TokenMixingError, "model.layer(x)[0]", "a state from token to token", __file__)


class Normalized(Tiny):
    def __init__(self, layer):
        super().__init__(lambda model, x, ids: model.layer(x.mT).mT)
        self.layer = layer


NORMS = [
    (nn.BatchNorm1d(WIDTH), "mix all sequences of a row"),
    (nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), "mix all sequences of a row"),
    (nn.GroupNorm(2, WIDTH), "normalizes over the tokens"),
    (nn.InstanceNorm1d(WIDTH), "normalizes over the tokens"),
]


@pytest.mark.parametrize(("layer", "why"), NORMS, ids=lambda value: type(value).__name__)
def test_normalization_over_tokens_is_refused(layer, why):
    require_refusal(Normalized(layer), TokenMixingError, "model.layer(x.mT)", why, __file__)


def test_batch_norm_in_eval_mode_is_exact():
    assert tree_model(Normalized(nn.BatchNorm1d(WIDTH)).eval()).check().ok


# Operators that the proof does not know


@torch.library.custom_op("tree_compile_tests::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, 1)


@shift.register_fake
def _(x):
    return torch.empty_like(x)


def custom_operator(model, x, ids):
    return torch.ops.tree_compile_tests.shift(x)


def fourier_transform(model, x, ids):
    return torch.fft.fft(x, dim=1).real


def average_pooling(model, x, ids):
    return F.avg_pool1d(x.mT, 1).mT


def loss_for_every_token(model, x, ids):
    return x + F.cross_entropy(x[0], ids[0] % WIDTH, reduction="none")[None, :, None]


def noise(model, x, ids):
    return x + torch.randn_like(x)


def noise_of_one_kind_for_all(model, x, ids):
    return x + torch.rand(x.shape[1])[None, :, None]


def noise_in_place(model, x, ids):
    return x + torch.empty_like(x).uniform_()


def random_slope(model, x, ids):
    return F.rrelu(x, training=True)


def random_choice(model, x, ids):
    return x * torch.bernoulli(torch.full_like(x, 0.5))


def identity_of_tokens(model, x, ids):
    return torch.eye(x.shape[1], dtype=x.dtype) @ x


UNKNOWN = [
    (custom_operator, "tree_compile_tests.shift(x)", "tree_compile_tests::shift"),
    (fourier_transform, "torch.fft.fft", "fft_fft"),
    (average_pooling, "F.avg_pool1d", "avg_pool1d"),
    (adaptive_pooling, "F.adaptive_avg_pool1d", "adaptive_avg_pool1d"),
    (loss_for_every_token, "F.cross_entropy", "cross_entropy_loss"),
    (noise, "torch.randn_like", "randn_like"),
    (noise_of_one_kind_for_all, "torch.rand(", "rand"),
    (noise_in_place, ".uniform_()", "uniform"),
    (random_slope, "F.rrelu", "rrelu"),
    (random_choice, "torch.bernoulli", "bernoulli"),
    (identity_of_tokens, "torch.eye", "eye"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "code", "operator"), named(UNKNOWN))
def test_unknown_operator_is_refused_by_name(step, code, operator):
    require_refusal(Tiny(step), UnknownOpError, code, "no rule", __file__)
    with pytest.raises(UnknownOpError, match=operator):
        tree_model(Tiny(step)).explain()
