"""Saves that wait where a test wants them, and what a test sees of them."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import io
import logging
import mmap
import os
import platform
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fastckpt
from fastckpt import _engine
from fastckpt.saving import lease

PAGE = mmap.PAGESIZE
WAIT_S = 60.0
USERFAULTFD = {"x86_64": 323, "aarch64": 282}
USER_MODE_ONLY = 1
MISSING_MODE = 1


def _ioctl_number(direction: int, number: int, nbytes: int) -> int:
    return direction << 30 | nbytes << 16 | 0xAA << 8 | number


UFFDIO_API = _ioctl_number(3, 0x3F, 24)


UFFDIO_REGISTER = _ioctl_number(3, 0x00, 32)


UFFDIO_COPY = _ioctl_number(3, 0x03, 40)


class Octets(bytearray):
    """Memory of a tensor that a weak reference can be made to."""


class HeldTensor:
    """A float32 tensor with one page that is missing: whoever reads it there waits for release().

    The page is made missing by userfaultfd(2), so a save that holds this tensor stands still in the
    middle of staging, without knowing it, for as long as a test likes. Nobody who holds the GIL may
    touch elements [begin, end) before release().
    """

    def __init__(self, nbytes: int = 2 << 20, value: float = 3.0) -> None:
        number = USERFAULTFD.get(platform.machine())
        if number is None:
            pytest.skip(f"the number of userfaultfd(2) on {platform.machine()} is not known here")
        libc = ctypes.CDLL(None, use_errno=True)
        self._pid = os.getpid()
        self._fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY)
        if self._fd < 0:
            pytest.skip(f"userfaultfd(2) is refused: {os.strerror(ctypes.get_errno())}")
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, nbytes, flags=private)
        self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._content = mmap.mmap(-1, PAGE, flags=private)
        self._content.write(struct.pack("f", value) * (PAGE // 4))
        offset = nbytes // 2 // PAGE * PAGE
        self.begin, self.end = offset // 4, (offset + PAGE) // 4
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + offset
        self.tensor = torch.frombuffer(self._memory, dtype=torch.float32)
        self.tensor.fill_(value)
        fcntl.ioctl(self._fd, UFFDIO_API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
        missing = struct.pack("QQQQ", self._address, PAGE, MISSING_MODE, 0)
        fcntl.ioctl(self._fd, UFFDIO_REGISTER, bytearray(missing))
        self._memory.madvise(mmap.MADV_DONTNEED, offset, PAGE)

    def wait_reached(self) -> None:
        """Returns once somebody stands at the missing page."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "nobody read the tensor"

    def release(self) -> None:
        """Lets the page arrive, with the tensor's value in it. Repeating it does nothing.

        Nor does a forked child, whose copy of the descriptor still stands for the parent's memory.
        """
        if self._fd < 0 or os.getpid() != self._pid:
            return
        source = ctypes.addressof(ctypes.c_char.from_buffer(self._content))
        arrival = struct.pack("QQQQq", self._address, source, PAGE, 0, 0)
        fcntl.ioctl(self._fd, UFFDIO_COPY, bytearray(arrival))
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> HeldTensor:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def wait_until(
    condition: Callable[[], object], what: str = "it was so", limit_s: float = WAIT_S
) -> None:
    """For what nobody announces: looks again and again."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.001)


def functions_of(thread: threading.Thread) -> list[str]:
    """The names of the functions that another thread is in, the innermost first."""
    stack = _engine.thread_stacks().get(thread.ident or 0, [])
    return [frame.f_code.co_name for frame, _ in stack]


def stands_in(thread: threading.Thread, function: str) -> bool:
    """Whether another thread is somewhere inside a function of this name."""
    return function in functions_of(thread)


@contextmanager
def running(target: Callable[[], None]) -> Iterator[threading.Thread]:
    """A thread that does something meanwhile; its exception becomes the test's."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:  # handed over below, to the thread that can report it
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the thread hangs"
    if errors:
        raise errors[0]


@contextmanager
def interrupted_in(function: str) -> Iterator[None]:
    """The main thread is sent a SIGINT once it stands in a function of this name, which does not
    return before; the KeyboardInterrupt leaves the block, and no other.
    """
    main, over = threading.main_thread(), threading.Event()

    def interrupt() -> None:
        wait_until(lambda: over.is_set() or stands_in(main, function), f"{function}() is called")
        if not over.is_set():
            signal.pthread_kill(main.ident, signal.SIGINT)

    with running(interrupt), pytest.raises(KeyboardInterrupt):
        try:
            yield
        finally:
            over.set()


def warnings_in(records: Iterable[logging.LogRecord]) -> list[logging.LogRecord]:
    """Those that are warnings, without what a machine that is short of rings says at any time."""
    return [
        record
        for record in records
        if record.levelno >= logging.WARNING and "backend" not in record.msg
    ]


def temporaries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix == ".tmp"]


def saving_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    # A connection to a store that is dead may be tried for minutes, by a daemon.
    return [name for name in names if "fastckpt" in name and name != "fastckpt-store"]


def give_up_leases() -> None:
    """Gives up the leases of directories that this process has, each of which has a thread."""
    for directory in [*lease._of_directories]:
        lease.give_up(directory)


def let_others_end() -> None:
    """Waits for the saves of earlier tests, and frees what they left: memory is measured next."""
    wait_until(lambda: not saving_threads(), "the saves of other tests are over")
    gc.collect()


@pytest.fixture(autouse=True)
def every_test_settles(disk: Path) -> Iterator[None]:
    """No save outlives its test, and no failure that nobody asked for meets the next one."""
    yield
    give_up_leases()
    wait_until(lambda: not saving_threads(), "the saves of the test are over")
    for _ in range(100):
        try:
            fastckpt.save(None, io.BytesIO())
            return
        except fastckpt.CheckpointError:
            continue
    pytest.fail("a failed save is raised again and again")
