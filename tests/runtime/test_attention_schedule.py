"""The calls of the CPU attention cover every visible pair once, and are few and small."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.runtime.attention_reference import visible_pairs
from tests.runtime.trees import Spec, random_forest, segment_table
from tree_compile.runtime.attention_kernels import call_mask
from tree_compile.runtime.attention_schedule import BLOCK, Call, Schedule, schedule
from tree_compile.runtime.attention_score import Score

CHANNELS = 512


def key_rows(call: Call) -> Tensor:
    if call.keys.index is not None:
        return call.keys.index
    return torch.cat([torch.arange(start, end) for start, end in call.keys.ranges])


def covered(plan: Schedule, tokens: int, window: int, chunk: int) -> Tensor:
    """How often each pair of rows is computed and not masked, [T, T]."""
    times = torch.zeros(tokens, tokens, dtype=torch.int64)
    for call in plan.calls:
        keys = key_rows(call)
        mask = call_mask(call, plan, Score(1.0, window, chunk), torch.float32)
        causal = torch.ones(call.end - call.start, len(keys), dtype=torch.bool).tril()
        times[call.start : call.end, keys] += (causal if mask is None else mask == 0).long()
    return times


def computed(plan: Schedule) -> int:
    """Pairs that the calls compute, masked ones included."""
    return sum((call.end - call.start) * call.keys.count for call in plan.calls)


def spine(length: int, *, leaf_first: bool) -> list[Spec]:
    """A chain of one-token segments, each with a one-token leaf."""
    spec: Spec = (1, [])
    for _ in range(length - 1):
        spec = (1, [(1, []), spec] if leaf_first else [spec, (1, [])])
    return [spec]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("channels", [None, 4, CHANNELS, 100_000])
def test_every_visible_pair_is_computed_once(seed: int, channels: int | None) -> None:
    rng = random.Random(seed)
    table = segment_table(random_forest(rng, rng.choice([5, 200, 700]), rng.choice([1, 5, 50, 400])))
    window, chunk = (0, 0) if channels else (rng.choice([0, 1, 20, 300]), rng.choice([0, 1, 30, 300]))
    tokens = int(table[:, 2].max())
    plan = schedule(table, window, chunk, channels, rng.choice([1, 7, BLOCK]))
    assert torch.equal(covered(plan, tokens, window, chunk), visible_pairs(table, tokens, window, chunk).long())


def test_short_segments_under_a_long_one_and_beside_it_are_computed_once() -> None:
    table = segment_table([(100, [(400, [(1, [])] * 700), (7, [])])])
    tokens = int(table[:, 2].max())
    plan = schedule(table, 0, 0, CHANNELS)
    assert [call.causal for call in plan.calls[:3]] == [True, True, False]
    assert plan.calls[-1][:2] == (1200, 1207)
    assert torch.equal(covered(plan, tokens, 0, 0), visible_pairs(table, tokens).long())


def test_few_channels_make_calls_dear() -> None:
    table = segment_table([(2000, [(10, [])] * 100)])
    few, many = (schedule(table, 0, 0, channels) for channels in (16, 4096))
    assert len(few.calls) < len(many.calls) == 101


def test_long_segments_take_one_call_each() -> None:
    plan = schedule(segment_table([(1024, [(512, [(400, []), (300, [])]), (700, [])])]), 0, 0, CHANNELS)
    assert plan.calls[0] == Call(0, 2936, plan.calls[0].keys, True)
    assert plan.calls[0].keys.ranges == ((0, 1024),)


@pytest.mark.parametrize("leaf_first", [True, False])
def test_thousands_of_one_token_segments_take_few_calls(leaf_first: bool) -> None:
    table = segment_table(spine(2500, leaf_first=leaf_first))
    plan = schedule(table, 0, 0, CHANNELS)
    tokens = int(table[:, 2].max())
    assert len(plan.calls) <= -(-tokens // BLOCK)
    pairs = int((table[:, 4] + 1).sum())
    assert computed(plan) <= pairs + BLOCK * tokens


def test_hundreds_of_short_siblings_share_calls() -> None:
    plan = schedule(segment_table([(2000, [(5, [])] * 600)]), 0, 0, CHANNELS)
    assert len(plan.calls) <= 2 + 600 * 5 // BLOCK


@pytest.mark.parametrize("seed", range(5))
def test_windowed_calls_stay_near_the_window(seed: int) -> None:
    table = segment_table(random_forest(random.Random(seed), 4000, 60, depth=60))
    tokens, window = int(table[:, 2].max()), 50
    assert computed(schedule(table, window, 0, None)) <= tokens * (window + 2 * BLOCK)


def test_schedule_is_made_once_for_equal_tables() -> None:
    first = schedule(segment_table([(30, [(4, [])])]), 0, 0, CHANNELS)
    assert schedule(segment_table([(30, [(4, [])])]), 0, 0, CHANNELS) is first
