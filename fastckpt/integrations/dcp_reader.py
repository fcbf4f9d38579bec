"""Reading checkpoints of torch.distributed.checkpoint, fastckpt's and torch's: the StorageReader.

Responsible for turning the items of a load plan into reads of files, and for handing what they hold
to the planner. It must not know the bytes of the files.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from fastckpt import pipeline
from fastckpt.distcp_load import ItemsFile, Request
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats.torch_pickle import torch_load
from fastckpt.integrations import dcp_metadata


class Reader(StorageReader):
    """Reads checkpoints of torch.distributed.checkpoint, whether fastckpt or torch wrote them: for
    torch's load().

    Of each tensor only the blocks that hold what is wanted are read, in order of the file, many at
    a time. In files of fastckpt every byte read is verified. torch's load() raises what goes wrong
    as CheckpointException on all ranks, with our error for the rank concerned.

    Args:
        path: the checkpoint's directory.
        weights_only: `.metadata` may name the classes that it has to have, no others, and objects
            have to be such as torch.load(weights_only=True) takes (torch.serialization.safe_globals
            extends that). False: unpickle what is there, which runs code that the files name.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> None:
        super().__init__()
        self.weights_only = weights_only
        self._metadata: Metadata | None = None
        if not path:
            raise ValueError(f"path is {path!r}")
        self.reset(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = os.path.abspath(os.fspath(checkpoint_id))
        self._metadata = None
        self.load_id = str(uuid.uuid4())

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What `.metadata` says, or that of one rank.

        Raises:
            FileNotFoundError, CorruptCheckpoint, pickle.UnpicklingError, StorageError.
        """
        rank = kwargs.get("rank")
        name = dcp_metadata.NAME if rank is None else f"__{rank}{dcp_metadata.NAME}"
        storage = pipeline.current().storage
        metadata = dcp_metadata.read(storage, os.path.join(self.path, name), self.weights_only)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        assert metadata.storage_data is not None, "the metadata has no storage_data"
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads what a plan asks for; it has been read when this returns.

        Raises:
            CorruptCheckpoint: naming the file, and the tensors or objects that are damaged.
            pickle.UnpicklingError: weights_only, and an object needs more.
            StorageError, DeviceError, IncompatibleCheckpoint.
        """
        assert self._metadata is not None
        transformed: list[ReadItem] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            info = self._metadata.storage_data[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                transformed.append(item)
            else:
                by_file.setdefault(info.relative_path, []).append(item)
        for name, items in by_file.items():
            self._read_file(name, items, planner)
        if transformed:
            self._read_transformed(dataclasses.replace(plan, items=transformed), planner)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read_file(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        if os.path.isabs(name) or os.pardir in name.split(os.sep):
            raise CorruptCheckpoint(f"the metadata of {self.path!r} names the file {name!r}")
        path, current = os.path.join(self.path, name), pipeline.current()
        asked = [(self._request(item), item) for item in items]
        asked.sort(key=lambda pair: pair[0].offset)
        requests = [request for request, _ in asked]
        # A planner that looks at a tensor when it is there must find it there.
        looks = type(planner).commit_tensor is not DefaultLoadPlanner.commit_tensor
        with ItemsFile(
            current.storage, current.staging, path, requests, lambda: self._names(name)
        ) as file:
            for request, item in asked:
                if item.type == LoadItemType.BYTE_IO:
                    content = file.content(request)
                    if self.weights_only:
                        _check_weights_only(content, f"{item.storage_index.fqn!r} in {path!r}")
                    planner.load_bytes(item, io.BytesIO(content))
                    continue
                target = planner.resolve_tensor(item).detach()
                if target.size() != item.lengths:
                    raise AssertionError(
                        f"{item.storage_index} is to be read into a tensor of sizes "
                        f"{target.size()}, not {item.lengths}"
                    )
                file.read(request, target)
                if looks:
                    file.arrive()
                planner.commit_tensor(item, target)
            file.arrive()

    def _request(self, item: ReadItem) -> Request:
        assert self._metadata is not None
        info, index = self._metadata.storage_data[item.storage_index], item.storage_index
        if item.type == LoadItemType.BYTE_IO:
            return Request(info.offset, info.length)
        stored: Any = self._metadata.state_dict_metadata[index.fqn]
        sizes = _chunk_sizes(stored.chunks, index)
        begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        return Request(info.offset, info.length, stored.properties.dtype, sizes, begin, lengths)

    def _names(self, file: str) -> Mapping[int, str]:
        assert self._metadata is not None
        stored = self._metadata.storage_data.items()
        return {info.offset: key.fqn for key, info in stored if info.relative_path == file}

    def _read_transformed(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Leaves to torch what went through its extensions for streams."""
        if self.weights_only and any(item.type == LoadItemType.BYTE_IO for item in plan.items):
            raise pickle.UnpicklingError(
                f"{self.path!r} holds objects that went through an extension of torch: to have "
                "torch load them, which runs code that they name, pass weights_only=False to Reader"
            )
        reader = FileSystemReader(self.path)
        assert self._metadata is not None
        reader.set_up_storage_reader(self._metadata, False)
        reader.read_data(plan, planner).wait()


def _chunk_sizes(chunks: list[Any], index: MetadataIndex) -> tuple[int, ...]:
    if index.offset is None and len(chunks) == 1:
        return tuple(chunks[0].sizes)
    if index.index is not None and index.index < len(chunks):
        hinted = chunks[index.index]
        if hinted.offsets == index.offset:
            return tuple(hinted.sizes)
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    raise CorruptCheckpoint(f"the metadata has no chunk of {index.fqn!r} at {index.offset}")


def _check_weights_only(content: bytes, what: str) -> None:
    """Makes sure that unpickling an object, as planners do it, runs no code that it names."""
    try:
        torch_load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "Unpickler" in line), error)
        raise pickle.UnpicklingError(
            f"{what} is an object that torch.load takes only with weights_only=False, which runs "
            "code that it names: if you trust whoever wrote the checkpoint, read it with "
            f"Reader(path, weights_only=False). torch says: {reason}"
        ) from None
