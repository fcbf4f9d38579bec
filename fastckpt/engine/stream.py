"""Streams give the bytes of one file in blocks, each verified before anything of it is copied out.

Responsible for what every stream does, for how it tells why it cannot go on, and for the stream
that the engine makes. It must not know formats, nor what a caller is told of a failure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fastckpt import _engine

DAMAGE, PEERS = "verify", "broadcast"  # operations of a Fault that are no system calls


class Fault(NamedTuple):
    """A fault is why a stream cannot give what is asked of it.

    Attributes:
        op: the operation that failed: "read"; "copy", to a device; DAMAGE, the CRC-32 of a block is
            another one; PEERS, another rank takes part no more.
        at: the offset in the file; of DAMAGE the number of the block.
        errno: of a read.
        text: the driver's words of a copy; what became of other ranks.
        ranks: those of PEERS, as far as known.
    """

    op: str
    at: int = 0
    errno: int = 0
    text: str = ""
    ranks: tuple[int, ...] = ()


class Stream(Protocol):
    """The verified bytes of a file, for one reader. close() ends what is under way.

    A method that returns False could not do what it was asked for, and fault() says why. The stream
    is of no use then.

    Attributes:
        defers: it is better to ask for a large storage when it is known where that belongs.
    """

    defers: bool

    def readinto(self, target: Any, offset: int) -> bool:
        """Copies bytes from offset on to memory of the host, as many as it has."""

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> bool:
        """As readinto(), to a storage; if that is among `devices` (see Reads), only begins to."""

    def arrive(self) -> bool:
        """Waits for what is on its way to devices."""

    def fault(self) -> Fault | None:
        """Why something could not be done; None if everything could."""

    def abandon(self) -> None:
        """Closes a stream that nobody has read from, whether other ranks take part or not."""

    def close(self) -> None: ...


class RunStream(Stream, Protocol):
    """A stream that one reader has to itself, and that moves runs of bytes with strides, too."""

    defers: bool = True

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> bool:
        runs = array("Q", (offset, storage.data_ptr(), storage.nbytes(), 1, 0, 0))
        return self.read_runs(runs, list(devices))

    def read_runs(self, runs: Any, devices: list[Any]) -> bool:
        """Moves rows, ascending, an array of numbers (see CopyRow), to the host or `devices`."""

    def nbytes_read(self) -> int:
        """Returns how many bytes of the file were read, or are being read."""

    def abandon(self) -> None:
        self.close()


class EngineStream(RunStream):
    """The engine's stream, its descriptor, and the engine made for it, if any; close() ends all."""

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

    def read_runs(self, runs: Any, devices: list[Any]) -> bool:
        return self._stream.read_runs(runs, devices)

    def arrive(self) -> bool:
        return self._stream.arrive()

    def nbytes_read(self) -> int:
        return self._stream.nbytes_read()

    def beside(self, other: EngineStream) -> None:
        """The same reader asks both: what one waits for is no memory that the other holds."""
        self._stream.beside(other._stream)

    def fault(self) -> Fault | None:
        failure, block = self._stream.failure(), self._stream.corrupt_block()
        if failure is None:
            return Fault(DAMAGE, block) if block >= 0 else None
        text = self._device_text(failure[2]) if failure[0] == "copy" else ""
        return Fault(*failure, text)

    def close(self) -> None:
        self._stream.close()
        self._close_file()
        if self._engine is not None:
            self._engine.close()
