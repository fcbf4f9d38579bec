"""A transfer that a server holds up, or refuses for now, delays no other: real files that the
kernel refuses to write for a while, through each backend, and files of several mounts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fastckpt import _engine
from fastckpt.engine import staging
from fastckpt.engine.staging import Staging
from fastckpt.storage.file_system import Storage, scratch
from tests.kit.engines import (
    PAGE,
    POOL,
    WAIT_S,
    Backend,
    Plan,
    backend,
    callback_backend,
    engine_of,
    opened,
    plain,
    start,
    written,
)
from tests.kit.saves import wait_until

__all__ = ["backend"]
CREATE = os.O_RDWR | os.O_CREAT
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10


@contextmanager
def immutable(fd: int) -> Iterator[None]:
    """Has the kernel refuse writes to a file with EPERM while the body runs."""
    flags = array("l", [0])
    try:
        fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
        before = array("l", flags)
        flags[0] |= FS_IMMUTABLE_FL
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags)
    except OSError as error:
        pytest.skip(f"files cannot be made immutable here: {error}")
    try:
        os.pwrite(fd, b"x", 0)
        pytest.skip("this file system lets immutable files be written to")
    except PermissionError:
        yield
    finally:
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, before)


def os_pwrite(kind: str, fd: int, memory: memoryview, offset: int) -> int:
    return os.pwrite(fd, memory, offset)


def refused_job(engine: _engine.Engine, fd: int, backend: Backend, count: int) -> _engine.WriteJob:
    """Begins to write `count` pages, which may be refused for WAIT_S."""
    segments, slots = plain(count * PAGE).columns()
    job = engine.stage(segments, slots, _engine.Allowance(count), 2)
    job.write_to(fd, 0, backend, False, WAIT_S)
    assert job.wait_staged(WAIT_S)
    return job


def test_writes_that_are_refused_for_now_delay_no_other(backend: Backend, disk: Path) -> None:
    """There are more of them than the backend has threads, or its ring places."""
    with ExitStack() as stack:
        engine = stack.enter_context(engine_of(20))
        refused = stack.enter_context(opened(disk / "refused", CREATE))
        other = stack.enter_context(opened(disk / "other", CREATE))
        with immutable(refused):
            job = refused_job(engine, refused, backend, 12)
            written(start(engine, other, plain(5 * PAGE, 3), backend))
            assert job.nbytes_written() == 0 and not job.wait_written(0)
        written(job)
    assert (disk / "other").read_bytes() == plain(5 * PAGE, 3).render()[0]
    assert (disk / "refused").read_bytes() == plain(12 * PAGE).render()[0]


def test_a_backend_closes_only_after_what_was_refused(disk: Path) -> None:
    ended = threading.Event()
    with engine_of(4) as engine, opened(disk / "refused", CREATE) as fd:
        own = _engine.threads_backend(1)
        with immutable(fd):
            job = refused_job(engine, fd, own, 4)
            closing = threading.Thread(target=lambda: (own.close(), ended.set()))
            closing.start()
            assert not ended.wait(0.05)
        closing.join(WAIT_S)
        assert ended.is_set()
        written(job)


@pytest.mark.parametrize("requested", ["auto", "threads"])
def test_each_mount_has_backends_of_its_own(
    requested: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MOUNTS_MAX", 2)
    storage = Storage()
    made = Staging(storage, 1 << 20)
    with ExitStack() as stack:
        stack.callback(made.close)
        fds = [stack.enter_context(opened(disk / name, CREATE)) for name in "ab"]
        fds.append(scratch())
        stack.callback(storage.close, fds[2])
        fds.append(stack.enter_context(opened(Path("/dev/null"), os.O_RDWR)))
        first, second, other, beyond = [
            made.route(fd, "a", requested, writing=True, offset=None).sink for fd in fds
        ]
    assert first is second and other is not first
    assert beyond is other, "mounts beyond the bound share backends"


# Writes that never return.


@contextmanager
def full_pipe() -> Iterator[int]:
    """Yields a descriptor of which writes do not return: nobody reads what is in the pipe."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writer, bytes(PAGE))
        os.set_blocking(writer, True)
        yield writer
    finally:
        os.close(writer)
        os.close(reader)


def test_a_job_that_is_given_up_gives_back_what_no_thread_has_begun(disk: Path) -> None:
    """The write that the only thread is in keeps its block until it returns."""
    begun, released = threading.Event(), threading.Event()

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        begun.set()
        assert released.wait(WAIT_S)
        return os.pwrite(fd, memory, offset)

    with ExitStack() as stack:
        own = stack.enter_context(callback_backend(transfer))
        engine = stack.enter_context(engine_of(8))
        fd = stack.enter_context(opened(disk / "hangs", CREATE))
        stack.callback(released.set)
        job = start(engine, fd, plain(6 * PAGE), own, offset=PAGE)
        assert job.wait_staged(WAIT_S) and begun.wait(WAIT_S)
        assert not job.wait_written(0.01)
        seconds, writing, offset = job.standstill()
        assert seconds > 0 and writing and offset == PAGE
        job.cancel()
        assert engine.arena_blocks_in_use() == 6, "what was submitted may still succeed"
        job.give_up()
        assert engine.arena_blocks_in_use() == 1 and not job.wait_written(0)
        assert job.failure() == ("write", PAGE, errno.ECANCELED)
        released.set()
        assert job.wait_written(WAIT_S) and engine.arena_blocks_in_use() == 0
        assert job.standstill() == (0.0, False, 0)


@pytest.mark.uring
def test_the_kernel_cancels_writes_of_a_ring_that_can_be_cancelled() -> None:
    try:
        ring = _engine.uring_backend(2)
    except _engine.BackendUnavailable as error:
        pytest.skip(str(error))
    with engine_of(8) as engine, full_pipe() as fd:
        job = start(engine, fd, plain(5 * PAGE), ring)
        assert job.wait_staged(WAIT_S) and not job.wait_written(0.01)
        job.give_up()
        assert job.wait_written(WAIT_S)
        assert job.failure() == ("write", 0, errno.ECANCELED)
    ring.close()


def test_who_waits_for_memory_that_others_hold_stands_still(disk: Path) -> None:
    """But not while the others wait for tokens, or get on."""
    released = threading.Event()

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert released.wait(WAIT_S)
        return os.pwrite(fd, memory, offset)

    with ExitStack() as stack:
        hanging = stack.enter_context(callback_backend(transfer))
        sound = stack.enter_context(callback_backend(os_pwrite))
        engine = stack.enter_context(engine_of(2))
        fd = stack.enter_context(opened(disk / "hangs", CREATE))
        stack.callback(released.set)
        holder = start(engine, fd, plain(2 * PAGE), hanging)
        assert holder.wait_staged(WAIT_S)
        job = start(engine, fd, plain(PAGE), sound, offset=2 * PAGE)
        wait_until(lambda: job.standstill()[0] > 0, "the job is seen to wait")
        assert job.standstill()[1:] == (False, 0)
        released.set()
        written(job)
        written(holder)


# Writes at a pace.


def test_paced_writes_go_on_while_there_is_always_something_to_stage(disk: Path) -> None:
    """The engine has one thread, and never rests before the paced job has ended."""
    ahead, jobs_max = 3, 200
    large = Plan()
    for _ in range(20):
        large.add(len(POOL) - 1, 0)
    columns, blocks = large.columns(), 20 * len(POOL) // PAGE + 1
    with ExitStack() as stack:
        own = stack.enter_context(callback_backend(os_pwrite))
        engine = stack.enter_context(engine_of((ahead + 1) * blocks, stagers=1))
        fd = stack.enter_context(opened(disk / "paced", CREATE))
        segments, slots = plain(16 * PAGE).columns()
        paced = engine.stage(segments, slots, _engine.Allowance(16), 1)
        bucket = _engine.TokenBucket(PAGE * 10_000.0, PAGE)  # a page takes 0.1 ms
        staging: list[_engine.WriteJob] = []
        for number in range(jobs_max):
            staging.append(engine.stage(*columns, _engine.Allowance(blocks), 1))
            if number == ahead - 1:
                paced.write_to(fd, 0, own, False, 0.0, bucket)
            if len(staging) == ahead:
                job = staging.pop(0)
                assert job.wait_staged(WAIT_S)
                job.cancel()
            if number >= ahead and paced.wait_written(0):
                break
        for job in staging:
            job.cancel()
        assert paced.wait_written(0), "it starved while other jobs were staged"
        assert paced.failure() is None
    assert (disk / "paced").read_bytes() == plain(16 * PAGE).render()[0]
