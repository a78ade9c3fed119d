"""The page of a plan: read back as XML, the blocks are the segments of the rows."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.batches import ROOM_OR_NONE, batches, limit, sequences_of
from tree_compile.runtime.page import plan_page
from tree_compile.runtime.plan import Plan
from tree_compile.runtime.planning import plan_rows

FULL = 930
REST = ("room", "padding")


def page_of(plan: Plan) -> ET.Element:
    return ET.fromstring(plan.to_html().split("\n", 1)[1])


def pictures(page: ET.Element) -> tuple[ET.Element, ET.Element]:
    """The rows and the tree."""
    rows, tree = (svg for svg in page.iter("svg") if svg.find("g") is not None)
    return rows, tree


def bars(page: ET.Element) -> list[ET.Element]:
    return pictures(page)[0].findall("g")


def classes(block: ET.Element) -> set[str]:
    return set(block.get("class").split())


def blocks(bar: ET.Element) -> list[ET.Element]:
    return [block for block in bar.findall("rect") if not classes(block) & {*REST}]


def width(found: list[ET.Element]) -> float:
    return sum(float(block.get("width")) for block in found)


def titles(found: list[ET.Element]) -> list[str]:
    return [block.findtext("title") for block in found]


GROUPS = sequences_of(
    [(1, 40), (2, 100), (3, 30)],
    [(1, 40), (2, 100), (4, 20)],
    [(1, 40), (2, 100)],
    [(1, 40), (5, 90), (6, 10)],
    [(1, 40), (5, 90), (7, 10)],
)


def test_numbers_stand_in_the_heading():
    page = page_of(plan_rows(GROUPS, 200, min_shared_tokens=1))
    found = dict(zip((e.text for e in page.iter("dt")), (e.text for e in page.iter("dd")), strict=True))
    assert found == {
        "sequences": "5",
        "tokens in": "750",
        "tokens computed": "340",
        "fewer tokens": "2.21x",
        "rows": "2",
        "tokens in a row, at most": "200",
        "rows filled": "85.0%",
        "row bound": "2",
        "token bound": "340",
    }


def test_one_row_without_a_limit_has_no_bounds_and_no_free_room():
    page = page_of(plan_rows(GROUPS, min_shared_tokens=1))
    (bar,) = bars(page)
    assert width(bar.findall("rect")) == pytest.approx(FULL, abs=0.1)
    assert blocks(bar) == bar.findall("rect")
    assert "row bound" not in [e.text for e in page.iter("dt")]


def test_blocks_tell_tokens_positions_depth_and_sequences_of_the_row():
    page = page_of(plan_rows(GROUPS, 200, min_shared_tokens=1))
    assert sorted(titles(blocks(bar)) for bar in bars(page)) == sorted(
        [
            [
                "40 tokens, positions 0 to 39, depth 0\n3 sequences: 0, 1, 2",
                "100 tokens, positions 40 to 139, depth 1\n3 sequences: 0, 1, 2",
                "30 tokens, positions 140 to 169, depth 2\n1 sequence: 0",
                "20 tokens, positions 140 to 159, depth 2\n1 sequence: 1",
            ],
            [
                "40 tokens, positions 0 to 39, depth 0\n2 sequences: 3, 4",
                "90 tokens, positions 40 to 129, depth 1\n2 sequences: 3, 4",
                "10 tokens, positions 130 to 139, depth 2\n1 sequence: 3",
                "10 tokens, positions 130 to 139, depth 2\n1 sequence: 4",
            ],
        ]
    )


def test_block_names_only_the_first_of_many_sequences():
    page = page_of(plan_rows([[1, 2, i] for i in range(20)], min_shared_tokens=1))
    assert titles(blocks(bars(page)[0]))[0] == (
        "2 tokens, positions 0 to 1, depth 0\n20 sequences: 0, 1, 2, 3, 4, 5, …"
    )


def test_row_label_tells_the_fill():
    page = page_of(plan_rows(GROUPS, 200, min_shared_tokens=1))
    assert sorted(bar.find("g").findtext("title").split(": ")[1] for bar in bars(page)) == [
        "150 of 200 tokens (75.0%) in 2 sequences",
        "190 of 200 tokens (95.0%) in 3 sequences",
    ]


def test_row_with_one_token_free_is_not_called_full():
    page = page_of(plan_rows([[1] * 9_999], 10_000))
    assert "(99.9%)" in bars(page)[0].find("g").findtext("title")


@pytest.mark.parametrize(("pad", "kind", "word"), [(False, "room", "free"), (True, "padding", "padding")])
def test_rest_of_a_row_is_free_or_padding(pad, kind, word):
    page = page_of(plan_rows([[1, 2, 3]], 5, 1, pad_rows=pad))
    (rest,) = (block for block in bars(page)[0].findall("rect") if classes(block) & {*REST})
    assert kind in classes(rest)
    assert rest.findtext("title") == f"2 tokens {word}"
    assert float(rest.get("width")) == pytest.approx(FULL * 2 / 5, abs=0.01)


def shades_by_tokens(page: ET.Element, found: list[ET.Element]) -> dict[str, str]:
    """The colour of each block, by its tokens, positions and depth."""
    return {block.findtext("title").split("\n")[0]: block.get("class").removesuffix(" b") for block in found}


def test_prefix_has_one_colour_in_all_rows_and_in_the_tree():
    # Segments have different lengths, so that the first line of a title says which one it is.
    sequences = sequences_of(
        *([(1, 50), (2 + g, 20 + g), (100 + 9 * g + i, 10 + 9 * g + i)] for g in range(5) for i in range(9))
    )
    page = page_of(plan_rows(sequences, 300, min_shared_tokens=1))
    drawn = [shades_by_tokens(page, blocks(bar)) for bar in bars(page)]
    tree = shades_by_tokens(page, list(pictures(page)[1].iter("rect")))
    assert len(drawn) > 2
    assert all(tree[segment] == shade for bar in drawn for segment, shade in bar.items())
    assert tree["50 tokens, positions 0 to 49, depth 0"] == "t d0"
    assert len({shade for segment, shade in tree.items() if segment.endswith("depth 1")}) == 5
    assert {shade.split()[1] for segment, shade in tree.items() if segment.endswith("depth 2")} == {"d1"}


def test_tree_lays_children_beside_their_parent():
    _, tree = pictures(page_of(plan_rows([[1, 1, 2, 2], [1, 1, 3], [4]], min_shared_tokens=1)))
    places = {
        block.findtext("title").split("\n")[0]: [float(block.get(k, "0")) for k in ("x", "y", "width", "height")]
        for block in tree.iter("rect")
    }
    assert places == {
        "2 tokens, positions 0 to 1, depth 0": [0, 0, FULL / 2, 36],
        "2 tokens, positions 2 to 3, depth 1": [FULL / 2, 0, FULL / 2, 18],
        "1 token, positions 2 to 2, depth 1": [FULL / 2, 18, FULL / 4, 18],
        "1 token, positions 0 to 0, depth 0": [0, 36, FULL / 4, 18],
    }


@given(batches(), ROOM_OR_NONE, st.integers(1, 4))
def test_blocks_of_a_row_add_up_to_its_share(sequences, room, min_shared_tokens):
    row_tokens = limit(sequences, room)
    plan = plan_rows(sequences, row_tokens, min_shared_tokens, plan_seconds=0)
    full = row_tokens or plan.rows[0].length
    for bar, row in zip(bars(page_of(plan)), plan.rows, strict=True):
        found = blocks(bar)
        assert width(found) == pytest.approx(FULL * row.length / full, abs=0.01 * len(found))
        assert sum(int(title.split()[0]) for title in titles(found)) == row.length
        edges = np.cumsum([0.0, *(float(block.get("width")) for block in found)])
        assert [float(block.get("x")) for block in found] == pytest.approx(edges[:-1], abs=0.01 * len(found))


def test_plan_without_its_sequences_has_the_same_page(tmp_path):
    plan = plan_rows(GROUPS, 200, min_shared_tokens=1)
    plan.save(tmp_path / "plan.npz")
    assert Plan.load(tmp_path / "plan.npz").to_html() == plan_page(plan)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.attributes = set(), set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)


def test_page_needs_no_script_and_no_other_file():
    text = plan_rows(GROUPS, 200, min_shared_tokens=1, pad_rows=True).to_html()
    tags = Tags()
    tags.feed(text)
    assert text.startswith("<!DOCTYPE html>\n<html")
    assert not tags.names & {"script", "link", "img", "a", "iframe", "use", "image", "object"}
    assert not any(name.startswith("on") or name in ("href", "src") for name in tags.attributes)
    assert set(re.findall(r"url\((.*?)\)", text)) == {"#hatch"}
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_words_are_escaped():
    from tree_compile.runtime import page

    rect = ET.fromstring(page._rect(0, 0, 1, 1, "small", "<b> & 'c'"))
    assert rect.findtext("title") == "<b> & 'c'"
    assert ET.fromstring(page._inside(0, 0, 100, 20, "small", "<b>")).text == "<b>"


def test_words_inside_blocks_fit():
    rows, tree = pictures(page_of(plan_rows(GROUPS, 200, min_shared_tokens=1)))
    for parent in [*rows.findall("g"), tree.find("g")]:
        shapes = [e for e in parent if e.tag in ("rect", "text")]
        for block, word in pairwise(shapes):
            if word.tag == "text":
                assert block.tag == "rect"
                assert len(word.text) * 6.5 < float(block.get("width"))


@pytest.mark.parametrize("full", [1, 2, 7, 10, 99, 4_096, 16_384, 32_768, 131_072, 1_000_001])
def test_axis_goes_from_none_to_all_and_its_numbers_do_not_touch(full):
    page = page_of(plan_rows([[1] * 1], full))
    axis = next(svg for svg in page.iter("svg") if svg.get("class") == "axis")
    ticks = [e for e in axis.iter("text") if "mid" in classes(e)]
    numbers = [int(e.text.replace(",", "")) for e in ticks]
    places = [float(e.get("x")) for e in ticks]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1]) == (0, full)
    assert min(np.diff(places)) >= 50


def chain() -> list[np.ndarray]:
    """2,501 sequences; one leaves the longest one at each token: 5,001 segments, 2,501 deep."""
    longest = np.arange(6_000)
    return [np.append(longest[: i + 1], 10_000 + i) for i in range(2_500)] + [longest]


@pytest.mark.parametrize("row_tokens", [None, 7_000])
def test_deep_chain_is_drawn_with_the_largest_segments(row_tokens):
    plan = plan_rows(chain(), row_tokens, min_shared_tokens=1, plan_seconds=0)
    page = page_of(plan)
    assert len(plan.tree) == 5_001
    assert len(list(pictures(page)[1].iter("rect"))) == 2_000
    text = "".join(page.itertext())
    assert "3,001 smaller ones with " in text
    assert re.search(r"[\d,]+ small segments, [\d,]+ tokens", text)
    assert len(plan.to_html()) < 1_000_000


def test_page_of_two_thousand_rows_is_small():
    rng = np.random.default_rng(0)
    shared, sequences = rng.integers(0, 1_000, 300), []
    for _ in range(2_100):
        prompt = np.concatenate([shared, rng.integers(0, 1_000, rng.integers(200, 500))])
        sequences += [np.append(prompt, rng.integers(0, 1_000, rng.integers(20, 300))) for _ in range(10)]
    plan = plan_rows(sequences, 2_560, plan_seconds=0)
    text = plan.to_html()
    assert len(plan.rows) > 2_000
    assert len(text.encode()) < 5_000_000
    page = ET.fromstring(text.split("\n", 1)[1])
    assert len(bars(page)) == 2_000
    assert f"… {len(plan.rows) - 2_000:,} more row" in "".join(page.itertext())
    for bar, row in zip(bars(page), plan.rows, strict=False):
        assert width(blocks(bar)) == pytest.approx(FULL * row.length / 2_560, abs=1)


def test_page_is_the_same_every_time():
    plans = [plan_rows(GROUPS, 200, min_shared_tokens=1, plan_attempts=5) for _ in range(2)]
    assert plans[0].to_html() == plans[1].to_html()
