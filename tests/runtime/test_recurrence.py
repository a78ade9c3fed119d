"""Ops that carry a state along the tokens, against their definitions, token by token and sequence by sequence."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.batches import ancestors, chain
from tree_compile import Row, plan_rows
from tree_compile.runtime import linear_recurrence as linear
from tree_compile.runtime.causal_convolution import causal_convolution, token_shift
from tree_compile.runtime.layout import END
from tree_compile.runtime.row_tree import CHUNK, RowTree, tree_of_segments
from tree_compile.runtime.selective_scan import selective_scan
from tree_compile.runtime.state_scan import ChunkMaps, final_states, state_scan

Inputs = dict[str, Tensor]
HEADS, KEY_HEADS, D, E = 4, 2, 6, 5


# Definitions: one sequence, token by token


def delta(query, key, value, decay, beta, scale=None, normalize=False, initial_state=None):
    """[T, H, …]; the decay may have channels; beta None for no delta rule. Outputs and the last state."""
    if normalize:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    group = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(group, 1), key.repeat_interleave(group, 1)
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    state = torch.zeros(value.shape[1], key.shape[-1], value.shape[-1], dtype=value.dtype)
    state = state if initial_state is None else initial_state
    out = []
    for t in range(len(value)):
        state = state * (decay[t][..., None] if decay[t].dim() == 2 else decay[t][:, None, None]).exp()
        new = value[t]
        if beta is not None:
            new = beta[t][:, None] * (new - torch.einsum("hd,hde->he", key[t], state))
        state = state + torch.einsum("hd,he->hde", key[t], new)
        out.append(torch.einsum("hd,hde->he", query[t], state))
    return torch.stack(out), state


def delta_rule(x, **options):
    return delta(x["query"], x["key"], x["value"], decay_of(x), x["beta"], **options)


def linear_attention(x, **options):
    return delta(x["query"], x["key"], x["value"], decay_of(x), None, **options)


def decay_of(x):
    decay = x.get("decay", torch.zeros(HEADS))
    return decay.expand(len(x["value"]), -1) if decay.dim() == 1 else decay


def state_space_scan(x, initial_state=None):
    decay = x["step"] * x["rate"]
    start = None if initial_state is None else initial_state.mT
    values = x["values"] * x["step"][..., None]
    out, state = delta(x["read"], x["write"], values, decay, None, scale=1.0, initial_state=start)
    return out + x["values"] * x["skip"].reshape(HEADS, -1), state.mT


def selective(x, initial_state=None):
    state = torch.zeros_like(x["rate"]) if initial_state is None else initial_state
    out = []
    for value, step, write, read in zip(x["values"], x["step"], x["write"], x["read"], strict=True):
        state = state * (step[:, None] * x["rate"]).exp() + (step * value)[:, None] * write
        out.append((state * read).sum(-1) + value * x["skip"])
    return torch.stack(out), state


def convolution(x):
    width = x["weight"].shape[1]
    return F.conv1d(F.pad(x["values"].T[None], (width - 1, 0)), x["weight"][:, None], x["bias"], groups=D)[0].T, None


def shift(x):
    return F.pad(x["values"], (0, 0, 1, -1)), None


# Inputs


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def delta_inputs(tokens: int, *, channels: bool = False, heads: int = KEY_HEADS) -> Inputs:
    return {
        "query": normal(1, tokens, heads, D),
        "key": normal(1, tokens, heads, D),
        "value": normal(1, tokens, HEADS, E),
        "decay": -F.softplus(normal(1, tokens, HEADS, D) if channels else normal(1, tokens, HEADS)),
        "beta": normal(1, tokens, HEADS).sigmoid(),
    }


def without(inputs: Inputs, *names: str) -> Inputs:
    return {name: value for name, value in inputs.items() if name not in names}


def space_inputs(tokens: int) -> Inputs:
    return {
        "values": normal(1, tokens, HEADS, E), "step": F.softplus(normal(1, tokens, HEADS)),
        "rate": -normal(HEADS).exp(), "write": normal(1, tokens, KEY_HEADS, D),
        "read": normal(1, tokens, KEY_HEADS, D), "skip": normal(HEADS),
    }  # fmt: skip


def selective_inputs(tokens: int) -> Inputs:
    return {
        "values": normal(1, tokens, D), "step": F.softplus(normal(1, tokens, D)), "rate": -normal(D, E).exp(),
        "write": normal(1, tokens, E), "read": normal(1, tokens, E), "skip": normal(D),
    }  # fmt: skip


def convolution_inputs(tokens: int, width: int = 4) -> Inputs:
    return {"values": normal(1, tokens, D), "weight": normal(D, width), "bias": normal(D)}


Op = tuple[Callable, Callable, Callable[[int], Inputs]]
STATES: dict[str, Op] = {
    "gated delta rule": (linear.delta_rule, delta_rule, delta_inputs),
    "kimi delta attention": (linear.delta_rule, delta_rule, partial(delta_inputs, channels=True)),
    "delta rule": (linear.delta_rule, delta_rule, lambda tokens: without(delta_inputs(tokens), "decay")),
    "delta rule with a decay per head": (
        linear.delta_rule,
        delta_rule,
        lambda tokens: delta_inputs(tokens) | {"decay": -normal(HEADS).exp()},
    ),
    "gated linear attention": (
        linear.linear_attention,
        linear_attention,
        lambda tokens: without(delta_inputs(tokens, channels=True), "beta"),
    ),
    "linear attention with a decay per token": (
        linear.linear_attention,
        linear_attention,
        lambda tokens: without(delta_inputs(tokens), "beta"),
    ),
    "linear attention with a decay per head": (
        linear.linear_attention,
        linear_attention,
        lambda tokens: without(delta_inputs(tokens), "beta") | {"decay": -normal(HEADS).exp()},
    ),
    "linear attention without decay": (
        linear.linear_attention,
        linear_attention,
        lambda tokens: without(delta_inputs(tokens), "beta", "decay"),
    ),
    "state space scan": (linear.state_space_scan, state_space_scan, space_inputs),
    "state space scan with a skip per channel": (
        linear.state_space_scan,
        state_space_scan,
        lambda tokens: space_inputs(tokens) | {"skip": normal(HEADS, E)},
    ),
    "selective scan": (selective_scan, selective, selective_inputs),
}
OPS: dict[str, Op] = {
    **STATES,
    "convolution": (causal_convolution, convolution, convolution_inputs),
    "wide convolution": (causal_convolution, convolution, partial(convolution_inputs, width=11)),
    "token shift": (token_shift, shift, lambda tokens: {"values": normal(1, tokens, D)}),
}


def first(result: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def of_sequence(inputs: Inputs, path: Tensor) -> Inputs:
    return {name: value[0, path] if is_per_token(value) else value for name, value in inputs.items()}


def is_per_token(value: Tensor) -> bool:
    return value.dim() > 2 or (value.dim() == 2 and value.shape[0] == 1)


def tree_of(row: Row, least: int = 1) -> RowTree:
    return tree_of_segments(row.segments, row.parent, least)


@st.composite
def long_batches(draw: st.DrawFn) -> list[list[int]]:
    """Sequences whose segments have 1 token, or about as many as one chunk or two."""
    rng = random.Random(draw(st.integers(0, 10_000)))
    lengths = (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1)
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        base = rng.choice([[], *sequences])
        kept = base[: rng.choice([at for at in (0, *lengths) if at <= len(base)])]
        sequences.append(kept + [rng.randrange(50) for _ in range(rng.choice(lengths))])
    return sequences


def difference(results: list[Tensor], others: list[Tensor]) -> float:
    """The greatest difference, relative to the greatest number of each pair."""
    return max(
        float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1e-3))
        for one, other in zip(results, others, strict=True)
    )


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=8, deadline=None)
@given(sequences=long_batches(), seed=st.integers(0, 1000))
def test_tree_equals_the_definition_on_every_sequence(name: str, sequences: list[list[int]], seed: int) -> None:
    torch.manual_seed(seed)
    op, definition, make = OPS[name]
    (row,) = plan_rows(sequences, min_shared_tokens=1).rows
    inputs = {key: value.requires_grad_() for key, value in make(len(row.tokens)).items()}
    out = first(op(**inputs, tree=tree_of(row)))
    paths = [torch.from_numpy(row.path(i)) for i in row.sequence_ids]
    weights = [normal(*out[0, path].shape) for path in paths]
    wanted = [definition(of_sequence(inputs, path))[0] for path in paths]
    assert difference([out[0, path] for path in paths], wanted) < 1e-10

    leaves = list(inputs.values())
    loss = sum((out[0, path] * weight).sum() for path, weight in zip(paths, weights, strict=True))
    wanted_loss = sum((part * weight).sum() for part, weight in zip(wanted, weights, strict=True))
    gradients, wanted_gradients = torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted_loss, leaves)
    assert difference(list(gradients), list(wanted_gradients)) < 1e-9


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("lengths", [(5, 3), (32, 33), (64, 1), (40, 90)])
def test_state_is_handed_on(name: str, lengths: tuple[int, int]) -> None:
    op, definition, make = STATES[name]
    inputs = {key: value.requires_grad_() for key, value in make(sum(lengths)).items()}

    def part(start: int, end: int) -> Inputs:
        return {key: value[:, start:end] if is_per_token(value) else value for key, value in inputs.items()}

    before, state = op(**part(0, lengths[0]), output_final_state=True)
    after, last = op(**part(lengths[0], sum(lengths)), initial_state=state, output_final_state=True)
    wanted, wanted_last = definition(of_sequence(inputs, torch.arange(sum(lengths))))
    assert difference([torch.cat([before, after], 1)[0], last[0]], [wanted, wanted_last]) < 1e-10

    leaves = list(inputs.values())
    loss, wanted_loss = after.square().sum() + last.sum(), wanted[lengths[0] :].square().sum() + wanted_last.sum()
    gradients, wanted_gradients = torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted_loss, leaves)
    assert difference(list(gradients), list(wanted_gradients)) < 1e-9


@pytest.mark.parametrize("name", OPS)
def test_batch_of_unpacked_sequences_equals_each_alone(name: str) -> None:
    op, definition, make = OPS[name]
    inputs = make(3 * 45)
    batch = {
        key: value.view(3, 45, *value.shape[2:]) if is_per_token(value) else value for key, value in inputs.items()
    }
    out = first(op(**batch))
    wanted = [definition(of_sequence(inputs, torch.arange(45 * i, 45 * i + 45)))[0] for i in range(3)]
    assert difference(list(out), wanted) < 1e-10


@pytest.mark.parametrize("name", ["gated delta rule", "kimi delta attention", "delta rule"])
def test_queries_and_keys_are_scaled_and_normalized(name: str) -> None:
    op, definition, make = STATES[name]
    inputs, options = make(70), {"scale": 0.3, "normalize": True}
    wanted, _ = definition(of_sequence(inputs, torch.arange(70)), **options)
    assert difference([op(**inputs, **options)[0][0]], [wanted]) < 1e-10


@pytest.mark.parametrize("name", [name for name, (_, _, make) in STATES.items() if make(1).keys() & {"decay", "rate"}])
def test_strong_decays_do_not_overflow(name: str) -> None:
    op, definition, make = STATES[name]
    inputs = make(100)
    strong = {key: value * 1e3 if key in ("decay", "rate") else value for key, value in inputs.items()}
    strong = {key: value.float().requires_grad_() for key, value in strong.items()}
    out = op(**strong)[0]
    gradients = torch.autograd.grad(out.sum(), list(strong.values()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    wanted, _ = definition(of_sequence(strong, torch.arange(100)))
    assert difference([out[0]], [wanted]) < 1e-4


@pytest.mark.parametrize(
    "name", [name for name, (_, _, make) in STATES.items() if make(1).get("decay", Tensor()).dim() > 1]
)
@pytest.mark.parametrize("reset", [-100.0, -1e5, -1e9, -torch.inf])
def test_decay_that_forgets_leaves_what_follows_exact(name: str, reset: float) -> None:
    op, definition, make = STATES[name]
    inputs = make(70)
    inputs["decay"][:, [3, 4, 40]] = reset
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        given = {key: value.to(dtype).requires_grad_() for key, value in inputs.items()}
        out = op(**given)[0]
        assert difference([out[0]], [definition(of_sequence(given, torch.arange(70)))[0]]) < tolerance
        leaves = [value for key, value in given.items() if key != "decay"]
        assert all(bool(gradient.isfinite().all()) for gradient in torch.autograd.grad(out.sum(), leaves))


DECAYING = [name for name, (_, _, make) in STATES.items() if make(1).keys() & {"decay", "step"}]


@pytest.mark.parametrize("name", DECAYING)
@pytest.mark.parametrize(("strong", "weak"), [(40.0, 0.3), (16.0, 1e-3)])
def test_float32_is_precise_where_strong_and_weak_decays_mix(name: str, strong: float, weak: float) -> None:
    op, _, make = STATES[name]
    inputs = {key: value.float() for key, value in make(96).items()}
    if "decay" in inputs:
        # Longer keys would make states of a delta rule grow, and their rounding with them.
        inputs |= {"decay": -either(strong, weak, inputs["decay"].shape), "key": F.normalize(inputs["key"], dim=-1)}
    else:
        inputs |= {"step": either(strong, weak, inputs["step"].shape), "rate": -torch.ones_like(inputs["rate"])}

    def results(dtype: torch.dtype) -> list[Tensor]:
        given = {key: value.to(dtype).requires_grad_() for key, value in inputs.items()}
        out = op(**given)[0]
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        return [out, *torch.autograd.grad(out, list(given.values()), weight)]

    assert difference([result.double() for result in results(torch.float32)], results(torch.float64)) < 2e-6


def either(one: float, other: float, shape: torch.Size) -> Tensor:
    return torch.where(torch.rand(shape) < 0.5, one, other)


@pytest.mark.parametrize("name", STATES)
def test_every_root_starts_from_its_own_state(name: str) -> None:
    op, definition, make = STATES[name]
    (row,) = plan_rows([[1] * 5, [2] * 80, [3] * 33], min_shared_tokens=1).rows
    inputs, tree = make(len(row.tokens)), tree_of(row)
    _, states = op(**inputs, tree=tree, output_final_state=True)
    initial = torch.randn_like(states)
    out, final = op(**inputs, tree=tree, initial_state=initial, output_final_state=True)
    for root, (start, end) in enumerate(row.segments[:, :2].tolist()):
        wanted, last = definition(of_sequence(inputs, torch.arange(start, end)), initial_state=initial[root])
        assert difference([out[0, start:end], final[root]], [wanted, last]) < 1e-10
    with pytest.raises(ValueError, match="one for each of 3 roots"):
        op(**inputs, tree=tree, initial_state=initial[:1])


def test_state_that_is_read_where_what_is_written_is_added_as_it_is() -> None:
    """A form of `ChunkMaps` that no op of ours has."""
    parent = torch.tensor([-1, 0, 0, 1, 1, 2])
    kept, fresh, reads, initial = normal(6, 2, 3, 1), normal(6, 2, 3, 5), normal(6, 2, 3, 3), normal(1, 2, 3, 5)
    given = [tensor.requires_grad_() for tensor in (kept, fresh, reads, initial)]
    weights = [normal(6, 2, 3, 5) for _ in range(3)]
    maps = ChunkMaps(kept, fresh, None, reads)
    scanned = state_scan(maps, parent, initial)
    results = [scanned.states, scanned.written, final_states(maps, scanned)]

    begun, new, ended = [], [], []
    for chunk, above in enumerate(parent.tolist()):
        begun.append(initial[0] if above < 0 else ended[above])
        new.append(fresh[chunk] + reads[chunk] @ begun[chunk])
        ended.append(kept[chunk] * begun[chunk] + new[chunk])
    wanted = [torch.stack(parts) for parts in (begun, new, ended)]
    assert difference(results, wanted) < 1e-10
    losses = [
        sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)) for parts in (results, wanted)
    ]
    assert difference(*(list(torch.autograd.grad(loss, given)) for loss in losses)) < 1e-10


@pytest.mark.parametrize("name", STATES)
def test_final_states_are_those_at_the_end_of_every_segment(name: str) -> None:
    op, definition, make = STATES[name]
    trunk = [1] * 40
    sequences = [trunk + [2] * 33, trunk + [3] * 5 + [4] * 64, trunk + [3] * 5 + [5], [6] * 32]
    (row,) = plan_rows(sequences, min_shared_tokens=1).rows
    inputs = make(len(row.tokens))
    _, final = op(**inputs, tree=tree_of(row), output_final_state=True)
    assert len(final) == len(row.segments) == 6
    for state, end in zip(final, row.segments[:, END].tolist(), strict=True):
        path = sorted(ancestors(row.parent, end - 1))
        assert difference([state], [definition(of_sequence(inputs, torch.tensor(path)))[1]]) < 1e-10


MISFITS: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "heads of a decay": ("gated delta rule", "decay", (1, 50, 2), "decay"),
    "a decay one token short": ("gated delta rule", "decay", (1, 49, HEADS), "decay"),
    "channels of a decay": ("kimi delta attention", "decay", (1, 50, HEADS, D - 1), "decay"),
    "a decay of one number": ("linear attention with a decay per head", "decay", (1,), "decay"),
    "heads of beta": ("gated delta rule", "beta", (1, 50, 1), "beta"),
    "channels of beta": ("delta rule", "beta", (1, 50, HEADS, HEADS), "beta"),
    "a shorter key": ("gated delta rule", "key", (1, 40, KEY_HEADS, D), "key"),
    "a wider query": ("gated linear attention", "query", (1, 50, KEY_HEADS, D + 1), "query"),
    "heads that do not divide": ("gated delta rule", "value", (1, 50, 3, E), "3 heads of value"),
    "a state of one head": ("gated delta rule", "initial_state", (1, 1, D, E), "initial_state"),
    "no tokens": ("gated delta rule", "value", (1, 0, HEADS, E), "no tokens"),
    "heads of a step": ("state space scan", "step", (1, 50, 1), "step"),
    "a rate for each token": ("state space scan", "rate", (50, 1), "rate"),
    "heads of a skip": ("state space scan", "skip", (2,), "skip"),
    "tokens of write": ("state space scan", "write", (1, 49, KEY_HEADS, D), "write"),
    "tokens of read": ("state space scan", "read", (1, 49, KEY_HEADS, D), "read"),
    "a state of one head and channel": ("state space scan", "initial_state", (1, HEADS, 1, D), "initial_state"),
    "channels of a step": ("selective scan", "step", (1, 50, 1), "step"),
    "a rate of one channel": ("selective scan", "rate", (1, E), "rate"),
    "one number for write": ("selective scan", "write", (1, 50, 1), "write"),
    "a skip for each token": ("selective scan", "skip", (50, 1), "skip"),
    "a selective state of one channel": ("selective scan", "initial_state", (1, 1, E), "initial_state"),
    "no tokens to scan": ("selective scan", "values", (1, 0, D), "no tokens"),
    "a weight of one channel": ("convolution", "weight", (1, 4), "weight"),
    "a weight of no token": ("convolution", "weight", (D, 0), "weight"),
    "a bias for each token": ("convolution", "bias", (50, 1), "bias"),
    "values without heads": ("gated delta rule", "value", (1, 50, E), "value is .*; it must have 4 dimensions"),
    "keys without heads": ("gated delta rule", "key", (1, 50, D), "key is .*; it must have 4 dimensions"),
    "queries without heads": ("gated delta rule", "query", (1, 50, D), "query"),
    "a space without heads": ("state space scan", "values", (1, 50, E), "values is .*; it must have 4 dimensions"),
    "write without groups": ("state space scan", "write", (1, 50, D), "write is .*; it must have 4 dimensions"),
    "read without groups": ("state space scan", "read", (1, 50, D), "read"),
    "values with heads": ("selective scan", "values", (1, 50, 1, D), "values is .*; it must have 3 dimensions"),
    "a rate of one number": ("selective scan", "rate", (), "rate is .*; it must have 2 dimensions"),
    "values of one sequence alone": ("convolution", "values", (50, D), "values is .*; it must have 3 dimensions"),
    "a weight of one number": ("convolution", "weight", (), "weight is .*; it must have 2 dimensions"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_shape_that_does_not_fit_is_refused(case: str) -> None:
    name, key, shape, why = MISFITS[case]
    op, _, make = OPS[name]
    with pytest.raises(ValueError, match=f"^{why}"):
        op(**make(50) | {key: normal(*shape)})


@pytest.mark.parametrize("name", OPS)
def test_values_that_are_not_the_row_of_the_tree_are_refused(name: str) -> None:
    op, _, make = OPS[name]
    (row,) = plan_rows([[1] * 50], min_shared_tokens=1).rows
    twice = {key: torch.cat([value] * 2) if is_per_token(value) else value for key, value in make(50).items()}
    with pytest.raises(ValueError, match="a batch of 2 over one tree"):
        op(**twice, tree=tree_of(row))
    for tokens in (49, 51):
        with pytest.raises(ValueError, match=f"has {tokens} tokens, and the row of the tree 50"):
            op(**make(tokens), tree=tree_of(row))


@pytest.mark.parametrize("name", OPS)
def test_siblings_in_another_order_give_identical_results(name: str) -> None:
    op, _, make = OPS[name]
    trunk = list(range(45))
    sequences = [trunk + [100 + i, *range(33)] for i in range(3)] + [[7, 8, 9]]
    given_inputs = make(45 + 3 * 34 + 3)
    results = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        (row,) = plan_rows([sequences[i] for i in order], min_shared_tokens=1).rows
        place = np.empty(len(row.tokens), np.int64)
        for at, i in enumerate(order):
            place[row.path(at)] = own_rows(i)
        inputs = {key: value[:, place] if is_per_token(value) else value for key, value in given_inputs.items()}
        out = first(op(**inputs, tree=tree_of(row)))[0]
        results.append([out[row.path(order.index(i))] for i in range(4)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def own_rows(sequence: int) -> np.ndarray:
    """Which row of the given inputs each token of a sequence of the test above takes."""
    if sequence == 3:
        return np.arange(147, 150)
    return np.concatenate([np.arange(45), 45 + 34 * sequence + np.arange(34)])


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=8, deadline=None)
@given(sequences=long_batches(), data=st.data())
def test_a_changed_token_changes_nothing_outside_its_own_subtree(name: str, sequences, data) -> None:
    op, _, make = OPS[name]
    (row,) = plan_rows(sequences, min_shared_tokens=1).rows
    inputs = make(len(row.tokens))
    token = data.draw(st.integers(0, len(row.tokens) - 1))
    changed = {key: value.clone() for key, value in inputs.items()}
    for value in changed.values():
        if is_per_token(value):
            value[0, token] *= 0.5
    before, after = (first(op(**x, tree=tree_of(row)))[0] for x in (inputs, changed))
    outside = np.ones(len(row.tokens), bool)
    outside[token : row.subtree_end[token]] = False
    assert torch.equal(before[outside], after[outside])
    reached = token if name != "token shift" else token + 1
    if reached < row.subtree_end[token]:
        assert not torch.equal(before[reached], after[reached])


@pytest.mark.parametrize("name", OPS)
def test_padding_is_not_zero_and_takes_no_gradient(name: str) -> None:
    op, _, make = OPS[name]
    (row,) = plan_rows([[1] * 40, [1] * 20 + [2]], 64, min_shared_tokens=1, pad_rows=True).rows
    assert row.padding == 23
    inputs = {key: value.requires_grad_() for key, value in make(64).items()}
    out = first(op(**inputs, tree=tree_of(row)))
    if name in STATES:  # a norm of zeros would have no gradient
        assert bool((out[0, 41:].flatten(1).norm(dim=1) > 0).all())
    gradients = torch.autograd.grad(out[0, :41].sum(), list(inputs.values()))
    for value, gradient in zip(inputs.values(), gradients, strict=True):
        assert not is_per_token(value) or not gradient[0, 41:].any()


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    op, _, make = OPS[name]
    half = {key: value.to(dtype) for key, value in make(80).items()}
    out = first(op(**half))
    wanted = first(op(**{key: value.float() for key, value in half.items()}))
    assert torch.equal(out, wanted.to(dtype))
    assert out.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(first(op(**half)), out)


def test_tree_deeper_than_calls_can_be_is_computed() -> None:
    depth = sys.getrecursionlimit() + 200
    (row,) = plan_rows(chain(depth), min_shared_tokens=1).rows
    inputs = delta_inputs(len(row.tokens))
    out, _ = linear.delta_rule(**inputs, tree=tree_of(row))
    path = torch.from_numpy(row.path(int(row.sequence_length.argmax())))
    wanted, _ = linear.delta_rule(**{key: value[:, path] for key, value in inputs.items()})
    assert difference([out[:, path]], [wanted]) < 1e-9


@pytest.mark.parametrize("least", [1, 2])
def test_chunks_hold_every_token_once(least: int) -> None:
    (row,) = plan_rows([[1] * 40 + [2] * 70, [1] * 40 + [3], [9]], min_shared_tokens=1).rows
    tree = tree_of(row, least)
    tokens = tree.chunk_tokens[tree.chunk_tokens < len(row.tokens)]
    assert sorted(tokens.tolist()) == list(range(len(row.tokens)))
    assert torch.equal(tree.chunk_tokens[tree.chunk_place], torch.arange(len(row.tokens)))
    assert len(tree.chunk_tokens) == CHUNK * len(tree.chunk_parent)
