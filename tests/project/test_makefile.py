"""Promise: each command of the Makefile does what its step needs, once, from a bare clone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

_PYTHON = """#!/bin/sh
case "$*" in *"install"*"-e"*) echo setup;; *build_ext*) echo build;; esac >>did
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_the_engine_is_compiled_once_by_setup_and_again_when_a_source_is_newer(
    tmp_path: Path,
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "setup.py", "csrc/engine/engine.cc", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(_PYTHON if name.endswith("python") else "")
        os.utime(tmp_path / name, (1e9, 1e9))
    (tmp_path / ".venv/bin/python").chmod(0o755)
    os.utime(tmp_path / "csrc/engine", (1e9, 1e9))
    os.utime(tmp_path / "csrc", (1e9, 1e9))

    def did() -> list[str]:
        command = ["make", "-s", "build", "install-system-packages=:"]
        subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=60)
        return (tmp_path / "did").read_text().split()

    assert did() == ["setup"]
    assert did() == ["setup"]
    os.utime(tmp_path / "csrc/engine/engine.cc")
    assert did() == ["setup", "build"]
    (tmp_path / "build/engine.stamp").unlink()
    assert did() == ["setup", "build", "build"]
