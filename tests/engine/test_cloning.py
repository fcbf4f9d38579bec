"""The cloner by itself: of each block, exactly the chunks that another file has in the same place
are cloned, and the rest is written by the backend behind it, whose errors are the job's.

Blocks and chunks are small here, and clones are copies between files in memory. Knows
fastckpt._engine; must not know formats, nor how a step finds the other file.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import struct
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.plan.image import address_of
from tests import compiler
from tests.engine.test_engine import PAGE, WAIT_S, callback_backend, engine_of, relaxed
from tests.paths import TESTS

CHUNK = PAGE
KEY = bytes(range(16))
UNKNOWN = b"\xff" * 16
SAMPLES = 8
POLYVAL = _engine.polyval_kernels()["portable"]


class Range(NamedTuple):
    """Bytes of a file."""

    begin: int
    end: int


def memory_file(files: ExitStack, content: bytes = b"", nbytes: int = 0) -> int:
    fd = os.memfd_create("cloned", os.MFD_CLOEXEC)
    files.callback(os.close, fd)
    os.pwrite(fd, content, 0)
    os.truncate(fd, max(nbytes, len(content)))
    return fd


def content_of(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def pieces(content: bytes) -> list[bytes]:
    return [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]


def hashes_of(content: bytes) -> list[bytes]:
    return [POLYVAL(piece, KEY) for piece in pieces(content)]


@dataclass
class Disk:
    """Clones ranges by copies, reads and writes what it is asked to, and notes all of it."""

    clones: list[Range] = field(default_factory=list)
    reads: list[Range] = field(default_factory=list)
    writes: list[Range] = field(default_factory=list)

    def clone(self, target: int, source: int, offset: int, nbytes: int) -> None:
        self.clones.append(Range(offset, offset + nbytes))
        os.pwrite(target, os.pread(source, nbytes, offset), offset)

    def read(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert kind == "read"
        self.reads.append(Range(offset, offset + len(memory)))
        return os.preadv(fd, [memory], offset)

    def write(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        assert kind == "write"
        self.writes.append(Range(offset, offset + len(memory)))
        return os.pwrite(fd, memory, offset)


@contextmanager
def cloning(disk: Disk, cloner: _engine.Cloner, threads: int = 2) -> Iterator[_engine.CloneSink]:
    with callback_backend(disk.write) as inner:
        hashing = _engine.threads_backend(threads, 10)
        try:
            yield _engine.CloneSink(inner, hashing, cloner)
        finally:
            hashing.close()


def staged(
    engine: _engine.Engine,
    content: bytearray,
    blocks: int,
    known: _engine.Cloner | None = None,
    cuts: Iterable[int] = (),
) -> _engine.WriteJob:
    """Begins to stage what the caller holds until then, in segments that end at the cuts."""
    segments, address = array("Q"), address_of(content)
    for begin, end in itertools.pairwise(sorted({0, len(content), *cuts})):
        segments.extend((begin, end - begin, address + begin))
    return engine.stage(segments, array("Q"), _engine.Allowance(blocks), 2, known=known)


class Saved(NamedTuple):
    """What came of a save: the file, the cloner, and how the job ended."""

    content: bytes
    cloner: _engine.Cloner
    failure: tuple[str, int, int] | None


def save(
    new: bytes,
    old: bytes,
    known: list[bytes],
    block_bytes: int,
    disk: Disk,
    *,
    key: bytes = KEY,
    direct: bool = False,
    in_place: bool = False,
    cuts: Iterable[int] = (),
) -> Saved:
    """Writes a file of which another one, with hashes, is the last version.

    Args:
        in_place: whether what the other file has as it lies in memory is not even staged.
        cuts: the ends of segments.
    """
    with ExitStack() as files, engine_of(3, block_bytes) as engine:
        source, fd = memory_file(files, old), memory_file(files, nbytes=len(new))
        sizes = (len(new), block_bytes, CHUNK)
        cloner = _engine.Cloner(*sizes, key, source, b"".join(known), disk.clone, disk.read)
        with cloning(disk, cloner) as sink:
            held = bytearray(new)
            job = staged(engine, held, 3, cloner if in_place else None, cuts)
            job.write_to(fd, 0, sink, direct)
            assert job.wait_staged(WAIT_S)
            held[:] = bytes(len(held))
            assert job.wait_written(WAIT_S) and engine.arena_blocks_in_use() == 0
            if job.failure() is None:
                blocks = [new[at : at + block_bytes] for at in range(0, len(new), block_bytes)]
                assert job.block_crcs() == [zlib.crc32(block) for block in blocks]
            return Saved(content_of(fd), cloner, job.failure())


def changed(content: bytes, chunks: set[int]) -> bytes:
    """The content with other bytes in some of its chunks, some only at their end."""
    new = bytearray(content)
    for chunk in chunks:
        new[min(len(new), (chunk + 1) * CHUNK) - 1] ^= 1
    return bytes(new)


@given(
    block_chunks=st.sampled_from([1, 4, 8, 16, 24]),
    chunks=st.integers(1, 60),
    ending=st.integers(1, CHUNK),
    changes=st.sets(st.integers(0, 59)),
    unknown=st.sets(st.integers(0, 59), max_size=5),
    comparable=st.integers(0, 60),
    direct=st.booleans(),
    in_place=st.booleans(),
    cuts=st.sets(st.integers(1, 59 * CHUNK), max_size=8),
)
@example(16, 32, 9, {0, 2, 4, 6, 8, 10, 12, 14}, set(), 60, False, False, set())  # all samples
@example(16, 32, 100, {0, 2, 4, 6, 8, 10, 12}, {20}, 60, True, False, set())
@example(16, 48, CHUNK, set(), set(), 20, False, False, set())
@example(16, 48, 100, {20}, set(), 60, True, True, {CHUNK, CHUNK + 1, 20 * CHUNK + 5})
@relaxed
def test_equal_chunks_are_cloned_and_all_others_written(
    block_chunks: int,
    chunks: int,
    ending: int,
    changes: set[int],
    unknown: set[int],
    comparable: int,
    direct: bool,
    in_place: bool,
    cuts: set[int],
) -> None:
    """Of a block in which each of the chunks looked at first has changed, nothing is cloned."""
    old = random.Random(chunks).randbytes((chunks - 1) * CHUNK + ending)
    new = changed(old, {chunk for chunk in changes if chunk < chunks})
    known = [UNKNOWN if chunk in unknown else each for chunk, each in enumerate(hashes_of(old))][
        :comparable
    ]
    disk = Disk()
    cuts = {cut for cut in cuts if cut < len(new)}
    how = (block_chunks * CHUNK, disk)
    saved = save(new, old, known, *how, direct=direct, in_place=in_place, cuts=cuts)
    padding = bytes(-len(new) % PAGE)
    assert saved.failure is None and saved.content[: len(new)] == new

    wanted = hashes_of(new)
    equal = [chunk < len(known) and known[chunk] == each for chunk, each in enumerate(wanted)]
    cloned = []
    for first in range(0, chunks, block_chunks):
        block = range(first, min(first + block_chunks, chunks))
        stride = max(1, len(block) // SAMPLES)
        taken = [chunk for chunk in block if equal[chunk]]
        if not any(equal[chunk] for chunk in block[::stride]):
            taken = []
            if first < len(known):
                for chunk in set(block) - set(block[::stride]):
                    wanted[chunk] = UNKNOWN
        cloned.append(sum(len(pieces(new)[chunk]) for chunk in taken))
        equal[first : first + block_chunks] = [chunk in taken for chunk in block]
    assert saved.cloner.hashes() == b"".join(wanted)
    assert saved.cloner.cloned() == cloned and saved.cloner.refusal() == (0, 0)
    # Each byte came by one way, and by as few calls as can be.
    ends = {chunk: min(len(new), (chunk + 1) * CHUNK) for chunk in range(chunks)}
    runs: list[tuple[bool, Range]] = []
    for chunk in range(chunks):
        kind, end = equal[chunk], ends[chunk]
        if direct and not kind and end == len(new):
            end += len(padding)
        if runs and chunk % block_chunks and runs[-1][0] == kind:
            runs[-1] = kind, Range(runs[-1][1].begin, end)
        else:
            runs.append((kind, Range(chunk * CHUNK, end)))
    assert sorted(disk.clones) == [each for kind, each in runs if kind] and not disk.reads
    assert sorted(disk.writes) == [each for kind, each in runs if not kind]
    padded = direct and not equal[-1]
    assert saved.content == new + (padding if padded else b"")


def test_a_chunk_with_the_hash_that_stands_for_none_is_written() -> None:
    key = b"\x01" + bytes(14) + b"\xc2"  # under which the hash is the sum of all words
    old = UNKNOWN + bytes(CHUNK - len(UNKNOWN)) + random.Random(7).randbytes(CHUNK)
    known = [POLYVAL(piece, key) for piece in pieces(old)]
    assert known[0] == UNKNOWN
    saved = save(old, old, known, 2 * CHUNK, Disk(), key=key)
    assert saved.content == old and saved.cloner.cloned() == [CHUNK]


class RefusesFrom(Disk):
    """Its clones fail from the k-th on, each with another error."""

    def __init__(self, first: int, *codes: int) -> None:
        super().__init__()
        self._first, self._codes = first, codes

    def clone(self, target: int, source: int, offset: int, nbytes: int) -> None:
        super().clone(target, source, offset, nbytes)
        number = len(self.clones) - 1 - self._first
        if number >= 0:
            os.pwrite(target, b"half a clone", offset)
            raise OSError(self._codes[number], "refused")


def test_after_a_refused_clone_everything_is_written() -> None:
    old = random.Random(1).randbytes(24 * CHUNK)
    new = changed(old, {1, 4, 9})
    disk = RefusesFrom(1, errno.EXDEV)  # the second one: chunks 2 and 3
    with ExitStack() as files, engine_of(1, 8 * CHUNK) as engine:
        source, fd = memory_file(files, old), memory_file(files, nbytes=len(new))
        sizes = (len(new), 8 * CHUNK, CHUNK)
        hashes = b"".join(hashes_of(old))
        cloner = _engine.Cloner(*sizes, KEY, source, hashes, disk.clone)
        with cloning(disk, cloner, threads=1) as sink:
            held = bytearray(new)
            job = staged(engine, held, 1)
            job.write_to(fd, 0, sink, False)
            assert job.wait_written(WAIT_S) and job.failure() is None
        assert content_of(fd) == new
    assert disk.clones == [Range(0, CHUNK), Range(2 * CHUNK, 4 * CHUNK)]
    blocks = [Range(at * CHUNK, (at + 8) * CHUNK) for at in (8, 16)]
    assert disk.writes == [Range(CHUNK, 8 * CHUNK), *blocks]
    assert cloner.refusal() == (errno.EXDEV, 2 * CHUNK)
    assert cloner.cloned() == [CHUNK, 0, 0]
    assert cloner.hashes() == b"".join(hashes_of(new))  # the next file is compared with it


@pytest.mark.parametrize("direct", [False, True])
def test_what_was_not_staged_and_cannot_be_cloned_is_read_from_the_other_file(
    direct: bool,
) -> None:
    old = random.Random(8).randbytes(24 * CHUNK + 100)
    new = changed(old, {12})
    disk = RefusesFrom(0, *[errno.EXDEV] * 4)
    saved = save(new, old, hashes_of(old), 8 * CHUNK, disk, direct=direct, in_place=True)
    assert saved.failure is None and saved.cloner.loss() is None
    assert saved.content == new + bytes(-len(new) % PAGE if direct else 0)
    ends = [min(len(new), at + CHUNK) for at in range(0, len(new), CHUNK)]
    chunks = [Range(at * CHUNK, end) for at, end in enumerate(ends)]
    assert sorted(disk.reads) == chunks[:12] + chunks[16:]  # the others were staged
    assert saved.cloner.cloned() == [0, 0, 0, 0]
    assert saved.cloner.taken() == [8 * CHUNK, 4 * CHUNK, 8 * CHUNK, 100]


@pytest.mark.parametrize("what", ["flipped", "cut", "unreadable"])
def test_a_chunk_of_the_other_file_that_is_not_what_its_hash_says_is_a_loss(what: str) -> None:
    class Refuses(RefusesFrom):
        def read(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
            if what == "unreadable" and offset >= 3 * CHUNK:
                raise OSError(errno.EIO, "failed")
            return super().read(kind, fd, memory, offset)

    new = random.Random(9).randbytes(8 * CHUNK)
    old = {"flipped": changed(new, {3}), "cut": new[: 4 * CHUNK - 1], "unreadable": new}[what]
    disk = Refuses(0, errno.EXDEV)
    saved = save(new, old, hashes_of(new), 8 * CHUNK, disk, in_place=True)
    assert saved.cloner.loss() == (errno.EIO if what == "unreadable" else 0, 3 * CHUNK)
    assert disk.writes == [Range(at * CHUNK, (at + 1) * CHUNK) for at in range(3)]


def test_what_is_known_keeps_no_memory() -> None:
    """All is staged though nothing can be written yet, in the memory of the only block that has
    changed.
    """
    old = random.Random(10).randbytes(80 * CHUNK)
    held = bytearray(changed(old, {79}))
    with ExitStack() as files, engine_of(1, 8 * CHUNK) as engine:
        source, fd = memory_file(files, old), memory_file(files, nbytes=len(old))
        sizes, hashes, disk = (len(old), 8 * CHUNK, CHUNK), b"".join(hashes_of(old)), Disk()
        cloner = _engine.Cloner(*sizes, KEY, source, hashes, disk.clone, disk.read)
        with cloning(disk, cloner) as sink:
            job = staged(engine, held, 1, cloner)
            assert job.wait_staged(WAIT_S) and engine.arena_blocks_in_use() == 1
            job.write_to(fd, 0, sink, False)
            assert job.wait_written(WAIT_S) and job.failure() is None
        assert content_of(fd) == held and disk.writes == [Range(79 * CHUNK, 80 * CHUNK)]


def test_numbers_that_are_not_finite_are_counted_where_they_lie() -> None:
    numbers = array("f", [1.0] * (8 * CHUNK // 4))
    for at in (0, 5000, len(numbers) - 1):
        numbers[at] = float("nan")
    held = bytearray(numbers.tobytes())
    with ExitStack() as files, engine_of(1, 4 * CHUNK) as engine:
        source, fd = memory_file(files, bytes(held)), memory_file(files, nbytes=len(held))
        known, disk = b"".join(hashes_of(bytes(held))), Disk()
        cloner = _engine.Cloner(len(held), 4 * CHUNK, CHUNK, KEY, source, known, disk.clone)
        segments = array("Q", [0, len(held), address_of(held)])
        run = array("Q", [0, len(held), 4, 0xFF << 23])
        how = (_engine.Allowance(1), 1)
        job = engine.stage(segments, array("Q"), *how, numbers=run, known=cloner)
        with cloning(disk, cloner) as sink:
            job.write_to(fd, 0, sink, False)
            assert job.wait_written(WAIT_S) and job.non_finite() == [3]
    assert not disk.writes


class Fails(Disk):
    """Writes at some offsets fail."""

    def __init__(self, codes: dict[int, int]) -> None:
        super().__init__()
        self._codes = codes

    def write(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        super().write(kind, fd, memory, offset)
        if offset in self._codes:
            raise OSError(self._codes[offset], "failed")
        return len(memory)


def test_first_error_of_a_blocks_parts_is_the_jobs() -> None:
    """The other parts of the block end before it does, whose memory they read."""
    old = random.Random(2).randbytes(16 * CHUNK)
    new = changed(old, {1, 3, 5, 7, 11})
    disk = Fails({3 * CHUNK: errno.ENOSPC, 5 * CHUNK: errno.EIO})
    saved = save(new, old, hashes_of(old), 8 * CHUNK, disk)
    assert saved.failure == ("write", 3 * CHUNK, errno.ENOSPC)
    assert {each.begin // CHUNK for each in disk.writes} >= {1, 3, 5, 7}


def test_short_writes_of_a_part_go_on() -> None:
    class Short(Disk):
        def write(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
            return super().write(kind, fd, memory[: 1 + len(memory) // 2], offset)

    old = random.Random(3).randbytes(20 * CHUNK + 5)
    new = changed(old, {0, 3, 4, 20})
    saved = save(new, old, hashes_of(old), 8 * CHUNK, Short())
    assert saved.content == new and saved.failure is None


class Gated(Disk):
    """Writes wait for an event."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def write(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        self.reached.set()
        assert self.go_on.wait(WAIT_S)
        return super().write(kind, fd, memory, offset)


@contextmanager
def under_way(
    disk: Gated, new: bytes, old: bytes, blocks: int
) -> Iterator[tuple[_engine.WriteJob, int]]:
    """A job of which a part is being written, and no more than so many blocks are staged."""
    with ExitStack() as files, engine_of(blocks, 8 * CHUNK) as engine:
        source, fd = memory_file(files, old), memory_file(files, nbytes=len(new))
        sizes = (len(new), 8 * CHUNK, CHUNK)
        hashes = b"".join(hashes_of(old))
        cloner = _engine.Cloner(*sizes, KEY, source, hashes, disk.clone)
        with cloning(disk, cloner) as sink:
            held = bytearray(new)
            job = staged(engine, held, blocks)
            job.write_to(fd, 0, sink, False)
            assert disk.reached.wait(WAIT_S)
            try:
                yield job, fd
            finally:
                disk.go_on.set()
                assert job.wait_written(WAIT_S)


def test_a_cancelled_job_ends_with_what_is_under_way() -> None:
    old = random.Random(5).randbytes(80 * CHUNK)
    disk, new = Gated(), changed(old, set(range(0, 80, 8)))
    with under_way(disk, new, old, 1) as (job, fd):
        job.cancel()
        assert not job.wait_written(0.0)
        disk.go_on.set()
        assert job.wait_written(WAIT_S)
        failure = job.failure()
        assert failure is not None and failure[2] == errno.ECANCELED
        assert job.nbytes_written() == 8 * CHUNK
        assert content_of(fd) == new[: 8 * CHUNK] + bytes(72 * CHUNK)


def test_files_that_are_written_at_once_have_their_own_cloners() -> None:
    disk = Disk()
    with ExitStack() as stack:
        engine = stack.enter_context(engine_of(4, 8 * CHUNK))
        inner = stack.enter_context(callback_backend(disk.write, 2))
        hashing = _engine.threads_backend(2)
        stack.callback(hashing.close)
        files: list[tuple[int, bytearray, _engine.Cloner, _engine.WriteJob]] = []
        for number in range(3):
            old = random.Random(number).randbytes((20 + number) * CHUNK)
            new = bytearray(changed(old, {number, 17 - number}))
            source, fd = memory_file(stack, old), memory_file(stack, nbytes=len(new))
            sizes = (len(new), 8 * CHUNK, CHUNK)
            hashes = b"".join(hashes_of(old))
            cloner = _engine.Cloner(*sizes, KEY, source, hashes, disk.clone)
            files.append((fd, new, cloner, staged(engine, new, 2)))
        for fd, _new, cloner, job in files:
            job.write_to(fd, 0, _engine.CloneSink(inner, hashing, cloner), False)
        for fd, new, cloner, job in files:
            assert job.wait_written(WAIT_S) and job.failure() is None
            assert content_of(fd) == new
            assert sum(cloner.cloned()) == len(new) - 2 * CHUNK


def niceness() -> int:
    """The calling thread's."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_hashes_are_computed_at_low_priority() -> None:
    """And blocks are written at that of the process."""
    found: dict[str, set[int]] = {"clone": set(), "write": set()}

    def noting(kind: str, call: Callable[..., int | None]) -> Callable[..., int | None]:
        def noted(*args: object) -> int | None:
            found[kind].add(niceness())
            return call(*args)

        return noted

    disk = Disk()
    disk.clone = noting("clone", disk.clone)  # type: ignore[assignment, method-assign]
    disk.write = noting("write", disk.write)  # type: ignore[assignment, method-assign]
    old = random.Random(6).randbytes(32 * CHUNK)
    own = niceness()
    save(changed(old, {3, 12, 30}), old, hashes_of(old), 8 * CHUNK, disk)
    assert found == {"clone": {min(own + 10, 19)}, "write": {own}} and niceness() == own


@pytest.mark.parametrize(("key", "hashes"), [(b"short", b""), (KEY, b"half a hash")])
def test_half_keys_and_hashes_are_refused(key: bytes, hashes: bytes) -> None:
    with pytest.raises(ValueError, match=r"16 bytes|rows"):
        _engine.Cloner(1, CHUNK, CHUNK, key, -1, hashes)


def test_what_changes_meanwhile_has_the_checksum_of_what_was_written(disk: Path) -> None:
    """A chunk is looked at where it lies: its hash, its CRC-32 and the count of its numbers that
    are not finite are of the same bytes, which are those written.
    """
    source, count, at = TESTS / "stubs" / "hammer.cc", 256, 1024
    library = ctypes.CDLL(str(compiler.library(disk, "hammer.so", source, "-O1")))
    one, infinite = struct.pack("f", 1.0), struct.pack("f", float("inf"))
    held, stop = bytearray(CHUNK), bytearray(4)
    held[at : at + 4] = one
    old = bytes(held) * count
    hashes, sizes = b"".join(hashes_of(old)), (len(old), CHUNK, CHUNK)
    # All chunks of the image are the same memory.
    segments = [(begin, CHUNK, address_of(held)) for begin in range(0, len(old), CHUNK)]
    plan = array("Q", itertools.chain(*segments))
    numbers = array("Q", (0, len(old), 4, 0x7F800000))
    words = [int.from_bytes(word, "little") for word in (one, infinite)]
    pointer, stop_pointer = (
        ctypes.c_void_p(address_of(held) + at),
        ctypes.c_void_p(address_of(stop)),
    )
    writer = threading.Thread(target=library.hammer, args=(pointer, *words, stop_pointer))
    writer.start()
    try:
        for _ in range(15):
            disk_of_file = Disk()
            with ExitStack() as files, engine_of(4, CHUNK) as engine:
                other, fd = memory_file(files, old), memory_file(files, nbytes=len(old))
                tools = (disk_of_file.clone, disk_of_file.read)
                cloner = _engine.Cloner(*sizes, KEY, other, hashes, *tools)
                with cloning(disk_of_file, cloner, 1) as sink:
                    allowance = _engine.Allowance(4)
                    job = engine.stage(
                        plan, array("Q"), allowance, 1, numbers=numbers, known=cloner
                    )
                    job.write_to(fd, 0, sink, False)
                    assert job.wait_written(WAIT_S) and job.failure() is None
                written = pieces(content_of(fd))
                assert list(map(zlib.crc32, written)) == job.block_crcs()
                assert job.non_finite() == [
                    sum(piece[at : at + 4] == infinite for piece in written)
                ]
    finally:
        stop[0] = 1
        writer.join()
