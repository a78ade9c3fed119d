"""Runs the scripts of this folder, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KERNELS = Path(sys.prefix) / "kernels"
"""Apart from other packages: transformers would call kernels that it finds, which need a GPU."""
TILELANG = Path(sys.prefix) / "tilelang"
"""Apart from other packages, like those of the other kernels."""
SHARED_BYTES_OF_HOPPER = 227 * 1024


def printed_by(
    script: str, *arguments: object, packages: Path, before: tuple[object, ...] = (), **settings: str
) -> Any:
    """The JSON that a script prints in its last line.

    Args:
        script: its name.
        arguments: of the script.
        packages: a folder whose packages it may import.
        before: a script that runs it, with its arguments.
        settings: variables of its environment.
    """
    paths = [str(HERE.parents[1]), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | settings
    command = [sys.executable, *map(str, (*before, HERE / script, *arguments))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    return json.loads(done.stdout.splitlines()[-1])
