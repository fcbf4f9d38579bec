"""What the machine can do at best: fio, or where it is missing the bare engine, on the same
directory, and plain copies in memory.

These are the limits the peers are held against. It must not know any peer.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from state import byte_view, flat_tensors, gpt_state
from storage import drop_page_cache, remove

ROOT = Path(__file__).resolve().parents[1]
BLOCKS_MIB = (1, 2, 4, 8, 16)
DEPTHS = (1, 2, 4, 8, 16, 32)
FINALISTS = 2
CELL_BYTES = 512 << 20
Cell = dict[str, Any]


class Fio:
    """fio's best sequential write and read on one directory.

    `scan` tries every block size and queue depth once on a small file. `measure` runs the best few
    of them on a file as large as the state and keeps the fastest, so that one lucky cell of the
    scan does not set the limit.
    """

    name = "fio"

    def __init__(self, directory: Path, nbytes: int, progress: Callable[[str], None]) -> None:
        self.file = directory / "fio.bin"
        self.nbytes = nbytes
        self.progress = progress
        self.write_cells: list[Cell] = []
        self.read_cells: list[Cell] = []

    @staticmethod
    def reason_missing() -> str | None:
        """Return why fio cannot run, or None when it can."""
        if shutil.which("fio") is None:
            return "fio is not on the PATH"
        engines = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True).stdout
        return None if "io_uring" in engines.split() else "this fio has no io_uring engine"

    def run(self, operation: str, nbytes: int, cell: Cell) -> float:
        """Run one cell; returns bytes a second, the final fsync of a write included."""
        command = [
            "fio",
            "--name=cell",
            f"--filename={self.file.name}",  # below cwd: fio takes ":" in a path for the next file
            f"--size={nbytes}",
            f"--rw={operation}",
            f"--bs={cell['block_mib']}m",
            f"--iodepth={cell['depth']}",
            f"--ioengine={cell['engine']}",
            f"--direct={int(cell['direct'])}",
            "--output-format=json",
        ]
        if operation == "write":
            self.file.unlink(missing_ok=True)
            command += ["--fallocate=native", "--end_fsync=1"]
        elif not cell["direct"]:
            drop_page_cache(self.file)
        done = subprocess.run(
            command, cwd=self.file.parent, capture_output=True, text=True, check=True
        )
        # Notes about the engine may precede the JSON.
        result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if result["error"] or not result[operation]["io_bytes"]:
            raise RuntimeError(f"fio {operation} failed with error {result['error']}")
        moved = result[operation]
        return float(moved["io_bytes"] / (max(1, moved["runtime"]) / 1e3))  # fio's clock has 1 ms

    def scan(self) -> None:
        """Try every write and read cell once."""
        size = min(self.nbytes, CELL_BYTES)
        direct = [
            {"block_mib": block, "depth": depth, "engine": "io_uring", "direct": True}
            for block in BLOCKS_MIB
            for depth in DEPTHS
        ]
        buffered = [
            {"block_mib": block, "depth": 1, "engine": "psync", "direct": False}
            for block in BLOCKS_MIB
        ]
        self.write_cells = self.timed("write", size, direct) or self.timed("write", size, buffered)
        self.read_cells = self.timed("read", size, direct + buffered)
        remove(self.file)

    def timed(self, operation: str, nbytes: int, cells: list[Cell]) -> list[Cell]:
        """Run the cells; returns those that work here with their speed, fastest first."""
        done = []
        for cell in cells:
            try:
                speed = self.run(operation, nbytes, cell)
            except subprocess.CalledProcessError as error:  # direct I/O refused, say
                self.progress(f"fio {operation} {describe(cell)}: {error.stderr.strip()[:200]}")
                continue
            done.append({**cell, "bytes_per_s": speed})
            self.progress(f"fio {operation} {describe(cell)}: {speed / 1e9:.2f} GB/s")
        return sorted(done, key=lambda cell: -cell["bytes_per_s"])

    def fastest(self, operation: str, cells: list[Cell]) -> float:
        """Return the best bytes a second of the finalists among `cells` at full size, else 0."""
        finalists = cells[:FINALISTS]
        return max((self.run(operation, self.nbytes, cell) for cell in finalists), default=0.0)

    def measure(self, reading: bool) -> dict[str, float]:
        """Run the finalists at full size; returns the best bytes a second of each direction."""
        best = {"write": self.fastest("write", self.write_cells)}
        if reading:
            for direct, key in ((True, "read_direct"), (False, "read_buffered")):
                cells = [cell for cell in self.read_cells if cell["direct"] is direct]
                best[key] = self.fastest("read", cells)
        remove(self.file)
        self.progress("fio " + ", ".join(f"{k} {v / 1e9:.2f} GB/s" for k, v in best.items()))
        return best


class EngineIo:
    """The best that fastckpt's engine writes and reads by itself, for where fio is missing.

    `fastckpt bench io` measures it: a few cells on a small file, and then the best of them on one
    as large as the state.
    """

    name = "fastckpt bench io"

    def __init__(self, directory: Path, nbytes: int, progress: Callable[[str], None]) -> None:
        self.directory, self.nbytes, self.progress = directory, nbytes, progress
        self.best: dict[str, Cell] = {}

    def run(self, *options: object) -> dict[str, Cell]:
        """Run the benchmark; returns the best cell of each operation."""
        command = [sys.executable, "-m", "fastckpt", "bench", "io", str(self.directory)]
        command += ["--json", "--rounds", "1", *map(str, options)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        return {operation: found[operation]["best"] for operation in ("write", "read")}

    def scan(self) -> None:
        """Find the best block size and depth."""
        self.best = self.run("--quick", "--size", min(self.nbytes, CELL_BYTES))

    def measure(self, reading: bool) -> dict[str, float]:
        """Run the best cells at full size; returns the best bytes a second of each direction."""
        cells = self.best.values()
        blocks = {cell["block_bytes"] for cell in cells}
        depths = {cell["depth"] for cell in cells}
        found = self.run("--size", self.nbytes, "--blocks", *blocks, "--depths", *depths)
        best = {operation: float(cell["rate"]) for operation, cell in found.items()}
        told = ", ".join(f"{key} {value / 1e9:.2f} GB/s" for key, value in best.items())
        self.progress(f"{self.name} {told}")
        return best if reading else {"write": best["write"]}


def describe(cell: Cell) -> str:
    """Return one cell's settings in a few words."""
    mode = "direct" if cell["direct"] else "buffered"
    return f"{mode} {cell['engine']} {cell['block_mib']} MiB x {cell['depth']}"


def memory_copies(nbytes: int) -> dict[str, float]:
    """Copy a state of about `nbytes` bytes into memory that is already faulted in.

    Returns the bytes, and the seconds of one thread's memmove and of Tensor.copy_ with all of
    torch's threads.
    """
    sources = [byte_view(tensor) for tensor in flat_tensors(gpt_state(nbytes)).values()]
    target = torch.ones(sum(map(len, sources)), dtype=torch.uint8)
    started = time.perf_counter()
    address = target.data_ptr()
    for source in sources:
        ctypes.memmove(address, source.data_ptr(), source.nbytes)
        address += source.nbytes
    moved = time.perf_counter()
    offset = 0
    for source in sources:
        target[offset : offset + len(source)].copy_(source)
        offset += len(source)
    copied = time.perf_counter()
    return {
        "copied_bytes": len(target),
        "memmove_s": moved - started,
        "torch_copy_s": copied - moved,
    }
