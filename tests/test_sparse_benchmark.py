"""The benchmark of sparse attention counts the pairs that are scored: those of the tree, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize("chosen", [16, 64])
def test_pairs_that_are_scored_are_those_of_the_tree(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sparse

    found = sparse.measure(700, chosen, rounds=1)
    kept = found["kept without a score"]
    assert 0 < found["scored"] < found["pairs of the tree"] < 700 * 699 // 2
    assert kept > 0
    assert found["scored"] + kept == found["pairs of the tree"]
