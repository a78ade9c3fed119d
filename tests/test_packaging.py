"""What a user installs is what stands in the repository."""

import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import tree_compile

ROOT = Path(__file__).resolve().parents[1]
HOME = {
    "tree_compile": "tree_compile",
    "passes": "tree_compile/passes",
    "runtime": "tree_compile/runtime",
    "models": "tree_compile/models",
}
PACKAGES = ("passes", "runtime", "models")


def tracked_files() -> list[str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listing.stdout.split("\0") if name]


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the tracked files so that nothing is written into the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked_files():
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            copy.symlink_to((ROOT / name).readlink())
        else:
            copy.write_bytes((ROOT / name).read_bytes())
    built = python(
        *("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), "."), cwd=source
    )
    assert built.returncode == 0, built.stderr
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    done = python(*("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)), cwd=target)
    assert done.returncode == 0, done.stderr
    return target


def test_wheel_holds_exactly_the_tracked_package_files(wheel):
    expected = set()
    for name in tracked_files():
        top, *rest = PurePosixPath(name).parts
        if top in HOME and rest and not (ROOT / name).is_symlink():
            expected.add(str(PurePosixPath(HOME[top], *rest)))
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_holds_the_licence_and_the_type_marker(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "tree_compile/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_takes_no_other_top_level_name(wheel):
    tops = {PurePosixPath(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tree_compile"}


def test_installed_packages_import_under_their_full_names(installed):
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        f"from tree_compile import {', '.join(PACKAGES)}\n"
        f"print({', '.join(f'{package}.__file__' for package in PACKAGES)}, sep='\\n')"
    )
    done = python("-P", "-c", code, cwd=installed)
    assert done.returncode == 0, done.stderr
    assert [Path(line) for line in done.stdout.splitlines()] == [
        installed / "tree_compile" / package / "__init__.py" for package in PACKAGES
    ]


def test_installed_bundled_rollouts_are_found(installed):
    code = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "from tree_compile.rollouts import BUNDLED, read_rollouts\n"
        "print(BUNDLED, len(read_rollouts(BUNDLED)))"
    )
    done = python("-P", "-c", code, cwd=installed)
    assert done.returncode == 0, done.stderr
    path, count = done.stdout.split()
    assert Path(path).is_relative_to(installed)
    assert int(count) > 50


@pytest.mark.parametrize("package", PACKAGES)
def test_package_refuses_its_bare_name(package):
    done = python("-c", f"import {package}", cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr.endswith(f"ImportError: import this package as tree_compile.{package}, not as {package}\n")


@pytest.mark.parametrize("package", PACKAGES)
def test_link_for_a_checkout_is_relative(package):
    assert (ROOT / "tree_compile" / package).readlink() == Path("..", package)


def test_import_loads_torch_only_when_it_is_needed():
    done = python("-c", "import tree_compile, sys; print('torch' in sys.modules)", cwd=ROOT)
    assert done.stdout == "False\n"


def test_every_exported_name_is_there():
    assert [name for name in tree_compile.__all__ if getattr(tree_compile, name, None) is None] == []


def test_pinned_versions_are_in_the_supported_ranges():
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name != "tree_compile":
            assert requirement.specifier.contains(pins[requirement.name]), requirement
