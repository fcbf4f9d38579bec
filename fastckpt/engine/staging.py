"""The staging resources of one process: the engine with its budget and threads, the backends, the
choice of a file's route, and the hook that makes optimizers wait. It must not know formats or
commits.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastckpt import _engine
from fastckpt.arguments import environment
from fastckpt.arguments.environment import is_first_on_machine
from fastckpt.engine.devices import Devices, DeviceSources
from fastckpt.engine.gds import BLOCKS, Gds, GdsDevice
from fastckpt.engine.read_stream import EngineReadStream
from fastckpt.errors import BackendUnavailable, CheckpointError
from fastckpt.latch import items_of
from fastckpt.plan.boxes import CopyRow
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.calls import Call
from fastckpt.storage.file_system import PATIENCE_S, Storage, reported
from fastckpt.storage.input_files import InputFile, PosixFile
from fastckpt.storage.machine import memory_left_bytes
from fastckpt.storage.object_upload import CONCURRENCY, FD_MIN, Upload
from fastckpt.storage.objects import WHY, ObjectFile
from fastckpt.storage.policies import Policy


def default_budget_bytes() -> int:
    """Returns $FASTCKPT_STAGING_BYTES, or, if it is not set, half of the memory available to this
    process now, divided by a launcher's number of ranks on the machine. The default is at most half
    of the free address space, since threads also need some.
    """
    nbytes = environment.staging_bytes(least=BLOCK_BYTES)
    if nbytes is None:
        nbytes = memory_left_bytes() // 2 // environment.launched_on_machine()
    return max(BLOCK_BYTES, min(nbytes, _address_space_left_bytes() // 2))


def _address_space_left_bytes() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    with open("/proc/self/statm", encoding="ascii") as file:
        return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())


# ---- The way of staged elements into a file that several ranks write together: the engine converts
# them to their dtype there, and writes them where they belong.

# csrc/cast/cast.h has the numbers; those before these are of items that are not converted.
_FLOATS = {
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 6,
    torch.float16: 7,
    torch.bfloat16: 8,
    torch.float32: 9,
    torch.float64: 10,
}
_E4M3_FINITE = 5


class Elements(NamedTuple):
    """A run of one tensor's elements that a rank writes, contiguous in its image.

    Attributes:
        nbytes: their size in the image.
        held, stored: their dtypes in memory and in the file.
        offset: the offset of their tensor in the file.
        rows: the result of boxes.copies(), in elements of the tensor and of this run; all rows have
            the same number of runs, length and strides.
    """

    nbytes: int
    held: torch.dtype
    stored: torch.dtype
    offset: int
    rows: Sequence[CopyRow]


class Scatterer:
    """Writes the blocks of an image, one rank's part of a file, to their positions in the file.

    Args:
        nbytes: the size of the file.
        elements: the runs that form the image, in order. No element crosses a block's end.

    Attributes:
        of_engine: the engine's object, which receives each block.
    """

    def __init__(self, nbytes: int, elements: Sequence[Elements]) -> None:
        table, starts, begin = array("Q"), array("Q"), 0
        for each in elements:
            _element, _first, size, count, stride, _step = each.rows[0]
            numbers = number_of(each.held), number_of(each.stored)
            end = begin + each.nbytes
            table.extend((begin, end, *numbers, len(starts), size, count, stride))
            itemsize = each.stored.itemsize
            starts.extend(each.offset + row[0] * itemsize for row in each.rows)
            begin = end
        self.of_engine = _engine.Scatterer(nbytes, table, starts)

    def written(self) -> tuple[int, int]:
        """Returns how many bytes were written, and their contribution to the file's CRC-32."""
        return self.of_engine.written()

    def lossy(self) -> set[int]:
        """Returns the numbers of the runs with finite values that became infinite or NaN."""
        return self.of_engine.lossy()

    def whole_page(self) -> int | None:
        """Returns the offset in the file of a page that only this rank writes, if writes without
        the page cache are worthwhile.
        """
        return self.of_engine.whole_page()


def number_of(dtype: torch.dtype) -> int:
    """Returns the engine's number of a dtype."""
    if dtype == torch.float8_e4m3fn and _is_finite():
        return _E4M3_FINITE
    return _FLOATS.get(dtype, dtype.itemsize.bit_length() - 1)


@cache
def _is_finite() -> bool:
    """Whether torch converts values too large for E4M3 to its largest number, not to NaN."""
    large = torch.tensor([1e9], dtype=torch.float32, device="cpu")
    return not bool(large.to(torch.float8_e4m3fn).to(torch.float32).isnan())


@dataclass
class _Held:
    """The unfinished transfers to one descriptor, and the contexts to leave after them."""

    transfers: list[Callable[[], bool]] = field(default_factory=list)
    files: ExitStack | None = None


class HungTransfers:
    """The hung transfers of one process. Their blocks remain taken from the staging budget."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}  # by descriptor

    def add(self, fd: int, has_returned: Callable[[], bool]) -> None:
        """Keeps a transfer to fd until has_returned() is true. A thread has a negative fd."""
        with self._lock:
            self._held.setdefault(fd, _Held()).transfers.append(has_returned)

    def take_over(self, fd: int, files: ExitStack) -> bool:
        """Takes over the contexts that close fd, if there is a transfer to it; returns whether it
        did. If fd were closed and its number reused, the transfer would write to another file.
        """
        with self._lock:
            entry = self._held.get(fd)
            if entry is not None:
                entry.files = files.pop_all()
            return entry is not None

    def sweep(self) -> bool:
        """Leaves, like after an error, the contexts of files whose transfers have all returned.
        Returns whether no transfer hangs any more.
        """
        with self._lock:
            done = {
                fd: held
                for fd, held in self._held.items()
                if all([has_returned() for has_returned in held.transfers])
            }
            for fd in done:
                del self._held[fd]
            is_empty = not self._held
        for held in done.values():
            if held.files is not None:
                error = CheckpointError("the save of this file was abandoned")
                with suppress(OSError, CheckpointError):  # what stays is removed as debris
                    held.files.__exit__(CheckpointError, error, None)
        return is_empty


log = logging.getLogger("fastckpt")

# The extension's errors if address space is short (ulimit -v), or threads (ulimit -u).
_LIMITS = (MemoryError, RuntimeError)
_RAISE_LIMITS = (
    "raise the limits of the process (ulimit -v, ulimit -u), or set FASTCKPT_STAGING_BYTES to a "
    "lower value"
)

QUEUE_DEPTH = 16
WINDOW_BLOCKS = 16  # how far a load reads ahead of torch, at most
IO_THREADS = 4
MOUNTS_MAX = 8  # with backends of their own; those met later share the last one's
STAGERS_MAX = 4
_WARM_BYTES = 64 << 20  # at a time


class Fenced(Protocol):
    """A save for whose copies the steps of optimizers wait."""

    def done(self) -> bool:
        """Returns whether it has ended."""

    def before_step(self) -> bool:
        """Waits until its state may be changed; returns whether everything is copied."""


class Route(NamedTuple):
    """How one file is read or written: the backend, or an object that uses its threads for this
    file only; whether O_DIRECT is used; and the reason.
    """

    sink: _engine.Sink
    direct: bool
    why: str
    patience_s: float = 0.0  # for how long a write that a server refuses is tried again
    bucket: _engine.TokenBucket | None = None  # limits the rate
    refusal: Callable[[], str] | None = None  # says why a write failed; None: the storage does
    ahead: int = WINDOW_BLOCKS  # how many blocks a load reads ahead


class Staging:
    """The engine of one process with its backends, GPUs and step fence. close() frees all of it.

    Args:
        storage: the access to the file system; also an attribute, like `hung`.
        budget_bytes: the limit of staging memory; default: $FASTCKPT_STAGING_BYTES, else half of
            the memory available when the first save begins.
        devices: the GPUs whose memory is copied in parallel with computation.
        gds: GPUDirect Storage for those GPUs.
    """

    def __init__(
        self,
        storage: Storage,
        budget_bytes: int | None = None,
        devices: Devices | None = None,
        gds: Gds | None = None,
    ) -> None:
        self.devices = devices or Devices()
        self.gds = gds or Gds(self.devices)
        self.storage = storage
        self.hung = HungTransfers()
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        # State below is protected by _lock.
        self._engine: _engine.Engine | None = None
        self._backends: dict[tuple[str, int], _engine.Backend] = {}  # by kind and mount
        self._mounts: dict[int, int] = {}  # their numbers, by device
        self._uring_refusal: str | None = None
        self._logged: set[tuple[str, str]] = set()
        self._warm_bytes = 0
        self._warms_pinned = False
        self._abandoned = False
        self._unstaged: dict[Fenced, None] = {}
        self._hook: Any = None

    def engine(self) -> _engine.Engine:
        """Returns the engine; the first call creates it. Its arena takes memory only when used."""
        engine = self._engine
        if engine is not None:
            return engine
        with self._lock:
            if self._abandoned:
                raise CheckpointError(
                    "nothing can be staged, because the interpreter is exiting or was forked"
                )
            if self._engine is None:
                self._engine = self._new_engine()
            return self._engine

    def _new_engine(self) -> _engine.Engine:
        """Makes an engine with the whole budget, or as much as the process's limits allow."""
        budget = self._budget_bytes or default_budget_bytes()
        # At least two, since one may sleep until a device has copied.
        stagers = max(2, stager_count())
        while True:
            try:
                return _engine.Engine(budget, BLOCK_BYTES, stagers)
            except _LIMITS as error:
                is_least = self._budget_bytes is not None or budget <= BLOCK_BYTES
                if is_least and stagers == 2:
                    raise CheckpointError(
                        f"cannot reserve {budget} bytes of address space for staging, or start "
                        f"{stagers} threads for copies ({error}): {_RAISE_LIMITS}"
                    ) from error
                stagers = max(2, stagers // 2)
                if not is_least:
                    budget //= 2

    def allowance(self, staging_bytes: int | None) -> Allowance:
        """Returns one save's allowance of at least one block; None: the whole budget."""
        blocks = self.engine().arena_blocks
        return Allowance(
            blocks if staging_bytes is None else min(blocks, staging_bytes // BLOCK_BYTES)
        )

    def route(
        self,
        fd: int,
        path: str,
        requested: str,
        *,
        writing: bool,
        offset: int | None = 0,
    ) -> Route:
        """Chooses backend and O_DIRECT for an open file by its file system's policy, by a probe,
        and by the caller's request.

        Args:
            path: the file's path, for messages.
            requested: the backend in SaveOptions.
            offset: the offset of the page that the probe reads or, if `writing`, fills with zeros;
                None if O_DIRECT is known to work.

        Raises:
            BackendUnavailable: `requested` names a backend that does not work here.
            StorageError: the probe failed for another reason than a refusal of O_DIRECT.
        """
        direct, why, policy = self._direct(fd, path, requested, writing, offset)
        patience_s = PATIENCE_S if policy.remote else 0.0
        # A few blocks keep a local disk busy, and files with many blocks in flight delay each other
        # (measured in docs/project/dlio.md).
        ahead = 2 + 2 * stager_count() if direct and not policy.remote else WINDOW_BLOCKS
        choice = policy.backend if requested == "auto" else requested
        if requested != "auto":
            why = f"{why}; backend {requested!r} was requested"
        if requested == "auto" and not direct:
            choice = "threads"  # io_uring hands buffered transfers to kernel workers anyway
        if choice == "io_uring":
            ring = self._uring_backend(self._mount(fd))
            if not isinstance(ring, str):
                return self._decided(Route(ring, direct, why, patience_s, ahead=ahead), path)
            if requested == "io_uring":
                raise BackendUnavailable(f"backend 'io_uring' does not work here: {ring}")
            why = f"{why}; but {ring}"
        count = IO_THREADS if writing else policy.readers
        threads = self._threads(f"{count} threads", fd, count)
        return self._decided(Route(threads, direct, why, patience_s, ahead=ahead), path)

    def input_route(self, file: InputFile) -> Route:
        """Chooses the route for reading a file; raises like route()."""
        if not isinstance(file, ObjectFile):
            return self.route(file.fd, file.path, "auto", writing=False)
        sink = _engine.callback_sink(self._object_threads(), file.transfer)
        return self._decided(Route(sink, False, WHY), file.path)

    def upload_route(self, upload: Upload, requested: str) -> Route:
        """Returns the route for writing an object. Raises BackendUnavailable."""
        if requested == "io_uring":
            raise BackendUnavailable("backend 'io_uring' is for files, but this is an object")
        sink = upload.sink(self._object_threads())
        return self._decided(Route(sink, False, WHY, refusal=upload.refusal), upload.path)

    def _object_threads(self) -> _engine.Backend:
        return self._backend("objects", 0, lambda: _engine.threads_backend(CONCURRENCY))

    def _direct(
        self, fd: int, path: str, requested: str, writing: bool, offset: int | None
    ) -> tuple[bool, str, Policy]:
        """Sets O_DIRECT on an open file if this is better; returns whether it is set, the reason,
        and the policy of the file system. For Args see route().
        """
        with reported("open", path):
            name, policy = self.storage.policy(fd)
        direct, why = policy.direct, f"{name}: {policy.text() if writing else policy.why}"
        if policy.direct_if_asked and writing and requested == "io_uring":
            direct = True
        if direct:
            cached_max = 1.0 if writing else 0.5
            with reported("write" if writing else "read", path, offset or 0):
                refusal = self.storage.set_direct(
                    fd, writing=writing, offset=offset, cached_max=cached_max
                )
            if refusal is not None:
                direct, why = False, f"{why}; {refusal}"
        return direct, why, policy

    def through(
        self,
        fd: int,
        transfer: Callable[[str, int, memoryview, int], int],
        refusal: Callable[[], str] | None = None,
    ) -> Route:
        """Returns a route that passes the blocks of the file with this descriptor to a function.

        Args:
            transfer: (kind, fd, memory, offset) -> bytes moved; called by several threads at the
                same time, for different blocks.
            refusal: see Route.
        """
        sink = _engine.callback_sink(self._threads("codecs", fd, stager_count()), transfer)
        return Route(sink, False, "buffered, through Python", refusal=refusal)

    def scatter_route(self, fd: int, path: str, scatterer: Scatterer, closing: ExitStack) -> Route:
        """Returns a route by which a scatterer writes the blocks of fd.

        Args:
            path: the file's path, for messages.
            closing: a context that is left after the last write.

        Raises:
            StorageError: the file cannot be opened again; or see route().
        """
        page, direct, buffered = scatterer.whole_page(), False, None
        why, policy = "buffered: no page belongs to this rank alone", self.storage.policy(fd)[1]
        if page is not None:
            direct, why, policy = self._direct(fd, path, "auto", True, page)
        if direct:
            # Pages that others write to, too, need a descriptor without O_DIRECT.
            with reported("open", path):
                buffered = self.storage.open(fd, "write")
            closing.callback(close_quietly, self.storage, buffered)
        # Its threads wait for the disk most of the time: as many writes are under way as of a ring.
        threads = self._threads("scattered writes", fd, QUEUE_DEPTH)
        sink = _engine.ScatterSink(threads, scatterer.of_engine, buffered)
        return Route(sink, direct, why, PATIENCE_S if policy.remote else 0.0)

    def _threads(self, kind: str, fd: int, count: int) -> _engine.Backend:
        """Returns the thread pool for this kind of work on an open file's mount."""
        return self._backend(kind, self._mount(fd), lambda: _engine.threads_backend(count))

    def _decided(self, route: Route, path: str) -> Route:
        """Logs a route when it is first used; at INFO only on the first rank of a machine, since
        all ranks choose the same.
        """
        text = f"{route.sink.name}, {'direct' if route.direct else 'buffered'}"
        with self._lock:
            new = (text, route.why) not in self._logged
            self._logged.add((text, route.why))
        if new:
            level = logging.INFO if is_first_on_machine() else logging.DEBUG
            log.log(level, "using %s for %r and similar files: %s", text, path, route.why)
        return route

    def _mount(self, fd: int) -> int:
        """Returns the number of an open file's mount. Each mount has its own backends, which are
        created when first needed, so that a server that does not respond delays no transfers to
        other mounts.
        """
        if fd >= FD_MIN:
            return MOUNTS_MAX  # of the objects of all stores
        with Call("status", fd):
            device = os.fstat(fd).st_dev
        with self._lock:
            if len(self._mounts) < MOUNTS_MAX:
                self._mounts.setdefault(device, len(self._mounts))
            return self._mounts.get(device, MOUNTS_MAX - 1)

    def _uring_backend(self, mount: int) -> _engine.Backend | str:
        """Returns the mount's ring, or the reason why there is none on any mount."""
        key = "io_uring", mount
        with self._lock:
            if self._uring_refusal is None and key not in self._backends:
                try:
                    self._backends[key] = _engine.uring_backend(QUEUE_DEPTH)
                except (_engine.BackendUnavailable, *_LIMITS) as error:
                    self._uring_refusal = str(error)
                    level = logging.WARNING if is_first_on_machine() else logging.DEBUG
                    log.log(level, "falling back to backend 'threads': %s", error)
            return self._backends.get(key) or str(self._uring_refusal)

    def _backend(
        self, kind: str, mount: int, make: Callable[[], _engine.Backend]
    ) -> _engine.Backend:
        key = kind, mount
        with self._lock:
            if key not in self._backends:
                try:
                    self._backends[key] = make()
                except _LIMITS as error:
                    raise CheckpointError(
                        f"cannot start threads for reads and writes ({error}): {_RAISE_LIMITS}"
                    ) from error
            return self._backends[key]

    def read(
        self,
        file: InputFile,
        nbytes: int,
        block_bytes: int,
        crcs: tuple[int, ...],
        wanted: Sequence[int] = (),
        route: Route | None = None,
        direct: GdsDevice | None = None,
    ) -> EngineReadStream:
        """Begins to read [0, nbytes) of a file; verifies the blocks if there are checksums.

        Args:
            crcs: every block's CRC-32, or empty.
            wanted: the numbers of the blocks that will be requested, ascending; default: all.
            route: the route, which uses the descriptor of `file`, so that `file` must stay open;
                default: chosen here.
            direct: the GPU to which all blocks are read; the blocks then have BLOCK_BYTES.
        """
        with ExitStack() as opened:
            if direct is not None or route is None:
                file = self.own(file, opened, direct is not None)
            if direct is not None:
                stream = self._read_direct(file, nbytes, crcs, wanted, direct)
                opened.pop_all()
                return stream
            if route is None:
                route = self.input_route(file)
            engine, own = self.engine(), None
            if block_bytes != engine.block_bytes:  # blocks of another size need their own arena
                window_blocks = min(WINDOW_BLOCKS, -(-nbytes // block_bytes))
                window_blocks = min(
                    window_blocks, engine.arena_blocks * engine.block_bytes // block_bytes
                )
                arena_bytes = max(1, window_blocks) * block_bytes
                engine = own = _engine.Engine(arena_bytes, block_bytes, stager_count())
            window = max(1, min(route.ahead, engine.arena_blocks // 2))
            of_engine = engine.read(
                file.fd, nbytes, list(crcs), route.sink, route.direct, window, list(wanted)
            )
            return EngineReadStream(of_engine, own, opened.pop_all().close, self.devices.text)

    def own(self, file: InputFile, closing: ExitStack, must_be: bool = False) -> InputFile:
        """Returns an open file on which O_DIRECT may be set. This is a second open of the file,
        which `closing` closes, because O_DIRECT must not be set on the caller's; or `file` itself
        if O_DIRECT is not tried.
        """
        storage = self.storage
        if isinstance(file, PosixFile):
            with reported("open", file.path):
                if must_be or storage.policy(file.fd)[1].direct:
                    file = PosixFile(storage, storage.open(file.fd), file.path)
                    closing.callback(file.close)
        return file

    def _read_direct(
        self,
        file: InputFile,
        nbytes: int,
        crcs: tuple[int, ...],
        wanted: Sequence[int],
        direct: GdsDevice,
    ) -> EngineReadStream:
        """Begins to read to a GPU, through blocks that saves and another stream also use."""
        with reported("read", file.path):
            refusal = self.storage.set_direct(file.fd, writing=False)

        sink, mode = direct.begin_file(file.fd)

        def close() -> None:
            _nbytes, _through_host, reason = direct.end_file(sink)
            if reason:
                self.gds.warn(reason)
            file.close()

        stream = None
        try:
            log.info("reading %r by %s", file.path, mode)
            is_direct, ahead = refusal is None, BLOCKS // 2
            stream = self.engine().read(
                file.fd, nbytes, list(crcs), sink, is_direct, ahead, list(wanted), direct.stage
            )
            return EngineReadStream(stream, None, close, self.devices.text)
        except BaseException:  # the caller closes fd, whose number may become another file's
            if stream is not None:
                stream.close()
            direct.end_file(sink)
            raise

    def warm(self, nbytes: int, reads: DeviceSources) -> None:
        """Allocates memory for nbytes of the arena before a save, pinned if `reads` has devices.

        Saves reuse blocks before they use new ones. So without this call, the second and third save
        would also wait for new memory pages, like the first.
        """
        with self._lock:
            engine = self._engine
            if engine is None:
                return  # it was closed meanwhile
            end = min(nbytes, engine.arena_blocks * BLOCK_BYTES)
            pinner = reads.ranges[0].queue if reads.ranges else None
            if pinner is not None and not self._warms_pinned:
                self._warm_bytes, self._warms_pinned = 0, True
            begin, self._warm_bytes = self._warm_bytes, max(end, self._warm_bytes)
        for at in range(begin, end, _WARM_BYTES):
            # An exiting process saves no more; a device that has refused to pin will do so again.
            exiting = not threading.main_thread().is_alive()
            if exiting or not engine.prefault(at, min(end, at + _WARM_BYTES), 1, pinner):
                return

    def fence_next_step(self, save: Fenced) -> None:
        """Makes steps of all torch optimizers in this process wait for the copies of a save."""
        # This takes no lock, since a signal handler may raise here, or save.
        for earlier, _ in items_of(self._unstaged):
            if earlier.done():
                self._unstaged.pop(earlier, None)
        self._unstaged[save] = None
        # The training thread registers it, and no other thread removes it: torch iterates over its
        # hooks without a lock.
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._wait_before_step)

    def _wait_before_step(self, *_: object) -> None:
        # Handles stay until they are staged: other optimizers may step on other threads.
        for save, _none in items_of(self._unstaged):
            if save.before_step():
                self._unstaged.pop(save, None)

    def abandon(self) -> None:
        """Drops all references without freeing anything, because a forked child lacks the threads,
        and at exit a daemon thread may still use the engine.
        """
        objects = [
            self._engine,
            self.hung,
            *self._backends.values(),
            *self.gds.abandon(),
            *self.devices.abandon(),
        ]
        for thing in objects:  # or destructors would wait for threads that do not exist here
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        self._engine, self._backends, self._unstaged = None, {}, {}
        self._abandoned = True
        if self._hook is not None:
            self._hook.remove()

    def close(self) -> None:
        """Waits for transfers and frees threads, rings and the arena, except those that the kernel
        still uses for hung transfers.
        """
        if not self.hung.sweep():
            log.warning(
                "requests that abandoned saves made to a server have not returned, and keep "
                "memory, threads and files"
            )
            self.abandon()
            return
        with self._lock:
            engine, self._engine = self._engine, None
            backends, self._backends = self._backends, {}
            self._mounts = {}
            hook, self._hook = self._hook, None
            self._warm_bytes, self._warms_pinned = 0, False
        if hook is not None:
            hook.remove()
        if engine is not None:
            engine.close()
        for backend in backends.values():
            backend.close()
        self.gds.close()
        self.devices.close()


Allowance = _engine.Allowance
combine_crcs = _engine.crc32_combine  # (crc of a, crc of b, len(b)) -> crc of a + b
crc32 = _engine.crc32  # (data, crc of what is before it) -> crc
crc32_kernel = _engine.crc32_kernel  # () -> name of the fastest one on this CPU


def stager_count() -> int:
    """Returns the number of copying threads: one per usable CPU, at most STAGERS_MAX."""
    return min(STAGERS_MAX, len(os.sched_getaffinity(0)))
