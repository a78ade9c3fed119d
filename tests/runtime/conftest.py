"""What the tests of this folder share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import settings

# How long an example takes says nothing: the first one may import torch, and cores may be busy.
settings.register_profile("tree_compile", deadline=None)
settings.load_profile("tree_compile")

HELPERS = Path(__file__).resolve().parents[2] / "benchmarks" / "helpers"


def module_of(file: Path) -> ModuleType:
    """The module in a file that is on no path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def workloads(shared: Path) -> ModuleType:
    """The families of batches."""
    return module_of(shared / "workloads.py")


@pytest.fixture(scope="session")
def airline_rollouts(shared: Path) -> list[np.ndarray]:
    """The token ids of real rollouts."""
    data = np.load(shared / "data" / "airline_rollouts.npz")
    return np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])


@pytest.fixture(scope="session")
def published_rule() -> ModuleType:
    """The published rule in plain Python."""
    return module_of(HELPERS / "published_rule.py")


@pytest.fixture(scope="session")
def exact_rows() -> ModuleType:
    """The fewest rows by a solver."""
    return module_of(HELPERS / "exact_rows.py")
