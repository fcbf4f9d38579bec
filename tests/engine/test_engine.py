"""The engine by itself: blocks from memory to a file and back, against a rendering in plain Python.

Blocks are small here, so that segments, slots and blocks cross in every way. Knows fastckpt._engine
and real files; must not know formats or tensors. What may hang or end the process runs in a process
of its own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import inspect
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.engine.staging import Staging
from fastckpt.plan.image import address_of
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import PosixFile
from tests.kit.engines import (
    BLOCK_SIZES,
    PAGE,
    POOL,
    POOL_ADDRESS,
    WAIT_S,
    Backend,
    Engine,
    Plan,
    backend,
    callback_backend,
    crcs_of,
    engine_of,
    opened,
    piece_sizes,
    plain,
    plans,
    relaxed,
    start,
    write,
    written,
)
from tests.kit.programs import run_python
from tests.kit.saves import let_others_end, wait_until
from tests.kit.storm import Chance

__all__ = ["backend"]  # a fixture


@contextmanager
def stream_of(
    engine: Engine,
    fd: int,
    nbytes: int,
    crcs: list[int],
    backend: Backend,
    *,
    direct: bool = False,
    window: int,
) -> Iterator[_engine.ReadStream]:
    stream = engine.read(fd, nbytes, crcs, backend, direct, window)
    try:
        yield stream
    finally:
        stream.close()


@pytest.fixture
def closed_fd() -> int:
    """A number that no open file has."""
    with open("/dev/null", "rb") as file:
        fd = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 700)
    os.close(fd)
    return fd


# ---- Plans: segments and slots, and the bytes they stand for ----


# ---- Writing ----


def check_written(
    path: Path,
    engine: Engine,
    backend: Backend,
    plan: Plan,
    *,
    offset: int,
    direct: bool,
    limit: int,
    stagers: int,
) -> None:
    """Writes a plan and compares the file and every checksum with the rendering."""
    expected, slot_crcs = plan.render()
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    with opened(path, flags) as fd:
        job = start(
            engine, fd, plan, backend, offset=offset, direct=direct, limit=limit, stagers=stagers
        )
        written(job)
    content = path.read_bytes()
    padding = -len(expected) % PAGE if direct else 0
    assert content == bytes(offset) + expected + bytes(padding)
    assert job.block_crcs() == crcs_of(expected, engine.block_bytes)
    assert job.slot_crcs() == slot_crcs
    assert job.nbytes_written() == len(expected)
    assert 1 <= job.blocks_held_max() <= limit
    assert engine.arena_blocks_in_use() == 0


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@settings(relaxed, max_examples=Chance.examples(10))
@given(data=st.data(), blocks=st.integers(1, 6), stagers=st.sampled_from([1, 4]))
def test_written_file_is_the_rendering(
    backend: Backend,
    disk: Path,
    direct: bool,
    block_bytes: int,
    data: st.DataObject,
    blocks: int,
    stagers: int,
) -> None:
    offset = data.draw(st.integers(0, 3)) * PAGE
    if not direct:
        offset += data.draw(st.integers(0, 5_000))
    with engine_of(blocks, block_bytes, stagers) as engine:
        check_written(
            disk / "image",
            engine,
            backend,
            data.draw(plans(block_bytes)),
            offset=offset,
            direct=direct,
            limit=data.draw(st.integers(1, blocks)),
            stagers=data.draw(st.integers(1, stagers)),
        )


# Where a described segment may begin: in the block of its slot, in the one before, further back.
DESCRIBED = [1, 100, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 7]


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("described_nbytes", DESCRIBED)
@pytest.mark.parametrize("gap", [0, 1, 30], ids=lambda gap: f"gap {gap}")
def test_slot_across_a_block_boundary(
    backend: Backend, disk: Path, described_nbytes: int, gap: int, limit: int
) -> None:
    boundary = 5 * PAGE
    with engine_of(4, PAGE, 3) as engine:
        for before in range(6):  # bytes of the slot and its neighbours left of the boundary
            plan = Plan()
            lead = boundary - before - gap - described_nbytes
            plan.add(lead, 17)
            plan.add_described(described_nbytes, 1_000, gap + 4 + before, gap)
            plan.add_described(PAGE - 2, 5_000, PAGE, PAGE - 4)
            assert plan.slots[0][0] == boundary - before
            check_written(
                disk / "image",
                engine,
                backend,
                plan,
                offset=0,
                direct=False,
                limit=limit,
                stagers=3,
            )


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize("described_nbytes", DESCRIBED)
def test_slots_of_one_segment_on_both_sides_of_a_block_boundary(
    backend: Backend, disk: Path, described_nbytes: int, limit: int
) -> None:
    boundary = 5 * PAGE
    with engine_of(4, PAGE, 3) as engine:
        for before in range(-1, 7):  # bytes of the holder left of the boundary
            plan = Plan()
            plan.add(boundary - before - described_nbytes, 17)
            plan.add_described(described_nbytes, 1_000, 2 * PAGE, 0, 4, 30, 2 * PAGE - 4)
            check_written(
                disk / "image",
                engine,
                backend,
                plan,
                offset=0,
                direct=False,
                limit=limit,
                stagers=3,
            )


def test_slots_end_to_end(backend: Backend, disk: Path) -> None:
    """Holders of four bytes each, all slot, many to a block and off its alignment."""
    plan = Plan()
    plan.add(3, 0)
    for number in range(3_000):
        plan.add_described(1 + number % 5, 7 * number, 4, 0)
    with engine_of(3) as engine:
        check_written(
            disk / "image", engine, backend, plan, offset=0, direct=False, limit=3, stagers=2
        )


def test_thousand_tiny_jobs(backend: Backend, disk: Path) -> None:
    content = bytearray()
    jobs = []
    with engine_of(5) as engine, opened(disk / "image", os.O_RDWR | os.O_CREAT) as fd:
        for number in range(1_000):
            plan = plain(1 + number % 7, 13 * number)
            jobs.append(start(engine, fd, plan, backend, offset=len(content)))
            content += plan.render()[0]
        for job in jobs:
            written(job)
        assert engine.arena_blocks_in_use() == 0
    assert (disk / "image").read_bytes() == content


def test_sources_may_change_once_staged(disk: Path) -> None:
    """What is written is what was staged, however late the transfers come."""
    proceed = threading.Event()

    def late(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert proceed.wait(WAIT_S)
        return os.pwrite(fd, memory, offset)

    source = bytearray(POOL[: 3 * PAGE])
    segments = array("Q", [0, len(source), address_of(source)])
    with (
        callback_backend(late) as backend,
        engine_of(4) as engine,
        opened(disk / "image", os.O_RDWR | os.O_CREAT) as fd,
    ):
        job = write(engine, fd, 0, segments, array("Q"), backend, False, 4, 2)
        assert job.wait_staged(WAIT_S)
        assert not job.wait_written(0.0)
        source[:] = bytes(len(source))
        proceed.set()
        written(job)
    assert (disk / "image").read_bytes() == POOL[: 3 * PAGE]


def test_columns_must_be_whole_rows(backend: Backend) -> None:
    with engine_of(1) as engine, pytest.raises(ValueError, match="rows"):
        write(engine, 0, 0, array("Q", [0, 1]), array("Q"), backend, False, 1, 1)


# ---- Writing when things go wrong ----


def test_full_device_fails_the_job(backend: Backend) -> None:
    with engine_of(2) as engine, opened(Path("/dev/full"), os.O_WRONLY) as fd:
        job = start(engine, fd, plain(5 * PAGE), backend, limit=1)
        assert job.wait_written(WAIT_S)
        assert job.failure() == ("write", 0, errno.ENOSPC)
        assert job.blocks_held_max() == 1


def test_failed_job_leaves_others_alone(backend: Backend, disk: Path, closed_fd: int) -> None:
    with engine_of(3) as engine, opened(disk / "image", os.O_RDWR | os.O_CREAT) as fd:
        good = []
        for number in range(40):
            start(engine, closed_fd, plain(3 * PAGE), backend)
            good.append(start(engine, fd, plain(PAGE, number), backend, offset=number * PAGE))
        for job in good:
            written(job)
    expected = b"".join(plain(PAGE, number).render()[0] for number in range(40))
    assert (disk / "image").read_bytes() == expected


def raising(error: BaseException) -> Callable[[str, int, memoryview, int], int]:
    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        raise error

    return transfer


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
        (OSError("without a number"), errno.EIO),
        (ValueError("a bug in the double"), errno.EIO),
        (InterruptedError(errno.EINTR, "again and again"), errno.EINTR),
        (BlockingIOError(errno.EAGAIN, "again and again"), errno.EAGAIN),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_error_of_a_transfer_is_the_jobs(error: BaseException, number: int) -> None:
    with callback_backend(raising(error)) as backend, engine_of(2) as engine:
        job = start(engine, 0, plain(6 * PAGE), backend, offset=PAGE)
        assert job.wait_staged(WAIT_S)
        assert job.wait_written(WAIT_S)
        assert job.failure() == ("write", PAGE, number)
        assert job.nbytes_written() == 0


def test_first_failure_is_kept_and_ends_staging() -> None:
    calls: list[int] = []

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        calls.append(offset)
        if offset == 2 * PAGE:
            raise OSError(errno.ENOSPC, "full")
        if offset > 2 * PAGE:
            raise OSError(errno.EIO, "consequence")
        return len(memory)

    with callback_backend(transfer) as backend, engine_of(2) as engine:
        job = start(engine, 0, plain(50 * PAGE), backend)
        assert job.wait_written(WAIT_S)
        assert job.failure() == ("write", 2 * PAGE, errno.ENOSPC)
        assert job.nbytes_written() == 2 * PAGE
        assert calls == sorted(calls)
        assert len(calls) <= 4  # what was staged already is still offered to the device


def test_write_that_never_advances_is_an_error() -> None:
    with callback_backend(lambda *_: 0) as backend, engine_of(1) as engine:
        job = start(engine, 0, plain(PAGE), backend)
        assert job.wait_written(WAIT_S)
        assert job.failure() == ("write", 0, errno.EIO)


@settings(relaxed, max_examples=Chance.examples(15))
@given(data=st.data(), seed=st.integers(0, 2**32), direct=st.booleans())
def test_short_and_interrupted_writes_are_resumed(
    data: st.DataObject, seed: int, direct: bool
) -> None:
    """A direct transfer may end anywhere, but is resumed from an aligned byte."""
    chance = random.Random(seed)
    target = bytearray()

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if chance.random() < 0.2:
            raise OSError(chance.choice([errno.EINTR, errno.EAGAIN]), "try again")
        assert not direct or (offset % PAGE == 0 and len(memory) % PAGE == 0)
        moved = chance.randint(1, len(memory)) if chance.random() < 0.7 else len(memory)
        target.extend(bytes(max(0, offset + moved - len(target))))
        target[offset : offset + moved] = memory[:moved]
        return moved

    plan = data.draw(plans(8192))
    with callback_backend(transfer) as backend, engine_of(3, 8192) as engine:
        job = start(engine, 0, plan, backend, direct=direct)
        written(job)
    expected = plan.render()[0]
    assert target == expected + bytes(-len(expected) % PAGE if direct else 0)


def test_cancelled_job_stages_no_further_block() -> None:
    arrived, proceed = threading.Semaphore(0), threading.Event()
    calls: list[int] = []

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        calls.append(offset)
        arrived.release()
        assert proceed.wait(WAIT_S)
        return len(memory)

    with callback_backend(transfer, 2) as backend, engine_of(2) as engine:
        job = start(engine, 0, plain(10 * PAGE), backend)
        assert arrived.acquire(timeout=WAIT_S) and arrived.acquire(timeout=WAIT_S)
        assert not job.wait_staged(0.0)  # all of the engine's blocks are in flight
        job.cancel()
        assert job.wait_staged(WAIT_S)  # the sources are free although transfers go on
        assert not job.wait_written(0.0)
        failure = job.failure()
        assert failure is not None
        assert failure[2] == errno.ECANCELED
        proceed.set()
        assert job.wait_written(WAIT_S)
        assert sorted(calls) == [0, PAGE]
        assert job.nbytes_written() == 2 * PAGE
        assert engine.arena_blocks_in_use() == 0


@settings(relaxed, max_examples=Chance.examples(15))
@given(delay_us=st.integers(0, 300), blocks=st.integers(1, 4))
def test_job_cancelled_at_any_moment_ends(backend: Backend, delay_us: int, blocks: int) -> None:
    with engine_of(blocks) as engine, opened(Path("/dev/null"), os.O_WRONLY) as fd:
        job = start(engine, fd, plain(100 * PAGE), backend)
        time.sleep(delay_us / 1e6)
        job.cancel()
        assert job.wait_staged(WAIT_S)
        assert job.wait_written(WAIT_S)
        failure = job.failure()
        if failure is None:
            assert job.nbytes_written() == 100 * PAGE
        else:
            assert failure[2] == errno.ECANCELED
            assert job.nbytes_written() < 100 * PAGE


def test_staged_job_is_not_cancelled_any_more(backend: Backend, disk: Path) -> None:
    with engine_of(4) as engine, opened(disk / "image", os.O_RDWR | os.O_CREAT) as fd:
        job = start(engine, fd, plain(4 * PAGE), backend)
        assert job.wait_staged(WAIT_S)
        job.cancel()
        written(job)
        job.cancel()
        assert job.failure() is None
    assert (disk / "image").read_bytes() == POOL[: 4 * PAGE]


# ---- Closing and accounting ----


def test_close_waits_for_jobs_in_flight() -> None:
    proceed = threading.Event()

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert proceed.wait(WAIT_S)
        return len(memory)

    with callback_backend(transfer) as backend:
        engine = Engine(2 * PAGE, PAGE, 2)
        job = start(engine, 0, plain(8 * PAGE), backend)
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        proceed.set()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert job.wait_written(0.0)
        assert job.nbytes_written() == 8 * PAGE
        engine.close()


def test_close_waits_for_streams(disk: Path, backend: Backend) -> None:
    (disk / "image").write_bytes(POOL[: 4 * PAGE])
    with opened(disk / "image", os.O_RDONLY) as fd:
        engine = Engine(2 * PAGE, PAGE, 2)
        stream = engine.read(fd, 4 * PAGE, [], backend, False, 2)
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        target = bytearray(4 * PAGE)
        assert stream.readinto(target, 0)
        stream.close()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert target == POOL[: 4 * PAGE]
        stream.close()


def test_reading_a_closed_stream_is_an_error(disk: Path, backend: Backend) -> None:
    (disk / "image").write_bytes(POOL[: 4 * PAGE])
    target = bytearray(PAGE)
    runs = array("Q", (0, address_of(target), PAGE, 1, 0, 0))
    with opened(disk / "image", os.O_RDONLY) as fd:
        engine = Engine(2 * PAGE, PAGE, 2)
        stream, other = (engine.read(fd, 4 * PAGE, [], backend, False, 1) for _ in range(2))
        stream.close()
        for end in (other.close, engine.close):
            with pytest.raises(ValueError, match="closed stream"):
                stream.readinto(target, 0)
            with pytest.raises(ValueError, match="closed stream"):
                stream.read_runs(runs)
            with pytest.raises(ValueError, match="closed stream"):
                other.beside(stream)
            assert stream.failure() is None and stream.arrive()
            stream.close()
            end()
        del engine, end  # a closed stream still answers
        with pytest.raises(ValueError, match="closed stream"):
            stream.readinto(target, 0)


def test_a_stream_is_closed_once(disk: Path) -> None:
    """Its descriptor's number is another file's by the time it is closed again."""
    (disk / "image").write_bytes(POOL[: 4 * PAGE])
    staging = Staging(Storage())
    with opened(disk / "image", os.O_RDONLY) as fd:
        before = set(os.listdir("/proc/self/fd"))
        stream = staging.read(PosixFile(Storage(), fd, "image"), 4 * PAGE, PAGE, ())
        taken = {int(name) for name in {*os.listdir("/proc/self/fd")} - before}
        stream.close()
        others = [os.dup(fd) for _ in taken]
        stream.close()
        for other in others:
            os.close(other)  # it is still open
        with pytest.raises(ValueError, match="closed stream"):
            stream.readinto(bytearray(PAGE), 0)
    staging.close()


NO_THREAD = """
import os, resource
from fastckpt import _engine
descriptors = os.listdir("/proc/self/fd")
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), -1))  # too little for a stack
for make in (_engine.uring_backend, _engine.threads_backend):
    for _ in range(3):
        try:
            make(4)
        except (RuntimeError, MemoryError) as error:
            print(make.__name__)
assert os.listdir("/proc/self/fd") == descriptors
"""


@pytest.mark.multiprocess
def test_a_thread_that_cannot_be_started_leaves_no_descriptor() -> None:
    said = run_python(NO_THREAD).stdout.split()
    assert said == ["uring_backend"] * 3 + ["threads_backend"] * 3


DROPPED = """
from fastckpt import _engine
from tests.kit.engines import PAGE, plain

written = []
def transfer(kind, fd, memory, offset):
    written.append(offset)
    return len(memory)

engine, backend = _engine.Engine(4 * PAGE, PAGE, 2), _engine.callback_backend(transfer)
for turn in range(100):
    for pages in (1, 3, 40):  # less than the arena has, or more
        job = engine.stage(*plain(pages * PAGE).columns(), _engine.Allowance(9), 2)
        if turn % 2:
            job.write_to(0, 0, backend, False)
        if turn % 3 == 0:
            job.wait_staged(0.001)
        del job
        assert engine.arena_blocks_in_use() == 0
engine.close()
backend.close()
assert written
"""


@pytest.mark.multiprocess
def test_a_job_that_its_owner_drops_keeps_no_memory() -> None:
    run_python(DROPPED)


def status_kib(name: str) -> int:
    """A value of this process in proc(5)'s status file."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0])


def task_count() -> int:
    return len(os.listdir("/proc/self/task"))


def test_closing_leaves_no_thread_descriptor_or_mapping() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    tasks, fds = task_count(), descriptors()
    with opened(Path("/dev/null"), os.O_WRONLY) as fd:
        for round_number in range(12):
            if round_number == 2:  # stacks of threads are kept for reuse from here on
                mapped = status_kib("VmSize")
            backends = [_engine.threads_backend(3)]
            try:
                backends.append(_engine.uring_backend(4))
            except _engine.BackendUnavailable:
                pass  # then there is only one kind to close
            engine = Engine(1 << 30, PAGE, 4)  # more than malloc reserves for threads, 64 MiB each
            for each in backends:
                written(start(engine, fd, plain(20 * PAGE), each))
            engine.close()
            for each in backends:
                each.close()
            del engine, backends, each
    # What tests before this one have left may go meanwhile.
    wait_until(lambda: task_count() <= tasks, "the kernel lists no thread that has ended")
    assert descriptors() <= fds
    assert status_kib("VmSize") - mapped < 2 << 20


def test_arena_is_budgeted_in_whole_blocks() -> None:
    for arena_bytes, blocks in ((0, 1), (1, 1), (PAGE, 1), (3 * PAGE - 1, 2), (3 * PAGE, 3)):
        engine = Engine(arena_bytes, PAGE, 1)
        assert (engine.arena_blocks, engine.block_bytes) == (blocks, PAGE)
        assert engine.arena_blocks_in_use() == engine.arena_blocks_in_use_max() == 0
        engine.close()


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_jobs_that_share_an_allowance_hold_no_more_together(limit: int) -> None:
    plans, allowance = [plain(40 * PAGE) for _ in range(4)], _engine.Allowance(limit)
    assert allowance.blocks == max(1, limit)
    with (
        callback_backend(lambda kind, fd, memory, offset: len(memory)) as backend,
        engine_of(8, PAGE, 4) as engine,
    ):
        jobs = [engine.stage(*plan.columns(), allowance, 3) for plan in plans]
        for job in reversed(jobs):  # in any order, as long as nobody waits before the last
            job.write_to(0, 0, backend, False)
        for job in jobs:
            written(job)
        assert 1 <= jobs[0].blocks_held_max() == jobs[3].blocks_held_max() <= max(1, limit)
        assert engine.arena_blocks_in_use_max() <= max(1, limit)


def test_a_job_of_one_block_does_not_wait_for_the_copies_of_longer_ones() -> None:
    """The end of a file that someone waits for, while another file has many blocks left."""
    order: list[int] = []

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        order.append(fd)
        return len(memory)

    with callback_backend(transfer) as backend, engine_of(1, PAGE, 1) as engine:
        allowance = _engine.Allowance(1)
        blocks = (40, 2, 1)
        jobs = [engine.stage(*plain(n * PAGE).columns(), allowance, 1) for n in blocks]
        for fd, job in enumerate(jobs):
            job.write_to(fd, 0, backend, False)
        for job in jobs:
            written(job)
    assert order.index(2) <= 1 and order.index(1) == 41  # the first may have had the only block


def test_arena_is_never_exceeded() -> None:
    highest = 0

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        nonlocal highest
        highest = max(highest, engine.arena_blocks_in_use())
        return len(memory)

    with callback_backend(transfer) as backend, engine_of(3, PAGE, 4) as engine:
        jobs = [start(engine, 0, plain(40 * PAGE), backend, limit=2) for _ in range(5)]
        for job in jobs:
            written(job)
            assert job.blocks_held_max() <= 2
        assert 1 <= highest <= 3
        assert engine.arena_blocks_in_use_max() == 3


def test_prefault_backs_the_arena_with_pages() -> None:
    arena_bytes, block_bytes = 64 << 20, 65536
    let_others_end()
    with engine_of(arena_bytes // block_bytes, block_bytes) as engine:
        kib = [status_kib("VmRSS")]
        for begin, end in (
            (0, 0),
            (0, block_bytes - 1),  # no whole block
            (0, arena_bytes // 2),
            (0, arena_bytes // 2),
            (arena_bytes // 2, 10 * arena_bytes),  # more than there is: the rest
            (3 * arena_bytes, 4 * arena_bytes),
        ):
            assert engine.prefault(begin, end, 2)
            kib.append(status_kib("VmRSS"))
    del engine
    kib.append(status_kib("VmRSS"))
    expected = [0, 0, 0, 32, 32, 64, 64, 0]
    grown_mib = [(each - kib[0]) / 1024 for each in kib]
    assert grown_mib == pytest.approx(expected, abs=8)


# ---- Reading ----


@st.composite
def accesses(draw: st.DrawFn, nbytes: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of reads in an order that a reader might choose."""
    kind = draw(st.sampled_from(["forward", "backward", "anywhere", "whole"]))
    if kind == "whole":
        return [(0, nbytes)] * draw(st.integers(1, 2))
    if kind == "anywhere":
        offsets = draw(st.lists(st.integers(0, nbytes), min_size=1, max_size=30))
        lengths = st.one_of(st.integers(0, 10), st.integers(0, nbytes))
        return [(offset, min(draw(lengths), nbytes - offset)) for offset in offsets]
    step = draw(st.one_of(st.integers(max(1, nbytes // 60), nbytes), st.just(nbytes)))
    runs = [(offset, min(step, nbytes - offset)) for offset in range(0, nbytes, step)]
    return runs if kind == "forward" else runs[::-1]


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@settings(relaxed, max_examples=Chance.examples(18))
@given(data=st.data(), blocks=st.integers(1, 6), window=st.integers(1, 8), verify=st.booleans())
def test_reads_in_any_order_return_the_file(
    backend: Backend,
    disk: Path,
    direct: bool,
    block_bytes: int,
    data: st.DataObject,
    blocks: int,
    window: int,
    verify: bool,
) -> None:
    nbytes = data.draw(st.integers(1, 12) | piece_sizes(block_bytes).map(lambda n: n * 3))
    path = disk / "image"
    path.write_bytes(POOL[: nbytes + data.draw(st.sampled_from([0, 1, 5_000]))])
    crcs = crcs_of(bytes(POOL[:nbytes]), block_bytes) if verify else []
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    with opened(path, flags) as fd, engine_of(blocks, block_bytes, 2) as engine:
        with stream_of(engine, fd, nbytes, crcs, backend, direct=direct, window=window) as stream:
            for offset, wanted in data.draw(accesses(nbytes)):
                target = bytearray(wanted)
                assert stream.readinto(target, offset)
                assert target == POOL[offset : offset + wanted]
                assert engine.arena_blocks_in_use() <= min(blocks, window)
            assert stream.failure() is None
            assert stream.corrupt_block() == -1
        assert engine.arena_blocks_in_use() == 0


def test_reading_nothing(backend: Backend, disk: Path) -> None:
    (disk / "image").write_bytes(b"")
    with (
        opened(disk / "image", os.O_RDONLY) as fd,
        engine_of(1) as engine,
        stream_of(engine, fd, 0, [], backend, window=4) as stream,
    ):
        assert stream.readinto(bytearray(), 0)


def test_every_flipped_byte_is_found(backend: Backend, disk: Path) -> None:
    nbytes = 4 * PAGE + 9
    crcs = crcs_of(bytes(POOL[:nbytes]), PAGE)
    for at in (0, 1, PAGE - 1, PAGE, 2 * PAGE + 77, 4 * PAGE, nbytes - 1):
        damaged = bytearray(POOL[:nbytes])
        damaged[at] ^= 0x10
        (disk / "image").write_bytes(damaged)
        bad = at // PAGE
        with opened(disk / "image", os.O_RDONLY) as fd, engine_of(4) as engine:
            for window in (1, 3, 8):
                with stream_of(engine, fd, nbytes, crcs, backend, window=window) as stream:
                    assert not stream.readinto(bytearray(nbytes), 0)
                    assert stream.failure() is None
                    assert stream.corrupt_block() == bad
                    for block in range(len(crcs)):  # the others are still served
                        target = bytearray(min(PAGE, nbytes - block * PAGE))
                        assert stream.readinto(target, block * PAGE) == (block != bad)
                        if block != bad:
                            assert target == POOL[block * PAGE : block * PAGE + len(target)]
            with stream_of(engine, fd, nbytes, [], backend, window=3) as stream:
                target = bytearray(nbytes)
                assert stream.readinto(target, 0)
                assert target == damaged


def test_first_of_several_damaged_blocks_is_named(backend: Backend, disk: Path) -> None:
    damaged = bytearray(POOL[: 8 * PAGE])
    for block in (3, 5, 6):
        damaged[block * PAGE + 5] ^= 1
    (disk / "image").write_bytes(damaged)
    crcs = crcs_of(bytes(POOL[: 8 * PAGE]), PAGE)
    with opened(disk / "image", os.O_RDONLY) as fd, engine_of(8, PAGE, 4) as engine:
        for _ in range(50):
            with stream_of(engine, fd, 8 * PAGE, crcs, backend, window=8) as stream:
                assert not stream.readinto(bytearray(8 * PAGE), 0)
                assert stream.corrupt_block() == 3


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("there", [0, 1, PAGE, 2 * PAGE, 2 * PAGE + 100, 4 * PAGE - 1])
def test_truncated_file_fails_the_read(
    backend: Backend, disk: Path, there: int, direct: bool
) -> None:
    (disk / "image").write_bytes(POOL[:there])
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    with opened(disk / "image", flags) as fd, engine_of(2) as engine:
        for crcs in ([], crcs_of(bytes(POOL[: 4 * PAGE]), PAGE)):
            with stream_of(engine, fd, 4 * PAGE, crcs, backend, direct=direct, window=1) as stream:
                whole = there // PAGE * PAGE
                target = bytearray(whole)
                assert stream.readinto(target, 0)  # what is there in whole blocks can be read
                assert target == POOL[:whole]
                assert not stream.readinto(bytearray(PAGE), whole)
                assert stream.failure() == ("read", there, errno.ENODATA)
                assert stream.corrupt_block() == -1


def test_error_of_a_read_is_the_streams() -> None:
    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert kind == "read"
        if offset == 2 * PAGE:
            raise OSError(errno.EIO, "bad sector")
        memory[:] = POOL[offset : offset + len(memory)]
        return len(memory)

    with (
        callback_backend(transfer) as backend,
        engine_of(2) as engine,
        stream_of(engine, 0, 4 * PAGE, [], backend, window=1) as stream,
    ):
        target = bytearray(PAGE + 5)
        assert stream.readinto(target, 0)
        assert target == POOL[: PAGE + 5]
        assert not stream.readinto(target, PAGE)
        assert stream.failure() == ("read", 2 * PAGE, errno.EIO)
        assert not stream.readinto(target, 0)  # a stream that failed stays failed


@settings(relaxed, max_examples=Chance.examples(15))
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_short_and_interrupted_reads_are_resumed(data: st.DataObject, seed: int) -> None:
    chance = random.Random(seed)
    nbytes = data.draw(st.integers(1, 60_000))

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if chance.random() < 0.2:
            raise OSError(chance.choice([errno.EINTR, errno.EAGAIN]), "try again")
        moved = chance.randint(1, len(memory)) if chance.random() < 0.7 else len(memory)
        memory[:moved] = POOL[offset : offset + moved]
        return moved

    with callback_backend(transfer) as backend, engine_of(3, 8192) as engine:
        crcs = crcs_of(bytes(POOL[:nbytes]), 8192)
        with stream_of(engine, 0, nbytes, crcs, backend, window=3) as stream:
            target = bytearray(nbytes)
            assert stream.readinto(target, 0)
            assert target == POOL[:nbytes]


def test_stream_closed_with_reads_on_their_way() -> None:
    proceed = threading.Event()

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert proceed.wait(WAIT_S)
        memory[:] = POOL[offset : offset + len(memory)]
        return len(memory)

    with callback_backend(transfer) as backend, engine_of(4) as engine:
        crcs = crcs_of(bytes(POOL[: 8 * PAGE]), PAGE)
        stream = engine.read(0, 8 * PAGE, crcs, backend, False, 4)
        closing = threading.Thread(target=stream.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()
        assert engine.arena_blocks_in_use() == 4
        proceed.set()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert engine.arena_blocks_in_use() == 0


@settings(relaxed, max_examples=Chance.examples(25))
@given(data=st.data(), window=st.integers(1, 5), damaged=st.booleans())
def test_runs_may_share_a_target(data: st.DataObject, window: int, damaged: bool) -> None:
    """The last one is there, be blocks verified in the arena or in their target."""
    blocks, reach = 6, st.integers(0, 6 * PAGE)
    runs = []
    for offset, nbytes, at in data.draw(st.lists(st.tuples(reach, reach, reach), max_size=5)):
        nbytes = min(nbytes, blocks * PAGE - max(offset, at))
        runs.append((offset, at, nbytes))
    runs.sort()  # in file order

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        memory[:] = POOL[offset : offset + len(memory)]
        return len(memory)

    target, wanted = bytearray(blocks * PAGE), bytearray(blocks * PAGE)
    for offset, at, nbytes in runs:
        wanted[at : at + nbytes] = POOL[offset : offset + nbytes]
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    rows = [(offset, address + at, nbytes, 1, 0, 0) for offset, at, nbytes in runs]
    crcs = crcs_of(bytes(POOL[: blocks * PAGE]), PAGE)
    bad = data.draw(st.integers(0, blocks - 1))
    crcs[bad] ^= damaged
    touched = damaged and any(
        nbytes and offset // PAGE <= bad <= (offset + nbytes - 1) // PAGE
        for offset, _at, nbytes in runs
    )
    with (
        callback_backend(transfer, 3) as backend,
        engine_of(2) as engine,
        stream_of(engine, 0, blocks * PAGE, crcs, backend, window=window) as stream,
    ):
        columns = array("Q", [value for row in rows for value in row])
        assert stream.read_runs(columns, []) is not touched
        if touched:
            assert stream.corrupt_block() == bad
        else:
            assert target == wanted


def test_what_was_verified_in_its_target_is_not_read_again() -> None:
    """By a run that goes back in the file, past which blocks are read ahead."""
    reads: list[int] = []

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        memory[:] = POOL[offset : offset + len(memory)]
        if offset in reads:
            memory[0] ^= 1
        reads.append(offset)
        return len(memory)

    target = bytearray(8 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    rows = [(0, address, 7 * PAGE, 1, 0, 0), (PAGE, address + 7 * PAGE, 9, 1, 0, 0)]
    with (
        callback_backend(transfer, 1) as backend,
        engine_of(1) as engine,
        stream_of(engine, 0, 7 * PAGE, [], backend, window=4) as stream,
    ):
        assert stream.read_runs(array("Q", [value for row in rows for value in row]), [])
    assert target[: 7 * PAGE] == POOL[: 7 * PAGE]


def test_a_read_that_has_returned_writes_to_its_target_no_more() -> None:
    """Though a block that was to be read there was on its way when an earlier one failed."""
    happened: list[str] = []
    returned = threading.Event()

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if offset == PAGE:
            raise OSError(errno.EIO, "bad sector")
        if offset == 2 * PAGE:
            returned.wait(0.2)  # it never comes, unless the read does not wait
            happened.append("written")
        return len(memory)

    with (
        callback_backend(transfer, 3) as backend,
        engine_of(1) as engine,
        stream_of(engine, 0, 4 * PAGE, [], backend, window=3) as stream,
    ):
        assert stream.readinto(bytearray(1), 0)
        assert not stream.readinto(bytearray(3 * PAGE), PAGE)
        happened.append("returned")
        returned.set()
    assert happened == ["written", "returned"]


# ---- In a process of its own: what hangs or kills if it is wrong ----

# Loads the extension without torch, which would take longer to import than most of these run.
ISOLATED_BEGIN = """
import ctypes, faulthandler, importlib.util, os, random, sys, threading, time, zlib
from array import array
faulthandler.enable()
faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
spec = importlib.util.spec_from_file_location("fastckpt._engine", sys.argv[1])
_engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_engine)
PAGE = 4096
POOL = bytearray(random.Random(7).randbytes(1 << 20))
POOL_ADDRESS = ctypes.addressof(ctypes.c_char.from_buffer(POOL))
"""


def isolated(scenario: Callable[..., None], *args: Any, seconds: float = 120.0) -> None:
    """Runs a function of this file alone in a new process; fails if that hangs, fails or dies."""
    source = inspect.getsource(write) + textwrap.dedent(inspect.getsource(scenario))
    call = f"{scenario.__name__}(*{args!r})\nprint('reached the end')\n"
    program = f"from __future__ import annotations\n{ISOLATED_BEGIN}\n{source}\n{call}"
    result = subprocess.run(
        [sys.executable, "-c", program, _engine.__file__ or "", str(seconds)],
        capture_output=True,
        text=True,
        timeout=seconds + 20,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "reached the end\n"), result.stderr[-4000:]


def backend_kinds() -> list[Any]:
    return ["threads", pytest.param("io_uring", marks=pytest.mark.uring)]


@pytest.fixture(params=backend_kinds())
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring":
        try:
            _engine.uring_backend(2).close()
        except _engine.BackendUnavailable as error:
            pytest.skip(str(error))
    return str(request.param)


def share_one_block(kind: str, path: str) -> None:
    """Jobs and streams on an arena of a single block: each has to let the others pass."""
    backend = _engine.threads_backend(2) if kind == "threads" else _engine.uring_backend(2)
    engine = _engine.Engine(PAGE, PAGE, 3)
    nbytes = 30 * PAGE + 11
    with open(path, "wb") as file:
        file.write(POOL[:nbytes])
    fd = os.open(path, os.O_RDWR)
    crcs = [zlib.crc32(POOL[at : min(nbytes, at + PAGE)]) for at in range(0, nbytes, PAGE)]
    wrong = []

    def read(reader: int) -> None:
        stream = engine.read(fd, nbytes, crcs, backend, False, 4)
        for step in (nbytes, 3 * PAGE + 5, 1 + PAGE // 2):
            for offset in range(0, nbytes, step):
                target = bytearray(min(step, nbytes - offset))
                if (
                    not stream.readinto(target, offset)
                    or target != POOL[offset : offset + step][: len(target)]
                ):
                    wrong.append((reader, offset))
        stream.close()

    segments = array("Q", [0, nbytes, POOL_ADDRESS])
    jobs = [write(engine, fd, 0, segments, array("Q"), backend, False, 4, 3) for _ in range(4)]
    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for reader in readers:
        reader.start()
    jobs += [write(engine, fd, 0, segments, array("Q"), backend, False, 1, 1) for _ in range(4)]
    for job in jobs:
        assert job.wait_written(60.0)
        assert job.failure() is None
    for reader in readers:
        reader.join()
    assert not wrong, wrong
    assert engine.arena_blocks_in_use() == 0
    assert engine.arena_blocks_in_use_max() == 1
    engine.close()
    backend.close()


@pytest.mark.multiprocess
def test_arena_of_one_block_serves_jobs_and_streams(kind: str, disk: Path) -> None:
    isolated(share_one_block, kind, str(disk / "image"))


def hammer(path: str, seconds: float, with_uring: bool) -> None:
    """Many threads, one engine: writers and readers of files of their own, checking every byte."""
    backends = [_engine.threads_backend(3)]
    if with_uring:
        backends.append(_engine.uring_backend(8))
    engine = _engine.Engine(6 * 8192, 8192, 3)
    deadline = time.monotonic() + seconds
    wrong: list[str] = []
    rounds = [0] * 6

    def write_and_read(number: int) -> None:
        chance = random.Random(number)
        fd = os.open(f"{path}-{number}", os.O_RDWR | os.O_CREAT)
        while (time.monotonic() < deadline or rounds[number] <= 2) and not wrong:
            nbytes, source = chance.randint(9, 120_000), chance.randint(0, 500_000)
            data, first = chance.randint(1, nbytes - 8), chance.randint(1, 4)
            # header, described data, header with its slot
            segments = array("Q", [0, first, POOL_ADDRESS, first, data, POOL_ADDRESS + source])
            segments.extend((first + data, nbytes - data, POOL_ADDRESS + source + data))
            slots = array("Q", [first + data, 1])
            backend = chance.choice(backends)
            limit = chance.randint(1, 6)
            job = write(engine, fd, 0, segments, slots, backend, False, limit, chance.randint(1, 3))
            if not (job.wait_staged(60.0) and job.wait_written(60.0) and job.failure() is None):
                wrong.append(f"write {number}: {job.failure()}")
            crc = zlib.crc32(POOL[source : source + data])
            image = POOL[:first] + POOL[source : source + data] + crc.to_bytes(4, "little")
            image += POOL[source + data + 4 : source + nbytes]
            blocks = [zlib.crc32(image[at : at + 8192]) for at in range(0, len(image), 8192)]
            if (job.block_crcs(), job.slot_crcs()) != (blocks, [crc]):
                wrong.append(f"checksums {number}")
            window = chance.randint(1, 5)
            stream = engine.read(fd, len(image), blocks, chance.choice(backends), False, window)
            for _ in range(4):
                offset = chance.randint(0, len(image) - 1)
                target = bytearray(chance.randint(0, len(image) - offset))
                if not stream.readinto(target, offset) or target != image[offset:][: len(target)]:
                    wrong.append(f"read {number}: {stream.failure()} {stream.corrupt_block()}")
            stream.close()
            rounds[number] += 1
        os.close(fd)

    threads = [threading.Thread(target=write_and_read, args=(n,)) for n in range(len(rounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert min(rounds) > 2, rounds
    assert engine.arena_blocks_in_use() == 0
    engine.close()
    for each in backends:
        each.close()


def close_after_a_failure(kind: str, how: str) -> None:
    """Closing an engine whose last job did not run to its end."""
    backend = _engine.threads_backend(2) if kind == "threads" else _engine.uring_backend(4)
    null = os.open("/dev/null", os.O_RDONLY if how == "fail" else os.O_WRONLY)
    segments = array("Q", [0, len(POOL), POOL_ADDRESS])
    for number in range(2_000):
        engine = _engine.Engine(2 * PAGE, PAGE, 4)
        job = write(engine, null, 0, segments, array("Q"), backend, False, 2, 4)
        if how == "cancel":
            job.cancel()
        if number % 2:
            assert job.wait_written(60.0)
        engine.close()
    backend.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["fail", "cancel"])
def test_engine_closes_after_a_failure(kind: str, how: str) -> None:
    isolated(close_after_a_failure, kind, how)


def drop_everything(kind: str, close_engine: bool) -> None:
    """Jobs whose owner keeps neither them nor the backend, nor the file's sink if it has one."""
    null = os.open("/dev/null", os.O_WRONLY)
    segments = array("Q", [0, 64 * PAGE, POOL_ADDRESS])
    for number in range(300):
        engine = _engine.Engine(16 * PAGE, PAGE, 2)
        sink = backend = (
            _engine.threads_backend(2) if kind == "threads" else _engine.uring_backend(4)
        )
        if number % 2 and kind == "threads":
            sink = _engine.callback_sink(backend, lambda kind, fd, memory, offset: len(memory))
        job = write(engine, null, 0, segments, array("Q"), sink, False, 16, 2)
        if close_engine:
            engine.close()
        del job, backend, sink, engine


@pytest.mark.multiprocess
@pytest.mark.parametrize("close_engine", [False, True], ids=["in flight", "closed"])
def test_job_and_backend_may_be_dropped(kind: str, close_engine: bool) -> None:
    isolated(drop_everything, kind, close_engine)


def drop_during_callbacks(what: str) -> None:
    """Freeing what waits for transfers that need the interpreter lock."""

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        time.sleep(0.02)
        return len(memory)

    backend = _engine.callback_backend(transfer)
    engine = _engine.Engine(8 * PAGE, PAGE, 2)
    if what == "stream":
        stream = engine.read(0, 16 * PAGE, [], backend, False, 4)
        del stream
    else:
        segments = array("Q", [0, 16 * PAGE, POOL_ADDRESS])
        job = write(engine, 0, 0, segments, array("Q"), backend, False, 8, 2)
        del job
    del engine
    del backend


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["job", "stream"])
def test_dropping_does_not_hold_the_interpreter_lock(what: str) -> None:
    isolated(drop_during_callbacks, what)


def drop_engine_first() -> None:
    """A closed stream and a finished job that are freed after the engine: a traceback may do so."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    null = os.open("/dev/null", os.O_WRONLY)
    backend = _engine.threads_backend(1)
    engine = _engine.Engine(2 * PAGE, PAGE, 1)
    segments = array("Q", [0, PAGE, POOL_ADDRESS])
    job = write(engine, null, 0, segments, array("Q"), backend, False, 1, 1)
    assert job.wait_written(60.0)
    stream = engine.read(null, 0, [], backend, False, 1)
    stream.close()
    engine.close()
    del engine
    for nbytes in range(64, 1024, 16):  # whatever was freed belongs to others now
        for _ in range(20):
            ctypes.memset(libc.malloc(nbytes), 0xFF, nbytes)
    del stream, job
    backend.close()


@pytest.mark.multiprocess
def test_engine_may_be_dropped_first() -> None:
    isolated(drop_engine_first)


def answer_nonsense(answer: object) -> None:
    """A test double that returns no number, or raises an OSError whose errno is none."""

    def transfer(kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if isinstance(answer, tuple):
            raise OSError(*answer)
        return answer  # type: ignore[return-value]

    sys.unraisablehook = lambda _: None
    backend = _engine.callback_backend(transfer)
    engine = _engine.Engine(2 * PAGE, PAGE, 2)
    segments = array("Q", [0, 4 * PAGE, POOL_ADDRESS])
    job = write(engine, 0, 0, segments, array("Q"), backend, False, 2, 2)
    assert job.wait_written(60.0)
    assert job.failure() == ("write", 0, 5), job.failure()
    engine.close()
    backend.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("answer", [None, "4096", ("text", "for a number")], ids=repr)
def test_nonsense_from_a_callback_is_an_error(answer: object) -> None:
    isolated(answer_nonsense, answer)
