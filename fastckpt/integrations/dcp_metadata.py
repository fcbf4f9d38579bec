"""The `.metadata` file of torch.distributed.checkpoint: its bytes, read without running any code.

Responsible for which classes such a pickle may hold, for a checksum behind it, and for which files
of a directory it leaves without a name. It must not know how items are stored.
"""

from __future__ import annotations

import builtins
import collections
import enum
import io
import os
import pathlib
import pickle
import re
import zlib
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata

from fastckpt.errors import CorruptCheckpoint
from fastckpt.storage import Storage, reported

NAME = ".metadata"
# Behind the pickle, where readers of it stop: version, size and CRC-32 of it.
_END = re.compile(rb"fastckpt metadata (\d{2}) ([0-9a-f]{16}) ([0-9a-f]{8})\Z")
_END_BYTES = len(f"fastckpt metadata {1:02d} {0:016x} {0:08x}")
_DATA_FILE = re.compile(r"__\d+_(\d+|[0-9a-f]{16})\.distcp")  # torch's and ours
_OUR_FILE = re.compile(rb"__\d+_[0-9a-f]{16}\.distcp")

# What unpickling raises of bytes that are no pickle, or not all of one.
_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OverflowError,
)

_CLASSES: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (metadata, "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta"),
        (metadata, "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"),
        (filesystem, "_StorageInfo _StoragePrefix"),
        (planner, "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType"),
        (collections, "OrderedDict"),
        (pathlib, "PosixPath PurePosixPath Path PurePath"),
        (builtins, "bytearray complex frozenset set slice"),
        (torch, "Size device"),
    )
    for name in names.split()
}
# What Megatron-core's classes of these names were: its own metadata and plans with more members.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES[_MEGATRON, "MCoreMetadata"] = Metadata
_CLASSES[_MEGATRON, "MCoreSavePlan"] = planner.SavePlan
_CLASSES["pathlib._local", "PosixPath"] = pathlib.PosixPath
_CLASSES["torch.serialization", "_get_layout"] = torch.serialization._get_layout


class _Refused(pickle.UnpicklingError):
    """A pickle that is whole asks for what it does not get."""


def _member(kind: Any, name: str) -> Any:
    """What some versions of Python pickle a member of an enumeration as."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and name in kind.__members__:
        return kind[name]
    raise _Refused(f"getattr of {kind!r}")


class _Unpickler(pickle.Unpickler):
    """Finds the classes above, and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _member
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused(f"a persistent id {pid!r}")


def encode(value: Metadata) -> bytes:
    """The content of a `.metadata` file: what torch pickles, and a checksum behind it."""
    content = pickle.dumps(value)
    end = f"fastckpt metadata 01 {len(content):016x} {zlib.crc32(content):08x}"
    return content + end.encode()


def check(content: bytes, path: str) -> bool:
    """Compares the bytes of a `.metadata` file with the checksum behind them.

    Returns:
        Whether there is one; others write none.

    Raises:
        CorruptCheckpoint: it is another.
    """
    match = _END.search(content[-_END_BYTES:])
    if match is None:
        return False
    body = content[:-_END_BYTES]
    if int(match[2], 16) != len(body) or int(match[3], 16) != zlib.crc32(body):
        raise CorruptCheckpoint(f"{path!r} is damaged: its CRC-32 is another")
    return True


def our_files(content: bytes) -> list[str]:
    """Names of fastckpt's data files in the bytes of a `.metadata` file, which is not unpickled."""
    return sorted({name.decode() for name in _OUR_FILE.findall(content)})


def read(storage: Storage, path: str, weights_only: bool) -> Metadata:
    """What a `.metadata` file says.

    Args:
        weights_only: refuse what needs other classes than such a file has to have.

    Raises:
        FileNotFoundError: there is none.
        CorruptCheckpoint: it is damaged.
        pickle.UnpicklingError: weights_only, and it asks for something else.
        StorageError: it cannot be read.
    """
    if storage.status(path) is None:
        raise FileNotFoundError(f"{path!r} does not exist: no checkpoint was committed there")
    with reported("read", path):
        fd = storage.open(path)
        try:
            content = storage.read_at(fd, storage.size(fd), 0)
        finally:
            storage.close(fd)
    has_checksum = check(content, path)
    file = io.BytesIO(content)
    try:
        value = _load(file) if weights_only else pickle.load(file)
    except _Refused as error:
        raise pickle.UnpicklingError(
            f"{path!r} holds {error}, which a .metadata file need not have and which may run code: "
            "if you trust whoever wrote it, read it with Reader(path, weights_only=False)"
        ) from None
    except _DAMAGE as error:
        raise CorruptCheckpoint(f"{path!r} is truncated or damaged: {error}") from None
    if not has_checksum and file.read(1):
        raise CorruptCheckpoint(f"{path!r} is damaged: more than a checksum follows the pickle")
    if not isinstance(value, Metadata):
        raise CorruptCheckpoint(f"{path!r} holds a {type(value).__name__}, no Metadata")
    return value


def _load(file: io.BytesIO) -> Any:
    """Unpickles; a pickle that sets attributes of the classes themselves has no effect."""
    kinds = {kind: dict(vars(kind)) for kind in {*_CLASSES.values()} if isinstance(kind, type)}
    try:
        return _Unpickler(file).load()
    finally:
        changed = False
        for kind, before in kinds.items():
            for name in vars(kind).keys() | before.keys():
                if vars(kind).get(name, kinds) is before.get(name, kinds):
                    continue
                changed = True
                if name in before:
                    setattr(kind, name, before[name])
                else:
                    delattr(kind, name)
        if changed:
            raise _Refused("a change of a class")


def unneeded(storage: Storage, directory: str, value: Metadata, rank: int | None) -> list[str]:
    """Paths of data files of a directory that nothing names when this has been committed there.

    Args:
        rank: whose metadata it is, where each rank has its own; None: of all.
    """
    named = {getattr(info, "relative_path", None) for info in (value.storage_data or {}).values()}
    try:
        names = storage.names(directory)
    except OSError:  # it may be written to but not listed: they stay
        return []
    others = [name for name in names if name.endswith(NAME) and name != NAME]
    if rank is None:
        found = [] if others else [name for name in names if _DATA_FILE.fullmatch(name)]
    else:
        own = f"__{rank}_"
        found = [name for name in names if name.startswith(own) and _DATA_FILE.fullmatch(name)]
        found = [] if NAME in names else found
    return [os.path.join(directory, name) for name in found if name not in named]
