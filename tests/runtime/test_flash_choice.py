"""Which attention kernels of flash attention can compute, and for which rows they are estimated to be faster."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.trees import Spec, segment_table
from tree_compile.runtime import flash_forms
from tree_compile.runtime.flash_choice import flash_is_faster
from tree_compile.runtime.flash_forms import AttentionForm, why_not_flash

CUDA = torch.device("cuda", 0)
FORM = AttentionForm(CUDA, torch.bfloat16, 128, frozenset())


@pytest.fixture
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_forms, "has_kernels", lambda device: device.type == "cuda")
    monkeypatch.setattr(flash_forms, "widest_head", lambda _: 256)
    monkeypatch.setattr(flash_forms, "has_capped_kernels", lambda: False)


@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 64, 100, 256])
def test_kernels_take_half_precision_up_to_their_width(dtype: torch.dtype, width: int) -> None:
    assert why_not_flash(FORM._replace(dtype=dtype, width=width)) is None


@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize(
    ("change", "why", "hint"),
    [
        ({"options": frozenset({"window"})}, "sliding window", "flex_attention"),
        ({"options": frozenset({"chunk"})}, "chunks", "flex_attention"),
        ({"options": frozenset({"key_bias"})}, "bias per key", "flex_attention"),
        ({"options": frozenset({"pair_bias"})}, "all pairs", "flex_attention"),
        ({"options": frozenset({"softcap"})}, "soft cap", "install flash-attn"),
        ({"dtype": torch.float32}, "not float32", "autocast"),
        ({"dtype": torch.float64}, "not float64", "model.bfloat16()"),
        ({"width": 264}, "264 wide", "flex_attention"),
        ({"device": torch.device("cpu")}, "no flash attention for the device cpu", "Ampere"),
    ],
)
def test_what_kernels_cannot_do_is_named(change: dict[str, object], why: str, hint: str) -> None:
    reason = why_not_flash(FORM._replace(**change))
    assert reason is not None
    assert why in reason.why
    assert hint in reason.hint


@pytest.mark.usefixtures("_with_kernels")
def test_soft_cap_is_taken_where_flash_attn_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_forms, "has_capped_kernels", lambda: True)
    assert why_not_flash(FORM._replace(options=frozenset({"softcap"}))) is None


def faster(forest: list[Spec]) -> bool:
    table = segment_table(forest)
    return flash_is_faster(table.numpy(), int(table[:, 2].max()), 32, 128)


@pytest.mark.parametrize(
    "forest", [[(65_536, [])], [(32_768, [(8_192, [])] * 4)], [(20_000, [(6_000, [(5_000, [])] * 3)])]]
)
def test_long_segments_in_shallow_trees_favour_flash(forest: list[Spec]) -> None:
    assert faster(forest)


def deep(levels: int, length: int) -> Spec:
    spec: Spec = (length, [])
    for _ in range(levels - 1):
        spec = (length, [spec, (length, [])])
    return spec


@pytest.mark.parametrize("forest", [[deep(200, 60)], [(64, [(8, [])] * 500)] * 8, [deep(30, 100)]])
def test_deep_trees_and_many_short_segments_favour_flex_attention(forest: list[Spec]) -> None:
    assert not faster(forest)
