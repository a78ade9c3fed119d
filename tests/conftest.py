"""What all tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Keeps workers that run side by side from taking each other's cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Gives every test the same random numbers, whatever ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of larger data beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder shared/ beside the checkout")
    return SHARED
