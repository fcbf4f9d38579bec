"""The environment of a rival: a venv below build/rivals that holds what the rival's file requires.

A file lists its requirements with exact versions, as inline metadata (PEP 723). torch is never
among them: it comes, with whatever else the benchmark uses, from the environment that runs the
benchmark. So all rivals are measured with one torch, and it is not installed again for each.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import torch

from rivals.peer import Peer

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "rivals"
METADATA = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)
INSTALL_S = 600


def file_of(peer: type[Peer]) -> Path:
    """Return the file of the rival that a peer belongs to."""
    return Path(inspect.getfile(peer))


def requirements(file: Path) -> list[str]:
    """Return what the inline metadata of a rival's file requires."""
    block = METADATA.search(file.read_text())
    assert block is not None, f"{file.name} has no inline metadata"
    lines = (line.removeprefix("#").removeprefix(" ") for line in block[1].splitlines())
    wanted: list[str] = tomllib.loads("\n".join(lines))["dependencies"]
    return wanted


def interpreter(file: Path) -> Path:
    """Return the Python that has what a rival's file requires; makes its environment if need be.

    Raises:
        RuntimeError: pip could not install it; the text is pip's.
    """
    wanted = requirements(file)
    if not wanted:
        return Path(sys.executable)
    home = ENVIRONMENTS / file.stem
    shared = sysconfig.get_path("purelib")
    stamp, contents = home / "stamp", "\n".join([sys.version, shared, torch.__version__, *wanted])
    if not stamp.exists() or stamp.read_text() != contents:
        make(home, shared, wanted)
        stamp.write_text(contents)
    return home / "bin" / "python"


def make(home: Path, shared: str, wanted: list[str]) -> None:
    """Make a new environment on top of the packages in the directory `shared`."""
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # What a path file names comes after the environment's own packages: those win.
    (packages / "shared.pth").write_text(shared + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    pip += ["--quiet", "--disable-pip-version-check", "--no-input"]
    # A rival that wants another torch is refused here; pip does not fetch one.
    try:
        done = subprocess.run(
            [*pip, f"torch=={torch.__version__}", *wanted],
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"pip did not install {wanted} within {INSTALL_S} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise RuntimeError((errors or done.stderr.splitlines() or ["pip failed"])[-1])
