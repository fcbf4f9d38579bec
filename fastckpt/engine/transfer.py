"""Transfers of images from memory into files, with waits that convert the engine's failures to
errors; and copies of small ranges into memory. It must not know the contents of an image, or how
its file is named or committed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from operator import add

from fastckpt import _engine
from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.save_stats import WRITE_SIZES, SaveStats
from fastckpt.engine.slot import Slot
from fastckpt.engine.staging import Allowance, Route, Staging
from fastckpt.errors import DeviceError, StorageError, ensure
from fastckpt.plan.image import BLOCK_BYTES, Image
from fastckpt.storage.bound import LOOK_S, PARTING_S, Bound
from fastckpt.storage.file_system import Storage, reported, room_text, scratch

log = logging.getLogger("fastckpt")

_ON_HOST = "no tensor is on a GPU"


class MemoryCopy:
    """Copies of memory ranges. Host ranges are copied at once, device ranges by fill().

    Args:
        storage: creates the memory file through which device ranges are copied.
        ranges: pairs of an address and a buffer, which is filled with the bytes there.
        path: the path of the file to which they belong, for messages.
        allowance: see ImageTransfer.
        reads: the address ranges on devices.

    Attributes:
        transfer: the ImageTransfer of the device ranges.
    """

    def __init__(
        self,
        staging: Staging,
        storage: Storage,
        ranges: Sequence[tuple[int, bytearray]],
        path: str,
        allowance: Allowance,
        reads: DeviceSources,
    ) -> None:
        self._storage = storage
        self._path = path
        self._late: list[bytearray] = []
        self._fd: int | None = None
        image = Image.tailless()
        for address, memory in ranges:
            if address in reads:
                image.append(address, len(memory))
                self._late.append(memory)
            else:
                memory[:] = ctypes.string_at(address, len(memory))
        self.transfer = ImageTransfer(staging, image, path, allowance, 1, reads)
        if not self._late:
            return
        try:
            with reported("open", path):
                self._fd = scratch()
            route = staging.route(self._fd, path, "auto", writing=True)
            self.transfer.write_to(self._fd, 0, route)
        except BaseException:
            self.__exit__()  # or what was staged would never give back its blocks
            raise

    def __enter__(self) -> MemoryCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.transfer.__exit__()
        if self._fd is not None:
            self._storage.close(self._fd)

    def fill(self) -> None:
        """Waits for the device ranges, and copies them into their buffers."""
        self.transfer.wait_written()
        offset = 0
        for memory in self._late:
            assert self._fd is not None
            with reported("read", self._path):
                memory[:] = self._storage.read_at(self._fd, len(memory), offset)
            offset += len(memory)
        self._late.clear()


class ImageTransfer:
    """The transfer of an image's body. Staging begins at once; writes begin at write_to().

    Leaving the context cancels operations that have not begun and waits for the others.

    Args:
        image: the image, whose body may be empty.
        path: the file's path, for messages.
        allowance: the staging blocks for this file and the save's other files together.
        stagers: the most threads that copy.
        reads: the address ranges on devices.
        direct: the GPU's blocks for GPUDirect writes straight to the file, where these are
            possible.
        slot: a file in memory in which to stage the image; it is released when nothing is in
            flight, or if no transfer is made.
        timeout_s: the longest time without progress while writes are in flight or memory is
            lacking. After it, waits raise an error, and leaving the context hands operations that
            the kernel still holds over to Staging.hung. inf: no limit.

    Attributes:
        nbytes: the size of the body.

    Raises:
        StorageError, DeviceError: in the waits: the error of the first failed write or copy, or
            ETIMEDOUT after timeout_s without progress.
    """

    def __init__(
        self,
        staging: Staging,
        image: Image,
        path: str,
        allowance: Allowance,
        stagers: int,
        reads: DeviceSources | None = None,
        direct: GdsDevice | None = None,
        slot: Slot | None = None,
        timeout_s: float = inf,
    ) -> None:
        self._path = path
        self._hung = staging.hung
        self._bound = Bound(timeout_s)
        self._devices = staging.devices
        self._gds = staging.gds
        self._storage = staging.storage
        self._fd: int | None = None
        self._route: Route | None = None
        self._direct, self._slot = direct, slot
        self._registered: _engine.GdsSink | None = None
        self._way = ""
        self._stats: SaveStats | None = None
        self._image: Image | None = image  # keeps the sources until they were copied
        self.nbytes = image.body_nbytes
        self._job = None
        if image.body_nbytes:
            try:
                self._job = staging.engine().stage(
                    image.segments,
                    image.slots,
                    allowance,
                    max(1, stagers),
                    [] if reads is None else reads.ranges,
                    None if direct is None else direct.stage,
                    image.numbers,
                    image.conversions,
                    None if slot is None else slot.of_engine,
                    image.base,
                )
            except BaseException:
                if slot is not None:
                    slot.release()
                raise

    def __enter__(self) -> ImageTransfer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            self.cancel()
            timeout_s = self._bound.timeout_s
            bound_s = inf if timeout_s == inf else min(PARTING_S, timeout_s)
            # By the engine's clock: this may be the first look, long after the last progress.
            while not self._job.wait_written(LOOK_S) and self._job.standstill()[0] < bound_s:
                pass
            self._job.give_up()
            while not self._job.wait_staged(LOOK_S):  # a device may still copy
                pass
            if not self._has_returned(LOOK_S):
                assert self._fd is not None
                log.warning(
                    "a write of %r at offset %d was abandoned, but has not returned; its "
                    "staging memory and its file stay in use until it returns",
                    self._path,
                    self._job.standstill()[2],
                )
                self._hung.add(self._fd, self._has_returned)
        self._image = None

    def use_slot(self, fd: int, path: str) -> None:
        """Makes the slot, which is open as `fd`, the file of the image."""
        assert self._job is not None
        self._fd, self._path = fd, path
        self._job.land()

    def cancel(self) -> None:
        """Stages and writes nothing more."""
        if self._job is not None:
            self._job.cancel()

    def _has_returned(self, wait_s: float = 0.0) -> bool:
        """Waits at most wait_s; returns whether nothing is in flight any more."""
        if self._job is None or not self._job.wait_written(wait_s):
            return False
        self._end_file()
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()
        return True

    def _awaited(self) -> str:
        """Describes the operation that is waited for."""
        assert self._job is not None
        seconds, writing, offset = self._job.standstill()
        if writing:
            return f"a write of {self._path!r} at offset {offset} has not ended for {seconds:.0f} s"
        return (
            f"the transfer of {self._path!r} has waited {seconds:.0f} s for staging memory that "
            "other transfers hold"
        )

    def _raise_if_ended(self) -> None:
        """Raises StorageError if there was no progress for timeout_s."""
        if self._job is None:
            return
        seconds, _writing, offset = self._job.standstill()
        if self._bound.is_over(seconds, self._awaited):
            detail = f"{self._awaited()}; it was abandoned after timeout_s without progress"
            raise StorageError("write", self._path, errno.ETIMEDOUT, offset, detail)

    def write_to(self, fd: int, offset: int, route: Route, path: str = "") -> None:
        """Begins to write the image to fd, which must stay open until the context is left. Pass the
        file's `path` if it was not known before.
        """
        if self._job is None:
            return
        sink, self._fd, self._path, self._route = route.sink, fd, path or self._path, route
        if self._direct is not None:
            sink, self._way = self._direct.begin_file(fd)
            self._registered = sink
        self._job.write_to(fd, offset, sink, route.direct, route.patience_s, route.bucket)

    def _end_file(self) -> None:
        """Deregisters the file when nothing is in flight; records how its bytes were written."""
        sink, self._registered = self._registered, None
        if sink is None or self._direct is None:
            return
        nbytes, through_host, reason = self._direct.end_file(sink)
        if reason:
            self._gds.warn(reason)
            self._way = f"{reason}; {through_host} bytes from the GPU were copied through the host"
        if self._stats is not None:
            self._stats.staging_why = self._way
            if not nbytes:
                self._stats.staging = "host"

    def queued(self, timeout_s: float) -> bool:
        """Waits at most timeout_s; returns whether only copies by devices remain."""
        if self._job is None or self._job.wait_queued(timeout_s):
            return True
        self._raise_if_ended()
        return False

    def wait_queued(self) -> None:
        """Waits until only copies by devices remain; a later wait raises their failure."""
        while not self.queued(self._bound.look_s):
            pass

    def staged(self, timeout_s: float) -> bool:
        """Waits at most timeout_s; returns whether everything was copied."""
        if self._job is not None and not self._job.wait_staged(timeout_s):
            self._raise_if_ended()
            return False
        self._check()
        self._image = None
        return True

    def wait_staged(self) -> None:
        while not self.staged(self._bound.look_s):
            pass

    def written(self, timeout_s: float) -> bool:
        """Waits at most timeout_s; returns whether the job has ended, successfully or not."""
        if self._job is None or self._job.wait_written(timeout_s):
            return True
        self._raise_if_ended()
        return False

    def nbytes_written(self) -> int:
        """Returns how many bytes have been written so far."""
        return 0 if self._job is None else self._job.nbytes_written()

    def tokens_waited_s(self) -> float:
        """Returns how many seconds blocks that were ready to be written waited for tokens."""
        return 0.0 if self._job is None else self._job.tokens_waited_s()

    def wait_written(self) -> None:
        """Waits until everything is written, and compares the number of bytes with the plan."""
        if self._job is None:
            return
        while not self.written(self._bound.look_s):
            pass
        self._end_file()
        self._check()
        written = self._job.nbytes_written()
        ensure(written == self.nbytes, f"{written} bytes were written instead of {self.nbytes}")

    def _check(self) -> None:
        failure = None if self._job is None else self._job.failure()
        if failure is not None:
            op, offset, number = failure
            if op == "copy":
                raise DeviceError(
                    f"copying from a GPU for {self._path!r}, at offset {offset}, failed: "
                    f"{self._devices.text(number)}; nothing was committed"
                )
            detail = ""
            if op == "write" and self._fd is not None:
                detail = self._refusal(number)
                if number == errno.ENOSPC and not detail:  # there is room only for part of the file
                    detail = self._room_text()
            raise StorageError(op, self._path, number, offset, detail)

    def _refusal(self, number: int) -> str:
        assert self._fd is not None
        if self._route is not None and self._route.refusal is not None:
            return self._route.refusal()
        return self._storage.refusal(self._fd, number).text

    def _room_text(self) -> str:
        assert self._job is not None
        with suppress(OSError):  # the error being explained counts
            room = self._storage.free_bytes(os.path.dirname(self._path))
            return "up to " + room_text(self.nbytes - self._job.nbytes_written(), room)
        return ""

    def block_crcs(self) -> list[int]:
        """Returns the CRC-32 of each block of the body; call it after wait_staged()."""
        return [] if self._job is None else self._job.block_crcs()

    def base_crcs(self) -> list[int]:
        """Returns the CRC-32 of each block of an image with a base, before the base was subtracted;
        call it after wait_staged().
        """
        return [] if self._job is None else self._job.base_crcs()

    def slot_crcs(self) -> list[int]:
        """Returns the CRC-32 of each slot's segment; call it after wait_staged()."""
        return [] if self._job is None else self._job.slot_crcs()

    def non_finite(self) -> list[int]:
        """Returns how many staged numbers are not finite in each run of image.numbers; call this
        after wait_staged().
        """
        return [] if self._job is None else self._job.non_finite()

    def lossy(self) -> set[int]:
        """Returns the segments in which the conversion made finite numbers infinite or NaN; call
        this after wait_staged().
        """
        return set() if self._job is None else self._job.lossy()

    def account(self, stats: SaveStats) -> None:
        """Adds the copies by devices to a save's statistics; call it after wait_staged()."""
        nbytes, seconds = (0, 0.0) if self._job is None else self._job.device_copies()
        if self._job is None or not nbytes:
            stats.staging = stats.staging or "host"
            stats.staging_why = stats.staging_why or _ON_HOST
            return
        pin_error = self._job.pin_error()
        stats.staging, why = "pinned", "copied by GPUs to pinned host memory"
        if self._direct is not None:
            stats.staging, why, self._stats = "gds", self._way, stats
        elif pin_error:
            stats.staging, why = "pageable", self._devices.warn_unpinned(pin_error)
        told = stats.staging_why in (_ON_HOST, "") or stats.staging_why in why
        chosen = "" if told else f"; {stats.staging_why}"
        stats.staging_why = why + chosen
        before = (stats.d2h_s or 0.0) * (stats.d2h_gbps or 0.0)
        stats.d2h_s = (stats.d2h_s or 0.0) + seconds
        stats.d2h_gbps = (before + nbytes / 1e9) / stats.d2h_s if stats.d2h_s else None

    def count_writes(self, stats: SaveStats) -> None:
        """Adds the writes, and the copies' wait for memory; call this after wait_written()."""
        if self._job is not None:
            of_size = self._job.writes()  # at i: of at most 2^i bytes
            ends = [*(size.bit_length() for size in WRITE_SIZES[:-1]), len(of_size)]
            counts = [sum(of_size[begin:end]) for begin, end in pairwise([0, *ends])]
            stats.writes = tuple(map(add, stats.writes, counts))
            stats.memory_waited_s += self._job.memory_waited_s()

    def staged_bytes_max(self) -> int:
        """Returns the peak staging memory, in bytes, of the files with this allowance."""
        return 0 if self._job is None else self._job.blocks_held_max() * BLOCK_BYTES
