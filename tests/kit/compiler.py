"""Compiles the stubs of libraries into build/, once for all workers and for all runs.

Responsible for a library that is that of its sources and of the command: one that was made of
others has another name. It must not know what a stub is for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from tests.kit.paths import ROOT, TESTS

CACHE = ROOT / "build" / "stubs"
SOURCES = (*sorted((TESTS / "stubs").iterdir()), *sorted(ROOT.glob("csrc/**/*.h")))


@cache
def library(directory: Path, name: str, source: Path, *flags: str) -> Path:
    """A shared library in a directory: what is loaded from two of them shares no state.

    Args:
        directory: where it is put.
        name: of its file.
        source: its C++ source, which may include headers of csrc/.
        flags: of the compiler; libraries to link with come last.
    """
    command = ["g++", "-shared", "-fPIC", str(source), *flags]
    content = hashlib.sha256(repr((command, torch.__version__)).encode())
    for path in SOURCES:
        content.update(path.read_bytes())
    kept = CACHE / content.hexdigest()[:16] / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two workers that need it one waits for the other
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as begun:
                made = Path(begun, name)
                subprocess.run([*command, "-o", str(made)], check=True)
                os.replace(made, kept)  # whole, or not there
    return Path(shutil.copy(kept, directory))
