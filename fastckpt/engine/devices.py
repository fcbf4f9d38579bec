"""The GPUs of one process: the CUDA driver, a queue of copies for each device, the device memory
that a save reads, and the order of its copies among other work.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch

from fastckpt import _engine
from fastckpt.errors import DeviceError

log = logging.getLogger("fastckpt")

LIBRARY = "libcuda.so.1"


class DeviceSources:
    """The device memory that one save reads. The copies run after all work that was queued on the
    current streams at the time of construction.

    Attributes:
        ranges: ascending address ranges, each with the queue of its device, for the engine.
        device: the first range's device; None if there is no range.
    """

    def __init__(
        self,
        runtime: Any = None,
        queues: dict[int, _engine.DeviceQueue] | None = None,
        ranges: list[_engine.DeviceRange] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device
        self._runtime = runtime
        self._queues = queues or {}
        self.ranges = ranges or []
        self._begins = [kept.begin for kept in self.ranges]
        self._waits: list[_engine.Wait] = []

    def __contains__(self, address: int) -> bool:
        number = bisect_right(self._begins, address) - 1
        return number >= 0 and address < self.ranges[number].end

    def lead(self) -> bool:
        """Makes the calling thread's current streams wait for the queued copies. Returns False if
        this is impossible, so that the caller has to wait.
        """
        try:
            for ordinal, queue in self._queues.items():
                stream = self._runtime.current_stream(ordinal).cuda_stream
                self._waits.append(queue.lead(stream))
        except _engine.DeviceError as error:  # if the device is lost, the copies will say so
            log.info("streams cannot wait for copies, so the host waits: %s", error)
            return False
        return True

    def forget_waits(self) -> None:
        self._waits.clear()

    def stall_s(self) -> float | None:
        """Returns how many seconds streams waited for copies; None while a stream still waits."""
        seconds = [wait.seconds() for wait in list(self._waits)]
        return None if any(value < 0 for value in seconds) else sum(seconds, 0.0)


class Devices:
    """The GPUs of one process. The driver is loaded only when torch uses a GPU.

    Args:
        kind: torch's name for this type of device.
        runtime: torch's module for this type: is_initialized(),
            current_stream(ordinal).cuda_stream, is_available(), init(), current_device(),
            device_count().
        library: the driver's name or path.
    """

    def __init__(
        self, kind: str = "cuda", runtime: Any = torch.cuda, library: str = LIBRARY
    ) -> None:
        self._kind = kind
        self._runtime = runtime
        self._library = library
        self._lock = threading.Lock()
        # State below is protected by _lock.
        self._driver: _engine.CudaDriver | None = None
        # On ROCm, torch.cuda stands for another driver.
        self._refused = kind == "cuda" and torch.version.hip is not None
        self._queues: dict[int, _engine.DeviceQueue] = {}
        self._warned: set[str] = set()

    def readable(self) -> frozenset[str]:
        """Returns the device types from which staging can copy directly, including "cpu"."""
        return frozenset(("cpu", self._kind) if self._loaded() else ("cpu",))

    def in_use(self) -> bool:
        """Whether this process already uses devices of this type."""
        return not self._refused and bool(self._runtime.is_initialized())

    def target(self, location: str | None = None) -> torch.device | None:
        """Initialises and returns the device for a location of torch.load (None: the current
        device); returns None if nothing can be copied to it.
        """
        location = self._kind if location is None else location
        if not location.startswith(self._kind) or self._refused:
            return None
        if not self._runtime.is_available():
            return None
        try:
            device = torch.device(location)
        except RuntimeError:
            return None  # torch handles old spellings, and refuses wrong locations
        if device.type != self._kind:
            return None
        self._runtime.init()
        index: int | None = device.index
        ordinal = self._runtime.current_device() if index is None else index
        if ordinal >= self._runtime.device_count() or not self._loaded():
            return None
        return torch.device(self._kind, ordinal)

    def _loaded(self) -> bool:
        with self._lock:
            if self._driver is None and not self._refused and self._runtime.is_initialized():
                try:
                    self._driver = _engine.CudaDriver(self._library)
                except _engine.DeviceUnavailable as error:
                    self._refused = True
                    log.warning(
                        "copies cannot overlap with computation; torch copies from GPUs instead: "
                        "%s",
                        error,
                    )
            return self._driver is not None

    def reads(self, storages: Iterable[torch.UntypedStorage]) -> DeviceSources:
        """Returns the storages' device memory, to be read after the work on the current streams.

        Raises:
            DeviceError: the driver refuses a request, or a current stream is being captured into a
                graph.
        """
        ranges_of: dict[int, list[tuple[int, int]]] = {}
        ordinals: dict[torch.device, int | None] = {}  # a device's attributes take long
        for storage in storages if self.in_use() else ():
            device = storage.device
            if device not in ordinals:
                ordinals[device] = (device.index or 0) if device.type == self._kind else None
            ordinal = ordinals[device]
            if ordinal is not None and (nbytes := storage.nbytes()):
                begin = storage.data_ptr()
                ranges_of.setdefault(ordinal, []).append((begin, begin + nbytes))
        if not ranges_of:
            return DeviceSources()
        try:
            queues = {ordinal: self._queue(ordinal) for ordinal in sorted(ranges_of)}
            for ordinal, queue in queues.items():
                queue.follow(self._runtime.current_stream(ordinal).cuda_stream)
        except _engine.StreamCaptured as error:
            raise DeviceError(f"{error}: save and load outside of the capture") from None
        except _engine.DeviceError as error:
            raise DeviceError(f"{error}: nothing was copied") from None
        ranges = [
            (begin, end, ordinal)
            for ordinal, bounds in ranges_of.items()
            for begin, end in _merged(bounds)
        ]
        ranges_read = [
            _engine.DeviceRange(b, e, queues[ordinal]) for b, e, ordinal in sorted(ranges)
        ]
        first = next(ordinal for ordinal in queues if queues[ordinal] is ranges_read[0].queue)
        return DeviceSources(self._runtime, queues, ranges_read, torch.device(self._kind, first))

    def queue(self, device: torch.device) -> _engine.DeviceQueue:
        """Returns the queue of a device that target() returned.

        Raises:
            DeviceError: the driver refuses.
        """
        try:
            return self._queue(device.index)
        except _engine.DeviceError as error:
            raise DeviceError(f"{error}: nothing was loaded") from None

    def _queue(self, ordinal: int) -> _engine.DeviceQueue:
        with self._lock:
            if ordinal not in self._queues:
                assert self._driver is not None
                self._queues[ordinal] = _engine.DeviceQueue(self._driver, ordinal)
            return self._queues[ordinal]

    def driver(self) -> _engine.CudaDriver:
        """Returns the driver, which must be loaded."""
        assert self._driver is not None
        return self._driver

    def text(self, code: int) -> str:
        """Returns the driver's text for an error code."""
        return str(code) if self._driver is None else self._driver.text(code)

    def warn_unpinned(self, code: int) -> str:
        """Logs once that staging memory cannot be pinned, and returns the reason."""
        reason = f"staging memory is not pinned: {self.text(code)}"
        with self._lock:
            new = reason not in self._warned
            self._warned.add(reason)
        if new:
            log.warning("%s; copies from GPUs take longer (try a lower staging_bytes)", reason)
        return reason

    def abandon(self) -> list[object]:
        """Drops all references; returns the objects, which the caller can keep from being freed."""
        objects: list[object] = [*self._queues.values(), self._driver]
        self._queues, self._driver, self._refused = {}, None, True
        return objects

    def close(self) -> None:
        """Frees the queues; no transfer may be in flight on them."""
        with self._lock:
            queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()


def _merged(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns disjoint, ascending ranges that cover these, which may overlap."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(bounds):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
