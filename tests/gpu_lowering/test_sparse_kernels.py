"""The kernels of sparse index attention, as far as they can be checked without a GPU.

Shown here: the programs, computed tile by tile on the CPU, give what the definition gives, forward and backward, with
indices of -1, part blocks, groups of heads, padded heads and several key heads, never touch a row that no query names
and write no row of -1; TileLang lowers the same programs to CUDA for sm_90a, ptxas assembles that, one block's shared
memory fits, and all reads of keys and values and all additions to their gradients are guarded with the bounds.

Not shown: that TileLang's layouts, pipelines and barriers are right on a GPU, and any time. `benchmarks/gpu.py`
compares them there, and `benchmarks/sparse_gpu.py` measures.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from functools import partial

import pytest

from tests.gpu_lowering import scripts
from tests.gpu_lowering.scripts import SHARED_BYTES_OF_HOPPER, TILELANG

TOLERANCES = {"float32": 5e-5, "float16": 1e-3, "bfloat16": 8e-3}
SHAPES = [
    # heads, width, value width, dtype
    (16, 64, 64, "float16"),
    (64, 64, 64, "bfloat16"),
    (64, 576, 512, "float16"),
    (128, 576, 512, "bfloat16"),
]
HAS_TILELANG = importlib.util.find_spec("tilelang") is not None or (TILELANG / "tilelang").is_dir()
HAS_NVCC = shutil.which("nvcc") is not None

printed_by = partial(scripts.printed_by, packages=TILELANG)

pytestmark = pytest.mark.skipif(not HAS_TILELANG, reason="tilelang is not installed: make test does")


def unguarded_reads(source):
    """Reads of keys or values other than asynchronous copies of what lies inside of the tensor."""
    guarded = re.compile(
        r"cp_async_gs_conditional<16>\(.*&\((?:key|value)\[\(*\(\(int64_t\)indices\[(?P<place>.+?)\]\) \* .*"
        r"\(indices\[(?P=place)\] < keys\) && \(0 <= indices\[(?P=place)\]\)"
    )
    reads = re.compile(r"\b(?:key|value)(?:\[| \+)")
    return [line for line in source.splitlines() if reads.search(line) and not guarded.search(line)]


def unguarded_additions(source):
    """Additions to gradients that do not stand under both bounds of their own row."""
    lines = source.splitlines()
    unguarded = []
    for number, line in enumerate(lines):
        if "AtomicAdd" not in line:
            continue
        place = re.search(r"&\((?:key|value)_grad\[\(*\(\(int64_t\)indices\[(.+?)\]\) \* ", line).group(1)
        around = "".join(lines[number - 3 : number])
        if f"if (0 <= indices[{place}]) {{" not in around or f"if (indices[{place}] < keys) {{" not in around:
            unguarded.append(line)
    return unguarded


def test_programs_computed_on_the_cpu_equal_the_definition():
    found = printed_by("sparse_on_cpu.py")
    assert len(found["float32"]) == 8
    for dtype, cases in found.items():
        for case, differences in cases.items():
            # Each by itself: the maximum of numbers and nan may be a number.
            assert all(difference < TOLERANCES[dtype] for difference in differences.values()), (case, differences)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_kernels_are_lowered_for_hopper_with_guarded_accesses(shape):
    kernels = printed_by("sparse_sources.py", *shape)
    assert all(kernel["shared_bytes"] <= SHARED_BYTES_OF_HOPPER for kernel in kernels.values())
    for kernel in kernels.values():
        assert len(re.findall("cp_async_gs_conditional", kernel["source"])) == 4
        assert not unguarded_reads(kernel["source"])
    assert "AtomicAdd" not in kernels["forward"]["source"]
    assert len(re.findall("AtomicAddx2", kernels["backward"]["source"])) == 4
    assert not unguarded_additions(kernels["backward"]["source"])


@pytest.mark.skipif(not HAS_NVCC, reason="nvcc is not installed, which TileLang calls")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-1]], ids=lambda shape: "-".join(map(str, shape)))
def test_kernels_are_assembled_for_hopper(shape):
    assert printed_by("sparse_sources.py", *shape, "--assemble") == {"forward": True, "backward": True}
