"""Promise: what is published is whole. The source distribution has every file of the project, an
installed package every file of fastckpt/, and the version is written in one place. `make wheels`
builds and tries the wheels themselves.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import fastckpt
from tests.kit.paths import ROOT

VERSION = "9.8.7"
UNPUBLISHED = {".gitignore"}
LEFT_BEHIND = (
    "benchmarks/out/bench.json",
    "benchmarks/state.pt",
    "build/rivals/stamp",
    "examples/run/state.pt",
    "fastckpt/__pycache__/api.cpython-310.pyc",
    "tests/x.tmp",
)


@dataclass(frozen=True)
class Built:
    """A copy of the tree with another version, and what was built from it."""

    tracked: set[str]
    sources: Path
    packed: set[str]
    metadata: str
    installed: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source distribution, and what an installation takes from it except the extension."""
    pytest.importorskip("pybind11")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    tracked = {name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()}
    if "setup.py" not in tracked:
        pytest.skip("git does not know this tree")
    copy = tmp_path_factory.mktemp("package")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in LEFT_BEHIND:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("left behind")
    opening = copy / "fastckpt" / "__init__.py"
    text = opening.read_text("utf-8")
    assert text.count(f'"{fastckpt.__version__}"') == 1
    opening.write_text(text.replace(fastckpt.__version__, VERSION), "utf-8")
    command = [sys.executable, "setup.py", "-q", "sdist", "build_py", "--build-lib", "installed"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=120)
    (sources,) = (copy / "dist").iterdir()
    with tarfile.open(sources) as archive:
        files = [member.name.partition("/")[2] for member in archive if member.isfile()]
        metadata = archive.extractfile(f"{sources.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert metadata is not None
        text = metadata.read().decode()
    lib = copy / "installed"
    installed = {path.relative_to(lib).as_posix() for path in lib.rglob("*") if path.is_file()}
    return Built(tracked, sources, {*files}, text, installed)


def test_the_version_is_written_in_one_place(built: Built) -> None:
    assert built.sources.name == f"fastckpt_torch-{VERSION}.tar.gz"
    assert f"\nVersion: {VERSION}\n" in built.metadata


def test_the_source_distribution_is_the_project(built: Built) -> None:
    generated = {name for name in built.packed if name.startswith("fastckpt_torch.egg-info/")}
    generated |= {"PKG-INFO", "setup.cfg"}
    assert built.packed - generated == built.tracked - UNPUBLISHED


def test_an_installation_has_the_whole_package(built: Built) -> None:
    package = {name for name in built.tracked if name.startswith("fastckpt/")}
    assert {"fastckpt/py.typed", "fastckpt/_engine.pyi"} < package
    assert built.installed == package
