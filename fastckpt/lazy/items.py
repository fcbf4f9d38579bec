"""A directory of torch.distributed.checkpoint or Megatron, opened for random access."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fastckpt.directories import dcp_metadata
from fastckpt.directories.items_load import OURS, ItemsFile, Request
from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.lazy.source import NAMES_MAX, Rest, Shard, Stored, Wanted
from fastckpt.lazy.value_digests import digest_of_file
from fastckpt.plan.boxes import Box, covers, intersect
from fastckpt.storage.file_system import Storage


class _Chunk(NamedTuple):
    """A stored part of a tensor: its file, its item there, and its box in the tensor."""

    path: str
    offset: int
    nbytes: int
    box: Box


class ItemsSource:
    """A Source of the tensors that a `.metadata` file describes.

    Args:
        storage, staging: read the files.
        path: the directory.

    Raises:
        CorruptCheckpoint: the metadata is damaged.
        IncompatibleCheckpoint: it has another format.
        StorageError: it cannot be read.
        pickle.UnpicklingError: it names classes that are not needed in such a file.
    """

    kind, has_paths = "a directory of torch.distributed.checkpoint", False

    def __init__(self, storage: Storage, staging: Staging, path: str) -> None:
        self._storage, self._staging = storage, staging
        metadata = dcp_metadata.read(storage, os.path.join(path, dcp_metadata.NAME), True)
        self._chunks: dict[str, list[_Chunk]] = {}
        self.tensors: dict[str, Stored] = {}
        objects: list[str] = []
        paths: dict[str, str] = {}  # of files, by their names
        for name, stored in metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                objects.append(name)
                continue
            chunks = self._chunks[name] = []
            for chunk in stored.chunks:
                info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
                if info is None:
                    raise CorruptCheckpoint(f"{path!r} lacks the file and offset of {name!r}")
                if getattr(info, "transform_descriptors", None):
                    raise IncompatibleCheckpoint(
                        f"{path!r} stores {name!r} compressed, which is not supported"
                    )
                file = paths.get(info.relative_path)
                if file is None:
                    file = paths[info.relative_path] = os.path.join(path, info.relative_path)
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                chunks.append(_Chunk(file, info.offset, info.length, box))
            self.tensors[name] = Stored(
                stored.properties.dtype,
                tuple(stored.size),
                tuple(Shard(chunk.path, chunk.box) for chunk in chunks),
            )
        others = {"a pickled object": len(objects)} if objects else {}
        digests = partial(self._digests, path, objects, metadata.storage_data)
        self.rest = Rest(others, len(objects), tuple(objects[:NAMES_MAX]), digests)
        files = {*paths.values()}
        self.facts: dict[str, int | str] = {"files": len(files)}
        for file in files:
            target = dcp_metadata.leads_outside(path, file)
            if target:
                raise IncompatibleCheckpoint(
                    f"{file!r} is a link to {target!r}, which is outside the checkpoint"
                )
        self.is_verified = bool(files) and all(
            OURS.fullmatch(os.path.basename(file)) for file in files
        )

    def read(self, wanted: Sequence[Wanted]) -> None:
        requests: dict[str, list[tuple[Request, torch.Tensor]]] = {}
        names: dict[str, dict[int, str]] = {}
        for want in wanted:
            parts = []
            for chunk in self._chunks[want.name]:
                part = intersect(chunk.box, want.box)
                if part is None or not part.numel:
                    continue
                parts.append(part)
                begin = tuple(map(int.__sub__, part.offsets, chunk.box.offsets))
                sizes, dtype = chunk.box.sizes, want.target.dtype
                request = Request(chunk.offset, chunk.nbytes, dtype, sizes, begin, part.sizes)
                at = tuple(map(int.__sub__, part.offsets, want.box.offsets))
                places = tuple(slice(a, a + n) for a, n in zip(at, part.sizes, strict=True))
                requests.setdefault(chunk.path, []).append((request, want.target[places]))
                names.setdefault(chunk.path, {})[chunk.offset] = want.name
            if want.box.numel and not covers(want.box, parts):
                raise CorruptCheckpoint(
                    f"the parts of {want.name!r} in the checkpoint overlap or leave gaps"
                )
        for path, its in requests.items():
            its.sort(key=lambda pair: pair[0].offset)
            ranges = [request for request, _target in its]
            name_of = partial(names.__getitem__, path)
            with ItemsFile(self._storage, self._staging, path, ranges, name_of) as file:
                try:
                    for request, target in its:
                        if prod(request.lengths):
                            file.read(request, target)
                except (AssertionError, pickle.UnpicklingError) as error:
                    # The file holds another tensor, or something else.
                    raise CorruptCheckpoint(f"{path!r} is damaged: {error}") from None
                file.arrive()

    def positions(self) -> Mapping[str, tuple[str, int]]:
        return {
            name: (chunks[0].path, chunks[0].offset) if chunks else ("", 0)
            for name, chunks in self._chunks.items()
        }

    def _digests(
        self, path: str, objects: Sequence[str], infos: Mapping[MetadataIndex, Any]
    ) -> dict[str, str | None]:
        """Returns the digests of these pickled objects, by name."""
        digests: dict[str, str | None] = dict.fromkeys(objects)
        files: dict[str, dict[str, Request]] = {}
        for name in objects:
            info = infos.get(MetadataIndex(name))
            if info is not None and not getattr(info, "transform_descriptors", None):
                request = Request(info.offset, info.length)
                files.setdefault(os.path.join(path, info.relative_path), {})[name] = request
        for file_path, requests in files.items():
            ordered = sorted({*requests.values()})
            names = {request.offset: name for name, request in requests.items()}
            name_of = partial(dict[int, str], names)
            with ItemsFile(self._storage, self._staging, file_path, ordered, name_of) as file:
                for name in sorted(requests, key=requests.__getitem__):
                    digests[name] = digest_of_file(file.content(requests[name]))
        return digests

    def close(self) -> None:
        """Does nothing, since no file is open between reads."""
