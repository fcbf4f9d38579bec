"""GPUDirect Storage: whether blocks go from a GPU to a file by cuFile, or through the host.

Responsible for cuFile's library, the registered blocks, and for the choice between the two ways,
with its reason. It must not know images, or when a checkpoint is committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fastckpt import _engine
from fastckpt.engine.devices import Devices, Reads
from fastckpt.plan.image import BLOCK_BYTES

log = logging.getLogger("fastckpt")

LIBRARY = "libcufile.so.0"
BLOCKS = 16  # of a GPU's memory, registered once
THREADS = 8  # transfers under way at a time


class Direct:
    """The blocks of one GPU, and what writes them. close() frees all.

    Attributes:
        stage: for the engine.
        backend: writes blocks of the GPU by cuFile, and all others as ever.
    """

    def __init__(self, library: _engine.CufileLibrary, queue: _engine.DeviceQueue) -> None:
        blocks = _engine.GdsBlocks(library, queue, BLOCKS, BLOCK_BYTES)
        self.queue = queue
        self.stage = _engine.GdsStage(blocks)
        self.backend = _engine.gds_backend(blocks, THREADS)

    def begin_file(self, fd: int) -> str:
        """Registers a file; how its bytes will go, in words."""
        self.backend.begin_file(fd)
        name, why = self.backend.mode(fd)
        return f"cuFile, {name} mode: {why}"

    def end_file(self, fd: int) -> tuple[int, int, str]:
        """After the last transfer: bytes that cuFile moved, bytes of the GPU's that went through
        the host, and why these did, or nothing.
        """
        return self.backend.end_file(fd)

    def close(self) -> None:
        """An error of a load, kept by somebody, may keep this: not the GPU's memory, too."""
        self.backend.close()
        del self.backend, self.stage, self.queue


class Gds:
    """One process's knowledge of GPUDirect Storage. Nothing is loaded before it is asked for.

    Args:
        devices: the GPUs.
        library: where cuFile is.
        open_library: loads it.
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
        self._direct: dict[int, Direct] = {}
        self._verdicts: dict[int, tuple[bool, str]] = {}  # by file system: st_dev
        self._warned: set[str] = set()

    def way(
        self, staging: str, queue: _engine.DeviceQueue | None, file_system: int
    ) -> tuple[Direct | None, str]:
        """Returns how bytes go between a GPU and a file, None for through the host; and why.

        Args:
            staging: "host", "gds" or "auto".
            queue: of the GPU; None if there is none.
            file_system: the file's, as stat(2) numbers them.
        """
        if staging == "host" or queue is None:
            return None, ""
        if staging == "auto":
            with self._lock:
                faster, why = self._verdicts.get(file_system, (False, "not measured yet"))
            if not faster:
                return None, why
        direct, refusal = self._of(queue)
        if direct is None:
            self.warn(refusal)
        return direct, refusal

    def undecided(self, staging: str, reads: Reads, file_system: int) -> bool:
        """Whether both ways are to be measured for a file system; who is told so does it."""
        if staging != "auto" or not reads.ranges:
            return False
        with self._lock:
            known = file_system in self._verdicts
            self._verdicts.setdefault(file_system, (False, "not measured yet"))
        return not known

    def decide(
        self,
        file_system: int,
        queue: _engine.DeviceQueue,
        seconds: Callable[[Direct | None], float],
    ) -> None:
        """Measures both ways for a file system, once, and keeps the faster.

        Args:
            file_system: its number.
            queue: of the GPU.
            seconds: how long it takes one way.
        """
        direct, why = self._of(queue)
        faster = False
        if direct is not None:
            by_gpu, by_host = [], []
            for _ in range(3):
                if not threading.main_thread().is_alive():
                    return  # a process that ends saves no more
                by_host.append(seconds(None))
                by_gpu.append(seconds(direct))
            refused = direct.backend.fallback_reason()
            faster = sorted(by_gpu)[1] < sorted(by_host)[1] and not refused
            why = refused or (
                f"GPUDirect Storage takes {sorted(by_gpu)[1] / sorted(by_host)[1]:.2f} times what "
                "the way through the host takes, measured here"
            )
        self.note(file_system, faster, why)

    def note(self, file_system: int, faster: bool, why: str) -> None:
        """Keeps a verdict on a file system."""
        with self._lock:
            self._verdicts[file_system] = faster, why
        log.info("staging by %s: %s", "GPUDirect Storage" if faster else "the host", why)

    def _of(self, queue: _engine.DeviceQueue) -> tuple[Direct | None, str]:
        """The blocks of a GPU, or why there are none; made at the first call."""
        with self._lock:
            if self._refusal:
                return None, self._refusal
            try:
                if self._library is None:
                    self._library = self._open(self._path, self._devices.driver())
                if id(queue) not in self._direct:
                    self._direct[id(queue)] = Direct(self._library, queue)
                return self._direct[id(queue)], ""
            except (
                _engine.CufileUnavailable,
                _engine.DeviceUnavailable,
                _engine.DeviceError,
                MemoryError,
            ) as error:
                self._refusal = f"no GPUDirect Storage: {error}"
                return None, self._refusal

    def warn(self, reason: str) -> None:
        """Says once why blocks go through the host that were meant not to."""
        with self._lock:
            new = reason not in self._warned
            self._warned.add(reason)
        if new:
            log.warning("%s; GPUs are copied to the host instead", reason)

    def abandon(self) -> list[object]:
        """Gives up everything without freeing it, which is the caller's to keep from happening."""
        kept: list[object] = [self._library, *self._direct.values()]
        self._library, self._direct, self._refusal = None, {}, "the process has forked, or ends"
        return kept

    def close(self) -> None:
        """Frees blocks and threads; nothing is in flight."""
        with self._lock:
            direct, self._direct = self._direct, {}
            self._library, self._refusal = None, ""
        for each in direct.values():
            each.close()
