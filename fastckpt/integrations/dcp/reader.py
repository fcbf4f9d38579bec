"""The StorageReader for torch.distributed.checkpoint checkpoints of fastckpt and torch.

Responsible for turning the items of a load plan into file reads, and for passing the contents to
the planner.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from fastckpt.arguments.checks import check_path
from fastckpt.directories import dcp_metadata
from fastckpt.directories.items_load import OURS, ItemsFile, Request
from fastckpt.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint, Telling
from fastckpt.formats import torch_pickle
from fastckpt.formats.strict_json import shown
from fastckpt.integrations.dcp.plan_exchange import StorageBase
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import reported

_streams_lock = threading.Lock()


class _Source(NamedTuple):
    """The storage_data of a rank's plan while it is sent to the first rank."""

    given: Any  # the plan's original storage_data
    save_id: str | None  # identifies the save that the rank will read


class Reader(StorageBase, StorageReader):
    """Reads torch.distributed.checkpoint checkpoints of fastckpt or torch; pass it to torch's
    load().

    Only the blocks with requested elements are read, in file order and many at a time. In files of
    fastckpt every byte read is verified. torch's load() raises an error as CheckpointException on
    all ranks; the exception holds fastckpt's error for each failed rank. If the directory is
    overwritten during the load, either the old checkpoint is loaded or the load fails.

    Args:
        path: the checkpoint's directory.
        _extension_registry: the argument of torch's FileSystemReader, which reads items that were
            written with extensions.
        weights_only: True: `.metadata` may contain only the classes that it needs, and objects only
            io.BytesIO and the classes that torch.load(weights_only=True) accepts
            (torch.serialization.safe_globals extends these). False: everything is unpickled, which
            runs code that the files name.
        follow_links: whether a file of the checkpoint may be a symbolic link to a file outside its
            directory; the directory itself may always be a link.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        weights_only: bool = True,
        follow_links: bool = False,
    ) -> None:
        super().__init__()
        self.weights_only = weights_only
        self.follow_links = follow_links
        self._extensions = _extension_registry
        self._metadata: Metadata | None = None
        self.reset(check_path("path", path))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._go_to(checkpoint_id)
        self._metadata = None
        self._failure: Exception | None = None  # the error of reading the shared `.metadata`
        self._name = dcp_metadata.NAME
        # The versions of files when they were first examined, by path. torch may overwrite its
        # files in place; our files have checksums, and names that no other save uses.
        self._seen: dict[str, tuple[int, ...]] = {}
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata in `.metadata`, or with `rank` that rank's own metadata.

        Raises:
            FileNotFoundError, CorruptCheckpoint, IncompatibleCheckpoint, StorageError.
            pickle.UnpicklingError: it needs weights_only=False.
        """
        rank = kwargs.get("rank")
        if rank is not None and self._failure is not None:
            # torch reads the rank's own metadata after any failure; that would be another
            # checkpoint's.
            raise self._failure
        self._failure = None
        name = dcp_metadata.NAME if rank is None else f"__{rank}{dcp_metadata.NAME}"
        path, storage = self._path(name), pipeline.current().storage
        self._name = name
        self._seen = {path: self._version(path)}
        try:
            metadata = dcp_metadata.read(storage, path, self.weights_only)
        except FileNotFoundError:
            raise
        except Exception as error:
            self._failure = error
            raise
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the identity of the save that this rank will read to the plan."""
        self._look_at_files(plan)
        return dataclasses.replace(plan, storage_data=_Source(plan.storage_data, self._save_id()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks will read the same save.

        Raises:
            CheckpointError: the ranks found different saves; torch raises it on all ranks.
        """
        sources = [plan.storage_data for plan in plans]
        save_ids = {source.save_id for source in sources if isinstance(source, _Source)}
        if len(save_ids) > 1:
            raise CheckpointError(
                f"{self.path!r} was overwritten while ranks began to load it, so they found "
                f"different saves: {sorted(map(str, save_ids))}. Nothing was loaded: load it again"
            )
        return [
            dataclasses.replace(plan, storage_data=source.given)
            if isinstance(source, _Source)
            else plan
            for plan, source in zip(plans, sources, strict=True)
        ]

    def _save_id(self) -> str | None:
        assert self._metadata is not None
        return getattr(self._metadata.storage_meta, "save_id", None)

    def _look_at_files(self, plan: LoadPlan) -> None:
        for name in {self._info(item).relative_path for item in plan.items}:
            path = self._path(name)
            if not OURS.fullmatch(os.path.basename(path)) and path not in self._seen:
                self._seen[path] = self._version(path)

    def _version(self, path: str) -> tuple[int, ...]:
        """Returns attributes of a file that change when it is rewritten; empty if there is no
        file.
        """
        with reported("stat", path):
            status = pipeline.current().storage.status(path)
        return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)

    def _tell_if_overwritten(self, error: BaseException) -> None:
        """Raises a clearer error if the directory was overwritten when `error` occurred."""
        metadata = self._path(self._name)
        if not isinstance(error, CorruptCheckpoint | AssertionError):
            return
        if self._seen.get(metadata) not in (None, self._version(metadata)):
            raise self._overwritten() from error

    def _check_versions(self) -> None:
        """Raises if the directory was overwritten while it was read."""
        if self._seen.keys() - {self._path(self._name)}:  # others are never overwritten
            for path, version in self._seen.items():
                if version != self._version(path):
                    raise self._overwritten()

    def _overwritten(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path!r} was overwritten while it was loaded, and the state may be partly "
            "overwritten: load it again"
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Reads the items of a plan; returns when all are read.

        Raises:
            CorruptCheckpoint: a file is damaged; the message names it, and the damaged tensors or
                objects.
            CheckpointError: the directory was overwritten during the load.
            pickle.UnpicklingError: an object needs weights_only=False.
            StorageError, DeviceError, IncompatibleCheckpoint.
        """
        with Telling(self._tell_if_overwritten):
            self._look_at_files(plan)
            self._read_plan(plan, planner)
        self._check_versions()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _read_plan(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        transformed: list[ReadItem] = []
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            info = self._info(item)
            if getattr(info, "transform_descriptors", None):
                transformed.append(item)
            else:
                by_file.setdefault(info.relative_path, []).append(item)
        for name, items in by_file.items():
            self._read_file(name, items, planner)
        if transformed:
            self._read_transformed(dataclasses.replace(plan, items=transformed), planner)

    def _read_file(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        path, current = self._path(name), pipeline.current()
        pairs = [(self._request(item), item) for item in items]
        pairs.sort(key=lambda pair: pair[0].offset)
        requests = [request for request, _ in pairs]
        # A planner that overrides commit_tensor() may read the tensor, so the data must have
        # arrived.
        looks = type(planner).commit_tensor is not DefaultLoadPlanner.commit_tensor
        with ItemsFile(
            current.storage, current.staging, path, requests, lambda: self._names(name)
        ) as file:
            # resolve_tensor() is called for each tensor in its turn, because planners expect pairs
            # of resolve_tensor() and commit_tensor(); reading ahead needs only the requests.
            for request, item in pairs:
                if item.type == LoadItemType.BYTE_IO:
                    content = file.content(request)
                    if self.weights_only:
                        _check_weights_only(content, f"{shown(item.storage_index.fqn)} in {path!r}")
                    planner.load_bytes(item, io.BytesIO(content))
                    continue
                target = planner.resolve_tensor(item).detach()
                if target.size() != item.lengths:
                    raise AssertionError(
                        f"the target of {item.storage_index} has sizes {target.size()}, must have "
                        f"{item.lengths}"
                    )
                file.read(request, target)
                if looks:
                    file.arrive()
                planner.commit_tensor(item, target)
            file.arrive()

    def _path(self, name: str) -> str:
        """Returns the path of a file of the checkpoint; raises an error if it may not be read."""
        path = os.path.join(self.path, name)
        if not dcp_metadata.is_within(name):
            raise CorruptCheckpoint(
                f"the metadata of {self.path!r} names the file {shown(name)}, which is not in "
                "that directory"
            )
        target = "" if self.follow_links else dcp_metadata.leads_outside(self.path, path)
        if target:
            raise IncompatibleCheckpoint(
                f"{path!r} is a link to {target!r}, which is outside the checkpoint: if you "
                "trust its author, read it with Reader(path, follow_links=True)"
            )
        return path

    def _info(self, item: ReadItem) -> Any:
        assert self._metadata is not None
        index = item.storage_index
        try:
            return self._metadata.storage_data[index]
        except KeyError:
            part = "" if index.offset is None else f" at {tuple(index.offset)}"
            raise CorruptCheckpoint(
                f"the metadata of {self.path!r} names no file for {shown(index.fqn)}{part}"
            ) from None

    def _request(self, item: ReadItem) -> Request:
        assert self._metadata is not None
        info, index = self._info(item), item.storage_index
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
        """Reads the items that were written with torch's stream extensions, by torch's own
        reader.
        """
        if self.weights_only and any(item.type == LoadItemType.BYTE_IO for item in plan.items):
            raise pickle.UnpicklingError(
                f"{self.path!r} holds objects that were written with a torch extension. Only torch "
                "can load them, which runs code that they name: to allow this, pass "
                "weights_only=False to Reader"
            )
        for item in plan.items:
            self._path(self._info(item).relative_path)
        reader = FileSystemReader(self.path, self._extensions)
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
    """Raises an error if unpickling an object, like planners do, would run code that it names."""
    with _streams_allowed() if b"BytesIO" in content else nullcontext():
        torch_pickle.unpickled(
            io.BytesIO(content), True, what, "read it with Reader(path, weights_only=False)"
        )


@contextmanager
def _streams_allowed() -> Iterator[None]:
    """Allows io.BytesIO in torch.load, because states such as torchtitan's contain it for data that
    they pickled themselves. It holds bytes and runs no code.
    """
    # All threads share torch's list: the first thread to leave would remove the entry for the
    # others.
    with _streams_lock, ExitStack() as told:
        if io.BytesIO not in torch.serialization.get_safe_globals():
            told.enter_context(torch.serialization.safe_globals([io.BytesIO]))
        yield
