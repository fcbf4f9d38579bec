"""Safetensors files, opened for random access: one file, or those of a Hugging Face directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache

import torch

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import safetensors
from fastckpt.formats.strict_json import KINDS_MAX, decode, shown
from fastckpt.lazy.extents import ExtentsSource, Form, Place
from fastckpt.lazy.source import Unreadable
from fastckpt.plan.boxes import row_major
from fastckpt.plan.image import BLOCK_BYTES, BlockChecksums
from fastckpt.reading.verified import Body, opened_regular, read_small
from fastckpt.storage.file_system import Storage, naming, reported
from fastckpt.storage.input_files import InputFile

_INDEX_BYTES_MAX = 1 << 30


def safetensors_file(staging: Staging, file: InputFile, close: Callable[[], None]) -> ExtentsSource:
    """Opens one file, which stays open until `close` is called.

    Raises:
        CorruptCheckpoint: its header is malformed.
        StorageError: it cannot be read.
    """
    body, tensors = _opened(staging, file, 0)
    return ExtentsSource("a safetensors file", staging, [body], tensors, close)


def hugging_face_directory(
    storage: Storage, staging: Staging, path: str, index: str
) -> ExtentsSource:
    """Opens the files that an index names.

    Args:
        path: the directory.
        index: the name of the index in it.

    Raises:
        CorruptCheckpoint: the index or a file is malformed, or a file or tensor is missing.
        StorageError: a file cannot be read.
    """
    # Files in the cache of the Hugging Face hub are symbolic links to its blobs.
    index_path = os.path.realpath(os.path.join(path, index))
    content = read_small(storage, index_path, _INDEX_BYTES_MAX)
    with naming(index_path):
        file_of = _weight_map(content)
    bodies: list[Body] = []
    tensors: dict[str, Place] = {}
    with ExitStack() as files:
        for number, name in enumerate(dict.fromkeys(file_of.values())):
            file = os.path.realpath(os.path.join(path, name))
            opened = files.enter_context(opened_regular(storage, file, f"{file!r} is missing"))
            body, its = _opened(staging, opened, number)
            bodies.append(body)
            for key, found in its.items():
                if file_of.get(key) == name:
                    tensors[key] = found
        missing = next((key for key in file_of if key not in tensors), None)
        if missing is not None:
            raise CorruptCheckpoint(
                f"{index_path!r} lists {shown(missing)} in {file_of[missing]!r}, but that "
                "file does not contain it"
            )
        ordered = {key: tensors[key] for key in file_of}
        close = files.pop_all().close
    return ExtentsSource("a Hugging Face directory", staging, bodies, ordered, close)


def _weight_map(content: bytes) -> dict[str, str]:
    """Returns the name of each tensor's file from an index."""
    try:
        index = decode(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"the index is malformed: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CorruptCheckpoint("the index must have a weight_map of file names")
    for name in set(weight_map.values()):
        if not _is_file_name(name):
            raise CorruptCheckpoint(f"{shown(name)} must be the name of a file in the directory")
    return weight_map


def _is_file_name(name: str) -> bool:
    """Returns whether this text from JSON is a valid name of a file in a directory."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return os.path.basename(name) == name and name not in ("", ".", "..") and "\0" not in name


def _opened(staging: Staging, file: InputFile, number: int) -> tuple[Body, dict[str, Place]]:
    path = file.path
    with reported("read", path):
        nbytes = file.nbytes()
        head = file.read_at(min(nbytes, safetensors.LENGTH_BYTES), 0)
    with naming(path):
        size = safetensors.header_nbytes(head, nbytes)
        with reported("read", path):
            head = file.read_at(size, 0)
        header = safetensors.parse(head, nbytes)
    body = Body(staging, file, BlockChecksums(nbytes, BLOCK_BYTES, (), b""))

    @lru_cache(KINDS_MAX)
    def form(kind: safetensors.Kind) -> Form:
        if isinstance(kind.dtype, str):  # one that cannot be read
            unreadable = Unreadable(kind.dtype, kind.nbytes)
            return Form(number, torch.uint8, kind.shape, (), unreadable=unreadable)
        return Form(number, kind.dtype, kind.shape, row_major(kind.shape))

    tensors: dict[str, Place] = {
        name: (form(kind), "", begin, kind.nbytes) for name, (kind, begin) in header.items()
    }
    return body, tensors
