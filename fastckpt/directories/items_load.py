"""Reads parts of the items of a `.distcp` file: only needed blocks, in file order.

Responsible for finding the elements of a stored tensor, for moving a part of them to memory and, if
fastckpt wrote the file, for verifying every byte and naming damaged items.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from fastckpt.arguments.names import listed
from fastckpt.engine.read_stream import EngineReadStream
from fastckpt.engine.staging import Staging, crc32
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import distcp, torch_pickle
from fastckpt.plan.boxes import CopyRow, blocks_of, row_major, strided_copies
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums, address_of
from fastckpt.reading.verified import OVERWRITTEN, Body
from fastckpt.state.targets import note_overwritten, takes_bytes
from fastckpt.storage.file_system import Storage, naming, reported
from fastckpt.storage.input_files import InputFile, input_file
from fastckpt.storage.owners import TOKEN

# Names of files that fastckpt wrote; the shorter ones do not identify the process.
OURS = re.compile(rf"__\d+_{TOKEN}\.distcp")
_APART_BYTES_MAX = 1 << 20  # objects within this span are read without the rest of their block
_RUNS_MAX = 64  # more copies go through the host: each takes microseconds to start


class Request(NamedTuple):
    """A requested part of an item.

    Attributes:
        offset, nbytes: the item's range in its file.
        dtype, sizes: the stored tensor's; None and () for bytes, which are read completely.
        begin, lengths: the requested part of the tensor.
    """

    offset: int
    nbytes: int
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


class _Found(NamedTuple):
    """The offset and dtype of a stored tensor's elements and, in a file that torch wrote, the bytes
    that must precede them.
    """

    data: int
    dtype: torch.dtype
    front: bytes


class ItemsFile:
    """A file, opened to read some requests; they are read fastest in order of offset.

    Args:
        storage, staging: read the file.
        path: the file's path. A file with a name of fastckpt's is verified.
        requests: all requests that will be read, ascending by offset.
        names: a function that returns the names of items, by their offsets, for messages.

    Raises:
        CorruptCheckpoint: it is missing, does not contain the requests, or was written by fastckpt
            and is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it. StorageError: it cannot be read.
    """

    def __init__(
        self,
        storage: Storage,
        staging: Staging,
        path: str,
        requests: Sequence[Request],
        names: Callable[[], Mapping[int, str]],
    ) -> None:
        self._staging, self._path, self._names = staging, path, names
        self._is_ours = OURS.fullmatch(os.path.basename(path)) is not None
        self._apart: dict[int, bytes] = {}  # objects read without their block, by offset
        self._stream: EngineReadStream | None = None
        self._older: int | None = None  # the index in distcp.fronts() of this file's fronts
        with reported("open", path):
            try:
                self._file = file = input_file(storage, path)
            except FileNotFoundError:
                raise CorruptCheckpoint(f"{path!r} is missing, but the metadata names it") from None
        try:
            if self._is_ours and (contents := contents_of(file)):
                index, items = contents.index, contents.items
            else:
                with reported("read", path):
                    index, items = (
                        BlockChecksums(file.nbytes(), BLOCK_BYTES, (), b""),
                        (),
                    )
            self._items = {item.offset: item for item in items}
            damaged = partial(_damaged, file.read_at, items, names)
            self._body = Body(staging, file, index, damaged, OVERWRITTEN)
            end = max(request.offset + request.nbytes for request in requests)
            if end > (nbytes := index.body_nbytes):
                raise CorruptCheckpoint(
                    f"{path!r} has {nbytes} bytes, but its items end at {end}: it is truncated "
                    "or belongs to another checkpoint"
                )
            self._found = {request: self._locate(request) for request in {*requests}}
            self._read(requests)
        except BaseException:
            file.close()
            raise

    def __enter__(self) -> ItemsFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()
        self._file.close()

    def _locate(self, request: Request) -> _Found | None:
        """Returns the location of a tensor's contiguous elements; None if only torch can find
        them.
        """
        if request.dtype is None:
            return None
        if not self._is_ours:
            front = self._front(request)
            if front is None:
                return None
            return _Found(request.offset + len(front), request.dtype, front)
        item = self._items.get(request.offset)
        if item is None or item.nbytes != request.nbytes:
            raise CorruptCheckpoint(
                f"{self._path!r} has no item of {request.nbytes} bytes at {request.offset}, "
                f"where {self._name(request)} should be, so it does not belong to the same "
                "checkpoint as the metadata"
            )
        if not item.dtype:
            return None
        dtype = distcp.DTYPES[item.dtype]
        if prod(request.sizes) * dtype.itemsize != item.data_nbytes:
            return None  # torch's own reader decides
        return _Found(item.data, dtype, b"")

    def _front(self, request: Request) -> bytes | None:
        """Returns the bytes before the elements in a file that torch wrote; None if unknown."""
        assert request.dtype is not None
        fronts = [*distcp.fronts(request.dtype, request.sizes)]
        if not fronts:
            return None
        if self._older is None:
            with reported("read", self._path):
                nbytes = min(request.nbytes, max(map(len, fronts)))
                head = self._file.read_at(nbytes, request.offset)
            matches = [number for number, front in enumerate(fronts) if head.startswith(front)]
            if not matches:
                return None
            self._older = matches[0]
        front = fronts[min(self._older, len(fronts) - 1)]
        data_nbytes = prod(request.sizes) * request.dtype.itemsize
        return front if len(front) + data_nbytes <= request.nbytes else None

    def _read(self, requests: Sequence[Request]) -> None:
        block_bytes = self._body.index.block_bytes
        rows: list[CopyRow] = []
        objects: dict[int, list[distcp.Item]] = {}  # by the block that contains each object
        for request in requests:
            place, item = self._found[request], self._items.get(request.offset)
            if request.dtype is None and item is not None and item.nbytes == request.nbytes > 0:
                last = (item.offset + item.nbytes - 1) // block_bytes
                if item.offset // block_bytes == last and not item.dtype:
                    objects.setdefault(last, []).append(item)
                    continue
            if place is None or request.lengths == request.sizes:
                rows.append((request.offset, 0, request.nbytes, 1, 0, 0))
                continue
            rows.append((request.offset, 0, len(place.front), 1, 0, 0))
            rows += _rows(request, place, 0, row_major(request.lengths))
        blocks = {*blocks_of([row for row in rows if row[2]], block_bytes)}
        for block, items in objects.items():
            if block not in blocks and not self._read_apart(items):
                blocks.add(block)
        if blocks:
            self._stream = self._body.stream(sorted(blocks))

    def _read_apart(self, items: Sequence[distcp.Item]) -> bool:
        """Reads objects of a block without the rest of the block, verified by their own checksums;
        returns False if they are too far apart.
        """
        begin, end = items[0].offset, max(item.offset + item.nbytes for item in items)
        if end - begin > _APART_BYTES_MAX:
            return False
        with reported("read", self._path, begin):
            content = self._file.read_at(end - begin, begin)
        for item in items:
            part = content[item.offset - begin : item.offset - begin + item.nbytes]
            if crc32(part) != item.crc:
                name = self._names().get(item.offset, f"item at {item.offset}")
                raise CorruptCheckpoint(
                    f"{self._path!r} is damaged: CRC-32 mismatch in bytes {item.offset} to "
                    f"{item.offset + item.nbytes}, in {name!r}"
                )
            self._apart[item.offset] = part
        return True

    def content(self, request: Request) -> bytes:
        """Returns all bytes of an item; raises CorruptCheckpoint or StorageError."""
        if request.offset in self._apart:
            return self._apart[request.offset]
        content = bytearray(request.nbytes)
        if request.nbytes:
            self._run([(request.offset, address_of(content), request.nbytes, 1, 0, 0)])
        return bytes(content)

    def read(self, request: Request, target: torch.Tensor) -> None:
        """Reads a part of a tensor into a tensor of the same sizes, and converts its dtype if
        necessary.

        Raises:
            CorruptCheckpoint, StorageError, DeviceError: the target may be partly overwritten.
            AssertionError: the stored tensor's sizes differ from the request's.
        """
        place = self._found[request]
        if place is None or not self._is_fronted(request, place):
            part = self._unpickled(request)
            with torch.no_grad():
                target.copy_(part)
            return
        if not target.numel() or not prod(request.sizes):
            return
        # For a whole tensor, the ends of its item are also read, so that all its blocks are
        # verified.
        whole = request.lengths == request.sizes
        last = request.offset + request.nbytes - 1
        ends = bytearray(2)
        before: list[CopyRow] = [(request.offset, address_of(ends), 1, 1, 0, 0)] if whole else []
        after: list[CopyRow] = [(last, address_of(ends) + 1, 1, 1, 0, 0)] if whole else []
        kinds = self._staging.devices.readable()
        direct = target.dtype == place.dtype and takes_bytes(target, kinds)
        received = target if direct else _on_the_host(request.lengths, place.dtype)
        rows = _rows(request, place, received.data_ptr(), received.stride())
        if received.device.type != "cpu" and sum(row[3] for row in rows) > _RUNS_MAX:
            received = _on_the_host(request.lengths, place.dtype)
            rows = _rows(request, place, received.data_ptr(), received.stride())
        if received is target:
            note_overwritten([target])
        self._run([*before, *rows, *after], received)
        if received is not target:
            with torch.no_grad():
                target.copy_(received)

    def arrive(self) -> None:
        """Waits until all data has arrived on the devices."""
        if self._stream is not None:
            self._body.check(self._stream, self._stream.arrive())

    def _is_fronted(self, request: Request, found: _Found) -> bool:
        """Returns whether the bytes before the elements are those that torch writes."""
        if not found.front:
            return True
        front = bytearray(len(found.front))
        self._run([(request.offset, address_of(front), len(front), 1, 0, 0)])
        return front == found.front

    def _unpickled(self, request: Request) -> torch.Tensor:
        """Returns a part of a tensor, read by torch, for storage formats that only torch
        supports.
        """
        if not self._is_ours:
            with reported("read", self._path, request.offset):
                content = self._file.read_at(request.nbytes, request.offset)
        else:
            content = self.content(request)
        what = f"{self._name(request)} in {self._path!r}"
        tensor = torch_pickle.unpickled(io.BytesIO(content), True, what)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != request.sizes:
            stored = list(getattr(tensor, "shape", ()))
            raise AssertionError(f"{what} has sizes {stored}, must have {request.sizes}")
        for dim, (begin, length) in enumerate(zip(request.begin, request.lengths, strict=True)):
            if length != tensor.size(dim):
                tensor = tensor.narrow(dim, begin, length)
        return tensor

    def _run(self, rows: Sequence[CopyRow], target: torch.Tensor | None = None) -> None:
        devices = []
        if target is not None and target.device.type != "cpu":
            devices = self._staging.devices.reads([target.untyped_storage()]).ranges
        assert self._stream is not None
        self._body.move(self._stream, rows, devices)

    def _name(self, request: Request) -> str:
        return repr(self._names().get(request.offset, f"the item at {request.offset}"))


def _damaged(
    read_at: Callable[[int, int], bytes],
    items: Sequence[distcp.Item],
    names: Callable[[], Mapping[int, str]],
    begin: int,
    end: int,
) -> str:
    """Returns the names of the damaged items in a range, by the items' own checksums; if all of
    these match, returns the names of all items in the range.
    """
    near = [item for item in items if item.offset < end and item.offset + item.nbytes > begin]
    wrong = [item for item in near if _crc(read_at, item) != item.crc]
    name_of = names()
    texts = [repr(name_of.get(i.offset, f"item at {i.offset}")) for i in wrong or near]
    what = "" if wrong else "the bytes around the elements of "
    return f"{what}{listed(dict.fromkeys(texts))}; {OVERWRITTEN}"


def _crc(read_at: Callable[[int, int], bytes], item: distcp.Item) -> int:
    crc = 0
    try:
        for at in range(item.data, item.data + item.data_nbytes, BLOCK_BYTES):
            crc = crc32(read_at(min(BLOCK_BYTES, item.data + item.data_nbytes - at), at), crc)
    except OSError as error:
        return -(error.errno or errno.EIO)  # not a CRC, so an unreadable item counts as damaged
    return crc


def contents_of(file: InputFile) -> distcp.Contents | None:
    """Returns the list of items at the end of a file; None if fastckpt did not write the file.

    Raises:
        CorruptCheckpoint: it has a name of fastckpt's and is truncated, or its end is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote it. StorageError: it cannot be read.
    """
    path = file.path
    with reported("read", path):
        nbytes = file.nbytes()
        end = file.read_at(distcp.END_BYTES, max(0, nbytes - distcp.END_BYTES))
        offset = distcp.tail_offset(end, nbytes)
        if offset is None:
            if not OURS.fullmatch(os.path.basename(path)):
                return None
            raise CorruptCheckpoint(
                f"{path!r} is truncated or damaged: its {nbytes} bytes end without a list of items"
            )
        tail = file.read_at(nbytes - offset, offset)
    with naming(path):
        return distcp.parse(tail, offset)


def _on_the_host(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cpu")


def _rows(request: Request, found: _Found, address: int, strides: Sequence[int]) -> list[CopyRow]:
    """Returns the copies of a part of a stored tensor to memory with these strides, in elements."""
    if not prod(request.lengths):
        return []
    stored, itemsize = row_major(request.sizes), found.dtype.itemsize
    begin = sum(map(int.__mul__, request.begin, stored)) * itemsize
    return strided_copies(request.lengths, found.data + begin, stored, address, strides, itemsize)
