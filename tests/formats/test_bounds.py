"""Whatever a file of ours claims of itself, reading what describes it takes memory in proportion to
its size, and a description that is made to do harm is damage like any other.

In children with little address space, whose memory is measured by the kernel. That loads of whole
steps hold to it is test_step_fuzz.py's business, of torch.distributed.checkpoint's metadata
test_plain_pickle.py's.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import struct
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastckpt
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import distcp, safetensors, torch_zip
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.reading import verified
from tests.kit.readers import READERS, closed

KIB, MIB = 1 << 10, 1 << 20
SIZE = 256 * KIB
TIMES_MAX, FLOOR = 40, 4 * MIB  # of the size; JSON takes up to 24 times its size
ROOM = 256 * MIB  # of address space


def taken_by(*reads: Callable[[], Any]) -> list[tuple[int, str]]:
    """The most memory that each call takes at a time, in a child for all, and what it raises."""
    seen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()  # garbage of the parent may wait, as it goes, for threads that are not here
        told = ["0 died"]
        try:
            nbytes = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (nbytes * resource.getpagesize() + ROOM, -1))
            told = [f"{grown} {kind}" for grown, kind in map(_peak_of, reads)]
        finally:
            os.write(tell, "\n".join(told).encode())
            os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    rows = [row.split() for row in os.read(seen, 64 * KIB).decode().splitlines()]
    os.close(seen)
    return [(int(grown), kind) for grown, kind in rows]


def _peak_of(read: Callable[[], Any]) -> tuple[int, str]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    try:
        read()
        kind = "nothing"
    except BaseException as error:
        kind = type(error).__name__
    rows = dict(row.split(":") for row in Path("/proc/self/status").read_text().splitlines())
    return (int(rows["VmHWM"].split()[0]) << 10) - resident, kind


def many(item: bytes, opening: bytes = b"[", closing: bytes = b"1]") -> bytes:
    """As many items as make up the size."""
    return opening + item * (SIZE // len(item)) + closing


TEXTS = {
    "nested lists": b"[" * SIZE,
    "nested objects": many(b'{"a":', b"", b""),
    "lists": many(b"[],"),
    "objects": many(b"{},"),
    "numbers": many(b"1000,"),
    "names": b"{" + b",".join(b'"%d":1' % n for n in range(SIZE // 9)) + b"}",
    "escapes": many(b"\\u1234", b'"', b'"'),
    "one number": b"9" * SIZE,
    "one fraction": b"1." + b"9" * SIZE,
    "an exponent": b"1e999999999",
    "half of a pair": b'{"\\ud800":1}',
    "zeros": bytes(SIZE),
    "no text": b"\xff" * SIZE,
}


def read_all(content: bytes, read: Callable[[bytes], Any]) -> None:
    ((grown, kind),) = taken_by(lambda: read(content))
    check(content, grown, kind)


def check(content: bytes, grown: int, kind: str, what: str = "") -> None:
    assert kind == "CorruptCheckpoint", what
    assert grown <= FLOOR + TIMES_MAX * len(content), f"{what} {grown} bytes for {len(content)}"


@pytest.mark.parametrize("reader", READERS)
def test_json_made_to_do_harm(reader: str) -> None:
    make, read = READERS[reader]
    contents = {text: make(content) for text, content in TEXTS.items()}
    taken = taken_by(*(partial(read, content) for content in contents.values()))
    for (text, content), (grown, kind) in zip(contents.items(), taken, strict=True):
        check(content, grown, kind, text)


def test_sizes_that_no_file_bears_out() -> None:
    """A sparse file may claim to be of any size."""
    read_all(
        (90_000_000).to_bytes(8, "little") + bytes(100),
        lambda content: safetensors.parse(content, 1 << 40),
    )
    body = 1 << 45
    described = {"version": 1, "body_bytes": body, "block_bytes": PAGE_BYTES, "items": []}
    text = json.dumps(described | {"crc32": "", "item_crc32": ""}).encode()
    read_all(closed(text, "fastckpt distcp", body), lambda content: distcp.parse(content, 1 << 45))
    described = {"version": 1, "body_bytes": body, "block_bytes": PAGE_BYTES, "crc32": ""}
    read_all(
        closed(json.dumps(described).encode(), "fastckpt", body),
        lambda content: torch_zip.parse(content, 1 << 45),
    )
    for kind, offset in (("fastckpt", torch_zip), ("fastckpt distcp", distcp)):
        end = closed(b"", kind, PAGE_BYTES)
        assert offset.tail_offset(end, 1 << 40) is None, "nobody reads a terabyte to verify it"
        assert offset.tail_offset(end, 1 << 20) == PAGE_BYTES


def test_zip_directories_made_to_do_harm(disk: Path) -> None:
    """Signed anew after eight bytes were changed at every place of a tail."""
    path = disk / "a.pt"
    fastckpt.save({"w": torch.ones(1000), "v": torch.ones(7)}, path).result()
    content = path.read_bytes()
    begin = torch_zip.tail_offset(content, len(content))
    assert begin is not None
    tail, failed = content[begin:-8], 0
    for at in range(len(tail) - 8):
        for changed in (b"\xff" * 8, struct.pack("<Q", 1 << 40)):
            hostile = tail[:at] + changed + tail[at + 8 :]
            try:
                index = torch_zip.parse(hostile + f"{zlib.crc32(hostile):08x}".encode(), begin)
                verified.storages_offset(index)
                verified.blocks_of_large(index, 1)
            except CorruptCheckpoint:
                failed += 1
    assert 0 < failed < 2 * len(tail)
