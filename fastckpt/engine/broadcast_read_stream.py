"""A stream of one file's blocks that the ranks of a group read in turn and broadcast to all. Each
rank reads only its share from storage. If one rank cannot continue, all end together.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fastckpt.engine.read_stream import DAMAGE, PEERS, EngineReadStream, Fault, ReadStream
from fastckpt.errors import ensure
from fastckpt.plan.image import block_count

# Four numbers follow each block: its reader's rank, and a fault's operation, place and errno.
_STATUS = struct.Struct("<qqqq")
_OPS = ("", "read", DAMAGE, PEERS)
AHEAD = 8  # broadcasts under way at a time


class BroadcastReadStream(ReadStream):
    """A collective stream of a file's blocks, with one reader on each rank of a group.

    Block i comes from rank i modulo the group's size. All ranks read the same ranges of the file in
    roughly the same order. If a rank needs an earlier block again, it reads the block itself. The
    group must not be used otherwise between the first readinto() and close().

    Args:
        group: a torch.distributed process group, over gloo or NCCL.
        open_stream: opens this rank's own stream of the blocks with these numbers, or of all
            blocks. The rank uses it for its share, and for blocks that it needs again or before
            their turn.
        nbytes, block_bytes: the sizes of the file's body and of its blocks.
    """

    def __init__(
        self,
        group: Any,
        open_stream: Callable[[Sequence[int]], EngineReadStream],
        nbytes: int,
        block_bytes: int,
    ) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._open = open_stream
        self._own_streams: dict[bool, EngineReadStream] = {}  # of all blocks, and of the last one
        self._nbytes = nbytes
        self._block_bytes = block_bytes
        self._blocks = block_count(nbytes, block_bytes)
        self._device = device_of(group)
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
        """Fills memory on the device of the broadcasts, like readinto() on the host."""
        done = 0
        while done < len(target):
            block, begin = divmod(offset + done, self._block_bytes)
            nbytes = min(len(target) - done, self._nbytes_of(block) - begin)
            part = target[done : done + nbytes]
            if block < self._current:  # its broadcast is over
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
            # Whoever opens a zip file reads its end first: that must not skip all other blocks.
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
        ensure(self._next == 0, "abandon() must precede the first broadcast")
        self._stream.close()

    def close(self) -> None:
        """Ends the exchange. If this rank has not received all blocks, it makes the others stop."""
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
        """Receives the next block; returns False on every rank if the block could not be read."""
        if self._fault is not None:
            return False
        try:
            while self._next < self._blocks and len(self._under_way) < AHEAD:
                self._begin(self._next)
            block, buffer, work = self._under_way.popleft()
            work.wait()
        except RuntimeError as error:  # of torch.distributed: a connection broke, or timed out
            reason = str(error).partition("\n")[0]
            self._fault = Fault(PEERS, text=f"a rank has ended or cannot be reached ({reason})")
            self._under_way.clear()  # the others would fail too, each after a time-out
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
        """Begins the broadcast of a block; first reads the block if it is this rank's."""
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
        """Reads one of this rank's blocks into a buffer; returns the fault if this fails."""
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
        return Fault(PEERS, text=f"rank {rank} failed: see the error that it raised", ranks=(rank,))
    return Fault(_OPS[op], at, number) if op else None


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous uint8 tensor on the CPU."""
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def device_of(group: Any) -> torch.device:
    """Returns the device on which the group broadcasts tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
