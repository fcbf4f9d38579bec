"""The `.metadata` file of torch.distributed.checkpoint, read without running code from it.

Responsible for the classes that the pickle may contain, for the check of its contents, for the
checksum after the pickle, and for finding data files that it does not name. The module is outside
the integration because the command line also reads the file.
"""

from __future__ import annotations

import collections
import enum
import errno
import io
import math
import os
import pathlib
import pickle
import re
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fastckpt.directories.items_load import OURS
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
)
from fastckpt.formats import plain_pickle
from fastckpt.formats.distcp import METADATA
from fastckpt.formats.plain_pickle import NUMBER_END, Callee, Instance, Refused, are_numbers
from fastckpt.formats.strict_json import shown
from fastckpt.formats.torch_pickle import collection_paused
from fastckpt.plan.boxes import Box, covers, whole
from fastckpt.reading.verified import opened_regular
from fastckpt.storage.atomic import is_old
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.owners import TOKEN, is_token_of_dead

NAME = METADATA
# This follows the pickle, after which readers stop: a version, and the pickle's size and CRC-32.
_END = re.compile(rb"fastckpt metadata (\d{2}) ([0-9a-f]{16}) ([0-9a-f]{8})\Z")
_END_VERSION = 1
_END_BYTES = len(f"fastckpt metadata {_END_VERSION:02d} {0:016x} {0:08x}")
_DATA_FILE = re.compile(rf"__\d+_({TOKEN}|\d+)\.distcp")  # torch's and ours
_NAMED = re.compile(_DATA_FILE.pattern.encode())
_NAME_BYTES_MAX, _SEARCH_BYTES = 255, 1 << 20
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_PATH_PARTS_MAX = 1000
_SHOWN_CHARS_MAX = 100

_LARGE_BYTES = 64 << 20  # the end of a larger file is checked before it is read
_NBYTES_MAX = 16 << 30  # limits the memory for a sparse file, which may have any size

# pickle raises these errors for bytes that are not a complete pickle.
_DAMAGE = (*plain_pickle.DAMAGE, pickle.UnpicklingError, EOFError, OverflowError, RecursionError)


@dataclass(frozen=True)
class _Enumeration:
    """A function that returns the member of an enumeration for a number in the pickle."""

    kind: type[enum.Enum]

    def __call__(self, value: Any) -> enum.Enum:
        if type(value) is not int:
            raise ValueError(f"a {self.kind.__name__} must be a number")
        return self.kind(value)


def _member(named: Any, name: Any) -> enum.Enum:
    """Returns a member of an enumeration; some versions of Python pickle members as a call of
    getattr.
    """
    maker = named.make if isinstance(named, Callee) else None
    if isinstance(maker, _Enumeration) and name in maker.kind.__members__:
        return maker.kind[name]
    raise Refused("getattr of an object that is not an enumeration")


def _numbers(values: Any) -> torch.Size:
    if not isinstance(values, tuple | list) or not are_numbers(values):
        raise ValueError("sizes must be numbers from 0 to below 2^63")
    return torch.Size(values)


def _bytearray(*values: Any) -> bytearray:
    if len(values) == 2 and type(values[0]) is str and values[1] == "latin-1":
        return bytearray(values[0], "latin-1")
    if values and (len(values) != 1 or type(values[0]) is not bytes):
        raise ValueError("a bytearray must be made of bytes")
    return bytearray(*values)


def _of(*kinds: type, make: Callable[..., Any], count: int) -> Callee:
    """Returns a Callee that calls `make` with at most `count` arguments, each of a type in
    `kinds`.
    """

    def checked(*values: Any) -> Any:
        if len(values) > count or any(type(value) not in kinds for value in values):
            raise ValueError(f"{getattr(make, '__name__', make)} has arguments of the wrong types")
        try:
            return make(*values)
        except (RuntimeError, OverflowError) as error:
            raise ValueError(str(error)) from None

    return Callee(checked)


def _take_properties(target: TensorProperties, state: Any) -> None:
    if (
        type(state) is not tuple
        or [isinstance(value, kind) for value, kind in zip(state, _PROPERTIES, strict=False)]
        != [True] * 5
    ):
        raise ValueError("properties of a tensor have the wrong types")
    target.__setstate__(state)  # type: ignore[no-untyped-call]


_ENCODING = metadata._MEM_FORMAT_ENCODING
_PROPERTIES = (torch.dtype, torch.layout, bool, _ENCODING, bool)
_PATHS = ("PosixPath", "PurePosixPath", "Path", "PurePath")
_GLOBALS: dict[tuple[str, str], Any] = {
    (module.__name__, name): Instance(getattr(module, name))
    for module, names in (
        (metadata, "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"),
        (metadata, "TensorStorageMetadata"),
        (filesystem, "_StorageInfo _StoragePrefix"),
        (planner, "BytesIOWriteData SavePlan TensorWriteData WriteItem"),
    )
    for name in names.split()
    if hasattr(module, name)  # older versions of torch lack some
}
_GLOBALS |= {
    (metadata.__name__, "TensorProperties"): Instance(TensorProperties, _take_properties),
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): Callee(_Enumeration(_ENCODING)),
    (planner.__name__, "WriteItemType"): Callee(_Enumeration(planner.WriteItemType)),
    ("builtins", "getattr"): Callee(_member),
    ("builtins", "bytearray"): Callee(_bytearray),
    ("builtins", "complex"): _of(int, float, make=complex, count=2),
    ("builtins", "frozenset"): _of(list, make=frozenset, count=1),
    ("builtins", "set"): _of(list, make=set, count=1),
    ("builtins", "slice"): _of(int, float, type(None), make=slice, count=3),
    ("collections", "OrderedDict"): _of(make=collections.OrderedDict, count=0),
    ("torch", "Size"): Callee(_numbers),
    ("torch", "device"): _of(str, int, make=torch.device, count=2),
    ("torch.serialization", "_get_layout"): _of(str, make=torch.serialization._get_layout, count=1),
    # Older versions of Megatron-core subclass torch's classes.
    (_MEGATRON, "MCoreMetadata"): Instance(Metadata),
    (_MEGATRON, "MCoreSavePlan"): Instance(planner.SavePlan),
}
for _module in ("pathlib", "pathlib._local"):
    for _name in _PATHS:
        _path = _of(str, make=getattr(pathlib, _name), count=_PATH_PARTS_MAX)
        _GLOBALS[_module, _name] = _path
_GLOBALS |= {
    ("torch", str(dtype)[6:]): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def _find(module: str, name: str) -> Any:
    try:
        # Pickles of protocol 2 use the Python 2 names of builtins.
        return _GLOBALS["builtins" if module == "__builtin__" else module, name]
    except KeyError:
        raise Refused(f"{module[:_SHOWN_CHARS_MAX]}.{name[:_SHOWN_CHARS_MAX]}") from None


def encode(value: Metadata) -> bytes:
    """Returns the content of a `.metadata` file: torch's pickle and a checksum after it."""
    content = pickle.dumps(value)
    end = f"fastckpt metadata {_END_VERSION:02d} {len(content):016x} {zlib.crc32(content):08x}"
    return content + end.encode()


def _check_end(end: bytes, path: str, nbytes: int) -> None:
    """Checks that `end` is a valid end of a `.metadata` file of `nbytes` bytes: a checksum of that
    size, or the end of a pickle. Otherwise raises CorruptCheckpoint.
    """
    match = _END.search(end)
    if match is None and not end.endswith(pickle.STOP):
        raise CorruptCheckpoint(f"{path!r} is truncated or damaged: its pickle has no end")
    if match is not None and int(match[2], 16) != nbytes - _END_BYTES:
        raise CorruptCheckpoint(f"{path!r} is damaged: its checksum has the wrong size")


def check(content: bytes, path: str) -> bool:
    """Verifies a `.metadata` file with its checksum. Returns False if it has no checksum, because
    only fastckpt writes one. Raises CorruptCheckpoint if the checksum differs, and
    IncompatibleCheckpoint if its version is unknown.
    """
    match = _END.search(content[-_END_BYTES:])
    if match is None:
        return False
    if int(match[1]) != _END_VERSION:
        raise IncompatibleCheckpoint(
            f"{path!r} has a checksum of version {int(match[1])}, must be {_END_VERSION}: it is "
            "damaged, or a newer fastckpt wrote it"
        )
    body = content[:-_END_BYTES]
    if int(match[2], 16) != len(body) or int(match[3], 16) != zlib.crc32(body):
        raise CorruptCheckpoint(f"{path!r} is damaged: its CRC-32 or size does not match")
    return True


def named_files(content: bytes) -> set[str]:
    """Finds the names of data files in the bytes of a `.metadata` file, without unpickling."""
    names = set[bytes]()
    for begin in range(0, len(content), _SEARCH_BYTES):  # in parts, because a search holds the GIL
        part = content[begin : begin + _SEARCH_BYTES + _NAME_BYTES_MAX]
        names.update(match.group() for match in _NAMED.finditer(part))
    return {name.decode() for name in names}


def files_named_by(storage: Storage, path: str) -> set[str]:
    """Returns the names of data files in the `.metadata` file at a path; empty if the file is
    missing or cannot be read.
    """
    try:
        return named_files(content_of(storage, path))
    except CheckpointError:
        return set()


def unnamed(storage: Storage, directory: str) -> list[str]:
    """Returns the names of fastckpt's data files in a directory that no `.metadata` file there
    names. They belong to killed saves, or to saves not yet committed. Returns none if a `.metadata`
    file is damaged, because it may have named any of them. Raises content_of()'s errors.
    """
    names = storage.names(directory)  # first, because later commits are then read below
    files = [name for name in sorted(names) if OURS.fullmatch(name)]
    named = set[str]()
    for name in storage.names(directory) if files else ():
        if name.endswith(NAME):
            path = os.path.join(directory, name)
            content = content_of(storage, path)
            if not _is_whole(content, path):
                return []
            named.update(named_files(content))
    return [name for name in files if name not in named]


def _is_whole(content: bytes, path: str) -> bool:
    """Returns whether the bytes of a `.metadata` file are intact: they match their checksum or, in
    a file of torch without a checksum, describe a checkpoint.
    """
    try:
        return check(content, path) or bool(described(content, path, weights_only=True))
    except (CheckpointError, pickle.UnpicklingError):
        return False


def content_of(storage: Storage, path: str) -> bytes:
    """Returns the bytes of a `.metadata` file.

    Raises:
        CorruptCheckpoint: it is not a regular file, or has an impossible size.
        StorageError: it cannot be read, or memory is short (ENOMEM).
    """
    with opened_regular(storage, path) as file, reported("read", path):
        nbytes = file.nbytes()
        if nbytes > _NBYTES_MAX:
            raise CorruptCheckpoint(
                f"{path!r} has {nbytes} bytes, an impossible size for a .metadata file"
            )
        if nbytes > _LARGE_BYTES:  # a sparse file may have any size
            _check_end(file.read_at(_END_BYTES, nbytes - _END_BYTES), path, nbytes)
        try:
            return file.read_at(nbytes, 0)
        except MemoryError:
            raise StorageError("allocate memory to read", path, errno.ENOMEM) from None


def read(storage: Storage, path: str, weights_only: bool) -> Metadata:
    """Reads and checks a `.metadata` file, and returns the metadata.

    Args:
        weights_only: allows only the classes that such a file needs. Time and memory are then
            proportional to the file's size for any content.

    Raises:
        FileNotFoundError: it does not exist. StorageError: it cannot be read.
        CorruptCheckpoint: it is damaged, is not a regular file, or does not describe a checkpoint.
        IncompatibleCheckpoint: it describes a checkpoint in another format.
        pickle.UnpicklingError: weights_only is set, and it needs another class or function.
    """
    if storage.status(path) is None:
        raise FileNotFoundError(f"{path!r} does not exist: no checkpoint was committed there")
    return described(content_of(storage, os.path.realpath(path)), path, weights_only)


def described(content: bytes, path: str, weights_only: bool) -> Metadata:
    """Returns the metadata in the bytes of a `.metadata` file; raises read()'s errors."""
    if not content:
        raise CorruptCheckpoint(f"{path!r} is empty")
    has_checksum = check(content, path)
    with collection_paused():  # of millions of objects, it would only double the time
        value, end = _unpickled(content, path, weights_only)
    if not has_checksum and end != len(content):
        raise CorruptCheckpoint(f"{path!r} is damaged: unexpected bytes follow the pickle")
    if not isinstance(value, Metadata):
        raise CorruptCheckpoint(f"{path!r} holds a {type(value).__name__}, must be Metadata")
    try:
        validate(value)
    except (ValueError, AttributeError) as error:  # some attributes were not pickled
        raise CorruptCheckpoint(f"{path!r} does not describe a checkpoint: {error}") from None
    except IncompatibleCheckpoint as error:
        raise IncompatibleCheckpoint(f"{path!r}: {error}") from None
    return value


def _unpickled(content: bytes, path: str, weights_only: bool) -> tuple[Any, int]:
    """Returns the unpickled object and the offset of the pickle's end."""
    try:
        if weights_only:
            return plain_pickle.loads(content, _find)
        file = io.BytesIO(content)
        return pickle.load(file), file.tell()
    except Refused as error:
        raise pickle.UnpicklingError(
            f"{path!r} holds {error}, which a .metadata file does not need and which may run "
            "code: if you trust its author, read it with Reader(path, weights_only=False)"
        ) from None
    except _DAMAGE as error:
        text = str(error)[:_SHOWN_CHARS_MAX]
        raise CorruptCheckpoint(f"{path!r} is truncated or damaged: {text}") from None
    except MemoryError:
        raise CorruptCheckpoint(
            f"{path!r} has {len(content)} bytes, but needs more memory than is available: it is "
            "damaged, or memory is short"
        ) from None


def validate(value: Metadata) -> None:
    """Checks the contents of a `.metadata` file once, before torch's planners use them.

    Raises:
        ValueError, AttributeError: the contents are invalid; the message describes the fault.
        IncompatibleCheckpoint: it was written in another format.
    """
    if not isinstance(value.state_dict_metadata, dict):
        raise ValueError("its state_dict_metadata must be a dict")
    for name, stored in value.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError("a key of its state_dict_metadata must be a string")
        if not isinstance(stored, BytesStorageMetadata):
            _check_stored(name, stored)
    if not isinstance(value.storage_data, dict):
        raise IncompatibleCheckpoint(
            f"its storage_data is a {type(value.storage_data).__name__}, must be a dict: read it "
            "with the reader of the library that wrote it"
        )
    for index, info in value.storage_data.items():
        if not isinstance(index, MetadataIndex) or type(index.fqn) is not str:
            raise ValueError("a key of its storage_data must be a MetadataIndex")
        if not isinstance(info, filesystem._StorageInfo):
            raise IncompatibleCheckpoint(
                f"it locates {shown(index.fqn)} with a {type(info).__name__}, must be a "
                "_StorageInfo: read it with the reader of the library that wrote it"
            )
        _check_info(index.fqn, info)
    if not isinstance(value.storage_meta, StorageMeta | None):
        raise ValueError("its storage_meta must be a StorageMeta")


def _check_stored(name: str, stored: Any) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        raise ValueError(f"{shown(name)} is a {type(stored).__name__}, must be tensor or bytes")
    sizes: Any = stored.size
    properties: Any = stored.properties
    if not isinstance(sizes, tuple) or not are_numbers(sizes):
        raise ValueError(f"the sizes of {shown(name)} must be numbers")
    if not isinstance(properties, TensorProperties) or type(properties.dtype) is not torch.dtype:
        raise ValueError(f"{shown(name)} must have a dtype")
    if not isinstance(stored.chunks, list):
        raise ValueError(f"the chunks of {shown(name)} must be a list")
    for chunk in stored.chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise ValueError(
                f"a chunk of {shown(name)} is a {type(chunk).__name__}, must be a "
                "ChunkStorageMetadata"
            )
        values: Any
        for values in (chunk.offsets, chunk.sizes):
            if not isinstance(values, tuple) or len(values) != len(sizes):
                raise ValueError(f"a chunk of {shown(name)} must have {len(sizes)} dimensions")
            if not are_numbers(values):
                raise ValueError(f"offsets and sizes of a chunk of {shown(name)} must be numbers")


def _check_info(name: str, info: Any) -> None:
    path, transforms = info.relative_path, getattr(info, "transform_descriptors", None)
    if type(path) is not str or not is_within(path):
        raise ValueError(
            f"{shown(name)} is in the file {shown(path)}, must be in a file of the directory"
        )
    if not are_numbers((info.offset, info.length)) or info.offset + info.length >= NUMBER_END:
        raise ValueError(f"offset and length of {shown(name)} must be numbers below 2^63")
    if transforms is not None and not (
        isinstance(transforms, list | tuple) and all(type(text) is str for text in transforms)
    ):
        raise ValueError(f"the transforms of {shown(name)} must be a list of strings")


def check_cover(key: str, tensor: TensorStorageMetadata) -> None:
    """Raises IncompatibleCheckpoint unless every element of the tensor is in exactly one chunk."""
    for chunk in tensor.chunks:
        ends = [at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for end, size in zip(ends, tensor.size, strict=True)):
            raise IncompatibleCheckpoint(
                f"a shard of {key!r} ends at {ends}, beyond the tensor's sizes {tuple(tensor.size)}"
            )
    covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    chunks = [Box(tuple(c.offsets), tuple(c.sizes)) for c in tensor.chunks]
    if not covers(whole(tensor.size), chunks):
        raise IncompatibleCheckpoint(
            f"the ranks hold {covered} elements of {key!r}, which has {math.prod(tensor.size)}, "
            "so shards overlap or are missing"
        )


@lru_cache(256)  # 100,000 tensors may share a few files
def is_within(name: str) -> bool:
    """Returns whether a relative name stays within its directory and can be the name of a file."""
    parts = name.split(os.sep)
    if os.path.isabs(name) or os.pardir in parts or not parts[-1] or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def leads_outside(directory: str, path: str) -> str:
    """Returns the real path of a path in a directory if symbolic links lead outside it, else ""."""
    inside, target = os.path.realpath(directory), os.path.realpath(path)
    return "" if os.path.commonpath((inside, target)) == inside else target


def is_data_file(name: str) -> bool:
    """Whether this is the name of a data file of torch or fastckpt."""
    return _DATA_FILE.fullmatch(name) is not None


def unneeded(
    storage: Storage, directory: str, value: Metadata, rank: int | None, replaced: Collection[str]
) -> list[str]:
    """Returns the paths of data files in a directory that are not needed once `value` is committed
    there. `value` is the metadata of all ranks (`rank` is None) or of one rank, if each has its
    own.

    Another job may be about to commit a file that `value` does not name. Therefore only files are
    returned that the previous metadata named (`replaced`), or whose saves have certainly ended.
    """
    named = {getattr(info, "relative_path", None) for info in (value.storage_data or {}).values()}
    try:
        names = storage.names(directory)
    except OSError:  # the directory may be write-only: the files stay
        return []
    others = [name for name in names if name.endswith(NAME) and name != NAME]
    if rank is None:
        files = [] if others else [name for name in names if is_data_file(name)]
    else:
        own = f"__{rank}_"
        files = [name for name in names if name.startswith(own) and is_data_file(name)]
        files = [] if NAME in names else files
    paths = {name: os.path.join(directory, name) for name in files if name not in named}
    return [path for name, path in paths.items() if name in replaced or is_left(storage, path)]


def is_of_dead(name: str) -> bool | None:
    """Whether the process that made the data file of this name has ended; None if unknown."""
    match = _DATA_FILE.fullmatch(name)
    return is_token_of_dead(match[1]) if match else None


def is_left(storage: Storage, path: str) -> bool:
    """Whether the save that made a data file has certainly ended: its process ran on this host and
    has ended or, if this is unknown, the file has not changed for DEAD_AFTER_S.
    """
    is_gone = is_of_dead(os.path.basename(path))
    return is_old(storage, path) if is_gone is None else is_gone
