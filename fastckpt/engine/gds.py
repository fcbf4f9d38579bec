"""GPUDirect Storage: cuFile's library, the registered blocks, and the choice between cuFile and
copies through the host, with its reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fastckpt import _engine
from fastckpt.engine.devices import Devices
from fastckpt.plan.image import BLOCK_BYTES

log = logging.getLogger("fastckpt")

LIBRARY = "libcufile.so.0"
BLOCKS = 16  # registered in a GPU's memory
THREADS = 8  # that is, transfers under way at a time


class GdsDevice:
    """The registered blocks of one GPU, and the threads that transfer them. close() frees both.

    Attributes:
        stage: the blocks, for the engine.
    """

    def __init__(self, library: _engine.CufileLibrary, queue: _engine.DeviceQueue) -> None:
        self.queue = queue
        self._blocks = _engine.GdsBlocks(library, queue, BLOCKS, BLOCK_BYTES)
        self.stage = _engine.GdsStage(self._blocks)
        self._threads = _engine.threads_backend(THREADS)

    def begin_file(self, fd: int) -> tuple[_engine.GdsSink, str]:
        """Registers a file. Returns a sink that transfers blocks of the GPU by cuFile and all
        others like a backend, and a text with cuFile's mode for the file and the reason.
        """
        sink = _engine.GdsSink(fd, self._blocks, self._threads)
        name, why = sink.mode()
        return sink, f"cuFile, {name} mode: {why}"

    def end_file(self, sink: _engine.GdsSink) -> tuple[int, int, str]:
        """Deregisters a file after its last transfer. Returns how many bytes cuFile moved, how many
        bytes of the GPU went through the host, and the reason for the latter ("" if none).
        """
        return sink.end()

    def close(self) -> None:
        self._threads.close()
        # An error that somebody keeps may hold this object by its traceback: free the GPU's memory.
        del self._threads, self.stage, self._blocks, self.queue


class Gds:
    """GPUDirect Storage of one process. cuFile is loaded when GPUDirect is first requested.

    Args:
        library: cuFile's name or path.
        open_library: loads it; default: the extension's CufileLibrary.
    """

    def __init__(
        self,
        devices: Devices,
        library: str = LIBRARY,
        open_library: Callable[[str, _engine.CudaDriver], _engine.CufileLibrary] | None = None,
    ) -> None:
        self._devices = devices
        self._path = library
        self._open = open_library or _engine.CufileLibrary
        self._lock = threading.Lock()
        # State below is protected by _lock.
        self._library: _engine.CufileLibrary | None = None
        self._refusal = ""
        self._direct: dict[int, GdsDevice] = {}
        self._warned: set[str] = set()

    def way(self, staging: str, queue: _engine.DeviceQueue | None) -> tuple[GdsDevice | None, str]:
        """Returns the blocks for transfers between a GPU and files, or None for copies through the
        host; and the reason.

        Args:
            staging: "host" or "gds".
            queue: the GPU's queue; None if there is none.
        """
        if staging == "host" or queue is None:
            return None, ""
        direct, refusal = self._of(queue)
        if direct is None:
            self.warn(refusal)
        return direct, refusal

    def _of(self, queue: _engine.DeviceQueue) -> tuple[GdsDevice | None, str]:
        """Returns a GPU's blocks, which the first call creates; or None and the reason."""
        with self._lock:
            if self._refusal:
                return None, self._refusal
            try:
                if self._library is None:
                    self._library = self._open(self._path, self._devices.driver())
                if id(queue) not in self._direct:
                    self._direct[id(queue)] = GdsDevice(self._library, queue)
                return self._direct[id(queue)], ""
            except (_engine.CufileUnavailable, _engine.DeviceUnavailable) as error:
                self._refusal = f"GPUDirect Storage is unavailable: {error}"
                return None, self._refusal
            except (_engine.DeviceError, MemoryError) as error:  # a later save may find room
                return (
                    None,
                    f"GPUDirect Storage is unavailable: {str(error) or 'too little memory'}",
                )

    def warn(self, reason: str) -> None:
        """Logs once the reason why blocks go through the host although GPUDirect was chosen."""
        with self._lock:
            new = reason not in self._warned
            self._warned.add(reason)
        if new:
            log.warning("%s; data on GPUs is copied to the host instead", reason)

    def abandon(self) -> list[object]:
        """Drops all references; returns the objects, which the caller can keep from being freed."""
        objects: list[object] = [self._library, *self._direct.values()]
        self._library, self._direct, self._refusal = (
            None,
            {},
            "the process was forked or is exiting",
        )
        return objects

    def close(self) -> None:
        """Frees blocks and threads; no transfer may be in flight."""
        with self._lock:
            direct, self._direct = self._direct, {}
            self._library, self._refusal = None, ""
        for each in direct.values():
            each.close()
