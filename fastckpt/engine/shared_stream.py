"""Blocks of one file, read by the ranks of a group in turn and broadcast to all of them.

Responsible for giving every rank every verified byte while each reads its share from storage, and
for ending together when one cannot go on. It must not know what the file holds.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastckpt.engine.stream import DAMAGE, PEERS, EngineStream, Fault, Stream
from fastckpt.plan.image import block_count

# Four numbers follow each block: its reader's rank, and a fault's operation, place and errno.
_STATUS = struct.Struct("<qqqq")
_OPS = ("", "read", DAMAGE, PEERS)
AHEAD = 8  # broadcasts under way at a time


class SharedStream(Stream):
    """A stream of a file's blocks for one reader on each rank of a group; a collective of theirs.

    Block i comes from rank i modulo the group's size. Ranks read the same ranges of the file in
    roughly the same order; what one asks for again, after it has gone by, it reads by itself. The
    group is used by this alone between the first readinto() and close().

    Args:
        group: a torch.distributed process group, over gloo or NCCL.
        open_stream: makes a stream of these blocks (of all if there are none), for one's own share,
            and for what is asked for again, or before its turn.
        nbytes, block_bytes: size of the file's body and of its blocks.
    """

    def __init__(
        self,
        group: Any,
        open_stream: Callable[[Sequence[int]], EngineStream],
        nbytes: int,
        block_bytes: int,
    ) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._open = open_stream
        self._own_streams: dict[bool, EngineStream] = {}  # of all blocks, and of the last one
        self._nbytes = nbytes
        self._block_bytes = block_bytes
        self._blocks = block_count(nbytes, block_bytes)
        self._device = _device_of(group)
        self.defers = self._device.type != "cpu"
        self._free: list[torch.Tensor] = []
        self._own: torch.Tensor | None = None  # for a block on its way to the device
        self._under_way: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._next = 0  # the block whose broadcast begins next
        self._current = -1  # the block in _buffer
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._memory: torch.Tensor | None = None  # the same on the host, when it was asked for
        self._fault: Fault | None = None  # of whichever rank reads the block
        self._stopping = False
        self._stream = open_stream([*range(self._rank, self._blocks, self._ranks)] or [0])

    def fill(self, storage: torch.UntypedStorage, offset: int, devices: Sequence[Any]) -> bool:
        octets = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        there = self._device
        received = octets if octets.device == there else torch.empty_like(octets, device=there)
        whole = self._read_to(received, offset)
        if received is not octets:
            octets.copy_(received)
        return whole

    def _read_to(self, target: torch.Tensor, offset: int) -> bool:
        """As readinto(), to bytes on the device on whose memory blocks are when they have come."""
        done = 0
        while done < len(target):
            block, begin = divmod(offset + done, self._block_bytes)
            nbytes = min(len(target) - done, self._nbytes_of(block) - begin)
            part = target[done : done + nbytes]
            if block < self._current:  # has gone by
                again = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                if not self.readinto(_bytes_of(again), offset + done):
                    return False
                part.copy_(again)
            else:
                while self._current < block:
                    if not self._advance():
                        return False
                part.copy_(self._buffer[begin : begin + nbytes])
            done += nbytes
        return True

    def readinto(self, target: Any, offset: int) -> bool:
        view = memoryview(target).cast("B")
        while view:
            block, begin = divmod(offset, self._block_bytes)
            nbytes = min(len(view), self._nbytes_of(block) - begin)
            # Whoever opens a zip looks at its end first; that is no reason to pass all the rest by.
            early = block == self._blocks - 1 and block > self._current + 1
            if block < self._current or early:
                if early not in self._own_streams:
                    self._own_streams[early] = self._open([block] if early else [])
                if not self._own_streams[early].readinto(view[:nbytes], offset):
                    return False
            else:
                while self._current < block:
                    if not self._advance():
                        return False
                if self._memory is None:
                    self._memory = self._buffer.cpu()
                view[:nbytes] = _bytes_of(self._memory)[begin : begin + nbytes]
            view, offset = view[nbytes:], offset + nbytes
        return True

    def arrive(self) -> bool:
        return True

    def fault(self) -> Fault | None:
        of_own = (stream.fault() for stream in self._own_streams.values())
        return self._fault or next((fault for fault in of_own if fault is not None), None)

    def abandon(self) -> None:
        assert self._next == 0
        self._stream.close()

    def close(self) -> None:
        """Ends the exchange; on a rank that has not seen all blocks, by telling the others."""
        self._stopping = True
        try:
            while self._fault is None and self._current + 1 < self._blocks:
                if not self._advance():
                    break
            while self._under_way:
                self._under_way.popleft()[2].wait()
        finally:
            for stream in (self._stream, *self._own_streams.values()):
                stream.close()

    def _nbytes_of(self, block: int) -> int:
        return min(self._block_bytes, self._nbytes - block * self._block_bytes)

    def _advance(self) -> bool:
        """Takes the next block; False when its reader could not give it, on every rank alike."""
        if self._fault is not None:
            return False
        try:
            while self._next < self._blocks and len(self._under_way) < AHEAD:
                self._begin(self._next)
            block, buffer, work = self._under_way.popleft()
            work.wait()
        except RuntimeError as error:  # of torch.distributed: a connection broke, or timed out
            reason = str(error).partition("\n")[0]
            self._fault = Fault(PEERS, text=f"a rank is gone ({reason})")
            self._under_way.clear()  # they fail alike, one time-out after the other
            return False
        if self._buffer.numel():
            self._free.append(self._buffer)
        self._buffer = buffer
        self._memory = buffer if buffer.device.type == "cpu" else None
        closing = buffer[-_STATUS.size :].cpu()
        self._fault = _unpacked(_bytes_of(closing))
        self._current = block
        return self._fault is None

    def _begin(self, block: int) -> None:
        """Starts the broadcast of a block, having read it where that is this rank's."""
        reader = block % self._ranks
        size = self._block_bytes + _STATUS.size
        buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if reader == self._rank:
            host = buffer
            if self._device.type != "cpu":
                if self._own is None:
                    self._own = torch.empty(size, dtype=torch.uint8, device="cpu")
                host = self._own
            _bytes_of(host)[-_STATUS.size :] = self._packed(self._read(block, host))
            if host is not buffer:
                buffer.copy_(host)
        source = dist.get_global_rank(self._group, reader)
        work = dist.broadcast(buffer, source, group=self._group, async_op=True)
        self._under_way.append((block, buffer, work))
        self._next += 1

    def _read(self, block: int, buffer: torch.Tensor) -> Fault | None:
        """Reads one of this rank's blocks into buffer; why it could not."""
        if self._stopping:
            return Fault(PEERS)
        target = _bytes_of(buffer)[: self._nbytes_of(block)]
        whole = self._stream.readinto(target, block * self._block_bytes)
        return None if whole else self._stream.fault()

    def _packed(self, fault: Fault | None) -> bytes:
        op, at, number, *_ = fault or Fault("")
        return _STATUS.pack(self._rank, _OPS.index(op), at, number)


def _unpacked(status: memoryview) -> Fault | None:
    rank, op, at, number = _STATUS.unpack(status)
    if _OPS[op] == PEERS:
        return Fault(PEERS, text=f"rank {rank} gave up; its own error tells why", ranks=(rank,))
    return Fault(_OPS[op], at, number) if op else None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor of the CPU."""
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def _device_of(group: Any) -> torch.device:
    """Returns the device on which tensors have to lie that the group broadcasts."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
