"""Windows of a row, and what reads them, against plain loops over the tokens of every sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_compile import plan_rows
from tree_compile.runtime import topk_index
from tree_compile.runtime.row import Row
from tree_compile.runtime.window_attention import (
    all_entries,
    first_entries,
    nearest_rows,
    topk_entries,
    window_attention,
)
from tree_compile.runtime.windows import WindowTables, windows_of_row

TOKENS = st.integers(0, 1)
SEQUENCES = st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=1, max_size=8)
SIZES = st.integers(2, 5)


def row_of(sequences: list[list[int]]) -> Row:
    return plan_rows(sequences, min_shared_tokens=1).rows[0]


def path_of(row: Row, token: int) -> list[int]:
    """The tokens from the root down to `token`, one by one."""
    path = [token]
    while row.parent[path[0]] >= 0:
        path.insert(0, int(row.parent[path[0]]))
    return path


def entries_by_loop(row: Row, size: int) -> list[dict[str, Any]]:
    """Every entry in row order, found token by token."""
    found: list[dict[str, Any]] = []
    for token in range(row.length):
        path = path_of(row, token)
        if len(path) % size == 0:
            found.append({"closing": token, "tokens": path[-size:], "number": len(path) // size - 1})
    return found


def seen_by_loop(row: Row, size: int, token: int) -> list[int]:
    """The entries that a token or one of its ancestors closes, from the root on."""
    path = path_of(row, token)
    return [place for place, entry in enumerate(entries_by_loop(row, size)) if entry["closing"] in path]


@given(SEQUENCES, SIZES)
def test_entries_are_those_of_every_path(sequences: list[list[int]], size: int) -> None:
    row = row_of(sequences)
    tables, expected = windows_of_row(row, size), entries_by_loop(row, size)
    count = len(expected)
    assert len(tables.number) == max(1, count)
    assert tables.tokens[:count].tolist() == [entry["tokens"] for entry in expected]
    assert tables.number[:count].tolist() == [entry["number"] for entry in expected]
    for place, entry in enumerate(expected):
        seen = seen_by_loop(row, size, entry["closing"])
        assert tables.previous[place] == (seen[-2] if len(seen) > 1 else -1)
        assert [at for at in tables.path[place].tolist() if at >= 0] == seen


@given(SEQUENCES, SIZES)
def test_last_and_ranges_tell_which_entries_a_token_sees(sequences: list[list[int]], size: int) -> None:
    row = row_of(sequences)
    tables, closing = windows_of_row(row, size), [entry["closing"] for entry in entries_by_loop(row, size)]
    for token in range(row.length):
        assert tables.last[token] == (seen_by_loop(row, size, token) or [-1])[-1]
    for (start, end, *_), (first, past) in zip(row.segments.tolist(), tables.ranges.tolist(), strict=True):
        assert closing[first:past] == [token for token in closing if start <= token < end]


def test_missing_entries_are_made_up_for_and_seen_by_nobody() -> None:
    row = row_of([[1, 2, 3], [1, 2, 4]])
    tables = windows_of_row(row, 4, least=2)
    assert (tables.tokens.shape, tables.path.shape) == ((2, 4), (2, 2))
    assert tables.last.tolist() == [-1] * 4
    assert tables.ranges.tolist() == [[0, 0]] * 3


def test_padding_closes_no_window() -> None:
    (row,) = plan_rows([[1] * 6], 16, min_shared_tokens=1, pad_rows=True).rows
    tables = windows_of_row(row, 2)
    assert len(tables.number) == 3
    assert tables.last.tolist() == [-1, 0, 0, 1, 1, 2] + [-1] * 10


@given(SEQUENCES, st.integers(1, 6))
def test_nearest_rows_are_the_last_ancestors(sequences: list[list[int]], window: int) -> None:
    row = row_of(sequences)
    found = nearest_rows(torch.from_numpy(row.segments), torch.from_numpy(row.position), window)
    for token in range(row.length):
        expected = path_of(row, token)[::-1][:window]
        assert found[token].tolist() == expected + [-1] * (window - len(expected))


def tensors(tables: WindowTables, *names: str) -> list[torch.Tensor]:
    return [torch.from_numpy(getattr(tables, name)) for name in names]


@given(SEQUENCES, SIZES)
def test_all_entries_are_those_on_the_path(sequences: list[list[int]], size: int) -> None:
    row = row_of(sequences)
    (found,) = all_entries(*tensors(windows_of_row(row, size), "path", "last"))
    for token in range(row.length):
        expected = seen_by_loop(row, size, token)
        assert found[token].tolist() == expected + [-1] * (found.shape[1] - len(expected))


@given(SEQUENCES, SIZES, st.integers(1, 4), st.integers(0, 2**31))
def test_chosen_entries_score_highest_among_those_on_the_path(
    sequences: list[list[int]], size: int, keep: int, seed: int
) -> None:
    row = row_of(sequences)
    tables = windows_of_row(row, size)
    generator = torch.Generator().manual_seed(seed)
    # Few different numbers: many scores are equal.
    query = torch.randint(-1, 2, (1, len(row.parent), 2, 3), generator=generator).double()
    key = torch.randint(-1, 2, (1, len(tables.number), 3), generator=generator).double()
    weights = torch.randint(-1, 2, (1, len(row.parent), 2), generator=generator).double()
    plan = [torch.from_numpy(row.segments), *tensors(tables, "ranges", "last")]
    with topk_index.recorded_choices() as recorded:
        (found,) = topk_entries(query, key, weights, *plan, keep)
    scores = (torch.relu(query[0] @ key[0].T) * weights[0, :, :, None]).sum(1)
    for token in range(row.length):
        seen = seen_by_loop(row, size, token)
        best = sorted(sorted(seen, key=lambda entry: (-float(scores[token, entry]), entry))[:keep])
        assert found[token].tolist() == best + [-1] * (keep - len(best))
        assert recorded[0][token].tolist() == [seen.index(e) for e in best] + [-1] * (keep - len(best))


@pytest.mark.parametrize("heads", [1, 4, 32])
def test_of_equal_entries_the_earliest_are_chosen_however_their_products_are_rounded(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_index, "BUDGET", 1 << 9)
    row = row_of([[*range(90), *range(100 * branch, 100 * branch + 70)] for branch in (1, 2, 3)])
    tables = windows_of_row(row, 2)
    query, weights = torch.rand(1, row.length, heads, 16), torch.rand(1, row.length, heads)
    key = torch.rand(16).expand(1, len(tables.number), 16).contiguous()
    plan = [torch.from_numpy(row.segments), *tensors(tables, "ranges", "last")]
    (found,) = topk_entries(query, key, weights, *plan, 7)
    for token in range(row.length):
        expected = seen_by_loop(row, 2, token)[:7]
        assert found[token].tolist() == expected + [-1] * (7 - len(expected))


def test_chosen_entries_are_added_up_in_the_dtype_of_the_weights_also_under_autocast() -> None:
    row = row_of([list(range(200))])
    tables = windows_of_row(row, 2)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 200, 4, 8, generator=generator).bfloat16()
    key = torch.randn(1, 100, 8, generator=generator).bfloat16()
    weights = torch.randn(1, 200, 4, generator=generator)
    plan = [torch.from_numpy(row.segments), *tensors(tables, "ranges", "last")]
    scores = ((query @ key.mT[:, None]).float().relu() * weights[..., None]).sum(2)
    hidden = torch.arange(100) > torch.from_numpy(tables.last)[:, None]
    best = scores[0].masked_fill(hidden, -torch.inf).argsort(descending=True, stable=True)[:, :3]
    expected = best.sort().values[5:]
    assert torch.equal(topk_entries(query, key, weights, *plan, 3)[0, 5:], expected.int())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(topk_entries(query, key, weights, *plan, 3)[0, 5:], expected.int())


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64])
def test_a_number_before_the_entries_takes_their_dtype(dtype: torch.dtype) -> None:
    later = torch.tensor([1, 0, 2]).to(dtype)
    found = first_entries(1.0, later, 0, torch.tensor([-1, 0, -1]))
    assert found.dtype == dtype
    assert found.tolist() == torch.tensor([1, 0, 1]).to(dtype).tolist()


def test_entries_of_other_branches_are_never_read() -> None:
    row = row_of([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7]])
    tables = windows_of_row(row, 2)
    key = torch.ones(1, len(tables.number), 3)
    other = int(tables.last[row.path(0)[-1]])
    key[0, other] = torch.nan
    query, weights = torch.ones(1, len(row.parent), 2, 3), torch.ones(1, len(row.parent), 2)
    plan = [torch.from_numpy(row.segments), *tensors(tables, "ranges", "last")]
    (found,) = topk_entries(query, key, weights, *plan, 1)
    assert found[row.path(1)].tolist() == [[-1], [0], [0], [0]]


@pytest.mark.parametrize("shares", [True, False])
def test_attention_over_tokens_and_entries_is_one_softmax(shares: bool) -> None:
    row = row_of([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8], [9]])
    tables = windows_of_row(row, 2)
    count, entries = len(row.parent), len(tables.number)
    generator = torch.Generator().manual_seed(0)
    query, key, value, entry_key, entry_value = (
        torch.randn(1, heads, rows, 5, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, rows in ((4, count), (2, count), (2, count), (2, entries), (2, entries))
    )
    if shares:
        value, entry_value = key, entry_key
    sinks = torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True)
    rows = nearest_rows(torch.from_numpy(row.segments), torch.from_numpy(row.position), 3)
    seen = all_entries(*tensors(tables, "path", "last"))
    found = window_attention(query, key, value, entry_key, entry_value, rows, seen, scale=0.5, sinks=sinks)
    visible = np.zeros((count, count + entries), bool)
    for token in range(count):
        visible[token, path_of(row, token)[-3:]] = True
        visible[token, [count + entry for entry in seen_by_loop(row, 2, token)]] = True
    keys, values = (torch.cat(pair, 2).repeat_interleave(2, 1) for pair in ((key, entry_key), (value, entry_value)))
    scores = (0.5 * query @ keys.mT).masked_fill(~torch.from_numpy(visible), -torch.inf)
    weights = torch.cat([scores, sinks[None, :, None, None].expand(1, 4, count, 1)], -1).softmax(-1)
    expected = weights[..., :-1] @ values
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    loss = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    inputs = list(dict.fromkeys((query, key, value, entry_key, entry_value, sinks)))
    for ours, theirs in zip(
        torch.autograd.grad((found * loss).sum(), inputs), torch.autograd.grad((expected * loss).sum(), inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def choice_inputs() -> dict[str, torch.Tensor]:
    row = row_of([[1, 2, 3, 4], [1, 2, 5, 6]])
    tables = windows_of_row(row, 2)
    query, key = torch.ones(1, len(row.parent), 2, 3), torch.ones(1, len(tables.number), 3)
    ranges, last = tensors(tables, "ranges", "last")
    segments = torch.from_numpy(row.segments)
    return {"query": query, "key": key, "weights": query[..., 0], "segments": segments, "ranges": ranges, "last": last}


@pytest.mark.parametrize("name", ["query", "key", "weights", "ranges", "last"])
def test_choice_among_entries_refuses_shapes_that_do_not_fit(name: str) -> None:
    inputs = choice_inputs()
    topk_entries(**inputs, k=1)
    with pytest.raises(ValueError, match=r"must be|line for each segment"):
        topk_entries(**{**inputs, name: inputs[name][..., :-1] if name != "ranges" else inputs[name][:-1]}, k=1)


@pytest.mark.parametrize("name", ["key", "value", "entry_key", "entry_value", "rows", "entries"])
def test_window_attention_refuses_shapes_that_do_not_fit(name: str) -> None:
    shapes = {"query": (1, 4, 6, 5), "key": (1, 2, 6, 5), "value": (1, 2, 6, 7)}
    shapes |= {"entry_key": (1, 2, 3, 5), "entry_value": (1, 2, 3, 7)}
    inputs = {of: torch.ones(shape) for of, shape in shapes.items()}
    inputs |= {"rows": torch.zeros(6, 2, dtype=torch.int32), "entries": torch.zeros(1, 6, 2, dtype=torch.int32)}
    window_attention(**inputs, scale=1.0)
    cut = inputs[name][:, :-1] if name != "rows" else inputs[name][:-1]
    with pytest.raises(ValueError, match=r"do not fit|must be"):
        window_attention(**{**inputs, name: cut}, scale=1.0)
