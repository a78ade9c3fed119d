"""The picture of a plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM_OR_NONE, batches, limit, sequences_of
from tree_compile.runtime.planning import plan_rows

SMALL = """\
3 sequences: 24 tokens in, 20 computed (1.20x fewer)
2 rows of at most 18 tokens
bound: 2 rows, 20 tokens; no packing needs fewer

tree: 4 segments, positions 0 to 9 from left to right
4  █████████████████  2 sequences
4                   ██████████████████  1 sequence
6                   ███████████████████████████  1 sequence
6  ██████████████████████████  1 sequence

rows: tokens computed, shaded by depth
row 0  ▕███████│▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓       ▏  14 in 2 sequences
row 1  ▕███████████                     ▏  6 in 1 sequence"""


def test_picture_of_a_small_plan():
    sequences = sequences_of([(1, 4), (2, 4)], [(1, 4), (3, 6)], [(4, 6)])
    text = plan_rows(sequences, 18, min_shared_tokens=1).render(60)
    assert text == SMALL


@given(batches(), ROOM_OR_NONE, st.integers(60, 130))
def test_lines_fit_the_width(sequences, room, width):
    row_tokens = limit(sequences, room)
    text = plan_rows(sequences, row_tokens, min_shared_tokens=1).render(width)
    assert max(map(len, text.splitlines())) <= width


def test_bar_is_in_proportion_to_tokens():
    text = plan_rows(sequences_of([(1, 75), (2, 25)], [(1, 75), (3, 100)]), min_shared_tokens=1).render(100)
    bar = next(line for line in text.splitlines() if line.startswith("row 0"))
    # 75 of the 200 tokens are at depth 0, the others at depth 1.
    cells = bar.index("▏") - bar.index("▕") - 1
    assert abs(bar.count("█") - cells * 75 / 200) <= 1


def test_large_plan_is_cut_short():
    sequences = [[group] * 100 + [answer] * 10 for group in range(40) for answer in range(50, 55)]
    lines = plan_rows(sequences, 150).render().splitlines()
    assert len(lines) < 60
    assert "… 216 smaller segments" in lines
    assert "… 16 more rows" in lines


def test_segments_with_the_most_tokens_are_shown():
    lines = plan_rows([[root] * (10 + root) for root in range(1, 41)]).render().splitlines()
    shown = [int(line.split()[0]) for line in lines if line.endswith("█  1 sequence")]
    assert shown == list(range(27, 51))


def test_bound_is_left_out_without_a_row_length():
    assert "bound" not in plan_rows([[1, 2]]).render()


def test_narrow_picture_is_refused():
    with pytest.raises(ValueError, match="it must be at least 60 columns"):
        plan_rows([[1, 2]]).render(59)
