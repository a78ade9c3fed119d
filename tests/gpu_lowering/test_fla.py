"""fla's kernels, one call for each depth of the tree, compute what the ops for the CPU do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path(sys.prefix) / "kernels"
"""Apart from other packages: transformers would call kernels that it finds, which need a GPU."""
FLOAT32_TOLERANCE = 1e-5


def are_installed() -> bool:
    found = [importlib.util.find_spec(name) is not None for name in ("fla", "triton")]
    return all(found) or (KERNELS / "fla").is_dir()


@pytest.mark.skipif(not are_installed(), reason="fla-core and triton are not installed: make test does")
def test_kernels_over_a_tree_equal_the_ops_for_the_cpu():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(KERNELS)]), "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "gpu_lowering" / "fla_in_interpreter.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    differences = json.loads(done.stdout.splitlines()[-1])
    assert differences.keys() == {"gated_delta_rule", "kda", "gla", "simple_gla"}
    assert max(differences.values()) < FLOAT32_TOLERANCE
