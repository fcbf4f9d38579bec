"""A transfer that a server holds up, or refuses for now, delays no other: real files that the
kernel refuses to write for a while, through each backend, and files of several mounts.
"""

from __future__ import annotations

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
from fastckpt.storage.file_system import Storage
from tests.engine.test_engine import (
    PAGE,
    WAIT_S,
    Backend,
    backend,
    engine_of,
    opened,
    plain,
    start,
    written,
)

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
        fds.append(storage.scratch())
        stack.callback(storage.close, fds[2])
        fds.append(stack.enter_context(opened(Path("/dev/null"), os.O_RDWR)))
        first, second, other, beyond = [
            made.route(fd, "a", requested, writing=False).backend for fd in fds
        ]
    assert first is second and other is not first
    assert beyond is other, "mounts beyond the bound share backends"
