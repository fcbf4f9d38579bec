"""Saves and loads in turns on one file system, run by tests/shared/run.sh where that is mounted.

    TRIAL=benchmarks/network_turns.py tests/shared/run.sh sshfs --mib 256 --rounds 5

Each way writes the same bytes to a new file and syncs it; each load begins with the file out of the
caches of client and server. Rows go to stdout, as JSON behind a word. It must not know which file
system it is on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # an installed fastckpt comes first

import torch

import fastckpt
from fastckpt.cli.bench.benchmark import before_clock, rotated

ROW = "ROW "  # begins the lines that are meant for who started this
TENSORS = 16
BLOCK = "8M"
Way = Callable[[Path], Any]


def synced(path: Path) -> None:
    """Make a file and its name durable."""
    for each in (path, path.parent):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def torch_save(state: dict[str, torch.Tensor], path: Path) -> None:
    """Save as one does without a library, and sync."""
    torch.save(state, path)
    synced(path)


def copied(command: list[str], path: Path) -> None:
    """Write a file by a command, and sync."""
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    synced(path)


def saves(state: dict[str, torch.Tensor], source: Path) -> dict[str, Way]:
    """The ways to write: fastckpt, torch, and those of a shell with the bytes of a file."""
    dd = ["dd", f"if={source}", f"bs={BLOCK}"]
    return {
        "fastckpt": lambda path: fastckpt.save(state, path).result(),
        "torch.save": lambda path: torch_save(state, path),
        "cp": lambda path: copied(["cp", str(source), str(path)], path),
        "dd": lambda path: copied([*dd, f"of={path}", "conv=fsync"], path),
        "dd direct": lambda path: copied([*dd, f"of={path}", "oflag=direct", "conv=fsync"], path),
    }


def loads(memory: Path) -> dict[str, tuple[str, Way]]:
    """The ways to read, each with the way that wrote its file; `memory` is a directory of a tmpfs,
    for a copy ends in memory of its own, too.
    """
    target = memory / "copy"

    def copy(*command: str) -> None:
        target.unlink(missing_ok=True)
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    return {
        "fastckpt": ("fastckpt", fastckpt.load),
        "torch.save": ("torch.save", torch.load),
        "cp": ("cp", lambda path: copy("cp", str(path), str(target))),
        "dd": ("dd", lambda path: copy("dd", f"if={path}", f"of={target}", f"bs={BLOCK}")),
    }


def make_cold(files: list[Path], served: Path) -> None:
    """Drop files from the caches of this machine, which is the client's and the server's."""
    for path in [*files, *(each for each in served.rglob("*") if each.is_file())]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    # A server that has its files in memory may have inodes alone of them, which have to stay.
    Path("/proc/sys/vm/drop_caches").write_text("1" if "SERVED_IN_MEMORY" in os.environ else "3")


def timed(way: Way, path: Path, nbytes: int) -> tuple[float, Any]:
    """Return the seconds that a way takes, and what it returns."""
    before_clock(nbytes)
    begun = time.perf_counter()
    result = way(path)
    return time.perf_counter() - begun, result


def tell(row: dict[str, Any]) -> None:
    """Print a row."""
    print(ROW + json.dumps(row), flush=True)


def turns(here: Path, served: Path, memory: Path, mib: int, rounds: int, ways: list[str]) -> None:
    """Take turns with a state of so many MiB, and tell the rows."""
    nbytes = mib << 20
    generator = torch.Generator().manual_seed(mib)
    state = {
        f"w{i}": torch.empty(nbytes // TENSORS, dtype=torch.uint8).random_(generator=generator)
        for i in range(TENSORS)
    }
    source = memory / "source"
    torch.save(state, source)
    writers = {name: way for name, way in saves(state, source).items() if name in ways}
    readers = {name: way for name, way in loads(memory).items() if name in ways}
    if "fastckpt" in ways:  # whose first save takes the staging memory
        writers["fastckpt"](here / "warm")
    (here / "warm").unlink(missing_ok=True)
    for each in range(rounds):
        for name in rotated(list(writers), each):
            path = here / name.replace(" ", "-")
            row = {"op": "save", "way": name, "mib": mib, "round": each}
            try:
                took, result = timed(writers[name], path, nbytes)
            except subprocess.CalledProcessError as error:
                tell({**row, "error": str(error)})
                continue
            why = result.why if name == "fastckpt" else ""
            tell({**row, "s": took, "why": why})
        for name in rotated(list(readers), each):
            written, way = readers[name]
            path = here / written
            make_cold([path], served)
            took, loaded = timed(way, path, nbytes)
            row = {"op": "load", "way": name, "mib": mib, "round": each, "s": took}
            if isinstance(loaded, dict):
                row["same"] = all(torch.equal(loaded[key], state[key]) for key in state)
            del loaded
            tell(row)
        (memory / "copy").unlink(missing_ok=True)
        for path in here.iterdir():
            path.unlink()
    source.unlink()


def main() -> None:
    """Take the turns that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mounts", nargs=2, type=Path, help="of two clients; the first is used")
    parser.add_argument("--mib", default="256,64", help="of the states")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default="fastckpt,torch.save,cp,dd,dd direct")
    given = parser.parse_args()
    here = given.mounts[0].resolve() / "turns"
    here.mkdir()
    memory = Path(os.environ.get("WORK_MEMORY", "/dev/shm")) / f"turns-{os.getpid()}"
    memory.mkdir()
    tell({"op": "versions", "kernel": os.uname().release, "torch": torch.__version__})
    try:
        for mib in map(int, given.mib.split(",")):
            served = Path(os.environ.get("SERVED", given.mounts[0]))
            turns(here, served, memory, mib, given.rounds, given.ways.split(","))
    finally:
        for each in memory.iterdir():
            each.unlink()
        memory.rmdir()


if __name__ == "__main__":
    main()
