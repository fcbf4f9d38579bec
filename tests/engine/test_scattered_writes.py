"""Elements come to where they belong in a file, as torch would convert them, by the engine alone;
together they have the checksum of the file, and a write that fails is the job's failure.

Knows fastckpt._engine and the tables of engine.scattering; must not know formats or checkpoints.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastckpt import _engine
from fastckpt.directories.shared_files import crc_of_zeros
from fastckpt.engine.staging import Elements, Scatterer, combine_crcs, number_of
from fastckpt.plan.boxes import Box, copies
from fastckpt.plan.image import address_of
from tests.kit.engines import PAGE, relaxed
from tests.kit.storm import Chance

FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16]
FLOATS += [torch.float32, torch.float64]
RAW = [torch.uint8, torch.bool, torch.int16, torch.int32, torch.int64]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Write = Callable[[str, int, memoryview, int], int]


def all_of(width: int) -> torch.Tensor:
    """Every pattern of so many bytes."""
    return torch.arange(1 << 8 * width, dtype=torch.int32).to(BITS[width])


def singles() -> torch.Tensor:
    """Patterns of float32 at and around the numbers of narrower dtypes, their middles, the limits
    of their ranges, and any others.
    """
    upper = all_of(2).to(torch.int32) << 16
    near = [upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = all_of(2).view(torch.float16).to(torch.float32).view(torch.int32)
    near += [halves + low for low in (-1, 1, 0xFFF, 0x1000, 0x1001)]
    any_of = torch.randint(-(1 << 31), 1 << 31, (200_003,), dtype=torch.int64)
    return torch.cat([*near, any_of.to(torch.int32)])


def doubles() -> torch.Tensor:
    """Patterns of float64 at and around those of float32, and any others."""
    wide = singles().view(torch.float32).to(torch.float64).view(torch.int64)
    near = [wide + low for low in (0, 1, -1, 1 << 28, (1 << 28) + 1)]
    return torch.cat([*near, torch.randint(-(1 << 62), 1 << 62, (100_001,)) * 2 + 1])


def patterns(dtype: torch.dtype) -> torch.Tensor:
    made = {4: singles, 8: doubles}.get(dtype.itemsize)
    return (all_of(dtype.itemsize) if made is None else made()).view(dtype)


def octets(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("kernel", _engine.cast_kernels())
@pytest.mark.parametrize("held", FLOATS, ids=str)
def test_casts_are_those_of_torch(kernel: str, held: torch.dtype) -> None:
    """NaN becomes NaN, whose other bits torch itself does not give alike everywhere."""
    cast, items = _engine.cast_kernels()[kernel], patterns(held)
    source = octets(items)
    for stored in FLOATS:
        into = bytearray(items.numel() * stored.itemsize)
        cast(number_of(held), number_of(stored), source, into)
        found, wanted = torch.frombuffer(into, dtype=stored), items.to(stored)
        differs = found.view(BITS[stored.itemsize]) != wanted.view(BITS[stored.itemsize])
        nan = wanted.to(torch.float32).isnan() & found.to(torch.float32).isnan()
        wrong = differs & ~nan
        assert not bool(wrong.any()), (stored, items[wrong][:5], found[wrong][:5])
        assert stored == held or bool((nan | ~items.to(torch.float32).isnan()).all())


@pytest.mark.parametrize("kernel", _engine.cast_kernels())
def test_casts_of_few_items_at_odd_addresses(kernel: str) -> None:
    cast = _engine.cast_kernels()[kernel]
    items = torch.randn(1030)
    for count in (0, 1, 3, 511, 512, 513, 1030):
        source, into = b"x" + octets(items[:count]), bytearray(1 + 2 * count + 1)
        numbers = number_of(torch.float32), number_of(torch.bfloat16)
        cast(*numbers, memoryview(source)[1:], memoryview(into)[1:-1])
        assert into == b"\0" + octets(items[:count].to(torch.bfloat16)) + b"\0"


def test_casts_without_meaning_are_refused() -> None:
    for cast in _engine.cast_kernels().values():
        for held, stored in itertools.product(RAW, FLOATS):
            with pytest.raises(ValueError, match="no cast"):
                cast(number_of(held), number_of(stored), bytes(8), bytearray(8))
        with pytest.raises(ValueError, match="differ in their items"):
            cast(number_of(torch.float32), number_of(torch.float16), bytes(8), bytearray(8))
        with pytest.raises(ValueError, match="no such dtype"):
            cast(99, 0, bytes(8), bytearray(8))


class Tensor(NamedTuple):
    """A tensor of a file, its dtype there, and the boxes of it that ranks write."""

    whole: torch.Tensor
    stored: torch.dtype
    boxes: Sequence[Box]


class Part(NamedTuple):
    """What one rank writes."""

    image: bytearray
    scatterer: Scatterer


def rendering(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(bytes(octets(each.whole.to(each.stored))) for each in tensors)


def part_of(tensors: Sequence[Tensor], rank: int) -> Part:
    offset, found = 0, list[tuple[bytearray, Elements]]()
    for whole, stored, boxes in tensors:
        box, shape = boxes[rank], tuple(whole.shape)
        if box.numel:
            local = whole
            for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                local = local.narrow(dim, begin, size)
            rows = copies(Box((0,) * len(shape), shape), 0, box, 0, 1)
            content = octets(local)
            found.append((content, Elements(len(content), whole.dtype, stored, offset, rows)))
        offset += whole.numel() * stored.itemsize
    found.sort(key=lambda each: -each[1].held.itemsize)
    image = bytearray(b"".join(content for content, _elements in found))
    return Part(image, Scatterer(offset, [elements for _content, elements in found]))


@contextmanager
def scattering(
    scatterer: Scatterer, write: Write | None = None, buffered: int | None = None
) -> Iterator[_engine.ScatterSink]:
    threads = _engine.threads_backend(3)
    try:
        yield _engine.ScatterSink(threads, scatterer.of_engine, buffered, write)
    finally:
        threads.close()


def write_parts(
    parts: Sequence[Part],
    fd: int,
    block_bytes: int,
    write: Write | None = None,
    buffered: int | None = None,
) -> list[tuple[int, int, int]]:
    """Writes parts block by block, in no order; returns how the blocks ended."""
    ended = []
    for image, scatterer in parts:
        address = address_of(image) if image else 0
        ops = [
            ("write", fd, address + at, min(block_bytes, len(image) - at), at, False)
            for at in range(0, len(image), block_bytes)
        ]
        random.Random(len(ops)).shuffle(ops)
        with scattering(scatterer, write, buffered) as sink:
            ended += _engine.run_ops(sink, ops)
    return ended


def joined_crc(parts: Sequence[Part], nbytes: int) -> int:
    crc, total = crc_of_zeros(nbytes, combine_crcs), 0
    for part in parts:
        count, contribution = part.scatterer.written()
        crc, total = crc ^ contribution, total + count
    assert total == nbytes
    return crc


def cut(shape: Sequence[int], dim: int, bounds: Sequence[int]) -> list[Box]:
    """Boxes between bounds along a dimension."""
    boxes = []
    for begin, end in itertools.pairwise([0, *sorted(bounds), shape[dim]]):
        offsets = tuple(begin if at == dim else 0 for at in range(len(shape)))
        sizes = tuple(end - begin if at == dim else size for at, size in enumerate(shape))
        boxes.append(Box(offsets, sizes))
    return boxes


@st.composite
def files(draw: st.DrawFn) -> list[Tensor]:
    """Tensors in the order of a file, each divided among three ranks along a dimension."""
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
        held = draw(st.sampled_from([*FLOATS, *RAW]))
        stored = draw(st.sampled_from(FLOATS)) if held in FLOATS else held
        dim = draw(st.integers(0, len(shape) - 1))
        bounds = draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=2))
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(prod(shape), generator=generator).mul_(9).to(held).reshape(shape)
        tensors.append(Tensor(whole, stored, cut(shape, dim, bounds)))
    return sorted(tensors, key=lambda each: -each.stored.itemsize)


@settings(relaxed, max_examples=Chance.examples(30))
@given(tensors=files(), pages=st.integers(1, 5), short=st.booleans(), seed=st.integers(0, 99))
def test_ranks_together_write_the_file(
    tensors: list[Tensor], pages: int, short: bool, seed: int
) -> None:
    wanted, chance = rendering(tensors), random.Random(seed)
    file, times = bytearray(len(wanted)), bytearray(len(wanted))

    def write(kind: str, _fd: int, memory: memoryview, offset: int) -> int:
        assert kind == "write"
        if short and chance.random() < 0.3:
            raise OSError(chance.choice([errno.EINTR, errno.EAGAIN]), "not now")
        count = chance.randint(1, len(memory)) if short else len(memory)
        file[offset : offset + count] = memory[:count]
        for at in range(offset, offset + count):
            times[at] += 1
        return count

    parts = [part_of(tensors, rank) for rank in range(3)]
    ended = write_parts(parts, 99, pages * PAGE, write)
    assert file == wanted and set(times) <= {1}
    assert all(error == 0 for _done, error, _retries in ended)
    assert sum(done for done, _error, _retries in ended) == sum(len(part.image) for part in parts)
    assert joined_crc(parts, len(wanted)) == zlib.crc32(wanted)


def large() -> list[Tensor]:
    """Rows and columns of three ranks that end within pages, more than what is gathered at once."""
    generator = torch.Generator().manual_seed(1)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows, columns = tensor(1777, 1001), tensor(301, 3000)
    return [
        Tensor(rows, torch.float32, cut(rows.shape, 0, [600, 1201])),
        Tensor(tensor(5), torch.bfloat16, cut([5], 0, [1, 1])),
        Tensor(rows, torch.bfloat16, cut(rows.shape, 0, [601, 1200])),
        Tensor(columns, torch.bfloat16, cut(columns.shape, 1, [1000, 1003])),
        Tensor(rows.to(torch.uint8), torch.uint8, cut(rows.shape, 0, [1, 1770])),
    ]


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
def test_large_parts_on_a_disk(disk: Path, direct: bool) -> None:
    tensors = large()
    wanted = rendering(tensors)
    parts = [part_of(tensors, rank) for rank in range(3)]
    path, buffered = disk / "file", None
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.truncate(fd, len(wanted))
    if direct:
        buffered = fd
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            pytest.skip(f"no O_DIRECT here: {error}")
    ended = write_parts(parts, fd, 1 << 20, None, buffered)
    assert all(error == 0 for _done, error, _retries in ended)
    assert path.read_bytes() == wanted
    assert joined_crc(parts, len(wanted)) == zlib.crc32(wanted)
    for each in {fd, buffered} - {None}:
        os.close(each)


def test_the_page_to_try_is_the_ranks_own() -> None:
    tensors = large()
    pages = [part_of(tensors, rank).scatterer.whole_page() for rank in range(3)]
    bounds = [0, 600 * 1001 * 4, 1201 * 1001 * 4]
    assert pages == [-(-bound // PAGE) * PAGE for bound in bounds]
    assert part_of(tensors[3:4], 0).scatterer.whole_page() is None


def test_what_follows_each_other_in_the_file_is_written_at_once() -> None:
    """Also if it is of several tensors, or of the ends of rows."""
    tensors = [
        Tensor(torch.randn(10, 7), torch.bfloat16, cut([10, 7], 0, [10])),
        Tensor(torch.randn(30), torch.bfloat16, cut([30], 0, [30])),
        Tensor(torch.randn(4, 9), torch.bfloat16, cut([4, 9], 1, [5])),
    ]
    written = []

    def write(_kind: str, _fd: int, memory: memoryview, offset: int) -> int:
        written.append((offset, len(memory)))
        return len(memory)

    write_parts([part_of(tensors, 0)], 99, 1 << 20, write)
    assert written == [(0, 210), (218, 10), (236, 10), (254, 10)]


def test_whole_pages_that_lie_as_in_the_file_are_written_from_where_they_are() -> None:
    """Of any size at once, also if they are of several tensors; what else there is, is gathered."""
    values = torch.randn(3 << 18)
    tensors = [Tensor(values, torch.float32, cut(values.shape, 0, [len(values)])) for _ in range(2)]
    tensors.append(Tensor(values[:1000], torch.bfloat16, cut([1000], 0, [1000])))
    (image, scatterer), written = part_of(tensors, 0), list[tuple[int, int, int]]()
    memory = mmap.mmap(-1, -(-len(image) // PAGE) * PAGE)  # whole pages
    memory[: len(image)] = bytes(image)

    def write(_kind: str, fd: int, part: memoryview, offset: int) -> int:
        written.append((fd, offset, len(part)))
        return len(part)

    with scattering(scatterer, write, buffered=98) as sink:
        ops = [("write", 99, address_of(memory), len(image), 0, False)]
        assert _engine.run_ops(sink, ops) == [(len(image), 0, 0)]
    whole = 2 * values.nbytes
    assert written == [(99, 0, whole), (98, whole, 2000)]
    assert joined_crc([Part(image, scatterer)], whole + 2000) == zlib.crc32(rendering(tensors))


def test_a_write_that_fails_is_the_blocks_error_and_counts_nothing() -> None:
    tensors = [Tensor(torch.randn(100, 30), torch.float16, cut([100, 30], 1, [10]))]
    part, calls = part_of(tensors, 0), itertools.count()

    def write(_kind: str, _fd: int, memory: memoryview, _offset: int) -> int:
        if next(calls) == 50:
            raise OSError(errno.ENOSPC, "full")
        return len(memory)

    assert write_parts([part], 99, PAGE, write) == [(0, errno.ENOSPC, 0)]
    assert part.scatterer.written() == (0, 0) and next(calls) == 51


def test_a_write_that_makes_no_progress_ends() -> None:
    tensors = [Tensor(torch.randn(30), torch.float16, cut([30], 0, [30]))]
    part = part_of(tensors, 0)
    assert write_parts([part], 99, PAGE, lambda *_: 0) == [(0, errno.EIO, 0)]
    assert part.scatterer.written() == (0, 0)
