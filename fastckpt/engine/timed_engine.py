"""An engine with one backend, block size and queue depth, for measurements on one file."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from typing import NamedTuple

from fastckpt import _engine
from fastckpt.engine.staging import (
    IO_THREADS,
    QUEUE_DEPTH,
    STAGERS_MAX,
    WINDOW_BLOCKS,
    Route,
    stager_count,
)
from fastckpt.errors import BackendUnavailable, CheckpointError, StorageError
from fastckpt.plan.image import BLOCK_BYTES, block_count

_WAIT_S = 1.0  # of one wait on the engine, between which signal handlers run; it is repeated


class Cell(NamedTuple):
    """The settings of a transfer: the backend's name, the block size in bytes, the number of blocks
    in flight (for `threads`: of threads), and whether O_DIRECT is used.
    """

    backend: str
    block_bytes: int
    depth: int
    direct: bool

    @classmethod
    def of(cls, route: Route) -> Cell:
        """Returns the settings of a transfer by this route."""
        name = route.sink.name
        depth = QUEUE_DEPTH if name == "io_uring" else IO_THREADS
        return cls(name, BLOCK_BYTES, depth, route.direct)


class TimedEngine:
    """A separate engine with the settings of a cell; its memory is allocated at construction.

    Args:
        path: the path of the file that is passed to write() and read(), for messages.
        nbytes: the size of that file.

    Raises:
        BackendUnavailable: the cell's backend does not work here.
        CheckpointError: the process has too little address space, or too few threads.
    """

    def __init__(self, cell: Cell, path: str, nbytes: int) -> None:
        self._cell, self._path, self._nbytes = cell, path, nbytes
        # As in a save or load, blocks are copied while others are in flight.
        blocks = min(block_count(nbytes, cell.block_bytes), 2 * max(WINDOW_BLOCKS, cell.depth))
        make = _engine.threads_backend if cell.backend == "threads" else _engine.uring_backend
        try:
            self._backend = make(cell.depth)
        except (_engine.BackendUnavailable, MemoryError, RuntimeError) as error:
            raise BackendUnavailable(f"{cell.backend!r} does not work here: {error}") from error
        with ExitStack() as opened:  # what is open is closed if what comes after it fails
            opened.callback(self._backend.close)
            try:
                arena_bytes, stagers = blocks * cell.block_bytes, max(2, stager_count())
                self._engine = _engine.Engine(arena_bytes, cell.block_bytes, stagers)
                opened.callback(self._engine.close)
                self._engine.prefault(0, arena_bytes, stagers)
            except (MemoryError, RuntimeError) as error:
                raise CheckpointError(f"no memory or threads for {cell}: {error}") from error
            opened.pop_all()

    def __enter__(self) -> TimedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._backend.close()

    def write(self, fd: int, address: int) -> list[int]:
        """Copies a complete file from memory, checksums it and writes it to fd, like a save.

        Returns:
            The CRC-32 of each block.

        Raises:
            StorageError: a write failed.
        """
        segments, slots = array("Q", (0, self._nbytes, address)), array("Q")
        allowance = _engine.Allowance(self._engine.arena_blocks)
        job = self._engine.stage(segments, slots, allowance, STAGERS_MAX)
        try:
            job.write_to(fd, 0, self._backend, self._cell.direct)
            while not job.wait_written(_WAIT_S):
                pass
        except BaseException:  # an interrupt: the memory and fd are free when nothing is under way
            job.cancel()
            while not job.wait_written(_WAIT_S):
                pass
            raise
        self._check(job.failure())
        return job.block_crcs()

    def read(self, fd: int, crcs: list[int], address: int) -> None:
        """Reads and verifies the complete file, and copies it to memory, like a load.

        Raises:
            StorageError: a read failed.
            CheckpointError: a block's checksum is wrong.
        """
        window = max(WINDOW_BLOCKS, self._cell.depth)
        stream = self._engine.read(fd, self._nbytes, crcs, self._backend, self._cell.direct, window)
        try:
            done = stream.read_runs(array("Q", (0, address, self._nbytes, 1, 0, 0)))
            self._check(stream.failure())
            if not done:
                raise CheckpointError(
                    f"{self._path!r}: block {stream.corrupt_block()} differs from the block "
                    "that was written"
                )
        finally:
            stream.close()

    def _check(self, failure: _engine._Failure | None) -> None:
        if failure is not None:
            op, offset, number = failure
            raise StorageError(op, self._path, number, offset)
