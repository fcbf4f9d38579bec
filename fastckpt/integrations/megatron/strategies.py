"""Megatron's save and load strategies for the torch_dist format, on fastckpt's engine.

Responsible for translating a sharded state dict to the ranks' items, a save in flight to an
AsyncRequest, and stored shards back to tensors and objects. Stock Megatron can read the directory,
and the LoadStrategy reads stock Megatron's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import torch as stock
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fastckpt import CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.arguments.options import SaveOptions, check_options
from fastckpt.directories.iterations import COMMON, CONFIG, METADATA, is_part, root_of
from fastckpt.directories.place import DirectoryPlace
from fastckpt.directories.verify import COMMON_CRC, check_common
from fastckpt.formats.torch_pickle import torch_save
from fastckpt.integrations import dcp
from fastckpt.integrations.megatron.calls_queue import Awaited
from fastckpt.integrations.megatron.partial_reads import read, read_objects, unpickled
from fastckpt.integrations.megatron.save_planner import DividingSavePlanner, Holdings, may_write
from fastckpt.ranks.round import Round
from fastckpt.saving.handle import InnerHandle
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, reported

BACKEND, VERSION = "torch_dist", 1
_COMMON_KEY = "common_state/shard_0_1"  # replaces common.pt since Megatron 0.19
_CONFIG = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": VERSION,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class Afterwards(NamedTuple):
    """The work after the commit of a save, on the first rank.

    Attributes:
        queue: the queue's name; saves of one queue commit in the order in which they began.
        committed: called after the commit, before the result is reported; its errors are `visible`.
        retain: called after that; removes old iterations.
    """

    queue: str
    committed: Callable[[], None]
    retain: Callable[[], None]


class Writer(dcp.Writer):
    """A DCP Writer that adds Megatron's files to the directory before the commit. An existing
    checkpoint and its files are replaced atomically.

    Args:
        common: the bytes of common.pt. None: Megatron has written the file, or stores an object
            instead. The file's checksum in `.metadata` shows if the two are from different saves.
        is_common_new: whether Megatron has written common.pt, which breaks an existing checkpoint.
        afterwards: the work after the commit.
        options: like dcp.Writer's.
    """

    def __init__(
        self,
        path: str,
        common: bytes | None = None,
        is_common_new: bool = False,
        afterwards: Afterwards | None = None,
        options: SaveOptions = SaveOptions(),
    ) -> None:
        super().__init__(path, options=options)
        self._common, self._is_common_new = common, is_common_new
        self._afterwards = afterwards
        self.queue = None if afterwards is None else afterwards.queue

    def place(self, agreement: Round, **options: Any) -> DirectoryPlace:
        return super().place(
            agreement,
            record=(METADATA, COMMON, CONFIG),
            is_part=is_part,
            is_broken=self._is_common_new,
            retain=None if self._afterwards is None else self._afterwards.retain,
            lease=self.leases and root_of(self.path),
        )

    def commit(self, storage: Storage, metadata: Metadata, results: Any, directory: str) -> Any:
        """Commits the checkpoint, on the first rank in the background, when all data is durable."""
        written, common = os.path.join(self.path, COMMON), self._common
        if _COMMON_KEY in metadata.state_dict_metadata:
            with reported("remove", directory), contextlib.suppress(FileNotFoundError):
                storage.remove(os.path.join(directory, COMMON))  # from another save
        elif common is None:
            # The file is missing if the caller of the strategy saves no common state.
            with reported("read", written), contextlib.suppress(FileNotFoundError):
                common = storage.read_file(written, sys.maxsize)
        if common is not None:
            self._write(storage, os.path.join(directory, COMMON), common)
            metadata.planner_data = {COMMON_CRC: zlib.crc32(common)}
        self._write(storage, os.path.join(directory, CONFIG), json.dumps(_CONFIG).encode())
        return super().commit(storage, metadata, results, directory)

    def committed(self) -> None:
        if self._afterwards is not None:
            self._afterwards.committed()

    def _write(self, storage: Storage, path: str, content: bytes) -> None:
        """Writes a file, which takes effect only when `.metadata` is written at the end."""
        replaced = atomic.replace_file(storage, path, content, self.options.durable, commits=False)
        if replaced is not None:
            atomic.close_quietly(storage, replaced)


class SaveStrategy(stock.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """The save strategy for megatron.core.dist_checkpointing.save.

    The save begins in async_save() and commits in the background, even if the request is never
    finalized; finalizing waits for the commit. No process is started, and the training thread runs
    no collective. Each data parallel replica writes a part of the state that all replicas hold.

    Args:
        options: the fence, how errors are handled, and how files are written (see SaveOptions).
    """

    def __init__(self, *, options: SaveOptions = SaveOptions()) -> None:
        super().__init__(BACKEND, VERSION)
        self._options = check_options(options)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def async_save(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
    ) -> Any:
        """Begins the save; returns a request for the queue of `async_strategy`."""
        handle = self.begin(sharded_state_dict, os.fspath(checkpoint_dir))
        return _request_class(async_strategy)(None, (), [Awaited(handle)], {})

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Saves, and returns when it is committed."""
        self.begin(sharded_state_dict, os.fspath(checkpoint_dir)).result()

    def begin(
        self,
        sharded_state_dict: ShardedStateDict,
        directory: str,
        common: bytes | None = None,
        afterwards: Afterwards | None = None,
    ) -> InnerHandle:
        """Begins to save a state dict, without its common state and with its factories applied.
        `common` and `afterwards` are passed to Writer.
        """
        holders_of = dict(holdings(nested_values(sharded_state_dict)))
        is_common_new = (
            common is None and _COMMON_KEY not in holders_of
        )  # Megatron's own save() calls
        handle: InnerHandle = dcp.async_save(
            holders_of,
            storage_writer=Writer(
                directory, common, is_common_new, afterwards, options=self._options
            ),
            planner=DividingSavePlanner(),
        )
        return handle


class LoadStrategy(stock.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """The load strategy for megatron.core.dist_checkpointing.load, for checkpoints of fastckpt or
    stock Megatron.

    It reads only the needed ranges, verifies them, and runs no collective.

    Args:
        weights_only: whether sharded objects are loaded with torch.load's weights_only=True, which
            then also allows the classes that Megatron allows in common.pt. False runs code from the
            file, like Megatron's own strategy.
        apart: a function that returns whether a key is read by other code. Such keys are hidden
            from Megatron, which may refuse a checkpoint with keys that are not requested.
    """

    def __init__(
        self, *, weights_only: bool = True, apart: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__()
        self._apart = apart
        self.stream_ckpt_dequant = False  # makes Megatron dequantize targets before it calls load()
        self._weights_only = weights_only

    def load(
        self,
        sharded_state_dict: ShardedStateDict,
        checkpoint_dir: str | Path,
        async_strategy: str = "mcore",
    ) -> Any:
        """Reads into the tensors of a state dict, or into new tensors; returns them in its
        structure.

        Raises:
            CorruptCheckpoint: bytes differ from those that were written.
            KeyError, CheckpointingException: the checkpoint lacks state that the state dict
                requests.
            IncompatibleCheckpoint: an object needs weights_only=False.
        """
        tensors = [v for v in nested_values(sharded_state_dict) if isinstance(v, ShardedTensor)]
        shards, flat, renamed = stock._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        values = stock.mcore_to_pyt_state_dict(shards, True)
        planner = _Planner(
            self._weights_only,
            shapes_validation_sharded_tensors=[t for t in tensors if not t.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                t.key: t for t in tensors if t.allow_shape_mismatch
            },
        )
        read(os.fspath(checkpoint_dir), planner, values, weights_only=self._weights_only)
        loaded = {key: stock._unwrap_pyt_sharded_tensor(value) for key, value in values.items()}
        loaded = stock._replace_sharded_keys_with_state_dict_keys(loaded, flat, renamed)
        stock._restore_dict_types(loaded, sharded_state_dict)
        return loaded

    def load_tensors_metadata(
        self, checkpoint_dir: str | Path, metadata: Metadata | None = None
    ) -> Any:
        """Returns shapes and dtypes of all tensors."""
        metadata = metadata or stored_metadata(checkpoint_dir)
        return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Returns shapes and dtypes of all tensors, and the keys of all objects."""
        metadata = stored_metadata(checkpoint_dir)
        result: dict[str, Any] = {
            key: ShardedObject.empty_from_unique_key(key)
            for key, value in metadata.state_dict_metadata.items()
            if not hasattr(value, "size")
        }
        result |= self.load_tensors_metadata(checkpoint_dir, metadata)
        apart = self._apart or (lambda key: False)
        return {name: value for name, value in result.items() if not apart(value.key)}


class _Planner(stock.MCoreLoadPlanner):  # type: ignore[misc]
    """Megatron's load planner, which by default runs no code from files."""

    def __init__(self, weights_only: bool, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, **options)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.original_state_dict[key] = unpickled(value, key, self._weights_only)

    if not stock.HAVE_TE:
        commit_tensor = DefaultLoadPlanner.commit_tensor  # the order of reads does not matter


def _request_class(async_strategy: str) -> Any:
    """Returns the AsyncRequest class of NVRx's queue, if requested and installed, or of
    Megatron's.
    """
    if async_strategy != "nvrx" or not getattr(stock, "HAVE_NVRX", False):
        return AsyncRequest
    return stock.get_async_strategy(async_strategy, "AsyncRequest")[1]


def holdings(values: Iterable[Any]) -> Holdings:
    """Returns the values of a state dict that this rank offers to write."""
    holders: dict[Any, Any] = {}
    objects: dict[str, list[Any]] = {}
    for value in values:
        if isinstance(value, ShardedTensor):
            if may_write(value.replica_id):  # a tensor may be in a state dict twice
                holders.setdefault((value.key, tuple(value.global_offset)), value)
        elif is_main_replica(value.replica_id):
            objects.setdefault(value.unique_key, []).append(value.data)
    return holders | {key: serialized(data) for key, data in objects.items()}


def serialized(value: Any) -> io.BytesIO:
    """Returns the bytes that torch.save writes for a value."""
    content = io.BytesIO()
    torch_save(value, content)
    content.seek(0)
    return content


def stored_metadata(directory: str | Path) -> Metadata:
    """Reads the `.metadata` of a directory, without running code from it."""
    return dcp.Reader(os.fspath(directory)).read_metadata()


def object_keys(metadata: Metadata) -> list[str]:
    """Returns the keys of all objects except the common state."""
    return [
        key
        for key, value in metadata.state_dict_metadata.items()
        if not hasattr(value, "size") and key != _COMMON_KEY
    ]


def stored_common(directory: str, metadata: Metadata, weights_only: bool = True) -> dict[str, Any]:
    """Returns the common state, from common.pt or, since Megatron 0.19, from an object.

    Raises:
        CorruptCheckpoint: it is missing or damaged, or from another save than `.metadata`.
        IncompatibleCheckpoint: it needs weights_only=False.
    """
    path = os.path.join(directory, COMMON)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError as error:
        if _COMMON_KEY not in metadata.state_dict_metadata:
            raise CorruptCheckpoint(f"{path!r} is missing") from error
        stored = read_objects(directory, [_COMMON_KEY], weights_only)[_COMMON_KEY]
        (value,) = unpickled(stored, _COMMON_KEY, weights_only)
        return dict(value)
    check_common(path, zlib.crc32(content), metadata.planner_data)
    try:
        common: dict[str, Any] = unpickled(io.BytesIO(content), path, weights_only)
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        if isinstance(error, IncompatibleCheckpoint):
            raise
        raise CorruptCheckpoint(f"{path!r} is damaged: {error}") from error
    return common
