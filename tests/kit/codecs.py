"""Files of compressed blocks, written and read by the engine alone."""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fastckpt.engine.codec import (
    Encoder,
    FrameReader,
    FrameWriter,
    ZstdEncoder,
)
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import PosixFile
from tests.kit.paths import ROOT

PAGE = 4096
BLOCK = 64 << 10
WAIT_S = 60.0
relaxed = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def split(content: bytes | bytearray, block_bytes: int) -> list[tuple[int, memoryview]]:
    view = memoryview(content)
    return [(at, view[at : at + block_bytes]) for at in range(0, len(view), block_bytes)]


def start_blocks(
    pool: ThreadPoolExecutor, threads: int, move: Callable[..., int], blocks: list[Any], seed: int
) -> list[Future[int]]:
    """Calls move for each block from `threads` threads, in random order among so many neighbours.

    The engine hands blocks out in order, and its threads overtake each other: a block is never
    taken before those that are more than `threads` ahead of it.
    """
    rng = random.Random(seed)
    order: list[Any] = []
    for first in range(0, len(blocks), threads):
        group = blocks[first : first + threads]
        order += rng.sample(group, len(group))
    return [pool.submit(move, at, memory) for at, memory in order]


def write(
    fd: int,
    content: bytes,
    block_bytes: int = BLOCK,
    *,
    storage: Storage | None = None,
    threads: int = 4,
    seed: int = 0,
    encoder: Callable[[], Encoder] = ZstdEncoder,
) -> tuple[int, ...]:
    """Writes content to an open file; returns the frames' sizes."""
    writer = FrameWriter(
        PosixFile(storage or Storage(), fd, "a.zst"), len(content), block_bytes, encoder
    )
    write_blocks(writer, fd, content, block_bytes, threads, seed)
    return writer.frames()


def write_blocks(
    writer: FrameWriter, fd: int, content: bytes, block_bytes: int, threads: int, seed: int = 0
) -> None:
    blocks = split(content, block_bytes)
    with ThreadPoolExecutor(threads) as pool:
        moved = start_blocks(
            pool, threads, lambda at, m: writer.transfer("write", fd, m, at), blocks, seed
        )
        assert sum(future.result(WAIT_S) for future in moved) == len(content)


def read(
    fd: int,
    nbytes: int,
    frames: Sequence[int],
    block_bytes: int = BLOCK,
    *,
    threads: int = 4,
    seed: int = 0,
    codec: str = "zstd",
) -> bytes:
    reader = FrameReader(PosixFile(Storage(), fd, "a.zst"), nbytes, block_bytes, frames, codec)
    target = bytearray(b"\xaa" * nbytes)
    blocks = split(target, block_bytes)
    with ThreadPoolExecutor(threads) as pool:
        moved = start_blocks(
            pool, threads, lambda at, m: reader.transfer("read", fd, m, at), blocks, seed
        )
        assert sum(future.result(WAIT_S) for future in moved) == nbytes
    return bytes(target)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with opened(tmp_path / "a.zst") as opened_fd:
        yield opened_fd


def documented() -> Callable[..., bytes]:
    """The decoder of docs/reference/format.md, which knows nothing of fastckpt."""
    names: dict[str, Any] = {}
    (code,) = re.findall(
        r"```python\n(import numpy\n.*?)```",
        (ROOT / "docs" / "reference" / "format.md").read_text(),
        re.DOTALL,
    )
    assert len(code.splitlines()) < 40
    exec(code, names)
    return names["block_of"]


block_of = documented()


def header_of(frame: bytes) -> list[tuple[int, int, list[int]]]:
    """Size, kind and stored sizes of the planes of each run."""
    magic, count = struct.unpack_from("<II", frame)
    assert magic == int.from_bytes(b"PLN1", "little")
    at, found = 8, []
    for _ in range(count):
        nbytes, kind = struct.unpack_from("<II", frame, at)
        sizes = struct.unpack_from(f"<{kind % 16}I", frame, at + 8)
        found.append((nbytes, kind, [*sizes]))
        at += 8 + 4 * len(sizes)
    return found
