"""The files of a step directory as bytes: safetensors shards, indexes, manifests.

Stock safetensors judges what is laid out; literal files keep the JSON formats from drifting; every
byte is flipped, every length cut off, and what a hostile author could write is listed one by one.
Knows the format modules only: no directory, no engine, no ranks.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import hashlib
import json
import math
import os
import random
import struct
import tempfile
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import _TYPES as STOCK_TYPES
from safetensors.torch import load as stock_load

from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import manifest as manifest_format
from fastckpt.formats import safetensors as shard_format
from fastckpt.formats.manifest import (
    KEYS_MAX,
    SEQUENCE_MAX,
    WRITER_BYTES_MAX,
    Manifest,
    ObjectsFile,
    Writer,
    key_hash,
    may_hold,
)
from fastckpt.formats.safetensors import DTYPES, Entry, layout, parse, supported
from fastckpt.formats.shard_index import (
    INDEX_BYTES_MAX,
    PER_RANK,
    Piece,
    ShardIndex,
    entry_name,
    index_name,
    shard_name,
)
from fastckpt.plan.boxes import Box, intersect, span
from fastckpt.plan.image import PAGE_BYTES, Image
from tests.kit.forgeries import sealed_bytes
from tests.kit.storm import Chance

MIB = 1 << 20
NONCE = "0123456789abcdef"
OTHER_NONCE = "fedcba9876543210"
relaxed = settings(deadline=None, max_examples=Chance.examples(20))


def bytes_of(image: Image) -> bytes:
    """The file of an image that has no slots: its segments one after the other."""
    assert image.tail_nbytes == 0 and image.tail([], []) == b"" and not image.slots
    parts, end = [], 0
    for offset, nbytes, address in image.rows():
        assert offset == end, "a hole or an overlap"
        parts.append(ctypes.string_at(address, nbytes))
        end += nbytes
    assert end == image.body_nbytes == image.nbytes
    return b"".join(parts)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits, NaNs among them; bools are 0 or 1."""
    count = math.prod(shape) * dtype.itemsize
    content = bytearray(random.Random(seed).randbytes(count))
    if dtype is torch.bool:
        content = bytearray(byte & 1 for byte in content)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


def octets(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    address = tensor.data_ptr() if tensor.numel() else 0
    return Entry(name, tensor.dtype, tuple(tensor.shape), address)


def laid_out(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[int]]:
    entries = [entry_of(name, tensor) for name, tensor in tensors.items()]
    image, offsets = layout(entries, list(tensors.values()), metadata or {})
    return bytes_of(image), offsets


@contextmanager
def opened_by_stock(content: bytes) -> Iterator[Any]:
    """safetensors.safe_open of a file with this content."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "shard.safetensors")
        with open(path, "wb") as file:
            file.write(content)
        with safetensors.safe_open(path, framework="pt") as opened:
            yield opened


def assert_equal_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert octets(actual) == octets(expected)


# ---- the safetensors shard ----

shapes = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.tuples(st.sampled_from([1023, 1024, 1025, 5000])),
)
tensor_kinds = st.tuples(st.sampled_from(sorted(DTYPES)), shapes)
names = st.one_of(
    st.text("ab/~@.,0é\U0001f600\x00", min_size=0, max_size=8),
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=8),
)


@relaxed
@given(
    st.dictionaries(names, tensor_kinds, max_size=12),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
@example({}, {})
@example({"a": ("BOOL", (3,)), "b": ("F64", (2,)), "c": ("BF16", (0, 2)), "d": ("F32", ())}, {})
def test_stock_readers_read_what_is_laid_out(
    kinds: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    kinds.pop(shard_format.METADATA, None)
    metadata = {
        key: value
        for key, value in metadata.items()
        if (key + value).encode(errors="ignore").decode() == key + value
    }
    tensors = {
        name: random_tensor(DTYPES[dtype], shape, seed)
        for seed, (name, (dtype, shape)) in enumerate(kinds.items())
    }
    content, offsets = laid_out(tensors, metadata)

    size = shard_format.header_nbytes(content[:8], len(content))
    assert size % PAGE_BYTES == 0 and content[size - 1 : size] in (b" ", b"}")
    assert len(content) == size + sum(tensor.nbytes for tensor in tensors.values())
    found = parse(content[:size], len(content))
    assert set(found) == set(tensors)
    for (name, tensor), offset in zip(tensors.items(), offsets, strict=True):
        kind, begin = found[name]
        assert (*kind[:2], begin) == (tensor.dtype, tuple(tensor.shape), offset)
        assert begin % tensor.dtype.itemsize == 0
        assert content[begin : begin + kind.nbytes] == octets(tensor)

    with opened_by_stock(content) as opened:
        assert set(opened.keys()) == set(tensors)
        assert (opened.metadata() or {}) == metadata
        for name, tensor in tensors.items():
            assert_equal_bits(opened.get_tensor(name), tensor)
            if tensor.ndim and tensor.numel():
                assert_equal_bits(opened.get_slice(name)[:1], tensor[:1])
    if all(dtype in STOCK_TYPES for dtype, _ in kinds.values()):
        loaded = stock_load(content)
        assert set(loaded) == set(tensors)
        for name, tensor in tensors.items():
            assert_equal_bits(loaded[name], tensor)


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype(name: str) -> None:
    dtype = DTYPES[name]
    assert supported(dtype)
    tensor = random_tensor(dtype, (3, 5), seed=1)
    content, _ = laid_out({"odd": torch.zeros(3, dtype=torch.bool), "x": tensor})
    assert json.loads(content[8:PAGE_BYTES])["x"]["dtype"] == name
    with opened_by_stock(content) as opened:
        assert_equal_bits(opened.get_tensor("x"), tensor)


def test_dtypes_beyond_the_format_are_told() -> None:
    others = [torch.complex64, torch.complex128, torch.qint8, torch.quint4x2]
    assert not any(map(supported, others))
    with pytest.raises(ValueError, match=r"'z' is torch\.complex64"):
        laid_out({"z": torch.zeros(1, dtype=torch.complex64)})


def test_larger_items_first_and_else_in_order() -> None:
    order = ["i8", "f32a", "f64", "bf16", "f32b", "bool"]
    dtypes = [torch.int8, torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.bool]
    tensors = {name: torch.ones(3, dtype=dtype) for name, dtype in zip(order, dtypes, strict=True)}
    _, offsets = laid_out(tensors)
    placed = sorted(zip(offsets, order, strict=True))
    assert [name for _, name in placed] == ["f64", "f32a", "f32b", "bf16", "i8", "bool"]
    assert placed[0][0] == PAGE_BYTES


def test_header_fills_pages_whatever_its_length() -> None:
    remainders = set()
    for length in range(PAGE_BYTES - 80, PAGE_BYTES - 50):
        content, (offset,) = laid_out({"x" * length: torch.ones(1)})
        text = content[8:offset].rstrip(b" ")
        remainders.add((8 + len(text)) % PAGE_BYTES)
        assert offset == -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
        assert len(content) == offset + 4
    assert {0, 1, PAGE_BYTES - 1} <= remainders


def test_an_image_without_entries_is_a_header() -> None:
    content, offsets = laid_out({})
    assert offsets == [] and len(content) == PAGE_BYTES
    assert content == (PAGE_BYTES - 8).to_bytes(8, "little") + b"{}".ljust(PAGE_BYTES - 8)
    assert parse(content, len(content)) == {}


def test_the_image_keeps_the_owners() -> None:
    class Owner:
        pass

    tensor, owner = torch.ones(4), Owner()
    gone = weakref.ref(owner)
    image, _ = layout([entry_of("x", tensor)], [owner], {})
    del owner
    gc.collect()
    assert gone() is not None
    assert bytes_of(image)[PAGE_BYTES:] == octets(tensor)
    del image
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("names", "metadata", "message"),
    [
        (["a", "b", "a"], {}, "named 'a'"),
        (["__metadata__"], {}, "reserved"),
        (["__metadata__"], {"a": "b"}, "reserved"),
        (["\ud800"], {}, "must be Unicode"),
        ([], {"a": "\udfff"}, "must be Unicode"),
        ([], {"a": 1}, "must be strings"),
        ([], {"a": "x" * 100_000_000}, "at most 100000000"),
    ],
)
def test_what_cannot_be_laid_out(names: list[str], metadata: Any, message: str) -> None:
    tensor = torch.ones(1)
    with pytest.raises(ValueError, match=message):
        layout([entry_of(name, tensor) for name in names], [tensor], metadata)


def header_of(text: str | bytes, data_nbytes: int = 8) -> tuple[bytes, int]:
    """The head of a file with this JSON, and the file's size."""
    text = text.encode() if isinstance(text, str) else text
    head = len(text).to_bytes(8, "little") + text
    return head, len(head) + data_nbytes


def one_tensor(**changes: Any) -> str:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return json.dumps({"x": tensor})


def beside_one_byte(**changes: Any) -> str:
    """The header of two tensors of a byte, of which the second is not quite like the first."""
    one = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    return json.dumps({"x": one, "y": one | {"data_offsets": [1, 2]} | changes})


def test_parse_reads_an_unpadded_file_of_others() -> None:
    found = parse(*header_of(one_tensor()))
    assert found == {"x": ((torch.float32, (2,), 8), 8 + len(one_tensor()))}


TWO = '{{"a": {{"dtype": "U8", "shape": [4], "data_offsets": [{}]}}, "b": {}}}'.format
U8_4 = '{{"dtype": "U8", "shape": [4], "data_offsets": [{}]}}'.format
HOSTILE_HEADERS: list[tuple[str | bytes, str]] = [
    ("[]", "must be an object"),
    ("", "Expecting value"),
    ("\ufeff" + one_tensor(), "Expecting value"),
    (b'\xff{"a": 1}', "decode"),
    ('{"a": "\x01"}', "control character"),
    *[(text, "malformed") for text in ("{", "[" * 1_000_000, '{"a":' * 1_000_000)],
    *[
        (text, "dtype, shape and data_offsets")
        for text in ('{"x": 1}', '{"x": {"dtype": "F32", "shape": [2]}}', one_tensor(more=1))
    ],
    (one_tensor(dtype="F31"), "'F31', which is not supported"),
    *[(one_tensor(dtype=name), "not supported") for name in ("f32", ["F32"], None)],
    *[
        (one_tensor(dtype=dtype, shape=shape, data_offsets=[0, nbytes]), "have whole bytes")
        for dtype, shape, nbytes in (
            *(("F4", [], 1), ("F4", [3], 2), ("F4", [3, 1], 2), ("F4", [5, 5], 13)),
            *(("F6_E2M3", [], 1), ("F6_E3M2", [3], 3), ("F6_E3M2", [2, 7], 11)),
        )
    ],
    *[
        (one_tensor(dtype=dtype, shape=[4], data_offsets=[0, 4]), f"span its {nbytes} bytes")
        for dtype, nbytes in (("F4", 2), ("F6_E2M3", 3), ("C64", 32))
    ],
    *[
        (one_tensor(shape=shape), "shape of 'x'")
        for shape in (2, "2", [True, 2], [2.0], [-2], [[2]], [1 << 63])
    ],
    *[
        (one_tensor(shape=shape, data_offsets=[0, 8 * (0 not in shape)]), "2\\^63 bytes")
        for shape in (
            [1 << 31, 1 << 30],
            [1 << 62, 1 << 62, 0],
            [0, 1 << 62, 1 << 62],
            [1 << 62] * 100_000,
        )
    ],
    (one_tensor(shape=[float("nan")]), "NaN"),
    *[(one_tensor(shape=[float(text)]), "Infinity") for text in ("inf", "-inf")],
    *[
        (f'{{"x": {{"dtype": "F32", "shape": [{number}], "data_offsets": [0, 8]}}}}', message)
        for number, message in (
            ("1e999", "must be finite"),
            ("9" * 1000, "1000 digits"),
            ("0." + "9" * 5000, "must be a list"),
        )
    ],
    *[
        (one_tensor(data_offsets=offsets), "two numbers")
        for offsets in ([0], [0, 8, 8], [0, 8.0], [False, 8], [-8, 0])
    ],
    *[(one_tensor(data_offsets=offsets), "must span") for offsets in ([0, 7], [8, 0])],
    (one_tensor(data_offsets=[8, 16]), "gap"),
    *[(one_tensor(shape=[n], data_offsets=[0, 4 * n]), "ends at") for n in (1, 4)],
    *[(TWO("0, 4", U8_4(offsets)), "overlaps") for offsets in ("3, 7", "0, 4")],
    (TWO("0, 4", U8_4("5, 9")), "gap"),
    (TWO("0, 4", U8_4("4, 8")).replace('"b"', '"a"'), "duplicate name"),
    (
        '{"x": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        "duplicate name",
    ),
    ('{"__metadata__": {"a": "b", "a": "b"}}', "duplicate name"),
    (one_tensor().replace('"x"', '"\\ud800"'), "must be Unicode"),
    ('{"__metadata__": {"a": "\\ud800"}}', "must be Unicode"),
    *[
        (f'{{"__metadata__": {value}}}', "__metadata__")
        for value in ("1", '{"a": 1}', '{"a": {"b": "c"}}')
    ],
    *[(beside_one_byte(shape=shape), "shape of 'y'") for shape in ([True], [1.0])],
    (beside_one_byte(data_offsets=[True, 2]), "data_offsets of 'y'"),
    *[(one_tensor() + more, "Extra data") for more in "x\0"],
]


@pytest.mark.parametrize(("text", "message"), HOSTILE_HEADERS, ids=range(len(HOSTILE_HEADERS)))
def test_hostile_header(text: str | bytes, message: str) -> None:
    with pytest.raises((CorruptCheckpoint, IncompatibleCheckpoint), match=message):
        parse(*header_of(text))


@pytest.mark.parametrize(
    ("head", "nbytes"),
    [
        (b"", 0),
        (b"\2\0\0\0\0\0\0", 7),
        (b"\2\0\0\0\0\0\0\0", 8),
        (b"\2\0\0\0\0\0\0\0{}", 9),
        (b"\xff" * 8, (1 << 63) - 1),
        (b"\x00\x00\x00\x00\x00\x00\x00\x80", (1 << 63) - 1),
        ((100_000_001).to_bytes(8, "little"), 1 << 62),
        ((100_000_000).to_bytes(8, "little"), 100_000_007),
    ],
)
def test_header_length_is_bounded(head: bytes, nbytes: int) -> None:
    tracemalloc.start()
    with pytest.raises(CorruptCheckpoint):
        shard_format.header_nbytes(head, nbytes)
    with pytest.raises(CorruptCheckpoint):
        parse(head, nbytes)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


def flips(content: bytes) -> Iterator[bytes]:
    """The content with each byte changed, by one bit of each kind and by all."""
    for at in range(len(content)):
        for mask in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF):
            yield content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


def test_a_damaged_header_is_refused_or_one_that_stock_reads() -> None:
    tensors = {
        "weight": random_tensor(torch.float32, (2, 3), 1),
        "é": random_tensor(torch.int8, (), 2),
        "none": torch.empty(0, 3),
    }
    content, _ = laid_out(tensors, {"format": "pt"})
    text = content[8:PAGE_BYTES].rstrip(b" ") + b"  "
    data = content[PAGE_BYTES:]
    refused = accepted = 0
    head, nbytes = header_of(text, len(data))
    expected = parse(head, nbytes)
    for damaged in flips(head):
        try:
            found = parse(damaged, nbytes)
        except (CorruptCheckpoint, IncompatibleCheckpoint):
            refused += 1
            continue
        accepted += 1
        # Another name or dtype of that size: still a sound header. Block checksums notice it.
        known = {dtype: name for name, dtype in DTYPES.items()}
        stock = dict(safetensors.deserialize(damaged + data))
        assert {
            name: (known[kind.dtype], list(kind.shape)) for name, (kind, _begin) in found.items()
        } == {name: (tensor["dtype"], tensor["shape"]) for name, tensor in stock.items()}
        spans = sorted((begin, kind.nbytes) for kind, begin in found.values())
        assert spans == sorted((begin, kind.nbytes) for kind, begin in expected.values())
    assert refused > 3 * accepted > 0
    for length in range(len(head)):
        with pytest.raises(CorruptCheckpoint):
            parse(head[:length], nbytes)
        with pytest.raises(CorruptCheckpoint):
            parse(head[:length], length)
    for other in (nbytes - 1, nbytes + 1, len(head), 2 * nbytes):
        with pytest.raises(CorruptCheckpoint):
            parse(head, other)


# ---- the index ----

GOLDEN_INDEX = (
    b'{"format":"fastckpt-index","version":3,"nonce":"0123456789abcdef","rank":3,'
    b'"file":"rank-00003.safetensors.zst","file_nbytes":12288,"nbytes":4180,"block_bytes":4096,'
    b'"crc32":"0000000adeadbeef","codec":"zstd","frames":[8192,4096],"per_rank":[4160,20],'
    b'"pieces":[\n'
    b'{"key":"model/w","dtype":"F32","shape":[4,4],"offset":[1,0],"size":[2,4],"at":4096},\n'
    b'{"key":"\\u00e9","dtype":"F32","shape":[],"offset":[],"size":[],"at":4128},\n'
    b'{"key":"model/e","dtype":"U8","shape":[0,9],"offset":[0,0],"size":[0,9],"at":4130}\n'
    b"]}\n"
)
INDEX = ShardIndex(
    nonce=NONCE,
    rank=3,
    file="rank-00003.safetensors.zst",
    file_nbytes=12288,
    nbytes=4180,
    block_bytes=4096,
    block_crcs=(10, 0xDEADBEEF),
    codec="zstd",
    frames=(8192, 4096),
    pieces=(
        Piece("model/w", "F32", (4, 4), Box((1, 0), (2, 4)), 4096),
        Piece("é", "F32", (), Box((), ()), 4128),
        Piece("model/e", "U8", (0, 9), Box((0, 0), (0, 9)), 4130),
    ),
    per_rank=(4160, 20),
)
INDEX_WRITER = Writer.of(INDEX, "rank-00003.json", GOLDEN_INDEX)


def test_the_index_to_the_byte() -> None:
    assert INDEX.to_bytes() == GOLDEN_INDEX
    assert ShardIndex.from_bytes(GOLDEN_INDEX) == INDEX
    assert INDEX_WRITER.parse_index(GOLDEN_INDEX, NONCE) == INDEX


@st.composite
def indexes(draw: st.DrawFn) -> ShardIndex:
    pieces, end = [], PAGE_BYTES
    for key in draw(st.lists(names, max_size=6)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        bounds = draw(st.lists(st.tuples(*[st.integers(0, 9)] * 3), max_size=3))
        box = Box(tuple(a for a, _, _ in bounds), tuple(b for _, b, _ in bounds))
        end += draw(st.integers(0, 9))
        pieces.append(Piece(key, dtype, tuple(map(sum, bounds)), box, end))
        end += box.numel * DTYPES[dtype].itemsize
    per_rank = draw(st.none() | st.tuples(st.integers(end, end + 9), st.integers(1, 9)))
    nbytes = end + 18 + draw(st.integers(0, 9000))
    block_bytes = draw(st.sampled_from([4096, 8192, 8 << 20]))
    count = -(-nbytes // block_bytes)
    crcs = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=count, max_size=count))
    frames: tuple[int, ...] = ()
    codec = draw(st.sampled_from([None, "zstd", "planes"]))
    if codec:
        pages = draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
        frames = tuple(PAGE_BYTES * number for number in pages)
    rank = draw(st.integers(0, 99_999))
    return ShardIndex(
        nonce=draw(st.text("0123456789abcdef", min_size=16, max_size=64)),
        rank=rank,
        file=shard_name(rank, codec),
        file_nbytes=sum(frames) if codec else nbytes,
        nbytes=nbytes,
        block_bytes=block_bytes,
        block_crcs=tuple(crcs),
        codec=codec,
        frames=frames,
        pieces=tuple(draw(st.permutations(pieces))),
        per_rank=per_rank,
    )


@relaxed
@given(indexes())
def test_an_index_comes_back(index: ShardIndex) -> None:
    content = index.to_bytes()
    assert content.isascii() and content.count(b"\n") == 2 + len(index.pieces)
    assert ShardIndex.from_bytes(content) == index
    writer = Writer.of(index, index_name(index.rank), content)
    assert writer.parse_index(content, index.nonce) == index
    assert Writer.from_bytes(writer.to_bytes()) == writer


def test_a_damaged_index_is_refused() -> None:
    """By its digest in the manifest always; by itself where it makes no sense."""
    assert INDEX_WRITER.parse_index(GOLDEN_INDEX, NONCE) == INDEX
    cuts = [GOLDEN_INDEX[:length] for length in range(len(GOLDEN_INDEX))]
    for cut in cuts:
        with pytest.raises(CorruptCheckpoint, match=f"has {len(cut)} bytes, must have "):
            INDEX_WRITER.parse_index(cut, NONCE)
    refused = accepted = 0
    for damaged in [*cuts, *flips(GOLDEN_INDEX)]:
        with pytest.raises(CorruptCheckpoint):
            INDEX_WRITER.parse_index(damaged, NONCE)
        try:
            index = ShardIndex.from_bytes(damaged)
        except (CorruptCheckpoint, IncompatibleCheckpoint):
            refused += 1
        else:
            accepted += 1
            assert ShardIndex.from_bytes(index.to_bytes()) == index
    assert refused > 2 * accepted > 0


def test_an_index_is_of_the_manifests_save_and_writer() -> None:
    with pytest.raises(CorruptCheckpoint, match=f"another save.*{NONCE}"):
        INDEX_WRITER.parse_index(GOLDEN_INDEX, OTHER_NONCE)
    changes: list[dict[str, Any]] = [{"rank": 2}, {"file": "rank-00002.safetensors"}]
    for change in [*changes, {"nbytes": 12287}]:
        with pytest.raises(CorruptCheckpoint, match="another save or writer"):
            replace(INDEX_WRITER, **change).parse_index(GOLDEN_INDEX, NONCE)


Change = Callable[[Any], object]


def put(*path: Any) -> Change:
    """Sets the member at a path to the last of the arguments."""
    *names, last, value = path

    def change(written: Any) -> None:
        for name in names:
            written = written[name]
        written[last] = value

    return change


def without(name: str) -> Change:
    return lambda written: written.pop(name)


def each(message: str, *path: Any, of: Iterable[Any]) -> list[tuple[Change, str]]:
    """The member at a path set to each of these in turn, and the message."""
    return [(put(*path, value), message) for value in of]


HOSTILE_FILE_NAMES = ["", ".", "..", ".hidden", "a/b", "/etc/passwd", "../x", "a\\b", "a\n", "a\0"]
HOSTILE_FILE_NAMES += ["a b", "é", "x" * 101]
HOSTILE_NUMBERS: list[Any] = [-1, 1 << 63, 1.0, True, None, "1", [1], 10**30]
HOSTILE_INDEXES: list[tuple[Change, str]] = [
    *each("file name", "file", of=HOSTILE_FILE_NAMES),
    *[
        row
        for name in ("rank", "file_nbytes", "nbytes", "block_bytes", "version")
        for row in each(f"the {name} ", name, of=HOSTILE_NUMBERS)
    ],
    *each("a piece has the at ", "pieces", 0, "at", of=HOSTILE_NUMBERS),
    *[
        row
        for name in ("shape", "offset", "size")
        for row in each("of 'model/w'|2\\^63|inside", "pieces", 0, name, 0, of=HOSTILE_NUMBERS)
    ],
    *[(without(name), f"lacks.*'{name}'") for name in json.loads(GOLDEN_INDEX)],
    (put("more", 1), "unknown.*'more'"),
    (put("pieces", 0, "more", 1), "a piece .*unknown"),
    *each("a piece must be an object", "pieces", 0, of=(None, [])),
    (put("pieces", {}), "the pieces "),
    (put("format", "fastckpt-step"), "fastckpt-step"),
    (put("version", 0), "version 0"),
    *each("nonce", "nonce", of=("0123456789abcde", "0" * 65, NONCE.upper(), NONCE + "\n")),
    *[row for n in (0, 4097, 67112960) for row in each(f"is {n}", "block_bytes", of=[n])],
    (put("block_bytes", 1 << 31), "block_bytes"),
    *each("CRC-32", "nbytes", of=(0, (1 << 63) - 1, 4096)),
    (put("nbytes", 4179), "pieces end at 4180"),
    *each("CRC-32", "crc32", of=("", "0000000adeadbee", "0000000aDEADBEEF", "0000000a deadbee")),
    (put("crc32", "0000000a" * 3), "CRC-32"),
    *each("codec", "codec", of=("lz4", 1)),
    (put("codec", None), "need a codec"),
    *each("frames", "frames", of=([], [12288], [8192, 4096, 0], [12288, 0], [8191, 4097])),
    *each("frames", "frames", of=([8192, 8192], [16384, -4096], [8192, 4096.0])),
    *each("per_rank", "per_rank", of=([4160], [4160, 20, 0], [4160, "20"])),
    *each("overlaps", "per_rank", of=([4131, 20], [4000, 100])),
    (put("per_rank", [4160, 21]), "pieces end at 4181"),
    (put("per_rank", [4160, 0]), "with bytes"),
    (put("per_rank", [1 << 62, 20]), "pieces end"),
    (put("pieces", 0, "dtype", "F31"), "'F31'"),
    (put("pieces", 0, "dtype", "F64"), "overlaps"),
    (put("pieces", 0, "key", "\ud800"), "must be Unicode"),
    (put("pieces", 0, "key", 1), "the key "),
    *each("2\\^63", "pieces", 0, "shape", of=([1 << 40, 1 << 40], [1 << 62] * 50_000)),
    *[
        (put("pieces", 0, name, value), "dimensions")
        for name, value in (("shape", [4]), ("offset", [1]), ("size", [8]))
    ],
    *each("must be inside", "pieces", 0, "offset", of=([3, 0], [(1 << 63) - 1, 0])),
    (put("pieces", 0, "size", [2, 5]), "must be inside"),
    (put("pieces", 0, "at", 4100), "overlaps"),
    (put("pieces", 1, "at", 4124), "overlaps"),
    (put("pieces", 1, "at", 4177), "overlaps|end at 4181"),
    (put("pieces", 2, "at", 4181), "pieces end at 4181"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE_INDEXES, ids=range(len(HOSTILE_INDEXES)))
def test_hostile_index(change: Change, message: str) -> None:
    written = json.loads(GOLDEN_INDEX)
    change(written)
    content = json.dumps(written).encode()
    with pytest.raises(CorruptCheckpoint, match=message):
        ShardIndex.from_bytes(content)
    writer = Writer.of(INDEX, "rank-00003.json", content)
    with pytest.raises(CorruptCheckpoint, match=message):
        writer.parse_index(content, NONCE)


JUNK = [b"", b"null", b"[]", b'"x"', b"\xff", b"\xef\xbb\xbf{}", b"[" * 1_000_000]
JUNK += [b'{"a":' * 1_000_000, b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":-Infinity}']
JUNK += [b'{"a":' + number + b"9" * 1_000_000 + b"}" for number in (b"", b"0.")]


@pytest.mark.parametrize("content", JUNK, ids=range(len(JUNK)))
def test_junk_for_json(content: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        ShardIndex.from_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        Writer.from_bytes(content)
    for sealed in (content, sealed_bytes(content)):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_bytes(sealed)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, "the fastckpt-index has version 1, .* versions 3 and 4 only$"),
        (2, "the fastckpt-index has version 2, .* versions 3 and 4 only$"),
        (5, "the fastckpt-index has version 5, .* versions 3 and 4 only: update it"),
    ],
)
def test_an_index_of_another_version_is_incompatible(version: int, message: str) -> None:
    other = GOLDEN_INDEX.replace(b'"version":3', f'"version":{version},"new":{{}}'.encode())
    with pytest.raises(IncompatibleCheckpoint, match=message):
        ShardIndex.from_bytes(other)
    writer = Writer.of(INDEX, "rank-00003.json", other)
    with pytest.raises(IncompatibleCheckpoint, match=message):
        writer.parse_index(other, NONCE)
    with pytest.raises(CorruptCheckpoint):
        INDEX_WRITER.parse_index(other, NONCE)


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../x"},
        {"rank": -1},
        {"rank": True},
        {"block_crcs": (1,)},
        {"block_crcs": (1, 1 << 32)},
        {"frames": ()},
        {"nonce": "short"},
        {"pieces": (Piece("x", "F32", (2,), Box((1,), (2,)), 4096),)},
        {"pieces": (Piece("\ud800", "F32", (2,), Box((0,), (2,)), 4096),)},
    ],
)
def test_an_index_is_validated_before_it_is_written(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(INDEX, **change).to_bytes()


# ---- writers and manifest ----

DIGEST = hashlib.sha256(b"").hexdigest()
GOLDEN_MANIFEST = (
    '{"format":"fastckpt-step","version":2,"step":100,"nonce":"0123456789abcdef","sequence":7,'
    '"world_size":4,"created":"2026-01-31T12:00:00Z","metrics":{},'
    '"objects":{"file":"objects.pt","nbytes":1234,"crc32":"0000beef"},"writers":[\n'
    '{"rank":0,"file":"rank-00000.safetensors","nbytes":4096,"index":"rank-00000.json",'
    f'"index_nbytes":300,"index_sha256":"{DIGEST}","span":[0.0,0.25],"keys":"AQAAAP////8="}},\n'
    '{"rank":3,"file":"rank-00003.safetensors.zst","nbytes":8192,"index":"rank-00003.json",'
    f'"index_nbytes":301,"index_sha256":"{DIGEST}","span":[0.1,1.0],"keys":null}}\n'
    '],"sha256":"05b78e0db18ddf68b104352355ae06533efa18a82ddedddf91caa21f7603e1b3"}\n'
).encode()
WRITERS = (
    Writer(
        rank=0,
        file="rank-00000.safetensors",
        nbytes=4096,
        index="rank-00000.json",
        index_nbytes=300,
        index_sha256=DIGEST,
        span=(0.0, 0.25),
        keys=(1, 0xFFFFFFFF),
    ),
    Writer(
        rank=3,
        file="rank-00003.safetensors.zst",
        nbytes=8192,
        index="rank-00003.json",
        index_nbytes=301,
        index_sha256=DIGEST,
        span=(0.1, 1.0),
        keys=None,
    ),
)
MANIFEST = Manifest(
    step=100,
    nonce=NONCE,
    sequence=7,
    world_size=4,
    created="2026-01-31T12:00:00Z",
    objects=ObjectsFile("objects.pt", 1234, 0xBEEF),
    writers=WRITERS,
)


def sealed(written: dict[str, Any]) -> bytes:
    written = {name: value for name, value in written.items() if name != "sha256"}
    return sealed_bytes(json.dumps(written).encode()[:-1])


def test_the_manifest_to_the_byte() -> None:
    assert MANIFEST.to_bytes() == GOLDEN_MANIFEST
    assert Manifest.from_bytes(GOLDEN_MANIFEST) == MANIFEST
    # The rule of docs/reference/format.md, and each writer on the line that it sent.
    closing = GOLDEN_MANIFEST[-78:]
    assert closing[:11] == b',"sha256":"' and closing[-3:] == b'"}\n'
    assert hashlib.sha256(GOLDEN_MANIFEST[:-78]).hexdigest().encode() == closing[11:-3]
    for line, writer in zip(GOLDEN_MANIFEST.split(b"\n")[1:3], WRITERS, strict=True):
        assert line.rstrip(b",") == writer.to_bytes()


TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
fractions = st.floats(0.0, 1.0).map(abs)
hashes = st.lists(st.integers(0, (1 << 32) - 1), max_size=KEYS_MAX, unique=True).map(sorted)
writers = st.builds(
    Writer,
    rank=st.integers(0, (1 << 63) - 1),
    file=st.text("aZ9._-", min_size=1, max_size=40).map(lambda name: name.lstrip(".") or "a"),
    nbytes=st.integers(0, (1 << 63) - 1),
    index=st.text("bZ9._-", min_size=1, max_size=40).map(lambda name: name.lstrip(".") or "b"),
    index_nbytes=st.integers(0, INDEX_BYTES_MAX),
    index_sha256=st.binary().map(lambda data: hashlib.sha256(data).hexdigest()),
    span=st.tuples(fractions, fractions).map(lambda bounds: (min(bounds), max(bounds))),
    keys=st.none() | hashes.map(tuple),
)
LARGEST_WRITER = Writer(
    rank=(1 << 63) - 1,
    file="f" * 100,
    nbytes=(1 << 63) - 1,
    index="i" * 100,
    index_nbytes=INDEX_BYTES_MAX,
    index_sha256=DIGEST,
    span=(2.2250738585072014e-308, 2.2250738585072014e-307),
    keys=tuple(range(1 << 31, (1 << 31) + KEYS_MAX)),
    base="ab" * 32,
    part="p" * 64,
)


@relaxed
@given(writers)
@example(LARGEST_WRITER)
def test_a_writer_comes_back_in_bounded_bytes(writer: Writer) -> None:
    content = writer.to_bytes()
    assert len(content) <= WRITER_BYTES_MAX
    assert Writer.from_bytes(content) == writer


@relaxed
@given(
    st.lists(writers, max_size=5),
    st.tuples(*[st.integers(0, (1 << 63) - 1)] * 3),
    st.integers(0, (1 << 32) - 1),
    st.datetimes(),
    st.dictionaries(TEXTS, TEXTS | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
)
def test_a_manifest_comes_back(
    found: list[Writer],
    numbers: tuple[int, int, int],
    crc: int,
    moment: Any,
    metrics: dict[str, float | str],
) -> None:
    numbered = tuple(
        replace(writer, rank=rank, file=shard_name(rank, None), index=index_name(rank))
        for rank, writer in enumerate(found)
    )
    step, sequence, nbytes = numbers
    manifest = Manifest(
        step=step,
        nonce=NONCE,
        sequence=min(sequence, SEQUENCE_MAX),
        world_size=len(found) + 1,
        created=moment.isoformat() + "+00:00",
        objects=ObjectsFile("objects.pt", nbytes, crc),
        writers=numbered,
        metrics=metrics,
    )
    content = manifest.to_bytes()
    assert content.isascii() and content.count(b"\n") == 2 + len(found)
    assert Manifest.from_bytes(content) == manifest


def test_any_damage_to_a_manifest_is_noticed() -> None:
    assert Manifest.from_bytes(GOLDEN_MANIFEST) == MANIFEST
    for length in range(len(GOLDEN_MANIFEST)):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_bytes(GOLDEN_MANIFEST[:length])
    for damaged in flips(GOLDEN_MANIFEST):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_bytes(damaged)
    for damaged in (
        GOLDEN_MANIFEST + b"\n",
        b" " + GOLDEN_MANIFEST,
        GOLDEN_MANIFEST.replace(b"\n", b"\r\n"),
        GOLDEN_MANIFEST.replace(b'"step":100', b'"step":200'),
        GOLDEN_MANIFEST[:-1],
        GOLDEN_MANIFEST * 2,
        bytes(len(GOLDEN_MANIFEST)),
    ):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_bytes(damaged)


def test_any_damage_to_a_writers_record_is_noticed_or_harmless() -> None:
    record = WRITERS[0].to_bytes()
    assert Writer.from_bytes(record) == WRITERS[0]
    for damaged in [*flips(record), *(record[:length] for length in range(len(record)))]:
        try:
            writer = Writer.from_bytes(damaged)
        except CorruptCheckpoint:
            continue
        assert Writer.from_bytes(writer.to_bytes()) == writer
    with pytest.raises(CorruptCheckpoint, match="too many"):
        Writer.from_bytes(record.ljust(WRITER_BYTES_MAX + 1))


def packed(*keys: int) -> str:
    return base64.b64encode(struct.pack(f"<{len(keys)}I", *keys)).decode()


HOSTILE_MANIFESTS: list[tuple[Change, str]] = [
    *[
        row
        for path in (
            *(("step",), ("sequence",), ("world_size",), ("version",), ("objects", "nbytes")),
            *(("writers", 0, name) for name in ("rank", "nbytes", "index_nbytes")),
        )
        for row in each(f"the {path[-1]} ", *path, of=HOSTILE_NUMBERS)
    ],
    *[
        row
        for path in (("objects", "file"), ("writers", 0, "file"), ("writers", 1, "index"))
        for row in each("file name", *path, of=HOSTILE_FILE_NAMES)
    ],
    *[
        (without(name), f"lacks.*'{name}'")
        for name in json.loads(GOLDEN_MANIFEST)
        if name != "sha256"
    ],
    (put("more", 1), "unknown.*'more'"),
    (put("writers", 0, "more", 1), "a writer .*unknown"),
    (put("objects", "more", 1), "objects .*unknown"),
    (put("writers", 0, 1), "a writer must be"),
    (put("objects", []), "the objects "),
    (put("writers", {}), "the writers "),
    (put("format", "fastckpt-index"), "fastckpt-index"),
    (put("version", 0), "version 0"),
    (put("nonce", "xyz"), "nonce"),
    (put("sequence", (1 << 62) + 1), "sequence 4611686018427387905 is above"),
    (put("world_size", 0), "world size"),
    (put("world_size", 3), "rank 3"),
    (put("writers", 1, "rank", 0), "rank 0"),
    (put("writers", 0, "rank", 4), "rank 4"),
    (put("writers", 1, "file", "rank-00000.safetensors"), "twice"),
    *each("twice", "writers", 1, "index", of=("rank-00000.json", "rank-00000.safetensors")),
    *each("twice", "writers", 0, "file", of=("objects.pt", "manifest.json")),
    (put("objects", "file", "manifest.json"), "twice"),
    *each("crc32", "objects", "crc32", of=("0000BEEF", "0beef", 48879)),
    *each("created", "created", of=("2026-01-31", "2026-01-31T12:00:00+01:00")),
    *each("created", "created", of=("٢٠٢٦-01-31T12:00:00Z", "2026-01-31T12:00:00Z\n")),
    (put("created", "2026-13-31T12:00:00Z"), "month"),
    (put("writers", 0, "index_nbytes", INDEX_BYTES_MAX + 1), "too many"),
    *each("must be 64 hex", "writers", 0, "index_sha256", of=(DIGEST[:-1], DIGEST.upper())),
    *each("span", "writers", 0, "span", of=([0.5, 0.25], [-0.5, 0.25], [0.0, 1.5], [0, 1], [0.0])),
    (put("writers", 0, "span", [0.0, True]), "span"),
    (put("writers", 0, "span", [0.0, float("nan")]), "NaN"),
    (put("writers", 0, "span", [0.0, float("inf")]), "Infinity"),
    *each("ascending", "writers", 0, "keys", of=(packed(2, 1), packed(1, 1))),
    (put("writers", 0, "keys", packed(*range(KEYS_MAX + 1))), "at most 128"),
    *each("32-bit", "writers", 0, "keys", of=("AQAA", "AQAAAP////9=")),
    *each("malformed", "writers", 0, "keys", of=("AQAAAA=="[:-1], "AQAA AA==", "é")),
    (put("writers", 0, "keys", []), "the keys "),
    (put("metrics", []), "the metrics "),
]


def test_metrics_are_kept_and_checked() -> None:
    manifest = replace(MANIFEST, metrics={"loss": 0.5, "von \u00e4": "nan"})
    content = manifest.to_bytes()
    assert Manifest.from_bytes(content) == manifest
    written = json.loads(content)
    for metrics in (
        *([], {"a": 1}, {"a": True}, {"a": None}, {"a": [1.0]}, {"a": float("inf")}),
        *({"a" * 257: 1.0}, {"a": "a" * 257}, {"\ud800": 1.0}, {"a": "\udfff"}),
        {f"{number}": 1.0 for number in range(257)},
    ):
        with pytest.raises(CorruptCheckpoint, match=r"metric|number|Infinity|Unicode"):
            Manifest.from_bytes(sealed(written | {"metrics": metrics}))


@pytest.mark.parametrize(
    ("change", "message"), HOSTILE_MANIFESTS, ids=range(len(HOSTILE_MANIFESTS))
)
def test_hostile_manifest_with_a_right_digest(change: Change, message: str) -> None:
    written = json.loads(GOLDEN_MANIFEST)
    assert Manifest.from_bytes(sealed(written)) == MANIFEST
    change(written)
    with pytest.raises(CorruptCheckpoint, match=message):
        Manifest.from_bytes(sealed(written))


@pytest.mark.parametrize(("version", "update"), [(1, "$"), (5, ": update it")])
def test_a_manifest_of_another_version_is_incompatible_unless_it_is_damaged(
    version: int, update: str
) -> None:
    written = json.loads(GOLDEN_MANIFEST) | {"version": version, "new": []}
    message = f"the fastckpt-step has version {version}, .* versions 2, 3 and 4 only{update}"
    with pytest.raises(IncompatibleCheckpoint, match=message):
        Manifest.from_bytes(sealed(written))
    with pytest.raises(CorruptCheckpoint):
        Manifest.from_bytes(sealed(written).replace(b'"step": 100', b'"step": 101'))


@pytest.mark.parametrize(
    "change",
    [
        {"writers": WRITERS[::-1]},
        {"writers": (WRITERS[0], WRITERS[0])},
        {"writers": (replace(WRITERS[0], file="a/b"),)},
        {"world_size": 3},
        {"created": "yesterday"},
        {"step": -1},
        {"objects": ObjectsFile("../objects.pt", 1, 1)},
        {"objects": ObjectsFile("objects.pt", 1, 1 << 32)},
    ],
)
def test_a_manifest_is_validated_before_it_is_written(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        replace(MANIFEST, **change).to_bytes()


def test_sizes_are_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_format, "MANIFEST_BYTES_MAX", len(GOLDEN_MANIFEST) - 1)
    with pytest.raises(CorruptCheckpoint, match="too many"):
        Manifest.from_bytes(GOLDEN_MANIFEST)
    with pytest.raises(ValueError, match="must have at most"):
        MANIFEST.to_bytes()


# ---- what a reader may leave out ----


def index_with(pieces: list[Piece]) -> ShardIndex:
    nbytes = PAGE_BYTES + (1 << 20)
    return replace(
        INDEX,
        pieces=tuple(pieces),
        per_rank=None,
        codec=None,
        frames=(),
        nbytes=nbytes,
        file_nbytes=nbytes,
        block_bytes=8 << 20,
        block_crcs=(0,),
    )


def writer_with(pieces: list[Piece]) -> Writer:
    index = index_with(pieces)
    return Writer.of(index, "rank-00003.json", index.to_bytes())


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


@settings(deadline=None, max_examples=Chance.examples(25))
@given(st.data(), st.lists(st.integers(1, 7), max_size=3).map(tuple))
def test_a_writer_that_holds_something_is_never_left_out(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    stored = data.draw(st.lists(st.tuples(st.sampled_from("abc"), boxes(shape)), max_size=3))
    pieces = [
        Piece(key, "U8", shape, box, PAGE_BYTES + number * 1000)
        for number, (key, box) in enumerate(stored)
    ]
    key, target = data.draw(st.sampled_from("abc")), data.draw(boxes(shape))
    writer = Writer.from_bytes(writer_with(pieces).to_bytes())
    holds = any(piece.key == key and intersect(piece.box, target) is not None for piece in pieces)
    if holds:
        assert may_hold(writer, {key_hash(key)}, *span(target, shape))
    if not any(piece.key == key and piece.box.numel for piece in pieces):
        assert not may_hold(writer, {key_hash(key)} - set(writer.keys or ()), 0.0, 1.0)


def test_a_writer_is_left_out_by_key_and_by_span() -> None:
    shape = (100, 10)
    writer = writer_with([Piece("a", "U8", shape, Box((25, 0), (25, 10)), PAGE_BYTES)])
    keys = {key_hash("a"), key_hash("b")}
    assert writer.span == (0.25, 0.5) and writer.keys == (key_hash("a"),)
    assert may_hold(writer, keys, 0.0, 1.0)
    assert may_hold(writer, keys, 0.49, 0.51)
    assert not may_hold(writer, {key_hash("b")}, 0.0, 1.0)
    assert not may_hold(writer, set(), 0.0, 1.0)
    assert not may_hold(writer, keys, *span(Box((0, 0), (25, 10)), shape))
    assert not may_hold(writer, keys, *span(Box((50, 0), (50, 10)), shape))
    nothing = Piece("none", "U8", (0, 3), Box((0, 0), (0, 3)), PAGE_BYTES)
    other = writer_with([nothing, Piece("a", "U8", shape, Box((50, 0), (25, 10)), PAGE_BYTES)])
    assert other.span == (0.5, 0.75) and other.keys is not None and key_hash("none") in other.keys


def test_writers_of_many_keys_are_left_out_by_span_alone() -> None:
    def stored(count: int) -> Writer:
        return writer_with(
            [
                Piece(f"k{number}", "U8", (4,), Box((2,), (2,)), PAGE_BYTES + 2 * number)
                for number in range(count)
            ]
        )

    few, many, none = stored(KEYS_MAX), stored(KEYS_MAX + 1), stored(0)
    assert few.keys is not None and len(few.keys) == KEYS_MAX
    assert all(low < high for low, high in pairwise(few.keys))
    assert not may_hold(few, {key_hash("other")}, 0.0, 1.0)
    assert many.keys is None
    assert may_hold(many, {key_hash("other")}, 0.0, 1.0)
    assert not may_hold(many, {key_hash("k1")}, 0.0, 0.5)
    assert none.keys == () and none.span == (0.0, 0.0)
    assert not may_hold(none, {key_hash("k1")}, 0.0, 1.0)


# ---- names, and all together ----


def test_names_of_files() -> None:
    assert shard_name(0, None) == "rank-00000.safetensors"
    assert shard_name(12, "zstd") == "rank-00012.safetensors.zst"
    assert shard_name(12, "planes") == "rank-00012.safetensors.planes"
    assert shard_name(123_456, None) == "rank-123456.safetensors"
    assert index_name(7) == "rank-00007.json"


def test_names_of_entries() -> None:
    assert entry_name("a/b", (4, 2), Box((0, 0), (4, 2))) == "a/b"
    assert entry_name("a/b", (4, 2), Box((2, 0), (2, 2))) == "a/b@2,0"
    assert entry_name("a", (), Box((), ())) == "a"
    assert entry_name("a@2", (4,), Box((0,), (4,))) == "a@2@"
    assert entry_name(PER_RANK, (4,), Box((0,), (4,))) == f"{PER_RANK}@"
    assert entry_name("__metadata__", (4,), Box((0,), (4,))) == "__metadata__@"


@settings(deadline=None, max_examples=Chance.examples(30))
@given(st.data())
def test_different_pieces_have_different_names(data: st.DataObject) -> None:
    keys = st.text("a@0,1", max_size=5) | st.sampled_from([PER_RANK, shard_format.METADATA])
    named: dict[str, tuple[str, tuple[int, ...]]] = {}
    shape_of: dict[str, tuple[int, ...]] = {}
    for key in data.draw(st.lists(keys, min_size=2, max_size=12)):
        drawn = data.draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
        shape = shape_of.setdefault(key, drawn)
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        whole = data.draw(st.booleans()) or not shape
        sizes = tuple(size - low for low, size in zip(offsets, shape, strict=True))
        box = Box((0,) * len(shape), shape) if whole else Box(offsets, (*sizes[:-1], 1))
        piece = ("whole" if box.sizes == shape else "part", key, box.offsets)
        name = entry_name(key, shape, box)
        assert named.setdefault(name, piece) == piece
        assert name not in (PER_RANK, shard_format.METADATA)


def test_a_shard_read_by_its_index_and_by_its_names() -> None:
    """Pieces of tensors and a rank's own values in one file, as a writer stores them."""
    whole = {
        "model/w": torch.randn(8, 6, dtype=torch.float64),
        "model/b": torch.randn(6).to(torch.bfloat16),
        "flags": torch.tensor(True),
    }
    parts = [
        ("model/w", Box((2, 0), (3, 6))),
        ("model/w", Box((5, 0), (1, 4))),
        ("model/b", Box((0,), (6,))),
        ("flags", Box((), ())),
    ]
    own = torch.frombuffer(bytearray(b"PK stands for a torch zip"), dtype=torch.uint8)
    tensors = {PER_RANK: own}
    for key, box in parts:
        slices = tuple(slice(o, o + s) for o, s in zip(*box, strict=True))
        name = entry_name(key, tuple(whole[key].shape), box)
        tensors[name] = whole[key][slices].contiguous()
    content, offsets = laid_out(tensors, {"format": "pt", "nonce": NONCE})
    known = {dtype: name for name, dtype in DTYPES.items()}
    pieces = [
        Piece(key, known[whole[key].dtype], tuple(whole[key].shape), box, at)
        for (key, box), at in zip(parts, offsets[1:], strict=True)
    ]
    index = replace(
        index_with(pieces),
        nbytes=len(content),
        file_nbytes=len(content),
        per_rank=(offsets[0], own.nbytes),
    )
    stored = index.to_bytes()
    writer = Writer.of(index, "rank-00003.json", stored)
    read = writer.parse_index(stored, NONCE)

    for piece in read.pieces:
        dtype = DTYPES[piece.dtype]
        nbytes = piece.box.numel * dtype.itemsize
        raw = bytearray(content[piece.begin : piece.begin + nbytes])
        slices = tuple(slice(o, o + s) for o, s in zip(*piece.box, strict=True))
        found = torch.frombuffer(raw, dtype=dtype).reshape(piece.box.sizes)
        assert_equal_bits(found, whole[piece.key][slices].contiguous())
    assert {"model/w@2,0", "model/w@5,0", "model/b", "flags", PER_RANK} == set(tensors)
    assert read.per_rank is not None
    begin, nbytes = read.per_rank
    assert content[begin : begin + nbytes].startswith(b"PK stands")
    with opened_by_stock(content) as opened:
        assert sorted(opened.keys()) == sorted(tensors)
        for name, tensor in tensors.items():
            assert_equal_bits(opened.get_tensor(name), tensor)
