"""Engines with backends that tests see into, and plans of what they write."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.plan.image import address_of

PAGE = 4096
BLOCK_SIZES = (4096, 8192, 65536)
WAIT_S = 60.0
POOL = bytearray(random.Random(7).randbytes(1 << 20))
POOL_ADDRESS = address_of(POOL)
Engine = _engine.Engine
Backend = _engine.Backend
relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(
    scope="module", params=["threads", pytest.param("io_uring", marks=pytest.mark.uring)]
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    try:
        made = (
            _engine.threads_backend(3) if request.param == "threads" else _engine.uring_backend(4)
        )
    except _engine.BackendUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


@contextmanager
def engine_of(blocks: int, block_bytes: int = PAGE, stagers: int = 2) -> Iterator[Engine]:
    """An engine that must close, and have given every block back by then."""
    engine = Engine(blocks * block_bytes, block_bytes, stagers)
    try:
        yield engine
    finally:
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(WAIT_S)
        if closing.is_alive():  # its destructor would hang as well, and the whole session with it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
            pytest.fail("the engine did not close")
    assert engine.arena_blocks_in_use() == 0


@contextmanager
def callback_backend(
    transfer: Callable[[str, int, memoryview, int], int], threads: int = 1
) -> Iterator[Backend]:
    backend = _engine.callback_backend(transfer, threads)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass
class Plan:
    """What a job is told, with its memory in POOL."""

    segments: list[tuple[int, int, int]] = field(default_factory=list)  # offset, nbytes, in POOL
    slots: list[tuple[int, int]] = field(default_factory=list)  # offset, segment

    @property
    def nbytes(self) -> int:
        return sum(self.segments[-1][:2]) if self.segments else 0

    def add(self, nbytes: int, source: int) -> None:
        self.segments.append((self.nbytes, nbytes, source % (len(POOL) - nbytes)))

    def add_described(self, nbytes: int, source: int, holder_nbytes: int, *slots_at: int) -> None:
        """A segment, and the next one, which holds its CRC-32 so many bytes from its begin."""
        self.add(nbytes, source)
        self.add(holder_nbytes, source + nbytes)
        begin = self.segments[-1][0]
        self.slots += [(begin + slot_at, len(self.segments) - 2) for slot_at in slots_at]

    def columns(self) -> tuple[array[int], array[int]]:
        rows = ((offset, nbytes, POOL_ADDRESS + source) for offset, nbytes, source in self.segments)
        return array("Q", [v for row in rows for v in row]), array(
            "Q", [v for r in self.slots for v in r]
        )

    def render(self) -> tuple[bytes, list[int]]:
        """The image, and the CRC-32 in each of its slots."""
        pieces = [bytes(POOL[source : source + nbytes]) for _, nbytes, source in self.segments]
        image = bytearray(b"".join(pieces))
        crcs = [zlib.crc32(pieces[segment]) for _, segment in self.slots]
        for (offset, _), crc in zip(self.slots, crcs, strict=True):
            image[offset : offset + 4] = crc.to_bytes(4, "little")
        return bytes(image), crcs


def piece_sizes(block_bytes: int) -> st.SearchStrategy[int]:
    near = st.builds(
        lambda count, off: max(1, count * block_bytes + off), st.integers(1, 3), st.integers(-5, 5)
    )
    return st.one_of(st.integers(1, 12), st.integers(1, 400), near, st.integers(1, 2 * block_bytes))


@st.composite
def plans(draw: st.DrawFn, block_bytes: int) -> Plan:
    plan = Plan()
    sizes = piece_sizes(block_bytes)
    for _ in range(draw(st.integers(1, 20))):
        source = draw(st.integers(0, len(POOL)))
        if draw(st.booleans()):
            holder_nbytes = max(4, draw(sizes))
            slot_at = draw(
                st.sampled_from([0, holder_nbytes - 4]) | st.integers(0, holder_nbytes - 4)
            )
            places = [slot_at]
            if slot_at >= 4:
                places = [*draw(st.lists(st.integers(0, slot_at - 4), max_size=1)), slot_at]
            plan.add_described(draw(sizes), source, holder_nbytes, *places)
        else:
            plan.add(draw(sizes), source)
    return plan


def crcs_of(content: bytes, block_bytes: int) -> list[int]:
    return [
        zlib.crc32(content[at : at + block_bytes]) for at in range(0, len(content), block_bytes)
    ]


def write(
    engine: Engine,
    fd: int,
    offset: int,
    segments: array[int],
    slots: array[int],
    sink: _engine.Sink,
    direct: bool,
    limit: int,
    stagers: int,
) -> _engine.WriteJob:
    job = engine.stage(segments, slots, _engine.Allowance(limit), stagers)
    job.write_to(fd, offset, sink, direct)
    return job


def start(
    engine: Engine,
    fd: int,
    plan: Plan,
    backend: Backend,
    *,
    offset: int = 0,
    direct: bool = False,
    limit: int = 1 << 20,
    stagers: int = 4,
) -> _engine.WriteJob:
    segments, slots = plan.columns()
    return write(engine, fd, offset, segments, slots, backend, direct, limit, stagers)


def written(job: _engine.WriteJob) -> None:
    """Waits for a job that must succeed."""
    assert job.wait_staged(WAIT_S)
    assert job.wait_written(WAIT_S)
    assert job.failure() is None


def plain(nbytes: int, source: int = 0) -> Plan:
    plan = Plan()
    plan.add(nbytes, source)
    return plan
