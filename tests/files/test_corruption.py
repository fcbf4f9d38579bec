"""Damaged, truncated, mixed and forged files: a load raises CorruptCheckpoint (a newer file:
IncompatibleCheckpoint) and names the damaged record, whatever byte it is, and never returns an
object made of bytes that nobody wrote. Knows the file as docs/reference/format.md describes it;
must not know how it is read.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fastckpt
from tests.kit.programs import run_python

BLOCK = 8 << 20
PAGE = 4096
SEED = 20240607
MARK = b"fastckpt1"
COMMENT = re.compile(rb"fastckpt (\d{2}) ([0-9a-f]{16}) ([0-9a-f]{8})\Z")
RECORD = ".data/fastckpt"
# What stock torch raises for a file that is none: all that is left to say about a few bytes.
TORCH_ERRORS = (RuntimeError, EOFError, pickle.UnpicklingError)


class Span(NamedTuple):
    """The data of one record: bytes [begin, end) of the file."""

    name: str
    begin: int
    end: int


class Anatomy:
    """Where everything lies in a file that fastckpt wrote."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        match = COMMENT.search(self.content[-64:])
        assert match is not None, "the file does not end as docs/reference/format.md says"
        self.body_nbytes = int(match[2], 16)
        self.spans = []
        self.headers = []
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                at = entry.header_offset
                name_nbytes = int.from_bytes(self.content[at + 26 : at + 28], "little")
                extra_nbytes = int.from_bytes(self.content[at + 28 : at + 30], "little")
                begin = at + 30 + name_nbytes + extra_nbytes
                short = entry.filename.split("/", 1)[1]
                self.spans.append(Span(short, begin, begin + entry.file_size))
                self.headers.append(range(at, begin))
        self.mark_end = self.content.index(MARK) + len(MARK)

    @property
    def nbytes(self) -> int:
        return len(self.content)

    def record_at(self, position: int) -> str | None:
        """The record whose data a byte belongs to; None for a header, a descriptor or padding."""
        for span in self.spans:
            if span.begin <= position < span.end:
                return span.name
        return None

    def interesting(self) -> list[int]:
        """Bytes of every structure: headers, first and last of the data, what follows, the tail."""
        found: set[int] = set()
        for header, span in zip(self.headers, self.spans, strict=True):
            found |= {*header[:34], *header[34 :: max(1, len(header) // 8)], header[-1]}
            found |= {span.begin, max(span.begin, span.end - 1), *range(span.end, span.end + 16)}
        found |= set(range(0, self.mark_end))
        found |= {b + d for b in range(BLOCK, self.body_nbytes, BLOCK) for d in (-1, 0)}
        found |= {self.body_nbytes - 1}
        tail = range(self.body_nbytes, self.nbytes)
        found |= {*tail[:: max(1, len(tail) // 200)], *tail[-140:]}
        return sorted(p for p in found if p < self.nbytes)


@contextmanager
def changed(path: Path, position: int, pattern: int) -> Iterator[None]:
    """One byte of a file is another one for a while."""
    fd = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([byte ^ pattern]), position)
        try:
            yield
        finally:
            os.pwrite(fd, bytes([byte]), position)
    finally:
        os.close(fd)


def outcome(path: Path, **options: Any) -> BaseException | None:
    """What a load raised; None if it returned an object."""
    try:
        fastckpt.load(path, **options)
    except Exception as error:  # whichever it is, the caller compares it with the one it expects
        return error
    return None


def check_corrupt(error: BaseException | None, path: Path, where: str) -> str:
    assert error is not None, f"{where}: the damage was not noticed, an object was returned"
    assert type(error) is fastckpt.CorruptCheckpoint, f"{where}: {error!r}"
    assert str(path) in str(error), where
    return str(error)


@pytest.fixture
def small(disk: Path) -> Path:
    path = disk / "small.pt"
    state = {
        "w": torch.arange(1600, dtype=torch.float32),
        "b": torch.arange(300, dtype=torch.int64),
        "empty": torch.empty(0),
        "step": 7,
        "names": ["a", "b"],
    }
    fastckpt.save(state, path).result(60)
    assert 12_000 < path.stat().st_size < 16_000
    return path


def large_state() -> dict[str, Any]:
    """Tensors that cross blocks, that end with one, and small ones between them."""
    return {
        "crossing": torch.arange(5 << 20, dtype=torch.int16),
        "small": [torch.full((7 + i,), i, dtype=torch.uint8) for i in range(40)],
        "long": torch.arange(3 * (1 << 20) + 5, dtype=torch.int32),
        "last": torch.arange(1001, dtype=torch.float64),
    }


@pytest.fixture(scope="module")
def large(real_disk: Path) -> Iterator[Path]:
    path = real_disk / "large.pt"
    fastckpt.save(large_state(), path).result(60)
    assert 2 * BLOCK < path.stat().st_size < 30 << 20
    yield path
    path.unlink()


def loads(path: Path, **options: Any) -> bool:
    return outcome(path, **options) is None


# One byte.


PATTERNS = (0x01, 0x80, 0xFF)


@pytest.mark.parametrize(
    "stride", [23, pytest.param(1, marks=pytest.mark.torture)], ids=["some", "all"]
)
def test_every_byte_of_a_small_file(small: Path, stride: int) -> None:
    """Each in three patterns, or one in 23 in one of them."""
    anatomy = Anatomy(small)
    assert loads(small)
    unnamed = []
    for position in range(0, anatomy.nbytes, stride):
        record = anatomy.record_at(position) if position < anatomy.body_nbytes else None
        for pattern in PATTERNS if stride == 1 else [PATTERNS[position % 3]]:
            with changed(small, position, pattern):
                error = outcome(small, weights_only=position % 2 == 0)
            message = check_corrupt(error, small, f"byte {position} ^ {pattern:#x} ({record})")
            if record is not None and f"record {record};" not in message:
                unnamed.append((position, record, message))
    assert not unnamed, unnamed[:3]
    assert loads(small), "the file was not restored"


@pytest.mark.parametrize(
    "stride", [23, pytest.param(7, marks=pytest.mark.torture)], ids=["some", "more"]
)
def test_bytes_of_a_small_file_when_mapped(small: Path, stride: int) -> None:
    anatomy = Anatomy(small)
    for position in range(0, anatomy.nbytes, stride):
        with changed(small, position, 0x10):
            error = outcome(small, mmap=True, weights_only=position % 2 == 0)
        check_corrupt(error, small, f"byte {position}, mapped")
    assert loads(small, mmap=True)


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_sampled_bytes_of_a_large_file(large: Path, mapped: bool) -> None:
    anatomy, rng = Anatomy(large), random.Random(SEED + mapped)
    positions = rng.sample(anatomy.interesting(), 24)
    positions += [rng.randrange(anatomy.body_nbytes) for _ in range(6)]
    for position in positions:
        record = anatomy.record_at(position) if position < anatomy.body_nbytes else None
        with changed(large, position, rng.randrange(1, 256)):
            error = outcome(large, mmap=mapped, weights_only=bool(rng.getrandbits(1)))
        where = f"byte {position} ({record}), seed {SEED + mapped}"
        message = check_corrupt(error, large, where)
        if record is not None:
            assert f"record {record};" in message, f"{where}: {message}"
    assert loads(large, mmap=mapped)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
def test_damage_is_named_whether_or_not_the_file_is_cached(large: Path, cached: bool) -> None:
    # Cold files are read past the page cache, with rules of their own about what may be asked for.
    anatomy = Anatomy(large)
    (span,) = [span for span in anatomy.spans if span.name == "data/0"]
    with changed(large, span.begin + BLOCK, 0x20):
        fd = os.open(large, os.O_RDONLY)
        try:
            os.fsync(fd)
            if not cached:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            elif len(os.pread(fd, anatomy.nbytes, 0)) != anatomy.nbytes:
                pytest.fail("a short read of a whole file")
        finally:
            os.close(fd)
        message = check_corrupt(outcome(large), large, "data/0")
    assert "record data/0;" in message
    begin, end = map(int, re.findall(r"bytes (\d+) to (\d+)", message)[0])
    assert begin <= span.begin + BLOCK < end, message


def test_damage_of_several_records_in_one_block_names_them(small: Path) -> None:
    anatomy = Anatomy(small)
    spans = {span.name: span for span in anatomy.spans}
    with changed(small, spans["data/0"].begin, 1), changed(small, spans["data/1"].begin, 1):
        message = check_corrupt(outcome(small), small, "two records")
    assert "data/0" in message and "data/1" in message and "data.pkl" not in message


def test_damage_where_no_tensor_reaches(disk: Path) -> None:
    """The last block may hold nothing that torch asks for; its bytes count all the same."""
    path = disk / "a.pt"
    # So many records that the zip directory, which torch looks for at the end, is far from it.
    small = [torch.full((i + 1,), i % 256, dtype=torch.uint8) for i in range(299)]
    fastckpt.save([*small, torch.zeros(BLOCK // 2, dtype=torch.uint8)], path).result(60)
    (begin,) = [span.begin for span in Anatomy(path).spans if span.name == "data/299"]
    state = [*small, torch.zeros(BLOCK - begin, dtype=torch.uint8)]
    fastckpt.save(state, path).result(60)
    anatomy = Anatomy(path)
    assert max(span.end for span in anatomy.spans if span.name.startswith("data/")) == BLOCK
    assert anatomy.nbytes - anatomy.body_nbytes > 2 * PAGE
    assert anatomy.body_nbytes > BLOCK and loads(path)
    for position in range(BLOCK, anatomy.body_nbytes, 511):
        for weights_only in (True, False):
            with changed(path, position, 0x40):
                error = outcome(path, weights_only=weights_only)
            check_corrupt(error, path, f"byte {position}, behind the last tensor")


# Files that are shorter, longer or mixed.


def check_truncated(path: Path, anatomy: Anatomy, nbytes: int, **options: Any) -> None:
    os.truncate(path, nbytes)
    error = outcome(path, **options)
    if nbytes < anatomy.mark_end:  # nothing tells any more who wrote it
        assert isinstance(error, TORCH_ERRORS), f"{nbytes} bytes left: {error!r}"
    else:
        check_corrupt(error, path, f"{nbytes} bytes left")


@pytest.mark.parametrize(
    "stride", [5, pytest.param(1, marks=pytest.mark.torture)], ids=["some", "all"]
)
def test_every_length_of_a_small_file(small: Path, stride: int) -> None:
    anatomy = Anatomy(small)
    for nbytes in range(anatomy.nbytes - 1, -1, -stride):
        check_truncated(small, anatomy, nbytes, weights_only=nbytes % 2 == 0)


def test_lengths_of_a_small_file_when_mapped(small: Path) -> None:
    anatomy = Anatomy(small)
    for nbytes in range(anatomy.nbytes - 1, -1, -37):
        check_truncated(small, anatomy, nbytes, mmap=True)


def test_lengths_of_a_large_file(large: Path, disk: Path) -> None:
    anatomy, rng = Anatomy(large), random.Random(SEED)
    lengths = {anatomy.nbytes - 1, anatomy.body_nbytes, anatomy.body_nbytes - 1, BLOCK, 2 * BLOCK}
    lengths |= {rng.randrange(anatomy.nbytes) for _ in range(50)}
    copy = disk / "copy.pt"
    copy.write_bytes(anatomy.content)
    for nbytes in sorted(lengths, reverse=True):
        check_truncated(copy, anatomy, nbytes)
    # The same lengths by a hole: the file has its size, its end never arrived.
    for nbytes in sorted(lengths):
        copy.write_bytes(anatomy.content[:nbytes])
        os.truncate(copy, anatomy.nbytes)
        if nbytes >= anatomy.mark_end:
            check_corrupt(outcome(copy), copy, f"a hole from {nbytes}")
            if nbytes < BLOCK:
                break


@pytest.mark.parametrize("more", [b"\0", b"\n", b"x" * 97, b"\0" * 5000, MARK])
def test_bytes_appended(small: Path, more: bytes) -> None:
    with small.open("ab") as file:
        file.write(more)
    for options in ({}, {"mmap": True}, {"weights_only": False}):
        check_corrupt(outcome(small, **options), small, f"{len(more)} bytes appended")


def test_halves_of_two_files(disk: Path) -> None:
    paths = [disk / f"{i}.pt" for i in range(2)]
    for i, path in enumerate(paths):
        state = {"w": torch.full((BLOCK * 5 // 8,), float(i)), "step": i}
        fastckpt.save(state, path).result(60)
    first, second = (Anatomy(path) for path in paths)
    assert first.nbytes == second.nbytes and first.body_nbytes == second.body_nbytes
    mixed = disk / "mixed.pt"
    cuts, middle = set(), first.nbytes // 2
    for cut in (PAGE, BLOCK, middle, 2 * BLOCK + 5, first.body_nbytes):
        for one, other in ((first, second), (second, first)):
            content = one.content[:cut] + other.content[cut:]
            if content in (one.content, other.content):
                continue  # both files begin with the same header
            mixed.write_bytes(content)
            cuts.add(cut)
            for mapped in (False, True):
                check_corrupt(outcome(mixed, mmap=mapped), mixed, f"mixed at {cut}")
    assert len(cuts) >= 4


# Forged ends: every checksum is right, what it vouches for is not.


def closed(content: bytes, version: bytes = b"01", offset: bytes | None = None) -> bytes:
    """The file with its comment set and the CRC-32 of its tail made right."""
    match = COMMENT.search(content)
    assert match is not None
    begin = int(match[2], 16)
    open_end = (
        content[: match.start()] + b"fastckpt " + version + b" " + (offset or match[2]) + b" "
    )
    return open_end + b"%08x" % zlib.crc32(open_end[begin:])


def with_record(path: Path, record: bytes) -> bytes:
    """The file with this checksum record in place of its own, whatever its length."""
    anatomy = Anatomy(path)
    (span,) = [span for span in anatomy.spans if span.name == RECORD]
    return closed(anatomy.content[: span.begin] + record + anatomy.content[span.end :])


def record_of(path: Path) -> dict[str, Any]:
    anatomy = Anatomy(path)
    (span,) = [span for span in anatomy.spans if span.name == RECORD]
    record: dict[str, Any] = json.loads(anatomy.content[span.begin : span.end])
    return record


def refused(path: Path, content: bytes, *kinds: type[BaseException]) -> BaseException:
    """That a load of this content raises one of our errors; returns it."""
    path.write_bytes(content)
    errors = [outcome(path), outcome(path, mmap=True), outcome(path, weights_only=False)]
    for error in errors:
        assert type(error) in kinds, f"{error!r}"
        assert str(path) in str(error)
    assert errors[0] is not None
    return errors[0]


def test_forging_nothing_changes_nothing(small: Path) -> None:
    content = small.read_bytes()
    assert closed(content) == content
    assert with_record(small, json.dumps(record_of(small)).encode()) == content


def test_newer_version(small: Path) -> None:
    record = record_of(small)
    content = small.read_bytes()
    newer = json.dumps(record | {"version": 2}).encode()
    both = closed(with_record(small, newer), b"02")
    record_only, comment_only = with_record(small, newer), closed(content, b"02")
    for forged in (both, comment_only, record_only, closed(content, b"99")):
        error = refused(small, forged, fastckpt.IncompatibleCheckpoint)
        assert "version" in str(error) and "update" in str(error)
        small.write_bytes(content)


def test_damaged_version_is_damage(small: Path) -> None:
    """Only a file whose checksums say so is a newer one."""
    anatomy = Anatomy(small)
    match = COMMENT.search(anatomy.content)
    assert match is not None
    for position in (match.start(1), match.start(1) + 1):
        for digit in b"023456789":
            with changed(small, position, anatomy.content[position] ^ digit or 1):
                check_corrupt(outcome(small), small, f"version digit {chr(digit)}")


NAN, INF = float("nan"), float("inf")
HUGE = 10**400
WIDE_DIGITS = 8 * "\uff11"  # decimal digits to str.isdigit() and int(), none of ours
BAD_VALUES: dict[str, list[Any]] = {
    "version": [0, -1, "1", "2", None, 1.0, 2.5, [1], {}, True, NAN, -INF, HUGE],
    "body_bytes": [0, -PAGE, 1, PAGE, 1 << 63, 10**30, None, "4096", 4096.0, NAN, []],
    "block_bytes": [
        *(0, -BLOCK, 1, PAGE - 1, PAGE + 1, 1 << 31, 1 << 62, HUGE),
        *(None, "8388608", 8388608.0, NAN, INF),
    ],
    "crc32": [
        *("", "0", 7 * "0", 9 * "0", 16 * "0", 8 * "z", "0000000G", "ABCDEF01", WIDE_DIGITS),
        *(" 0000000", "0x000000", "-0000000", 0, None, ["00000000"], {}),
    ],
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_checksum_record_with_a_wrong_value(small: Path, key: str) -> None:
    record, content = record_of(small), small.read_bytes()
    for value in [*BAD_VALUES[key], "missing"]:
        forged = {k: v for k, v in record.items() if k != key}
        if value != "missing":
            forged[key] = value
        small.write_bytes(content)
        kinds = [fastckpt.CorruptCheckpoint]
        if key == "version":
            kinds.append(fastckpt.IncompatibleCheckpoint)
        try:
            refused(small, with_record(small, json.dumps(forged).encode()), *kinds)
        except AssertionError as failure:
            raise AssertionError(f"{key} = {str(value)[:40]!r}: {str(failure)[:300]}") from None


BAD_RECORDS = {
    "empty": b"",
    "list": b"[1, 2]",
    "string": b'"fastckpt"',
    "number": b"1",
    "null": b"null",
    "NaN": b"NaN",
    "no object": b"}",
    "open object": b'{"version": 1, ',
    "two objects": b'{"version": 1}{"version": 1}',
    "not UTF-8": b'{"version": "\xff\xfe"}',
    "zeros": b"\0" * 100,
    "nested": b'{"version": {"version": {"version": {}}}}',
    "deep lists": b'{"version": ' + 100_000 * b"[" + 100_000 * b"]" + b"}",
    "deep objects": 100_000 * b'{"version":' + b"1" + 100_000 * b"}",
    "deep lists alone": 100_000 * b"[" + b"}",
    "many digits": b'{"version": ' + 100_000 * b"9" + b"}",
    "long key": b'{"' + 1_000_000 * b"k" + b'": 1}',
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_checksum_record_that_is_none(small: Path, name: str) -> None:
    refused(
        small,
        with_record(small, BAD_RECORDS[name]),
        fastckpt.CorruptCheckpoint,
        fastckpt.IncompatibleCheckpoint,
    )


def test_comment_with_a_wrong_offset(small: Path) -> None:
    anatomy = Anatomy(small)
    offsets = [0, 1, PAGE - 1, PAGE, anatomy.body_nbytes - 1, anatomy.body_nbytes + 1]
    offsets += [anatomy.body_nbytes - PAGE, anatomy.nbytes - 1, anatomy.nbytes, anatomy.nbytes + 1]
    offsets += [1 << 32, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]
    start = COMMENT.search(anatomy.content)
    assert start is not None
    for offset in offsets:
        text = b"%016x" % offset
        open_end = anatomy.content[: start.start()] + b"fastckpt 01 " + text + b" "
        forged = open_end + b"%08x" % zlib.crc32(open_end[offset:])
        refused(small, forged, fastckpt.CorruptCheckpoint)


def test_older_version_than_the_first(small: Path) -> None:
    content = small.read_bytes()
    refused(
        small,
        closed(content, b"00"),
        fastckpt.CorruptCheckpoint,
        fastckpt.IncompatibleCheckpoint,
    )


def forge_directory(path: Path, position: int, value: int, nbytes: int) -> bytes:
    """The file with an integer of its zip directory or end records replaced, counted from there."""
    content = bytearray(path.read_bytes())
    content[position : position + nbytes] = value.to_bytes(nbytes, "little")
    return closed(bytes(content))


def test_forged_directory_of_a_damaged_file_is_damage_soon(small: Path) -> None:
    """Saying what is damaged reads the zip directory: nonsense there must not lead astray."""
    anatomy = Anatomy(small)
    body = bytearray(anatomy.content)
    body[100] ^= 1  # so that there is something to say
    small.write_bytes(bytes(body))
    end64 = anatomy.content.rindex(b"PK\x06\x06")
    central = anatomy.content.index(b"PK\x01\x02", anatomy.body_nbytes)
    huge = (0, 1, 1 << 20, (1 << 32) - 1)
    forgeries = [(end64 + at, value, 8) for at in (24, 32, 40, 48) for value in (*huge, 1 << 62)]
    forgeries += [(central + at, value, 4) for at in (20, 24, 42) for value in huge]
    forgeries += [(central + at, value, 2) for at in (28, 30, 32) for value in (0, 1, 65535)]
    damaged = small.read_bytes()
    for position, value, nbytes in forgeries:
        small.write_bytes(damaged)
        content = forge_directory(small, position, value, nbytes)
        try:
            refused(small, content, fastckpt.CorruptCheckpoint)
        except AssertionError as failure:
            where = f"{nbytes} bytes at {position - anatomy.body_nbytes} of the tail = {value}"
            raise AssertionError(f"{where}: {str(failure)[:300]}") from None


HUGE_RECORD = """
import sys
import fastckpt
try:
    fastckpt.load(sys.argv[1])
except fastckpt.CorruptCheckpoint:
    print("refused")
"""


@pytest.mark.multiprocess
def test_forged_size_of_a_damaged_record_costs_no_time(small: Path) -> None:
    """A zip64 size of 2^60 bytes for the record that is damaged."""
    anatomy = Anatomy(small)
    content = bytearray(anatomy.content)
    content[anatomy.spans[0].begin] ^= 1
    central = content.index(b"PK\x01\x02", anatomy.body_nbytes)
    content[central + 24 : central + 28] = b"\xff" * 4
    name_nbytes = int.from_bytes(content[central + 28 : central + 30], "little")
    content[central + 30 : central + 32] = (20).to_bytes(2, "little")
    extra = b"\x01\0\x10\0" + 2 * (1 << 60).to_bytes(8, "little")
    after = central + 46 + name_nbytes
    content[after:after] = extra
    # The directory has grown: its size stands in the zip64 end record.
    at = content.rindex(b"PK\x06\x06") + 40
    size = int.from_bytes(content[at : at + 8], "little") + len(extra)
    content[at : at + 8] = size.to_bytes(8, "little")
    small.write_bytes(closed(bytes(content)))
    assert run_python(HUGE_RECORD, small, limit_s=60).stdout == "refused\n"


# Memory and time.

LOAD_WITHIN = """
import sys
import torch, fastckpt

def kilobytes(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1])

warm, path, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
fastckpt.load(warm)
before = kilobytes("VmRSS")
for mmap in (False, True):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew: proc(5)
    try:
        print(len(fastckpt.load(path, mmap=mmap)))
    except fastckpt.CorruptCheckpoint:
        print("refused")
    grown = kilobytes("VmHWM") - before
    assert grown << 10 <= limit, f"mmap={mmap}: {grown >> 10} MiB more memory"
"""


@pytest.mark.multiprocess
def test_forged_offset_in_a_large_file_takes_little_memory(small: Path, disk: Path) -> None:
    """A tail of almost a GiB, most of it a hole: damage of the offset must not cost that much."""
    anatomy = Anatomy(small)
    large = disk / "sparse.pt"
    large.write_bytes(anatomy.content[:PAGE])
    os.truncate(large, 1 << 30)
    end = b"fastckpt 01 %016x %08x" % (PAGE, 0)
    with large.open("ab") as file:
        file.write(anatomy.content[-1000 : -len(end)] + end)
    output = run_python(LOAD_WITHIN, small, large, 256 << 20).stdout
    assert output.split() == ["refused", "refused"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("block_bytes", [2 * BLOCK, 1 << 26])
def test_file_with_larger_blocks_loads_in_little_memory(disk: Path, block_bytes: int) -> None:
    """The block size is the file's to choose; what a load takes is bounded by the file's size."""
    small, path = disk / "warm.pt", disk / "a.pt"
    fastckpt.save(torch.ones(9), small).result(60)
    state = torch.full((BLOCK // 2,), 7, dtype=torch.uint8)
    fastckpt.save(state, path).result(60)
    anatomy, record = Anatomy(path), record_of(path)
    assert len(record["crc32"]) == 8
    old = json.dumps(record).encode()
    new = json.dumps(record | {"block_bytes": block_bytes}, separators=(",", ":")).encode()
    assert len(new) <= len(old)
    padded = new[:-1] + b" " * (len(old) - len(new)) + b"}"
    path.write_bytes(with_record(path, padded))
    assert anatomy.nbytes == path.stat().st_size
    assert torch.equal(fastckpt.load(path), state)
    output = run_python(LOAD_WITHIN, small, path, 64 << 20).stdout
    assert output.split() == 2 * [str(len(state))]
    with changed(path, BLOCK // 4, 1):
        check_corrupt(outcome(path), path, "larger blocks")


def test_damage_does_not_break_the_next_load(large: Path) -> None:
    expected = large_state()
    for _ in range(6):
        with changed(large, BLOCK + 12345, 0x08):
            check_corrupt(outcome(large), large, "again")
        loaded = fastckpt.load(large)
        assert torch.equal(loaded["crossing"], expected["crossing"])
    assert torch.equal(loaded["long"], expected["long"])
    assert all(map(torch.equal, loaded["small"], expected["small"]))
