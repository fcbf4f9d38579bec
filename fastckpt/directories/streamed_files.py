"""Safetensors files of tensors that are read while they are written, in bounded memory: one file,
or those of an export.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

import torch

from fastckpt.arguments.options import Pacing, WriteOptions
from fastckpt.directories.draft import Draft
from fastckpt.engine.save_stats import SaveStats
from fastckpt.formats import hugging_face, safetensors
from fastckpt.formats.file_list import File
from fastckpt.plan.image import PORTION_BYTES
from fastckpt.ranks.per_group import together
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.image_file import write_portions
from fastckpt.saving.pacing import Pace
from fastckpt.storage.lustre_layout import Purpose


class Tensor(hugging_face.Tensor, Protocol):
    """A tensor of a file: its name there, its dtype and its shape."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Tensor)
# Yields the bytes of tensors, one after the other.
Read = Callable[[Sequence[T]], Iterator[memoryview]]


def add_files(draft: Draft, tensors: Sequence[T], read: Read[T], shard_bytes: int) -> None:
    """Writes the files of an export into its directory, and adds their index."""
    files = hugging_face.divided(tensors, shard_bytes)
    for name, its in files.items():
        path, make = os.path.join(draft.directory, name), partial(draft.made, name)
        draft.listed[name] = _write(path, its, read, draft.agreement, make)
    if index := hugging_face.index(files):
        draft.add_content(index, hugging_face.INDEX)


def write_file(fd: int, path: str, tensors: Sequence[T], read: Read[T]) -> None:
    """Writes one file, which is open and still empty, and makes it durable."""
    agreement = together(None).coordinator.begin(f"conversion to {path!r}")
    with agreement.failing():
        _write(path, tensors, read, agreement, lambda _purpose: nullcontext((fd, path)))
    agreement.close()


def _write(
    path: str,
    tensors: Sequence[T],
    read: Read[T],
    agreement: Round,
    make: Callable[[Purpose], AbstractContextManager[tuple[int, str]]],
) -> File:
    """Writes a file, which `make` makes as for ImageFile, and returns its size and CRC-32."""
    # Those with larger items come first, so that each is aligned to its items.
    tensors = sorted(tensors, key=lambda its: -its.dtype.itemsize)
    entries = [(its.name, safetensors.NAMES[its.dtype], tuple(its.shape)) for its in tensors]
    header = safetensors.header(entries, hugging_face.METADATA, safetensors.LENGTH_BYTES)
    nbytes, crc = len(header) + sum(its.nbytes for its in tensors), 0

    def portions() -> Iterator[bytearray]:
        nonlocal crc
        for portion in _portions(chain([memoryview(header)], read(tensors))):
            crc = zlib.crc32(portion, crc)
            yield portion

    current = pipeline.current()
    pace = Pace(Pacing(), agreement, current.rates, path, SaveStats())
    write_portions(current, portions(), path, WriteOptions(), pace, make, Purpose(nbytes))
    return File(nbytes, crc)


def _portions(contents: Iterator[memoryview]) -> Iterator[bytearray]:
    """Yields the bytes of some contents, one after the other, as write_portions() takes them."""
    portion, other, filled = bytearray(PORTION_BYTES), bytearray(PORTION_BYTES), 0
    for content in contents:
        while content:
            count = min(len(content), PORTION_BYTES - filled)
            memoryview(portion)[filled : filled + count] = content[:count]
            filled, content = filled + count, content[count:]
            if filled == PORTION_BYTES:
                yield portion
                portion, other, filled = other, portion, 0
    if filled:
        yield portion[:filled]
