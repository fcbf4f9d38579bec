"""The StorageWriter for torch.distributed.checkpoint checkpoints.

Responsible for capturing a plan's items from a state, and for the order of a DCP commit.
"""

from __future__ import annotations

import copy
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from fastckpt.arguments.checks import check_path
from fastckpt.arguments.options import SaveOptions, WriteOptions, check_options
from fastckpt.directories import dcp_metadata
from fastckpt.directories.items_capture import captured_items
from fastckpt.directories.items_plan import ItemsConclusion, ItemsPlan, MakeItems, Places
from fastckpt.directories.place import DirectoryPlace
from fastckpt.errors import CheckpointError
from fastckpt.integrations.dcp.plan_exchange import StorageBase, with_member
from fastckpt.ranks.per_group import together
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.lease import lease_of
from fastckpt.saving.save import Save
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, reported

log = logging.getLogger("fastckpt")

_COPY_AHEAD_BYTES = 10_000_000  # torch's default


class _Outcome(torch.futures.Future[list[WriteResult]]):
    """The outcome of a rank's file.

    Its error stays in Python. torch.futures.Future keeps one in C++, where Python's garbage
    collector does not see that the error's traceback leads back to the future: the state of every
    failed save would stay in memory.
    """

    _error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.set_result([])

    def wait(self) -> list[WriteResult]:
        return self._checked(super().wait())

    def value(self) -> list[WriteResult]:
        return self._checked(super().value())

    def _checked(self, results: list[WriteResult]) -> list[WriteResult]:
        if self._error is not None:
            raise self._error
        return results


class Writer(StorageBase, StorageWriter):
    """Writes checkpoints that torch.distributed.checkpoint reads. Pass it to save() and
    async_save() of fastckpt.integrations.dcp or of torch.

    Each rank writes one file, `__RANK_TOKEN.distcp`, with a new name and a checksum for each block;
    then the first rank replaces `.metadata`. Until then, and if anything fails, an older checkpoint
    in the same directory stays loadable. Afterwards the older checkpoint's data files
    (`__*_*.distcp`, of fastckpt or torch) are removed, and so are those of saves that have
    certainly ended. A save to a directory that another job saves to raises RootInUse.

    The positional arguments are those of torch's FileSystemWriter, in the same order.

    Args:
        path: the checkpoint's directory, created if it is missing; a checkpoint_id overrides it.
        sync_files: False is the same as durable=False in the options.
        overwrite: False: a save to a directory that holds a checkpoint fails and changes nothing.
        single_file_per_rank, thread_count, per_thread_copy_ahead, cache_staged_state_dict: ignored,
            because each rank writes one file block by block, with fastckpt's threads; a log message
            names them.
        _extensions, serialization_format: must be empty and TORCH_SAVE; no other values are
            supported.
        options: how its saves are made (see SaveOptions). With torch's own save and async_save,
            `fence` and `on_error` have no effect.

    Attributes:
        save_id: the identifier of this writer's last save; also in the storage_meta of the first
            rank's metadata.

    Raises:
        ValueError, TypeError: an argument is unknown or out of range, or path is not a path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = _COPY_AHEAD_BYTES,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        options: SaveOptions = SaveOptions(),
    ) -> None:
        super().__init__()
        durable = check_options(options).durable and bool(sync_files)
        self.options = WriteOptions.of(replace(options, durable=durable))
        self.overwrite = overwrite
        self.rank: int | None = None
        self.use_collectives = True
        self.queue: str | None = None  # its saves commit in order; None: one queue per path
        self._commits = True  # whether this rank commits
        self.by_torch = True  # whether torch coordinates the save
        if _extensions:
            raise ValueError(
                f"_extensions is {_extensions}, must be empty: extensions are not supported"
            )
        if getattr(serialization_format, "name", "TORCH_SAVE") != "TORCH_SAVE":
            raise ValueError(f"serialization_format is {serialization_format}, must be TORCH_SAVE")
        given = {
            "single_file_per_rank": not single_file_per_rank,
            "thread_count": thread_count != 1,
            "per_thread_copy_ahead": per_thread_copy_ahead != _COPY_AHEAD_BYTES,
            "cache_staged_state_dict": cache_staged_state_dict,
        }
        if unused := ", ".join(name for name, differs in given.items() if differs):
            log.info("the Writer for %r ignores %s, which fastckpt does not need", path, unused)
        self.reset(check_path("path", path))

    def with_options(self, options: SaveOptions) -> Writer:
        """Returns a copy of the writer with other options."""
        other = copy.copy(self)
        other.options = WriteOptions.of(check_options(options))
        return other

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._go_to(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._commits = is_coordinator or not self.use_collectives

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        storage = pipeline.current().storage
        if self._commits:
            self._check_may_commit(storage)
        if self.by_torch and self.leases:
            with reported("open", self.path):
                is_there = storage.status(self.path) is not None
            if not is_there:
                atomic.make_directory(storage, self.path, self.options.durable)
            lease = lease_of(storage, self.path, alone=True)
            lease.take()
            lease.renew()  # torch removes no data file if the commit is refused
        return plan

    @property
    def leases(self) -> str:
        """The directory whose lease this rank takes; "" if another rank takes it."""
        return self.path if self._commits and not self.rank else ""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        first = 0 if self.use_collectives else self.rank or 0
        return [
            with_member(plan, "storage_data", _StoragePrefix(f"__{rank}_"))
            for rank, plan in enumerate(plans, first)
        ]

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Writes and syncs this rank's file, in the background; finish() commits."""
        outcome = _Outcome()
        handle = InnerHandle(self.path, time.perf_counter())
        results: list[WriteResult] = []

        def tell(done: InnerHandle) -> None:
            error = done.failure()
            done.note_reported()
            if error is None:
                outcome.set_result(results)
            else:
                outcome.fail(error)

        label, timeout_s = f"dcp file in {self.path!r}", self.options.timeout_s
        agreement = together(None).coordinator.begin(label, timeout_s)
        with agreement.failing():
            place, kept = self.place(agreement), _Kept(plan, results)
            waiting = self.with_options(replace(self.options, fence="call"))
            save = waiting.save(handle, agreement, place, plan, planner, kept)
        handle.add_done_callback(tell)
        pipeline.current().save(save)
        return outcome

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint; called on the first rank."""
        storage = pipeline.current().storage
        if self.leases:
            lease_of(storage, self.path, alone=True).renew()
        replaced, unneeded = self.commit(storage, metadata, results, self.path)
        if replaced is not None:
            storage.close(replaced)
        atomic.remove_files(storage, unneeded)

    def commit(
        self,
        storage: Storage,
        metadata: Metadata,
        results: list[list[WriteResult]],
        directory: str,
    ) -> tuple[int | None, list[str]]:
        """Completes the metadata and writes it to a directory. In the writer's own directory this
        is the commit; another directory then replaces the writer's. Returns a descriptor of the
        replaced `.metadata` (or None) and a list of files: the caller must close the descriptor and
        remove the files.
        """
        version = getattr(torch_filesystem, "CURRENT_DCP_VERSION", None)
        if version is not None:  # like the installed torch
            metadata.version = version
        metadata.storage_data = {
            its.index: its.storage_data for of_rank in results for its in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        rank, durable = self._metadata_rank(), self.options.durable
        self._check_may_commit(storage)  # again, because another save may have committed since
        if directory != self.path:  # in a draft, where it may be missing
            with reported("make directory", directory):
                storage.make_directory(directory, parents=True)
        content = dcp_metadata.encode(metadata)
        path, commits = self._metadata_path(directory), directory == self.path
        before = dcp_metadata.files_named_by(storage, path)
        replaced = atomic.replace_file(storage, path, content, durable, commits=commits)
        # Listed before the other ranks see the commit, because they may then create the next save's
        # files.
        return replaced, dcp_metadata.unneeded(storage, directory, metadata, rank, before)

    def committed(self) -> None:
        """Called on the first rank, in the background, after async_save()'s commit. It must not
        raise.
        """

    def _metadata_rank(self) -> int | None:
        """Returns this rank if it writes its own metadata; None if all ranks share one file."""
        return None if self.use_collectives else self.rank

    def _metadata_path(self, directory: str) -> str:
        rank = self._metadata_rank()
        name = dcp_metadata.NAME if rank is None else f"__{rank}{dcp_metadata.NAME}"
        return os.path.join(directory, name)

    def _check_may_commit(self, storage: Storage) -> None:
        if not self.overwrite and storage.status(self._metadata_path(self.path)) is not None:
            raise CheckpointError(
                f"Checkpoint already exists in {self.path!r}, and overwrite=False: the old one is "
                "unchanged, and the new one was not committed"
            )

    def save(
        self,
        handle: InnerHandle,
        agreement: Round,
        place: DirectoryPlace,
        plan: SavePlan,
        planner: SavePlanner,
        conclusion: ItemsConclusion,
    ) -> Save:
        options, path = self.options, handle.path
        items = self.items(plan, planner, conclusion, path, place.made)
        queue = path if self.queue is None else self.queue
        return Save(handle, agreement, items, place, options, queue=queue)

    def items(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        conclusion: ItemsConclusion,
        directory: str,
        made: MakeItems,
    ) -> ItemsPlan:
        """Returns this rank's file, with the current contents of a plan's items."""
        devices = pipeline.current().staging.devices
        content = captured_items(plan, planner, devices, self.options.fence == "step")
        prefix = getattr(plan.storage_data, "prefix", f"__{self.rank or 0}_")
        rank = int(prefix.strip("_"))
        return ItemsPlan(*content, rank, directory, made, self.options, conclusion)

    def place(self, agreement: Round, **options: Any) -> DirectoryPlace:
        """Returns the DirectoryPlace of the checkpoint, with further options."""
        storage, durable = pipeline.current().storage, self.options.durable
        options = {"record": (dcp_metadata.NAME,), **options}
        if not self.by_torch:
            options.setdefault("lease", self.leases)
        return DirectoryPlace(storage, self.path, agreement, durable, **options)


class _Kept:
    """The conclusion of write_data(): keeps this rank's results for torch to gather."""

    def __init__(self, plan: SavePlan, results: list[WriteResult]) -> None:
        self._plan, self._results = plan, results

    def agree(self) -> None:
        """Does nothing, because torch has planned with the other ranks."""

    def record(self, name: str, places: Places) -> bytes:
        self._results += results_of(self._plan, name, places)
        return b""

    def publish(self, records: list[bytes]) -> None:
        """Does nothing, because finish() commits."""


def results_of(plan: SavePlan, name: str, places: Places) -> list[WriteResult]:
    return [
        WriteResult(item.index, nbytes, _StorageInfo(name, offset, nbytes))
        for item, (offset, nbytes) in zip(plan.items, places, strict=True)
    ]
