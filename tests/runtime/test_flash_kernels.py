"""Where kernels of flash attention are: devices, and versions of flash-attn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tree_compile.runtime.flash_kernels import has_capped_kernels, has_kernels, widest_head

CUDA = torch.device("cuda", 0)


def pretend(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str | None = "12.8", built: bool = True
) -> None:
    """A GPU of some capability, and whether torch is built for CUDA and with flash attention."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)


@pytest.mark.parametrize(
    ("capability", "has"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_kernels_are_for_ampere_and_newer(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    assert has_kernels.__wrapped__(CUDA) is has


def test_kernels_are_not_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 4), cuda=None)
    assert not has_kernels.__wrapped__(CUDA)


def test_kernels_are_not_there_where_torch_is_built_without(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0), built=False)
    assert not has_kernels.__wrapped__(CUDA)


def test_kernels_are_not_for_the_cpu_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))
    assert not has_kernels.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize(
    ("capability", "width"),
    [((8, 0), 256), ((8, 6), 192), ((8, 9), 192), ((9, 0), 256), ((10, 0), 256), ((12, 0), 192)],
)
def test_heads_are_less_wide_on_the_small_gpus_of_a_generation(
    capability: tuple[int, int], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    assert widest_head.__wrapped__(CUDA) == width


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages are imported from; flash_attn from nowhere else."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    yield tmp_path
    sys.modules.pop("flash_attn", None)


def install_flash_attn(packages: Path, version: str) -> None:
    """An empty package that says its version in itself and beside it, as installed ones do."""
    package, metadata = packages / "flash_attn", packages / f"flash_attn-{version}.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (package / "flash_attn_interface.py").touch()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "has"),
    [
        ("2.6.3", False),
        ("2.7rc1", False),
        ("2.7.0", True),
        ("2.7.4.post1", True),
        ("2.8.post1", True),
        ("2.10.0", True),
        ("3.0.0", False),
    ],
)
def test_capped_kernels_are_those_of_flash_attn_from_2_7_on_and_below_3(
    version: str, has: bool, packages: Path
) -> None:
    install_flash_attn(packages, version)
    assert has_capped_kernels.__wrapped__() is has


def test_capped_kernels_are_not_there_without_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert not has_capped_kernels.__wrapped__()


def test_flash_attn_that_cannot_be_imported_is_one_that_is_missing(packages: Path) -> None:
    install_flash_attn(packages, "2.8.0")
    (packages / "flash_attn" / "__init__.py").write_text('raise ImportError("undefined symbol")')
    assert has_capped_kernels.__wrapped__() is False
