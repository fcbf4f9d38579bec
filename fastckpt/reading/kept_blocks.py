"""KeptBlocks: the blocks of an open checkpoint from which small parts were read last.

A file is read and verified in complete blocks, so a second small part of a block comes from memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import closing

import torch

from fastckpt.plan.boxes import CopyRow, blocks_of
from fastckpt.reading.verified import Body

_KEPT_BYTES = 64 << 20  # of blocks
_SMALL_BYTES = 1 << 20  # of a part, up to which the block around it costs more
_RUNS_MAX = 64  # of a part; more are copied faster by the engine


class _Kept:
    """A block, or the room for it until it is read and verified."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.users = nbytes, 0  # threads that read it or copy from it
        self.lock = threading.Lock()  # held by one of them
        self.memory: torch.Tensor | None = None


class KeptBlocks:
    """At most 64 MiB of blocks of files that stay open, for reads by any number of threads.

    A block is kept after it was verified; blocks of files without checksums are kept as they are.
    When there is no room for another block, the blocks that were not used for longest are dropped.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[tuple[str, int], _Kept] = {}  # by path and number; used last: at the end
        self._free = _KEPT_BYTES

    def gives(self, body: Body, rows: Sequence[CopyRow]) -> bool:
        """Copies the rows of a small part to host memory, and reads the blocks that are not kept.
        Returns False for a part that must be read without this: it is large, or there is no room.

        Raises:
            CorruptCheckpoint, StorageError: see Body.check().
        """
        few = sum(row[3] for row in rows) <= _RUNS_MAX
        if not few or sum(row[2] * row[3] for row in rows) > _SMALL_BYTES:
            return False
        index = body.index
        for number in blocks_of(rows, index.block_bytes):
            begin = number * index.block_bytes
            nbytes = min(index.block_bytes, index.body_nbytes - begin)
            block = self._used((body.path, number), nbytes)
            if block is None:
                return False
            try:
                with block.lock:
                    if block.memory is None:
                        block.memory = _read(body, number, begin, nbytes)
                    _copy(rows, begin, nbytes, block.memory.data_ptr())
            finally:
                with self._lock:
                    block.users -= 1
        return True

    def _used(self, place: tuple[str, int], nbytes: int) -> _Kept | None:
        """Returns a block or the room for it, with one more user; None if there is no room."""
        with self._lock:
            block = self._blocks.pop(place, None)
            if block is None:
                if not self._has_room(nbytes):
                    return None
                block = _Kept(nbytes)
                self._free -= nbytes
            self._blocks[place] = block
            block.users += 1
            return block

    def _has_room(self, nbytes: int) -> bool:
        """Drops blocks without users until there is so much room; returns whether there is."""
        for place, block in [*self._blocks.items()] if nbytes <= _KEPT_BYTES else ():
            if self._free < nbytes and not block.users:
                self._free += self._blocks.pop(place).nbytes
        return self._free >= nbytes

    def clear(self) -> None:
        """Drops all blocks, after the last read."""
        with self._lock:
            self._blocks.clear()
            self._free = 0


def _read(body: Body, number: int, begin: int, nbytes: int) -> torch.Tensor:
    """Returns a block in memory, verified if the file has checksums."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with closing(body.stream([number])) as stream:
        body.move(stream, [(begin, memory.data_ptr(), nbytes, 1, nbytes, nbytes)])
        body.check(stream, stream.arrive())
    return memory


def _copy(rows: Sequence[CopyRow], begin: int, nbytes: int, block: int) -> None:
    """Copies what rows take of the block that begins at this offset and lies at this address."""
    for offset, address, run, count, stride, step in rows:
        for number in range(count):
            at = offset + number * stride
            first, end = max(at, begin), min(at + run, begin + nbytes)
            if first < end:
                to = address + number * step + first - at
                ctypes.memmove(to, block + first - begin, end - first)
