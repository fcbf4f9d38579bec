"""Streams, which read one file in blocks and verify each block before the call succeeds: their
protocols, their faults, and the engine's stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fastckpt import _engine

DAMAGE, PEERS = "verify", "broadcast"  # operations of a Fault that are not system calls


class Fault(NamedTuple):
    """The reason why a stream cannot return the requested bytes.

    Attributes:
        op: the failed operation: "read"; "copy" to a device; DAMAGE, if a block's CRC-32 is wrong;
            PEERS, if another rank no longer takes part.
        at: the offset in the file; for DAMAGE the block's number.
        errno: a read's errno, or the driver's code for a copy.
        text: the driver's text for a copy; for PEERS the other rank's failure.
        ranks: for PEERS the ranks that do not take part, as far as known.
    """

    op: str
    at: int = 0
    errno: int = 0
    text: str = ""
    ranks: tuple[int, ...] = ()


class ReadStream(Protocol):
    """The verified bytes of a file, for one reader. close() cancels reads in flight.

    If a method returns False, fault() returns the reason, and the stream can no longer be used.

    Attributes:
        defers: whether to read a large storage only after its device is known.
    """

    defers: bool

    def readinto(self, target: Any, offset: int) -> bool:
        """Fills host memory with the bytes from offset on."""

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> bool:
        """Fills a storage; if it is in a range of `devices`, it is complete only after arrive()."""

    def arrive(self) -> bool:
        """Waits for copies to devices."""

    def fault(self) -> Fault | None:
        """Returns the stream's fault, or None."""

    def abandon(self) -> None:
        """Closes a stream that was not read from, without waiting for other ranks."""

    def close(self) -> None: ...


class StridedReadStream(ReadStream, Protocol):
    """A stream of a single rank that can also copy strided runs of bytes."""

    defers: bool = True

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> bool:
        runs = array("Q", (offset, storage.data_ptr(), storage.nbytes(), 1, 0, 0))
        return self.read_runs(runs, list(devices))

    def read_runs(self, runs: Any, devices: list[Any], xors: bool = False) -> bool:
        """Copies rows (see CopyRow), an array in ascending order, to the host or `devices`. If
        `xors` is set, host memory receives the XOR of its own bytes and the file's bytes.
        """

    def nbytes_read(self) -> int:
        """Returns how many bytes of the file were read or are being read."""

    def abandon(self) -> None:
        self.close()


class EngineReadStream(StridedReadStream):
    """The engine's stream, with its descriptor and, if it has one, its own engine.

    Reading after close() raises ValueError.
    """

    def __init__(
        self,
        stream: _engine.ReadStream,
        engine: _engine.Engine | None,
        close_file: Callable[[], None],
        device_text: Callable[[int], str],
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._close_file = close_file
        self._device_text = device_text

    def readinto(self, target: Any, offset: int) -> bool:
        return self._stream.readinto(target, offset)

    def read_runs(self, runs: Any, devices: list[Any], xors: bool = False) -> bool:
        return self._stream.read_runs(runs, devices, xors)

    def arrive(self) -> bool:
        return self._stream.arrive()

    def nbytes_read(self) -> int:
        return self._stream.nbytes_read()

    def beside(self, other: EngineReadStream) -> None:
        """Records that both streams have the same reader, which must not wait in one for memory
        that the other holds.
        """
        self._stream.beside(other._stream)

    def fault(self) -> Fault | None:
        failure, block = self._stream.failure(), self._stream.corrupt_block()
        if failure is None:
            return Fault(DAMAGE, block) if block >= 0 else None
        text = self._device_text(failure[2]) if failure[0] == "copy" else ""
        return Fault(*failure, text)

    def close(self) -> None:
        self._stream.close()
        close_file, self._close_file = self._close_file, _nothing
        close_file()
        if self._engine is not None:
            self._engine.close()


def _nothing() -> None:
    """Does nothing, because the file is closed and its descriptor may belong to another file."""
