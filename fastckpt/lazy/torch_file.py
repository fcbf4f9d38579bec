"""A torch zip, opened for random access: the tensors of its pickle, and where their records lie.

It must not know how bytes are read, nor what the pickle's opcodes mean.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import torch

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats import torch_zip, zip_records
from fastckpt.formats.zip_records import Entry
from fastckpt.lazy.extents import Extent, ExtentsSource
from fastckpt.lazy.torch_names import StoredView, named_views
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums
from fastckpt.reading.verified import Body
from fastckpt.reading.verified_file import body_of
from fastckpt.storage.file_system import Storage, naming, reported

_PICKLE = "data.pkl"


def torch_file(
    storage: Storage, staging: Staging, fd: int, path: str, close: Callable[[], None]
) -> ExtentsSource:
    """Opens a torch zip, ours or another's.

    Args:
        fd, path: the file, which stays open until `close` is called.

    Raises:
        CorruptCheckpoint: it is damaged, or no such file. IncompatibleCheckpoint: it is of an older
            or a newer version. StorageError: it cannot be read.
    """
    body = body_of(storage, staging, fd, path)
    with naming(path):
        if body is not None:
            end = len(body.index.tail) - torch_zip.END_BYTES
            entries = {entry.name: entry for entry in zip_records.directory(body.index.tail, end)}
            kind = "a torch file of fastckpt"
        else:
            body, entries = _of_others(storage, staging, fd, path)
            kind = "a torch file"
        records = {name.partition("/")[2]: entry for name, entry in entries.items()}
        if _PICKLE not in records:
            raise CorruptCheckpoint(f"its zip has no record {_PICKLE!r}: torch did not write it")
        views = named_views(_content(body, records[_PICKLE]))
        tensors = dict(_placed(body, records, views))
    return ExtentsSource(kind, staging, [body], tensors, close)


def _of_others(
    storage: Storage, staging: Staging, fd: int, path: str
) -> tuple[Body, dict[str, Entry]]:
    """Returns the body and the records of a file that has no checksums of blocks."""
    with reported("read", path):
        nbytes = storage.size(fd)
        body = Body(staging, fd, path, BlockChecksums(nbytes, BLOCK_BYTES, (), b""))
        try:
            with zipfile.ZipFile(_Unverified(partial(storage.read_at, fd), nbytes)) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            raise IncompatibleCheckpoint(
                f"it is no zip file ({error}): it is truncated, in torch's format from before "
                "version 1.6, or something else"
            ) from None
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise IncompatibleCheckpoint("its zip records are compressed: torch did not write it")
    return body, {
        info.filename: Entry(info.filename, info.header_offset, info.file_size, info.CRC)
        for info in infos
    }


class _Unverified(io.RawIOBase):
    """The bytes of a file, as zipfile reads them."""

    def __init__(self, read_at: Callable[[int, int], bytes], nbytes: int) -> None:
        super().__init__()
        self._read_at, self._nbytes, self._at = read_at, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at += offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        nbytes = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        content = self._read_at(nbytes, self._at) if nbytes else b""
        self._at += len(content)
        return content


def _bytes(body: Body, offset: int, nbytes: int) -> bytes:
    """Returns a range of a file, verified if the file has checksums."""
    if offset + nbytes > body.index.body_nbytes:
        raise CorruptCheckpoint(f"a record at {offset} reaches beyond the end of its data")
    content = bytearray(nbytes)
    first = offset // body.index.block_bytes
    last = (offset + max(nbytes, 1) - 1) // body.index.block_bytes
    with closing(body.stream(range(first, last + 1))) as stream:
        body.check(stream, stream.readinto(content, offset))
    return bytes(content)


def _data_at(body: Body, entry: Entry) -> int:
    """Returns where a record's data begins, behind its local header."""
    header = _bytes(body, entry.offset, zip_records.LOCAL_BYTES)
    at = zip_records.data_offset(header, entry.offset)
    if at is None or header[:4] != b"PK\x03\x04" or at + entry.nbytes > body.index.body_nbytes:
        raise CorruptCheckpoint(f"{body.path!r}: record {entry.name!r} is not where it should be")
    return at


def _content(body: Body, entry: Entry) -> bytes:
    """Returns a record, compared with its own CRC-32."""
    content = _bytes(body, _data_at(body, entry), entry.nbytes) if entry.nbytes else b""
    if zlib.crc32(content) != entry.crc:
        raise CorruptCheckpoint(f"record {entry.name!r} is damaged: its CRC-32 is another")
    return content


def _placed(
    body: Body, records: dict[str, Entry], views: dict[str, StoredView]
) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...], Extent]]]:
    """Yields dtype, shape and place of each tensor after its name."""
    begins: dict[str, Callable[[], int]] = {}
    for name, view in views.items():
        entry = records.get(view.record)
        last = view.offset + sum(
            (size - 1) * step for size, step in zip(view.shape, view.strides, strict=True)
        )
        if entry is None or (
            0 not in view.shape and entry.nbytes < (last + 1) * view.dtype.itemsize
        ):
            raise CorruptCheckpoint(f"tensor {name!r} reaches beyond record {view.record!r}")
        if view.record not in begins:
            begins[view.record] = _Once(partial(_data_at, body, entry))
        begin = partial(_shifted, begins[view.record], view.offset * view.dtype.itemsize)
        yield name, (view.dtype, view.shape, Extent(0, begin, view.strides))


class _Once:
    """Calls a function at most once, when its result is first asked for."""

    def __init__(self, find: Callable[[], int]) -> None:
        self._find = find
        self._found: int | None = None

    def __call__(self) -> int:
        if self._found is None:
            self._found = self._find()
        return self._found


def _shifted(begin: Callable[[], int], nbytes: int) -> int:
    return begin() + nbytes
