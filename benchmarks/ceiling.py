"""What the machine can do at best: fio, or where it does not run the bare engine, on the same
directory, plain copies in memory, and a bare socket.

These are the limits the peers are held against. It must not know any peer.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
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
LIMIT = "limit"  # the name of rows of what the machine can do, beside those of what is measured
LIMITS = {
    "copied_s": "Tensor.copy_",
    "written_s": "fio write",
    "read_s": "fio read",
    "encoded_s": "the codec alone",
    "socket_s": "a bare socket",
}


class Ceiling:
    """The best sequential write and read on one directory, an fsync of the writes included.

    Every block size and queue depth of `fastckpt bench io` is tried once on a small file, when this
    is made. `measure` runs the best few of them on a file as large as the state and keeps the
    fastest, so that one lucky cell does not set the limit.

    Args:
        quick: tries four block sizes and depths instead of all, and runs the best of them again.

    Attributes:
        name: fio, or the engine that takes its place.
        missing: why it is the engine, else empty.
        cells: what was tried, with bytes a second by operation.
    """

    def __init__(self, directory: Path, nbytes: int, quick: bool = False) -> None:
        self.nbytes = max(1, round(nbytes / BLOCK_BYTES_MAX)) * BLOCK_BYTES_MAX
        self.directory, self.finalists = directory, 1 if quick else FINALISTS
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
            for cell, _ in sorted(self.cells, key=lambda its: -its[1][operation])[: self.finalists]
        )
        transfers = io.Transfers(self.directory, self.nbytes)
        found = [transfers.rates(cell) for cell in finalists]
        best = {operation: max(its[operation] for its in found) for operation in operations}
        progress(f"{self.name} {shown(best)}")
        return best


def shown(rates: io.Rates) -> str:
    """Return rates in words."""
    return ", ".join(f"{key} {rate / 1e9:.2f} GB/s" for key, rate in rates.items())


def copy_s(nbytes: int) -> float:
    """Return the seconds of one Tensor.copy_ of so many bytes into memory that has its pages."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    started = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - started


SENDER = """
import socket, sys
sent, left = memoryview(bytearray(8 << 20)), int(sys.argv[2])
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as link:
    link.recv(1)
    while left > 0:
        left -= link.send(sent[:left])
"""


def socket_s(nbytes: int) -> float:
    """Return the seconds that so many bytes take over loopback from another process, through one
    bare socket.
    """
    taken, left = memoryview(bytearray(8 << 20)), nbytes
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", SENDER, str(server.getsockname()[1]), str(nbytes)]
        with subprocess.Popen(command), server.accept()[0] as link:
            started = time.perf_counter()
            link.sendall(b".")
            while left > 0:
                if not (count := link.recv_into(taken)):
                    raise ConnectionError("the sender has ended")
                left -= count
            return time.perf_counter() - started


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
