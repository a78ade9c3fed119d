"""What torch.compile makes of the product for a GPU, as far as it can be checked without one.

Shown here: what the product runs on CUDA is lowered, forward and backward, for a row length that is known only when it
runs, once for all trees; Triton and ptxas make a binary for sm_90 of every kernel, and its shared memory fits a block;
and the generated kernels of attention, interpreted on the CPU, give the outputs and gradients of the definition.

Not shown: the rounding of tensor cores, races, what the other configurations of a kernel do, and any time.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_lowering.scripts import HERE, KERNELS, SHARED_BYTES_OF_HOPPER, printed_by

FLOAT32_TOLERANCE = 1e-5
WRITTEN_FOR = "2.13."
"""The private parts of torch that the GPU is pretended in differ from version to version."""

Found = dict[str, Any]
Run = Callable[..., Found]


def reason_against() -> str:
    """Why nothing can be lowered here; empty where it can."""
    if not torch.__version__.startswith(WRITTEN_FOR) or torch.version.cuda or torch.version.hip:
        return f"the GPU is pretended for torch {WRITTEN_FOR}* built for the CPU, not {torch.__version__}"
    if importlib.util.find_spec("triton") is None and not (KERNELS / "triton").is_dir():
        return "triton is not installed: make test does"
    return "" if shutil.which("g++") else "g++ is not installed"


pytestmark = pytest.mark.skipif(bool(reason_against()), reason=reason_against())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script of this folder with the pretended GPU, and returns the object that it prints."""
    folder = tmp_path_factory.mktemp("gpu")
    before = (HERE / "with_gpu.py", built_library(folder))
    return partial(printed_by, packages=KERNELS, before=before, TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))


def built_library(folder: Path) -> Path:
    """The library that answers what torch asks of a device."""
    torch_folder, library = Path(torch.__file__).parent, folder / "pretended_gpu.so"
    where = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", HERE / "pretended_gpu.cpp", "-o", library]
    subprocess.run([*command, *where, "-lc10", "-ltorch_cpu"], check=True)
    return library


@pytest.fixture(scope="module")
def lowered(run: Run) -> Found:
    return run("kernels_for_gpu.py")


@pytest.fixture(scope="module")
def interpreted(run: Run) -> Found:
    return run("attention_in_interpreter.py", TRITON_INTERPRET="1")


CASES = ["tree", "window", "softcap", "sinks", "wide heads", "short rows", "convolution", "recurrence", "logprobs"]
COMPILED = [case for case in CASES if case != "logprobs"]
ATTENTION = ["tree", "window", "softcap", "sinks", "wide heads", "short rows"]
INTERPRETED = ["tree", "full tile", "window", "softcap", "grouped queries", "sinks"]


def test_every_case_of_the_scripts_is_asserted_on(lowered: Found, interpreted: Found) -> None:
    assert lowered.keys() == set(CASES)
    assert interpreted.keys() == {*INTERPRETED, "mask of one sequence"}


@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles_for_hopper_and_fits_its_shared_memory(lowered: Found, case: str) -> None:
    assert lowered[case]["kernels"]
    for kernel in lowered[case]["kernels"]:
        assert kernel["binary_bytes"] > 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES_OF_HOPPER, kernel


@pytest.mark.parametrize("case", COMPILED)
def test_forward_and_backward_are_lowered_once_for_all_trees_and_lengths(lowered: Found, case: str) -> None:
    assert {kernel["is_backward"] for kernel in lowered[case]["kernels"]} == {False, True}
    assert lowered[case]["compilations"] == 1


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_one_fused_kernel_forward_and_one_backward(lowered: Found, case: str) -> None:
    fused = [kernel["is_backward"] for kernel in lowered[case]["kernels"] if kernel["name"].startswith("triton_tem")]
    assert fused == [False, True]


@pytest.mark.parametrize("case", ATTENTION)
def test_what_makes_the_mask_is_an_input_of_the_graph(lowered: Found, case: str) -> None:
    inputs = " ".join(lowered[case]["inputs"])
    assert "segments" in inputs
    assert "subtree_end" in inputs
    assert ("position" in inputs) == (case == "window")


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_attention_has_the_output_and_gradients_of_the_definition(interpreted: Found, case: str) -> None:
    assert len(interpreted[case]) == (5 if case == "sinks" else 4)
    # Each by itself: the maximum of numbers and nan may be a number.
    assert all(difference < FLOAT32_TOLERANCE for difference in interpreted[case])


def test_interpreted_attention_with_the_mask_of_one_sequence_is_far_off(interpreted: Found) -> None:
    assert all(difference > 100 * FLOAT32_TOLERANCE for difference in interpreted["mask of one sequence"])
