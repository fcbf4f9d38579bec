"""The start of a save to one file, by this library, or by torch.save itself for requests that only
torch.save supports.
"""

from __future__ import annotations

import io
import logging
import operator
import os
import pickle
import sys
from collections.abc import Callable
from functools import partial
from typing import IO, Any, NamedTuple

from fastckpt.arguments.options import WriteOptions
from fastckpt.arguments.urls import is_mounted
from fastckpt.errors import StorageError
from fastckpt.files.plan import FilePlace, FilePlan
from fastckpt.files.url_place import UrlPlace, put_written
from fastckpt.formats import torch_pickle
from fastckpt.formats.torch_pickle import torch_save
from fastckpt.ranks import per_group
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.mutation_check import named_tensors
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.save import Save, Veto
from fastckpt.state.kinds import is_sharded
from fastckpt.storage import atomic
from fastckpt.storage.atomic import check_directory, close_quietly, real_path, settle
from fastckpt.storage.calls import looked_up
from fastckpt.storage.file_system import Storage
from fastckpt.storage.policies import is_written_through

log = logging.getLogger("fastckpt")


def save_stock(
    pipeline: Pipeline,
    write: Callable[[IO[bytes]], None],
    handle: InnerHandle,
    path: str,
    durable: bool,
) -> InnerHandle:
    """Calls `write` to write the file at a path now, and commits it. Raises any error of
    `write`.
    """
    storage = pipeline.storage
    pipeline.wait_for(path)
    if is_mounted(path):
        handle.stats.nbytes = put_written(storage, path, write)
        handle.mark_staged()
        handle.stats.written_s = handle.elapsed_s()
        return finish_stock(handle)
    with atomic.temporary(storage, path) as (fd, name):
        with os.fdopen(os.dup(fd), "wb") as file:
            write(file)
        handle.mark_staged()
        handle.stats.written_s = handle.elapsed_s()
        handle.stats.nbytes = storage.fstat(fd).st_size
        atomic.take_permissions(storage, fd, name, path)
        settle(storage, fd, path, durable)
        replaced = atomic.publish(storage, name, path, durable, fd)
    if replaced is not None:
        close_quietly(storage, replaced)
    return finish_stock(handle)


def save_to_object(write: Callable[[Any], None], file: Any, handle: InnerHandle) -> InnerHandle:
    """Calls `write` to write to a file-like object now. Raises any error of `write`. The number of
    bytes is taken from the object's own position, so `write` gets the object itself.
    """
    before = _position(file)
    write(file)
    after = _position(file)
    if before is not None and after is not None:
        handle.stats.nbytes = max(0, after - before)
    return finish_stock(handle)


def _position(file: Any) -> int | None:
    """Returns the position of a file-like object; None if it has none."""
    try:
        return operator.index(file.tell())
    except Exception:  # others' classes may raise anything, and only messages need the number
        return None


def finish_stock(handle: InnerHandle) -> InnerHandle:
    """Completes the handle of a save that torch.save did itself."""
    handle.stats.backend, handle.stats.why = "stock", "written by torch.save itself"
    handle.stats.stall_s = handle.stats.committed_s = handle.elapsed_s()
    handle.set_result(handle.stats)
    if handle.path and handle.stats.nbytes:  # else nothing was committed: an object, or a device
        log.info("saved %r: %s", handle.path, handle.stats)
    return handle


_parts_told = set[str]()  # names of DTensors that were warned of
# Files saved at once pay for their writes together: their drain_rate is this process's.
_PROCESS = "files of this process"


class TorchSave(NamedTuple):
    """The arguments of torch.save, except the target."""

    obj: object
    pickle_module: Any
    pickle_protocol: int
    as_zip: bool
    disable_byteorder: bool

    def write(self, target: Any) -> None:
        """Calls torch.save itself to write to a target."""
        torch_save(
            self.obj,
            target,
            pickle_module=self.pickle_module,
            pickle_protocol=self.pickle_protocol,
            _use_new_zipfile_serialization=self.as_zip,
            _disable_byteorder_record=self.disable_byteorder,
        )


def begin_save(
    asked: TorchSave,
    target: Any,
    path: str | None,
    options: WriteOptions,
    group: Any,
    before_commit: Veto | None,
    started: float,
) -> InnerHandle:
    """Begins a save, or calls torch.save to do it; returns when the fence opens.

    Args:
        target, path: fastckpt.save's `f`, and its path; None if it is not a path.
        group, before_commit: see fastckpt.save.
        started: when fastckpt.save was called.
    """
    shared, current, on_error = per_group.together(group), pipeline.current(), options.on_error
    if group is None:
        current.raise_unreported(path or "", "file", on_error)
    if path is None:
        _refuse_group(group, "to a file-like object")
        return save_to_object(asked.write, target, InnerHandle("", started, target))
    checks = asked.as_zip and shared.coordinator.rank == 0
    look = partial(_look, current.storage, path, checks)
    handled = sys.exc_info()[1]
    try:
        real, through, missing = looked_up(look, path, options.timeout_s)
    except StorageError as error:
        if on_error == "raise":
            raise
        handle = InnerHandle(path, started, on_error=on_error)
        current.refuse(handle, error, handled)
        return handle
    handle = InnerHandle(real, started, on_error=on_error)
    if through:
        _refuse_group(group, f"to {handle.path!r}, which is not a regular file")
        asked.write(path)
        return finish_stock(handle)
    if asked.pickle_module is not pickle:  # refused as torch does
        torch_save(None, io.BytesIO(), asked.pickle_module, asked.pickle_protocol)
    if not asked.as_zip:
        _refuse_group(group, "in torch's legacy format")
        return save_stock(current, asked.write, handle, real, options.durable)
    agreement = shared.coordinator.begin(f"save to {handle.path!r}", options.timeout_s)
    with agreement.failing():
        # With a group only now, when other ranks hear of it.
        current.raise_unreported(handle.path, handle.kind, on_error)
        if missing is not None:
            raise missing
        try:
            devices = current.staging.devices
            captured = torch_pickle.capture(
                asked.obj,
                asked.pickle_module,
                asked.pickle_protocol,
                asked.disable_byteorder,
                options.fence == "step",
                devices.readable(),
            )
        except torch_pickle.SkipDataActive:
            _refuse_group(group, "under skip_data()")
            agreement.close()
            return save_stock(current, asked.write, handle, real, options.durable)
        if group is None:
            _warn_of_parts(captured, asked.obj, handle.path)
        agreed = None if group is None else shared
        kind = UrlPlace if is_mounted(real) else FilePlace
        place = kind(current.storage, real, agreement, options.durable)
        plan = FilePlan(captured, asked.obj, agreed, devices, agreement, place, options)
        save = Save(
            handle, agreement, plan, place, options, before_commit, queue=real, rate_group=_PROCESS
        )
    del captured
    return current.save(save)


def _warn_of_parts(captured: torch_pickle.Capture, obj: object, path: str) -> None:
    """Warns, once for each name, of a DTensor of which this rank saves only its own part."""
    if not captured.mentions(b"DTensor\n"):
        return
    name: str
    tensor: Any  # which may be a DTensor
    for name, tensor in named_tensors(obj):
        is_part = is_sharded(tensor) and any(not its.is_replicate() for its in tensor.placements)
        if is_part and tensor.device_mesh.size() > 1:
            if name not in _parts_told:
                log.warning(
                    "%r gets only this rank's part of the DTensor %s, and perhaps of other "
                    "DTensors: save with a fastckpt.Checkpointer on all ranks, or save the "
                    "result of full_tensor()",
                    path,
                    name,
                )
            _parts_told.add(name)
            return


def _look(storage: Storage, path: str, checks: bool) -> tuple[str, bool, StorageError | None]:
    """Returns the path without symbolic links, whether it is not a regular file, and the error if
    its directory is missing. The directory is only checked if `checks`.
    """
    real, through = real_path(path), is_written_through(path)
    try:
        if checks and not through and not is_mounted(real):  # objects need no directory
            check_directory(storage, real)
    except StorageError as missing:
        return real, through, missing
    return real, through, None


def _refuse_group(group: Any, what: str) -> None:
    if group is not None:
        raise ValueError(f"group: several ranks cannot save together {what}")
