"""Short measurements for `fastckpt advise --measure`: the rates at which this node writes to a
directory and copies memory. Nothing that is written stays there.

The module must not know the model that the rates go into.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

import fastckpt
from fastckpt.arguments.quantities import shown_rate, shown_size
from fastckpt.cli.scratch import check_room, own_directory

_MIB = 1 << 20
_BYTES_FIRST, _BYTES_MIN, _BYTES_MAX = 16 * _MIB, 64 * _MIB, 512 * _MIB
_SAVE_S = 1.0  # the time that one save is meant to take
_WRITERS_MAX = 8
# Seconds from the beginning until one process stops saving, until all processes have to be ready,
# and until all have to have written.
_ONE_S, _START_S, _WRITE_S = 4.0, 14.0, 19.0
# The script of a writer. It saves once to take its staging memory, says that it is ready, waits for
# the word to go, saves again, and says when it began and ended.
_WRITER = """
import sys, time, torch, fastckpt
path, nbytes = sys.argv[1], int(sys.argv[2])
state = torch.empty(nbytes // 8, dtype=torch.int64, device="cpu").random_()
fastckpt.save(state, path).result()
print("ready", flush=True)
sys.stdin.readline()
begun = time.perf_counter()
fastckpt.save(state, path).result()
print(begun, time.perf_counter(), flush=True)
"""


class Measured(NamedTuple):
    """Rates in bytes per second, by the name of a Job's input, and notes on what was measured."""

    rates: dict[str, float]
    notes: list[str]


def measure(directory: str) -> Measured:
    """Measures, in about 20 seconds at most, how fast one process and several write to a directory,
    and how fast memory is copied.

    Raises:
        OSError: the directory does not exist or is full. CheckpointError: a save failed.
    """
    found, begun = Measured({}, []), time.monotonic()
    with own_directory(os.path.realpath(directory), "fastckpt-measure-") as own:
        one, nbytes = _one_writer(own, begun)
        found.rates["writer_rate"] = one
        found.notes.append(
            f"one process writes {shown_rate(one)} to {directory}: {shown_size(nbytes)}, durable"
        )
        _measure_several(own, nbytes, one, begun, found)
    _measure_copies(found)
    return found


def _one_writer(directory: Path, begun: float) -> tuple[float, int]:
    """Returns the rate at which one process writes, and the bytes of a save of about a second."""
    # The best of several saves, since whatever else the machine does can only slow them down.
    path, nbytes, best = directory / "one.pt", _BYTES_FIRST, 0.0
    while not best or time.monotonic() - begun < _ONE_S:
        check_room(str(directory.parent), 2 * nbytes)  # a save replaces the one before
        best = max(best, _saved(path, nbytes))  # the first also takes its staging memory
        nbytes = min(_BYTES_MAX, max(nbytes, int(best * _SAVE_S) // _MIB * _MIB))
    path.unlink()
    return best, nbytes


def _saved(path: Path, nbytes: int) -> float:
    state = torch.empty(nbytes // 8, dtype=torch.int64, device="cpu").random_()
    begun = time.perf_counter()
    fastckpt.save(state, path).result()
    return nbytes / (time.perf_counter() - begun)


def _measure_several(
    directory: Path, nbytes: int, one: float, begun: float, found: Measured
) -> None:
    """Adds the rate at which the node writes, by one process for each CPU, to `found`."""
    count = min(_WRITERS_MAX, len(os.sched_getaffinity(0)))
    if count < 2 or nbytes < _BYTES_MIN:
        found.rates["network_rate"] = one
        why = "one CPU" if count < 2 else "a slow disk"
        found.notes.append(f"{why}: the rate of one process stands for the node")
        return
    share = max(_BYTES_FIRST, nbytes // count // _MIB * _MIB)
    check_room(str(directory.parent), 2 * share * count)
    rate = _written_at_once(directory, count, share, begun)
    if rate is None:
        found.rates["network_rate"] = one
        found.notes.append(
            f"{count} processes did not start and write in time: the rate of one process stands "
            "for the node"
        )
        return
    found.rates["network_rate"] = max(rate, one)
    found.notes.append(
        f"{count} processes write {shown_rate(rate)} together, {shown_size(share)} each; the "
        "node's rate is the higher of both"
    )


def _written_at_once(directory: Path, count: int, nbytes: int, begun: float) -> float | None:
    """Returns the rate at which so many processes write together; None if they took too long."""
    command = [sys.executable, "-c", _WRITER]
    root = str(Path(fastckpt.__file__).parents[1])
    writers: list[subprocess.Popen[str]] = []
    try:
        for number in range(count):
            writers.append(
                subprocess.Popen(
                    [*command, str(directory / f"{number}.pt"), str(nbytes)],
                    cwd=root,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        told = _lines_of(writers, begun + _START_S)
        if told is None:
            return None
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("\n")
            writer.stdin.flush()
        told = _lines_of(writers, begun + _WRITE_S)
        if told is None:
            return None
        times = [tuple(map(float, line.split())) for line in told]
        return count * nbytes / (max(end for _, end in times) - min(begin for begin, _ in times))
    finally:
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.communicate()


def _lines_of(writers: list[subprocess.Popen[str]], until: float) -> list[str] | None:
    """Returns a line from each writer, in their order; None if one is late. Raises OSError if one
    ended without a line.
    """
    lines = []
    for writer in writers:
        assert writer.stdout is not None
        if not _readable(writer.stdout.fileno(), until - time.monotonic()):
            return None
        line = writer.stdout.readline()
        if not line:
            raise OSError("a writing process ended before it had written: see its error above")
        lines.append(line)
    return lines


def _readable(fd: int, within_s: float) -> bool:
    return bool(select.select([fd], [], [], max(0.0, within_s))[0])


def _measure_copies(found: Measured) -> None:
    """Adds the rate of copies in memory, or from a GPU if there is one, to `found`."""
    source = torch.ones(256 * _MIB, dtype=torch.uint8, device="cpu")
    target = torch.zeros_like(source)
    memory = max(_copied(target, source) for _ in range(3))
    note = f"memory is copied at {shown_rate(memory)}"
    if not torch.cuda.is_available():
        found.rates["d2h_rate"] = memory
        found.notes.append(f"{note}, which stands for copies from a GPU: there is none here")
        return
    pinned = torch.zeros(256 * _MIB, dtype=torch.uint8, device="cpu", pin_memory=True)
    device = torch.ones(256 * _MIB, dtype=torch.uint8, device="cuda")
    rate = max(_copied(pinned, device) for _ in range(3))
    found.rates["d2h_rate"] = rate
    found.notes.append(f"{note}; one GPU is copied to pinned memory at {shown_rate(rate)}")


def _copied(target: torch.Tensor, source: torch.Tensor) -> float:
    if source.is_cuda:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    target.copy_(source)  # returns when all has arrived, also from a GPU
    return source.nbytes / (time.perf_counter() - begun)
