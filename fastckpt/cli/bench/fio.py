"""Runs fio, the usual disk benchmark, with comparable options: O_DIRECT where it works,
preallocated space and an fsync at the end.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from fastckpt.engine.timed_engine import Cell

_RUN_S = 600.0


def version() -> str:
    """Returns fio's version; "" if it is not on PATH."""
    if shutil.which("fio") is None:
        return ""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def rate(operation: str, file: Path, nbytes: int, cell: Cell) -> float:
    """Writes a new file, or reads a file; returns bytes per second.

    Raises:
        OSError: fio failed, for example because io_uring is forbidden.
    """
    command = [
        "fio",
        "--name=cell",
        "--thread",  # one process, which the timeout can end
        f"--filename={file.name}",  # relative, because fio splits a path at ":"
        f"--size={nbytes}",
        f"--rw={operation}",
        f"--bs={cell.block_bytes}",
        f"--iodepth={cell.depth}",
        "--ioengine=io_uring",
        f"--direct={int(cell.direct)}",
        "--output-format=json",
    ]
    if operation == "write":
        file.unlink(missing_ok=True)
        command += ["--fallocate=native", "--end_fsync=1"]
    try:
        done = subprocess.run(
            command, cwd=file.parent, capture_output=True, text=True, timeout=_RUN_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"fio did not end within {_RUN_S:g} s") from None
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip()
        raise OSError(f"fio failed: {output.splitlines()[-1] if output else done.returncode}")
    # The JSON may follow notes about the engine.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job[operation]
    if job["error"] or not moved["io_bytes"]:
        raise OSError(f"fio {operation} failed with error {job['error']}")
    return float(moved["io_bytes"] / (max(1, moved["runtime"]) / 1e3))  # in units of 1 ms
