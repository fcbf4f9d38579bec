"""What the machine can do at best: fio, or where it does not run the bare engine, on the same
directory, and plain copies in memory.

These are the limits the peers are held against. It must not know any peer.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch
from harness import progress

from fastckpt.cli.bench import io
from fastckpt.cli.bench.saves import byte_view, flat_tensors, gpt_state
from fastckpt.engine.timed_engine import Cell

FINALISTS = 2
CELL_BYTES = 512 << 20
BLOCK_BYTES_MAX = max(io.BLOCKS)
WHOLE, QUICK = (io.BLOCKS, io.DEPTHS), (io.QUICK_BLOCKS, io.QUICK_DEPTHS)


class Ceiling:
    """The best sequential write and read on one directory, an fsync of the writes included.

    Every block size and queue depth of `fastckpt bench io` is tried once on a small file, when this
    is made. `measure` runs the best few of them on a file as large as the state and keeps the
    fastest, so that one lucky cell does not set the limit.

    Args:
        quick: tries four block sizes and depths instead of all.

    Attributes:
        name: fio, or the engine that takes its place.
        missing: why it is the engine, else empty.
        cells: what was tried, with bytes a second by operation.
    """

    def __init__(self, directory: Path, nbytes: int, quick: bool = False) -> None:
        self.nbytes = max(1, round(nbytes / BLOCK_BYTES_MAX)) * BLOCK_BYTES_MAX
        self.directory = directory
        grid = io.Grid(directory, *(QUICK if quick else WHOLE))
        cells = [cell for point in grid.points for cell in point]
        by_fio = [cell for cell in cells if cell.backend == io.FIO]
        self.missing = "" if by_fio else f"{'; '.join(grid.notes)}: the engine sets the limit"
        self.name = io.FIO if by_fio else "fastckpt bench io"
        self.cells: list[tuple[Cell, io.Rates]] = []
        scanned = io.Transfers(directory, min(self.nbytes, CELL_BYTES))
        for cell in by_fio or cells:
            self.cells.append((cell, scanned.rates(cell)))
            progress(f"{self.name} {cell}: {shown(self.cells[-1][1])}")

    def measure(self, reading: bool) -> io.Rates:
        """Return the best bytes a second of each operation at full size."""
        operations = io.OPERATIONS if reading else ("write",)
        finalists = dict.fromkeys(
            cell
            for operation in operations
            for cell, _ in sorted(self.cells, key=lambda its: -its[1][operation])[:FINALISTS]
        )
        transfers = io.Transfers(self.directory, self.nbytes)
        found = [transfers.rates(cell) for cell in finalists]
        best = {operation: max(its[operation] for its in found) for operation in operations}
        progress(f"{self.name} {shown(best)}")
        return best


def shown(rates: io.Rates) -> str:
    """Return rates in words."""
    return ", ".join(f"{key} {rate / 1e9:.2f} GB/s" for key, rate in rates.items())


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
