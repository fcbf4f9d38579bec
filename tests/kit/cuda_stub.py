"""The stub of the CUDA driver (tests/stubs/cuda.cc): builds it, and steers it from Python.

Responsible for compiling it once and for its functions' types. Must not know what is tested.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.kit import compiler
from tests.kit.paths import TESTS

SOURCE = TESTS / "stubs" / "cuda.cc"
TO_HOST, TO_DEVICE, KERNEL, _RECORD, _WAIT, ON_DEVICE, LAUNCH = range(7)
ALL = -1
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


class Done(ctypes.Structure):
    """An operation that a stream has done; times are the stub's, in microseconds."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("stream", ctypes.c_uint64),
        ("begin_us", ctypes.c_double),
        ("end_us", ctypes.c_double),
        ("nbytes", ctypes.c_uint64),
    )


class Alive(NamedTuple):
    """What callers have made and not freed."""

    contexts: int
    streams: int
    events: int
    pinned_parts: int
    pinned_bytes: int


class Pending(NamedTuple):
    """What streams have held at a time since configure().

    Attributes:
        operations: the most of one stream, a batch of copies as one.
        waited: calls that waited because a stream was full.
    """

    operations: int
    waited: int


class Memory(NamedTuple):
    """Of the device: what callers have taken and not given back."""

    allocations: int
    nbytes: int
    modules: int


def built(directory: Path) -> Path:
    """The library, in a directory."""
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    return compiler.library(directory, "libcuda-stub.so", SOURCE, *flags)


def built_for_others(directory: Path) -> Path:
    """The library with what others ask of a driver: whoever opens libcuda.so.1 is given it, once it
    is loaded.
    """
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    source = SOURCE.with_name("cuda_for_others.cc")
    named = "-Wl,-soname,libcuda.so.1"
    return compiler.library(directory, "libcuda.so.1", source, *flags, named, "-ldl")


class CudaStub:
    """The stub as loaded into this process.

    Attributes:
        path: for those who load it by name.
        real: whether it is a GPU's.
        is_held: whether kernels wait, too, when copies are held.
    """

    real = is_held = False

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.stub_synchronize.restype = ctypes.c_double
        self._library.stub_log.restype = ctypes.c_size_t
        self._library.stub_stream.restype = ctypes.c_void_p
        self.configure()

    def configure(self, latency_us: float = 0, bytes_per_us: float = 0) -> None:
        """What a copy takes; 0 bytes per microsecond: no time. Forgets log, calls and failures."""
        self.hold(False)
        self.capture(False)
        self.miscalculate(False)
        self._library.stub_configure(ctypes.c_double(latency_us), ctypes.c_double(bytes_per_us))

    def fail(
        self, name: str, result: int, *, after: int = 0, times: int = ALL, here: bool = False
    ) -> None:
        """So many calls of a function fail after so many that do not; with `here`, only those that
        the calling thread makes count.
        """
        self._library.stub_fail(name.encode(), after, times, result, int(here))

    def failed(self, name: str) -> int:
        """How many calls of a function failed since fail() was told to let them."""
        return int(self._library.stub_failed(name.encode()))

    @contextlib.contextmanager
    def silent(self, name: str) -> Iterator[Callable[[int], None]]:
        """Calls of a function do not return meanwhile; `with silent(name) as reached`:
        reached(count) waits until there are so many.
        """
        self._library.stub_silence(name.encode(), 1)
        try:
            yield self._library.stub_await_silence
        finally:
            self._library.stub_silence(name.encode(), 0)

    def hold(self, held: bool) -> None:
        """While held, no copy begins."""
        self._library.stub_hold(int(held))

    def capture(self, capturing: bool) -> None:
        """Whether streams say that they are being captured."""
        self._library.stub_capture(int(capturing))

    def miscalculate(self, wrong: bool) -> None:
        """Whether kernels that are launched compute something else."""
        self._library.stub_miscalculate(int(wrong))

    def kernel(self, memory: bytearray, value: int, took_us: float, stream: int = 0) -> None:
        """Queues a kernel that fills memory."""
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        self.kernel_at(ctypes.addressof(buffer), len(memory), value, took_us, stream)

    def kernel_at(
        self, address: int, nbytes: int, value: int, took_us: float, stream: int = 0
    ) -> None:
        """The same, of memory that has this address."""
        self._library.stub_kernel(
            ctypes.c_void_p(stream),
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            value,
            ctypes.c_double(took_us),
        )

    def synchronize(self, stream: int = 0) -> float:
        """Waits for a stream; the time it is at, in microseconds."""
        return float(self._library.stub_synchronize(ctypes.c_void_p(stream)))

    @contextlib.contextmanager
    def streams(self, count: int) -> Iterator[list[int]]:
        """So many streams beside the default one, whose clocks begin at 0."""
        made = [int(self._library.stub_stream()) for _ in range(count)]
        try:
            yield made
        finally:
            for stream in made:
                self._library.stub_stream_free(ctypes.c_void_p(stream))

    def calls(self, name: str) -> int:
        """How often a function was called."""
        return int(self._library.stub_calls(name.encode()))

    def log(self) -> list[Done]:
        """What all streams have done, in the order of its end."""
        count = self._library.stub_log(None, ctypes.c_size_t(0))
        entries = (Done * count)()
        self._library.stub_log(entries, ctypes.c_size_t(count))
        return [*entries]

    def alive(self) -> Alive:
        """What is alive."""
        values = (ctypes.c_uint64 * 5)()
        self._library.stub_alive(values)
        return Alive(*values)

    def pending(self) -> Pending:
        """How full streams were."""
        values = (ctypes.c_uint64 * 2)()
        self._library.stub_pending(values)
        return Pending(*values)

    def memory(self) -> Memory:
        """What is taken of the device."""
        values = (ctypes.c_uint64 * 3)()
        self._library.stub_memory(values)
        return Memory(*values)
