"""zstd frames by themselves: blocks to a real file and back by several threads at once, judged by
stock zstd and by frames that were damaged on purpose.

Knows fastckpt.engine.codec, the Storage below it and, at the end, the engine above it; must not
know formats or steps. Blocks are small, so that there are many of them. Frames of planes are
test_planes.py's business.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fastckpt import _engine
from fastckpt.engine import codec
from fastckpt.engine.codec import (
    Encoder,
    FrameReader,
    FrameWriter,
    ZstdEncoder,
    encoder_of,
    padding_nbytes,
    stored_nbytes_max,
)
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.plan.image import ItemRun, address_of
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import PosixFile
from tests.kit.codecs import (
    BLOCK,
    PAGE,
    WAIT_S,
    fd,
    opened,
    read,
    relaxed,
    split,
    write,
    write_blocks,
)

__all__ = ["fd"]  # a fixture

MAGIC = (0x184D2A50).to_bytes(4, "little")

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd command")


def weights(nbytes: int, seed: int) -> bytes:
    """bf16 weights: what can be gained is in the exponents alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(-(-nbytes // 2), generator=generator) * 0.02
    return bytes(values.to(torch.bfloat16).view(torch.uint8).numpy())[:nbytes]


CONTENTS: dict[str, Callable[[int, int], bytes]] = {
    "constant": lambda nbytes, seed: bytes([seed % 256]) * nbytes,
    "incompressible": lambda nbytes, seed: random.Random(seed).randbytes(nbytes),
    "weights": weights,
}


def without_padding(stored: bytes) -> bytes:
    """The frame of one block, after a look at what follows it: nothing, or one skippable frame."""
    decoder = zstandard.ZstdDecompressor().decompressobj()
    decoder.decompress(stored)
    rest = decoder.unused_data
    if rest:
        assert rest == MAGIC + (len(rest) - 8).to_bytes(4, "little") + bytes(len(rest) - 8)
    return stored[: len(stored) - len(rest)]


# ---- What is written comes back, and stock zstd reads it ----


@relaxed
@given(
    block_bytes=st.sampled_from([1000, PAGE, 3 * PAGE, BLOCK]),
    whole=st.integers(0, 7),
    rest=st.integers(0, 999) | st.just(1),
    kind=st.sampled_from(sorted(CONTENTS)),
    level=st.sampled_from([1, 1, -3, 5]),
    threads=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
)
def test_round_trip(
    tmp_path: Path,
    block_bytes: int,
    whole: int,
    rest: int,
    kind: str,
    level: int,
    threads: int,
    seed: int,
) -> None:
    nbytes = max(1, whole * block_bytes + rest)
    content = CONTENTS[kind](nbytes, seed)
    with opened(tmp_path / "a.zst") as fd:
        encoder = partial(ZstdEncoder, level)
        frames = write(fd, content, block_bytes, threads=threads, seed=seed, encoder=encoder)
        assert len(frames) == -(-nbytes // block_bytes)
        assert sum(frames) == os.fstat(fd).st_size
        at = 0
        for (_, block), stored in zip(split(content, block_bytes), frames, strict=True):
            assert stored % PAGE == 0 and 0 < stored <= stored_nbytes_max(len(block))
            frame = without_padding(os.pread(fd, stored, at))
            assert zstandard.frame_content_size(frame) == len(block)
            assert stored == len(frame) + padding_nbytes(len(frame))
            at += stored
        assert read(fd, nbytes, frames, block_bytes, threads=threads, seed=seed + 1) == content


@needs_zstd
def test_zstd_gives_back_the_safetensors_file(tmp_path: Path, fd: int) -> None:
    tensors = {"w": (torch.randn(300, 1000) * 0.02).to(torch.bfloat16), "b": torch.arange(3)}
    save_file(tensors, tmp_path / "plain.safetensors")
    content = (tmp_path / "plain.safetensors").read_bytes()
    frames = write(fd, content)
    assert len(content) / sum(frames) > 1.2
    subprocess.run(["zstd", "-q", "-d", "a.zst", "-o", "out.safetensors"], cwd=tmp_path, check=True)
    loaded = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", CONTENTS)
def test_full_size_block_fits_its_workspace(fd: int, kind: str) -> None:
    content = CONTENTS[kind]((8 << 20) + 5, 3)
    frames = write(fd, content, 8 << 20)
    assert read(fd, len(content), frames, 8 << 20) == content


# ---- Padding ----


def test_padding_reaches_the_end_of_a_page_with_room_for_a_header() -> None:
    for nbytes in range(1, 3 * PAGE + 1):
        padding = padding_nbytes(nbytes)
        assert (nbytes + padding) % PAGE == 0
        assert padding == 0 if nbytes % PAGE == 0 else 8 <= padding < PAGE + 8
        assert nbytes + padding <= stored_nbytes_max(nbytes)


def test_frames_that_end_near_the_end_of_a_page(fd: int) -> None:
    ends = set()
    for nbytes in range(PAGE - 40, PAGE + 10):
        os.ftruncate(fd, 0)
        content = random.Random(nbytes).randbytes(2 * nbytes)
        frames = write(fd, content, nbytes, threads=2)
        frame = without_padding(os.pread(fd, frames[0], 0))
        rest = -len(frame) % PAGE
        assert frames[0] == len(frame) + rest + (PAGE if 0 < rest < 8 else 0)
        assert read(fd, 2 * nbytes, frames, nbytes, threads=2) == content
        ends.add(rest)
    assert ends >= set(range(16)) | {PAGE - 1, PAGE - 2}


def test_padding_after_a_longer_frame_in_the_same_memory_is_zero(fd: int) -> None:
    noise = random.Random(1).randbytes(BLOCK)
    frames = write(fd, noise + bytes(BLOCK) + noise[:7], threads=1)
    without_padding(os.pread(fd, frames[1], frames[0]))
    without_padding(os.pread(fd, frames[2], sum(frames[:2])))


# ---- Direct I/O, threads, memory ----


def test_direct_io(disk: Path) -> None:
    storage = Storage()
    path = disk / "a.zst"
    fd = storage.create(str(path), 0o644)
    try:
        refused = storage.set_direct(fd, writing=True)
        if refused is not None:
            pytest.skip(refused)
        content = weights(9 * BLOCK + 13, 5)
        frames = write(fd, content, storage=storage, threads=3)
    finally:
        os.close(fd)
    with open(path, "rb") as file:
        assert read(file.fileno(), len(content), frames) == content


class Meeting(Storage):
    """Ends no write before as many as said are under way."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties, timeout=WAIT_S)

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        self._barrier.wait()
        super().write_at(fd, data, offset)


def count_workspaces(
    monkeypatch: pytest.MonkeyPatch, parties: int = 1
) -> tuple[list[int], WeakSet[Any]]:
    """Block sizes of all workspaces made, and those alive; `parties` of them compress at a time."""
    made: list[int] = []
    alive: WeakSet[Any] = WeakSet()
    barrier = threading.Barrier(parties, timeout=WAIT_S)

    class Counted(codec._Workspace):
        def __init__(self, encoder: Encoder, block_bytes: int) -> None:
            super().__init__(encoder, block_bytes)
            made.append(block_bytes)
            alive.add(self)

        def stored(self, block: memoryview, offset: int) -> memoryview:
            barrier.wait()
            return super().stored(block, offset)

    monkeypatch.setattr(codec, "_Workspace", Counted)
    return made, alive


def test_threads_compress_and_write_at_the_same_time_with_a_workspace_each(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, alive = count_workspaces(monkeypatch, parties=4)
    content = weights(8 * BLOCK, 1)
    writer = FrameWriter(PosixFile(Meeting(4), fd, "a.zst"), len(content), BLOCK)
    write_blocks(writer, fd, content, BLOCK, 4)
    assert made == [BLOCK] * 4
    assert not alive, "the last block frees them"
    assert read(fd, len(content), writer.frames()) == content


# ---- Errors ----


class Broken(Storage):
    """Its writes raise, after a moment in which other threads get as far as they can."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self.writes = 0

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        self.writes += 1
        time.sleep(0.1)
        raise self._error


class Held(Storage):
    """Its writes say that they have begun, and wait to be let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write_at(self, fd: int, data: Any, offset: int) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        super().write_at(fd, data, offset)


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError(errno.EAGAIN, "busy"), errno.EAGAIN),
        (RuntimeError("a bug"), errno.EIO),
    ],
)
def test_error_in_one_block_ends_all(fd: int, error: BaseException, number: int) -> None:
    """Block 1 never comes: without the error, those after it would wait for it."""
    content = weights(6 * BLOCK, 1)
    blocks = split(content, BLOCK)
    storage = Broken(error)
    writer = FrameWriter(PosixFile(storage, fd, "a.zst"), len(content), BLOCK)
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(writer.transfer, "write", fd, m, at) for at, m in blocks[2:]]
        with pytest.raises((StorageError, RuntimeError)) as first:
            writer.transfer("write", fd, blocks[0][1], 0)
        raised = [future.exception(WAIT_S) for future in waiting]
    if isinstance(error, OSError):
        assert str(first.value).startswith("write of 'a.zst' at offset 0 failed")
        assert {str(other) for other in raised} == {str(first.value)}
    assert all(isinstance(other, StorageError) and other.errno == number for other in raised)
    for call in (lambda: writer.transfer("write", fd, blocks[1][1], BLOCK), writer.frames):
        with pytest.raises(StorageError) as later:
            call()
        assert later.value.errno == number
    assert storage.writes == 1


def test_first_error_is_the_one_that_counts(fd: int) -> None:
    content = weights(2 * BLOCK, 1)
    blocks = split(content, BLOCK)

    class TwiceBroken(Held):
        def write_at(self, fd: int, data: Any, offset: int) -> None:
            if offset == 0:
                assert self.begun.wait(WAIT_S)
                raise OSError(errno.ENOSPC, "full")
            super().write_at(fd, data, offset)
            raise OSError(errno.EIO, "broken")

    storage = TwiceBroken()
    writer = FrameWriter(PosixFile(storage, fd, "a.zst"), len(content), BLOCK)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(writer.transfer, "write", fd, blocks[1][1], BLOCK)
        with pytest.raises(StorageError):
            writer.transfer("write", fd, blocks[0][1], 0)
        storage.go_on.set()
        error = second.exception(WAIT_S)
    assert isinstance(error, StorageError) and error.errno == errno.EIO
    with pytest.raises(StorageError) as kept:
        writer.frames()
    assert (kept.value.errno, kept.value.offset) == (errno.ENOSPC, 0)


def test_turn_that_never_comes(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "TURN_WAIT_S", 0.1)
    content = weights(4 * BLOCK, 1)
    blocks = split(content, BLOCK)
    writer = FrameWriter(PosixFile(Storage(), fd, "a.zst"), len(content), BLOCK)
    writer.transfer("write", fd, blocks[0][1], 0)
    with pytest.raises(StorageError, match="wait for block 1 before block 3") as error:
        writer.transfer("write", fd, blocks[3][1], 3 * BLOCK)
    assert error.value.errno == errno.ETIMEDOUT


def test_no_memory_for_another_workspace(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = weights(2 * BLOCK, 1)
    blocks = split(content, BLOCK)
    storage = Held()
    writer = FrameWriter(PosixFile(storage, fd, "a.zst"), len(content), BLOCK)

    def refuse(encoder: Encoder, block_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(codec, "_Workspace", refuse)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(writer.transfer, "write", fd, blocks[0][1], 0)
        try:
            assert storage.begun.wait(WAIT_S)
            with pytest.raises(StorageError, match="allocate") as error:
                writer.transfer("write", fd, blocks[1][1], BLOCK)
            assert error.value.errno == errno.ENOMEM
        finally:
            storage.go_on.set()
        assert first.result(WAIT_S) == BLOCK  # its frame had its place
    with pytest.raises(StorageError, match="allocate"):
        writer.frames()


# ---- Damage ----


@pytest.mark.parametrize(
    "frames",
    [(), (PAGE,), (PAGE, PAGE, PAGE), (PAGE, 0), (-PAGE, PAGE), (PAGE + 1, PAGE), (PAGE, 1 << 50)],
)
def test_sizes_of_frames_that_cannot_be(fd: int, frames: tuple[int, ...]) -> None:
    with pytest.raises(CorruptCheckpoint, match="frame"):
        FrameReader(PosixFile(Storage(), fd, "a.zst"), 2 * PAGE, PAGE, frames)


def forged_header(content_nbytes: int, frame: bytes) -> bytes:
    """A frame that claims another size, in eight bytes, and otherwise has the blocks of `frame`."""
    assert frame[4] >> 5 == 0b011, "a header of one segment with a size of two bytes"
    return frame[:4] + b"\xe0" + content_nbytes.to_bytes(8, "little") + frame[7:]


def test_frame_with_another_content_size_gives_zeros(fd: int) -> None:
    nbytes = 3000
    content = weights(nbytes + 1, 1)
    right = zstandard.ZstdCompressor(level=1).compress(content[:nbytes])
    assert forged_header(nbytes, right) != right
    sizeless = zstandard.ZstdCompressor(level=1, write_content_size=False)
    forged = {
        "longer": zstandard.ZstdCompressor(level=1).compress(content),
        "shorter": zstandard.ZstdCompressor(level=1).compress(content[: nbytes - 1]),
        "unknown": sizeless.compress(content[:nbytes]),
        "huge": forged_header(1 << 50, right),
        "unlimited": forged_header((1 << 64) - 3, right),
        "one more": forged_header(nbytes + 1, right),
        "skippable": MAGIC + (100).to_bytes(4, "little") + bytes(100),
        "none": b"",
    }
    for name, frame in {"right": right, "wide": forged_header(nbytes, right), **forged}.items():
        os.pwrite(fd, frame.ljust(PAGE, b"\0"), 0)
        expected = bytes(nbytes) if name in forged else content[:nbytes]
        assert read(fd, nbytes, (PAGE,), PAGE, threads=1) == expected, name


@pytest.mark.parametrize("window", [0x88, 0xF8], ids=["128 MiB", "2 TiB"])
def test_frame_that_asks_for_a_large_window_and_ends(fd: int, window: int) -> None:
    header = b"\x28\xb5\x2f\xfd\x40" + bytes([window]) + (3000 - 256).to_bytes(2, "little")
    if window == 0x88:  # the other is too large to be asked about
        assert zstandard.get_frame_parameters(header).window_size == 128 << 20
    os.pwrite(fd, header + b"\xff" * (PAGE - len(header)), 0)
    assert read(fd, 3000, (PAGE,), PAGE, threads=1) == bytes(3000)


def decompressed(stored: bytes, nbytes: int) -> bytes:
    """What stock zstd makes of damaged bytes: other bytes of that size, or nothing at all."""
    try:
        content = zstandard.ZstdDecompressor().decompress(stored, max_output_size=nbytes)
    except zstandard.ZstdError:
        return bytes(nbytes)
    return content if len(content) == nbytes else bytes(nbytes)


def test_every_damage_gives_bytes_that_the_checksum_judges(fd: int) -> None:
    content = weights(600, 1)
    frames = write(fd, content, PAGE)
    stored = os.pread(fd, PAGE, 0)
    used = len(without_padding(stored))
    reader = FrameReader(PosixFile(Storage(), fd, "a.zst"), len(content), PAGE, frames)
    target = bytearray(len(content))
    zeros = 0

    def check(damaged: bytes) -> None:
        nonlocal zeros
        os.pwrite(fd, damaged, 0)
        target[:] = content  # bytes that stay would pass for read ones
        assert reader.transfer("read", fd, memoryview(target), 0) == len(content)
        assert target == decompressed(damaged, len(content)), damaged[:used].hex()
        assert target == content or zlib.crc32(target) != zlib.crc32(content)
        zeros += not any(target)

    for at in range(used + 16):
        for bit in range(8):
            flipped = bytes([stored[at] ^ 1 << bit])
            check(stored[:at] + flipped + stored[at + 1 :])
        for lost in (b"\0", b"\xff"):
            check(stored[:at].ljust(PAGE, lost))
    assert zeros > used, "few damages were noticed by zstd: is this test about frames?"


@pytest.mark.parametrize("codec", ["zstd", "planes"])
def test_padding_that_is_damaged_is_told_to_who_asks(fd: int, codec: str) -> None:
    """Blocks of all kinds that zstd has: raw ones, single bytes and compressed ones."""
    content = os.urandom(BLOCK) + bytes(BLOCK) + weights(2 * BLOCK, 1) + b"end"
    encoder = encoder_of(codec, [ItemRun(0, 2, True)], BLOCK)
    frames = write(fd, content, encoder=encoder)

    def unpadded() -> list[int]:
        found: list[int] = []
        reader = FrameReader(
            PosixFile(Storage(), fd, "a.zst"),
            len(content),
            BLOCK,
            frames,
            codec,
            unpadded=found,
        )
        for at, block in split(bytearray(content), BLOCK):
            assert reader.transfer("read", fd, block, at) and bytes(block) == content[at:][:BLOCK]
        return found

    assert unpadded() == []
    for number, end in enumerate(itertools.accumulate(frames)):
        stored = os.pread(fd, PAGE, end - PAGE)
        for at in (stored.rfind(b"\x50\x2a\x4d\x18"), PAGE - 1):
            flipped = bytes([stored[at] ^ 1])
            os.pwrite(fd, flipped, end - PAGE + at)
            assert unpadded() == [number]
            os.pwrite(fd, stored, end - PAGE)


def test_short_file_is_an_error_at_every_length(fd: int) -> None:
    content = weights(600, 1)
    frames = write(fd, content, PAGE)
    reader = FrameReader(PosixFile(Storage(), fd, "a.zst"), len(content), PAGE, frames)
    for nbytes in reversed(range(PAGE)):
        os.ftruncate(fd, nbytes)
        with pytest.raises(StorageError) as error:
            reader.transfer("read", fd, memoryview(bytearray(len(content))), 0)
        assert (error.value.errno, error.value.offset) == (errno.ENODATA, nbytes)


# ---- Below the engine ----


@contextmanager
def engine_with(
    transfer: Callable[[str, int, memoryview, int], int],
) -> Iterator[tuple[_engine.Engine, _engine.Backend]]:
    engine = _engine.Engine(6 * BLOCK, BLOCK, 2)
    backend = _engine.callback_backend(transfer, 3)
    try:
        yield engine, backend
    finally:
        engine.close()
        backend.close()


def engine_write(writer: FrameWriter, fd: int, content: bytearray) -> _engine.WriteJob:
    segments = array("Q", [0, len(content), address_of(content)])
    with engine_with(writer.transfer) as (engine, backend):
        job = engine.stage(segments, array("Q"), _engine.Allowance(6), 2)
        job.write_to(fd, 0, backend, False)
        assert job.wait_written(WAIT_S)
    return job


def test_engine_writes_and_reads_through_frames(fd: int) -> None:
    content = bytearray(weights(40 * BLOCK + 11, 1))
    writer = FrameWriter(PosixFile(Storage(), fd, "a.zst"), len(content), BLOCK)
    job = engine_write(writer, fd, content)
    assert job.failure() is None
    frames = writer.frames()
    os.pwrite(fd, b"\xff" * 99, sum(frames[:30]) + 50)
    reader = FrameReader(PosixFile(Storage(), fd, "a.zst"), len(content), BLOCK, frames)
    target = bytearray(30 * BLOCK)
    with engine_with(reader.transfer) as (engine, backend):
        stream = engine.read(fd, len(content), job.block_crcs(), backend, False, 4)
        try:
            assert stream.readinto(target, 0) and target == content[: 30 * BLOCK]
            assert not stream.readinto(bytearray(1), 30 * BLOCK)
            assert stream.corrupt_block() == 30 and stream.failure() is None
        finally:
            stream.close()


def test_engine_learns_why_a_frame_was_not_written(fd: int) -> None:
    content = bytearray(weights(20 * BLOCK, 1))
    storage = Broken(OSError(errno.EDQUOT, "quota"))
    job = engine_write(
        FrameWriter(PosixFile(storage, fd, "a.zst"), len(content), BLOCK), fd, content
    )
    failure = job.failure()
    assert failure is not None and failure[0] == "write" and failure[2] == errno.EDQUOT


def test_a_lack_of_memory_is_told(tmp_path: Path) -> None:
    """A save that begins when address space is short ends with an error of the closed set."""
    with (
        open(tmp_path / "a.zst", "wb") as file,
        pytest.raises(StorageError, match=r"allocate memory to compress of 'a\.zst'") as raised,
    ):
        FrameWriter(PosixFile(Storage(), file.fileno(), "a.zst"), 1, 1 << 47)
    assert raised.value.errno == errno.ENOMEM
