"""Divides the reads of a file: blocks that go to a GPU as a whole come by GPUDirect Storage, all
others through the host. It must not know formats, nor how a block is moved.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.read_stream import DAMAGE, EngineReadStream, Fault, StridedReadStream
from fastckpt.plan.runs import CopyRow

_RUN = 6


class GdsReadStream(StridedReadStream):
    """Streams of one file, each opened when it is first needed; close() closes all.

    Args:
        open_stream: opens a stream of the blocks with these numbers, by GPUDirect or the host.
        blocks: ascending numbers of the blocks that may be asked for.
        whole: those of them that go to the GPU as a whole, as far as known.
        direct: reads those to its GPU.
    """

    def __init__(
        self,
        open_stream: Callable[[Sequence[int], GdsDevice | None], EngineReadStream],
        blocks: Sequence[int],
        block_bytes: int,
        whole: Collection[int],
        direct: GdsDevice,
    ) -> None:
        self._open = open_stream
        self._block_bytes = block_bytes
        self._whole = frozenset(whole)
        self._direct = direct
        self._rest = [number for number in blocks if number not in self._whole]
        self._streams: dict[tuple[bool, bool], EngineReadStream] = {}

    def _stream(self, whole: bool, to_gpu: bool) -> EngineReadStream:
        key = whole, to_gpu
        if key not in self._streams:
            wanted = sorted(self._whole) if whole else self._rest
            stream = self._open(wanted, self._direct if to_gpu else None)
            others, self._streams[key] = [*self._streams.values()], stream
            for other in others:
                stream.beside(other)
        return self._streams[key]

    def _pieces(self, offset: int, nbytes: int) -> Iterator[tuple[bool, int, int]]:
        """Divides a range into runs that lie in whole blocks (True) or in others (False), each with
        its offset and size.
        """
        end = offset + nbytes
        while offset < end:
            number = offset // self._block_bytes
            whole = number in self._whole
            while number * self._block_bytes < end and (number in self._whole) == whole:
                number += 1
            until = min(end, number * self._block_bytes)
            yield whole, offset, until - offset
            offset = until

    def readinto(self, target: Any, offset: int) -> bool:
        view, begin = memoryview(target), offset
        return all(
            self._stream(whole, False).readinto(view[at - begin : at - begin + nbytes], at)
            for whole, at, nbytes in self._pieces(offset, len(view))
        )

    def read_runs(self, runs: Any, devices: list[Any]) -> bool:
        divided: dict[tuple[bool, bool], array[int]] = {}
        columns = memoryview(runs).cast("B").cast("Q")
        for first in range(0, len(columns), _RUN):
            offset, address, nbytes, count, _, _ = row = columns[first : first + _RUN].tolist()
            if count != 1:
                divided.setdefault((False, False), array("Q")).extend(row)
                continue
            of_gpu = goes_to(self._direct.queue, address, devices)
            for whole, at, size in self._pieces(offset, nbytes):
                rows = divided.setdefault((whole, whole and of_gpu), array("Q"))
                rows.extend((at, address + at - offset, size, 1, 0, 0))
        return all(self._stream(*key).read_runs(rows, devices) for key, rows in divided.items())

    def arrive(self) -> bool:
        return all([stream.arrive() for stream in self._streams.values()])

    def nbytes_read(self) -> int:
        return sum(stream.nbytes_read() for stream in self._streams.values())

    def fault(self) -> Fault | None:
        found = [fault for s in self._streams.values() if (fault := s.fault()) is not None]
        return min(found, key=lambda fault: fault.op == DAMAGE, default=None)

    def close(self) -> None:
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.close()


def goes_to(queue: Any, address: int, devices: Sequence[Any]) -> bool:
    """Whether an address lies in a range of `devices` that the queue serves."""
    number = bisect_right(devices, address, key=lambda kept: kept.begin) - 1
    return number >= 0 and address < devices[number].end and devices[number].queue is queue


def whole_blocks(
    rows: Sequence[CopyRow], block_bytes: int, queue: Any, devices: Sequence[Any]
) -> set[int]:
    """Returns the numbers of the blocks of which all wanted rows go to one device, each in one run.

    Args:
        rows: the rows wanted of the file.
        queue: the device's.
        devices: ascending ranges of addresses, as DeviceSources.ranges.
    """
    whole: set[int] = set()
    others: set[int] = set()
    for offset, address, nbytes, count, stride, _ in rows:
        last = offset + (count - 1) * stride + nbytes - 1
        touched = range(offset // block_bytes, last // block_bytes + 1)
        goes = count == 1 and goes_to(queue, address, devices)
        (whole if goes else others).update(touched)
    return whole - others
