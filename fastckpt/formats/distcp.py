"""A file of concatenated items, which are torch zips of single tensors or bytes, with block
checksums at the end.

Responsible for the bytes of a `.distcp` file of torch.distributed.checkpoint as fastckpt writes it
(docs/reference/format.md), and for the offset of the elements in a tensor that torch.save wrote. It
must not know the state, files, or readers.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from fastckpt.errors import CorruptCheckpoint, ensure
from fastckpt.formats import torch_pickle, torch_zip, zip_records
from fastckpt.formats.image_builder import (
    ClosingLine,
    ImageBuilder,
    check_body,
    check_digits,
    crcs_in,
    digits_of,
)
from fastckpt.formats.strict_json import check_members, decode, encode
from fastckpt.plan.image import BLOCK_BYTES, PAGE_BYTES, BlockChecksums, Image, block_count

METADATA, SUFFIX = ".metadata", ".distcp"  # the names of a checkpoint's record and data files
TRACKER = "latest_checkpointed_iteration.txt"  # beside the iterations of Megatron
VERSION = 1
ITEM_ALIGNMENT = torch_zip.TORCH_ALIGNMENT
_CLOSING = ClosingLine("fastckpt distcp", VERSION)
END_BYTES, tail_offset = _CLOSING.nbytes, _CLOSING.tail_offset
_SEPARATE_BYTES = 1 << 20  # bytes objects of this size and more are not copied by layout()
_KINDS = {"version": int, "body_bytes": int, "block_bytes": int, "crc32": str, "items": list}
_KINDS["item_crc32"] = str
# torch.save writes no plain tensors of quantized types and of those smaller than a byte.
_UNUSUAL = re.compile(r"torch\.(q.*|u?int[1-7])")
DTYPES = {
    str(value)[6:]: value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not _UNUSUAL.fullmatch(str(value))
}


class Item(NamedTuple):
    """One item of a file.

    `offset` and `nbytes` are those of the complete item. Its elements are row-major, of type
    `dtype` and with CRC-32 `crc`; they have `data_nbytes` bytes from offset `data` of the file. If
    `dtype` is "", the item consists of opaque bytes, and `data` and `data_nbytes` cover all of
    them.
    """

    offset: int
    nbytes: int
    data: int
    data_nbytes: int
    dtype: str
    crc: int


@dataclass(frozen=True)
class Contents:
    """The contents of a written file: its checksums, and its items in order."""

    index: BlockChecksums
    items: tuple[Item, ...]


class _Shell(NamedTuple):
    """The bytes that torch.save writes around a tensor's elements, and the offsets of their CRC-32.

    `crc_places` are two offsets in `back`, or none if there are no elements.
    """

    front: bytes
    back: bytes
    crc_places: tuple[int, ...]


class _NoData:
    """Stands for the storage of a pickled tensor."""


class _TensorPickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storage: tuple[object, ...]) -> None:
        super().__init__(file, protocol=2)
        self._storage = storage

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        return self._storage if isinstance(obj, _NoData) else None


class _Rebuilt:
    """An object that is pickled as a call of `function`."""

    def __init__(self, function: Any, arguments: tuple[object, ...]) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def _pickled(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """Returns data.pkl of a contiguous tensor on the CPU."""
    empty: Any = torch.empty(0, dtype=dtype, device="cpu")
    rebuild, (storage, offset, _sizes, _strides, *more) = empty.__reduce_ex__(2)
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim], step = step, step * max(1, sizes[dim])
    numel, kind = prod(sizes), torch.UntypedStorage
    if isinstance(storage, torch.UntypedStorage):
        numel *= dtype.itemsize
    else:
        kind = getattr(torch, storage._pickle_storage_type())
    file = io.BytesIO()
    arguments = (_NoData(), offset, sizes, tuple(strides), *more)
    persistent = ("storage", kind, "0", "cpu", numel)
    _TensorPickler(file, persistent).dump(_Rebuilt(rebuild, arguments))
    return file.getvalue()


def _small_records() -> tuple[tuple[str, bytes], ...]:
    """Returns the records that this torch writes between data.pkl and the elements."""
    return tuple(
        (name, str(ITEM_ALIGNMENT).encode() if name == ".storage_alignment" else content)
        for name, content in torch_pickle.small_records()
    )


# Laid out once for each dtype and sizes, without torch.save; the engine fills in the CRC-32s.
@lru_cache(4096)
def _shell(
    dtype: torch.dtype, sizes: tuple[int, ...], small: tuple[tuple[str, bytes], ...]
) -> _Shell:
    front, entries = bytearray(), []
    for short, content in (("data.pkl", _pickled(dtype, sizes)), *small):
        record, entry = torch_zip.whole_record(short.encode(), content, len(front))
        front += record
        entries.append(entry)
    name, begin, nbytes = f"{torch_zip.ARCHIVE}/data/0".encode(), len(front), prod(sizes)
    nbytes *= dtype.itemsize
    front += zip_records.local_header(name, begin, nbytes, ITEM_ALIGNMENT)
    back = bytearray(zip_records.descriptor(begin, nbytes, 0))
    entries.append(zip_records.central_header(name, begin, nbytes, 0))
    base = len(front) + nbytes
    identity = f"{0:020d}{zlib.crc32(front):020d}".encode()
    closing = ((b"version", torch_zip.container_version()), (b".data/serialization_id", identity))
    for short_name, content in closing:
        record, entry = torch_zip.whole_record(short_name, content, base + len(back))
        back += record
        entries.append(entry)
    directory, at = b"".join(entries), len(back)
    in_directory = at + sum(map(len, entries[: len(small) + 1])) + zip_records.CRC_AT
    back += directory
    back += zip_records.end_records(base + at, len(directory), len(entries), 0)
    places = (zip_records.DESCRIPTOR_CRC_AT, in_directory) if nbytes else ()
    return _Shell(bytes(front), bytes(back), places)


def fronts(dtype: torch.dtype, sizes: tuple[int, ...]) -> Iterator[bytes]:
    """Yields the possible bytes before the elements of a contiguous tensor in a file of torch.save.

    Those of this version of torch come first, then those of older versions; yields nothing for
    unusual dtypes.
    """
    if str(dtype)[6:] not in DTYPES:
        return
    small = _small_records()
    yield _shell(dtype, sizes, small).front
    # torch 2.6 and before
    older = tuple(record for record in small if record[0] == "byteorder")
    if older != small:
        yield _shell(dtype, sizes, older).front


def layout(contents: Sequence[torch.Tensor | bytes]) -> tuple[Image, list[tuple[int, int]]]:
    """Lays out items: contiguous tensors like torch.save, and bytes unchanged.

    Returns:
        The image, and the offset and size of each item.
    """
    builder = _Builder()
    for content in contents:
        if isinstance(content, bytes):
            builder.add_bytes(content)
        else:
            builder.add_tensor(content)
    return builder.finish(), [item[:2] for item in builder.items]


class _Builder(ImageBuilder):
    """The state of one layout()."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Item] = []
        self._slot_of: dict[int, int] = {}  # of an item with elements; both are numbers
        self._small = _small_records()

    def add_bytes(self, content: bytes) -> None:
        begin = self._align(ITEM_ALIGNMENT)
        nbytes = len(content)
        if nbytes < _SEPARATE_BYTES:
            self.put(content)
        else:
            address = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
            self.put_memory(content, address or 0, nbytes)
        self.items.append(Item(begin, nbytes, begin, nbytes, "", zlib.crc32(content)))

    def add_tensor(self, tensor: torch.Tensor) -> None:
        ensure(tensor.is_contiguous(), "the elements must be in their order")
        begin, nbytes = self._align(ITEM_ALIGNMENT), tensor.numel() * tensor.element_size()
        shell = _shell(tensor.dtype, tuple(tensor.shape), self._small)
        data = begin + len(shell.front)
        if nbytes:
            self._slot_of[len(self.items)] = self.put_framed(
                shell.front, tensor, tensor.data_ptr(), nbytes, shell.back, shell.crc_places
            )
        else:
            self.put(shell.front + shell.back)
        name = str(tensor.dtype)[6:]
        self.items.append(Item(begin, self.offset - begin, data, nbytes, name, 0))

    def _align(self, alignment: int) -> int:
        self.put(bytes(-self.offset % alignment))
        return self.offset

    def finish(self) -> Image:
        self._align(PAGE_BYTES)
        tail = _Tail(self.offset, self.items, self._slot_of)
        return self.image(tail.nbytes, tail.build)


class _Tail:
    """The bytes after the body: checksums, the list of items, and the closing line."""

    def __init__(self, body_nbytes: int, items: list[Item], slot_of: dict[int, int]) -> None:
        self._body_nbytes = body_nbytes
        self._items = items
        self._slot_of = slot_of
        blocks = block_count(body_nbytes, BLOCK_BYTES)
        self.nbytes = len(self._content([0] * blocks, [0] * len(items))) + END_BYTES

    def _content(self, block_crcs: Sequence[int], item_crcs: Sequence[int]) -> bytes:
        described = {
            "version": VERSION,
            "body_bytes": self._body_nbytes,
            "block_bytes": BLOCK_BYTES,
            "crc32": digits_of(block_crcs),
            "items": [list(item[:5]) for item in self._items],
            "item_crc32": digits_of(item_crcs),
        }
        validate(described, self._body_nbytes)
        return encode(described).encode()

    def build(self, block_crcs: Sequence[int], slot_crcs: Sequence[int]) -> bytes:
        crcs = [item.crc for item in self._items]
        for item, slot in self._slot_of.items():
            crcs[item] = slot_crcs[slot]
        tail = _CLOSING.closed(self._content(block_crcs, crcs), self._body_nbytes)
        ensure(len(tail) == self.nbytes, f"the tail has {len(tail)} bytes, must have {self.nbytes}")
        return tail


def validate(described: Any, body_nbytes: int) -> None:
    """Raises ValueError unless this is a tail's JSON; both writers and readers use this check."""
    check_members(described, _KINDS, "the tail")
    check_body(described, body_nbytes, VERSION)
    items, end = described["items"], 0
    check_digits("item_crc32", described["item_crc32"], len(items))
    for item in items:
        if type(item) is not list or [type(value) for value in item] != [int] * 4 + [str]:
            raise ValueError("an item must be four numbers and a type")
        offset, nbytes, data, data_nbytes, dtype = item
        if not end <= offset <= data <= data + data_nbytes <= offset + nbytes <= body_nbytes:
            raise ValueError(
                f"the item at {offset} must be inside the body and overlap no other item"
            )
        if dtype and (dtype not in DTYPES or data_nbytes % DTYPES[dtype].itemsize):
            raise ValueError(f"the item at {offset} cannot have the type {dtype!r}")
        end = offset + nbytes


def parse(tail: bytes, body_nbytes: int) -> Contents:
    """Verifies and parses a file's tail, which begins at body_nbytes.

    Raises:
        CorruptCheckpoint: the tail is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
    """
    if _CLOSING.version(tail) is None:
        raise CorruptCheckpoint("its closing bytes (checksums and list of items) are damaged")
    try:
        described: Any = decode(tail[:-END_BYTES])
        validate(described, body_nbytes)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"its list of items is malformed: {error}") from None
    crcs = crcs_in(described["item_crc32"])
    items = tuple(
        Item(o, n, d, m, t, crc)
        for (o, n, d, m, t), crc in zip(described["items"], crcs, strict=True)
    )
    block_crcs = crcs_in(described["crc32"])
    return Contents(BlockChecksums(body_nbytes, described["block_bytes"], block_crcs, tail), items)
