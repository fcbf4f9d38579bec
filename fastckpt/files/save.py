"""The begin of a save to one file: by this library, or by torch.save itself where only that can
write what is asked for. It must not know how a save goes on.
"""

from __future__ import annotations

import io
import logging
import pickle
import sys
from functools import partial
from typing import Any, NamedTuple

from fastckpt.arguments.options import WriteOptions
from fastckpt.errors import StorageError
from fastckpt.files.place import FilePlace
from fastckpt.files.plan import FilePlan
from fastckpt.files.stock_save import finish_stock, save_stock, save_to_object
from fastckpt.formats import torch_pickle
from fastckpt.formats.torch_pickle import torch_save
from fastckpt.ranks import per_group
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.mutation_check import named_tensors
from fastckpt.saving.save import Save, Veto
from fastckpt.state.kinds import is_sharded
from fastckpt.storage.atomic import check_directory, real_path
from fastckpt.storage.calls import looked_up
from fastckpt.storage.file_system import Storage
from fastckpt.storage.policies import is_written_through

log = logging.getLogger("fastckpt")

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
        """Lets torch.save itself write to a target."""
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
    fence: str,
    group: Any,
    timeout_s: float,
    before_commit: Veto | None,
    on_error: str,
    started: float,
) -> InnerHandle:
    """Begins a save, or lets torch.save do it; returns when the fence opens.

    Args:
        target, path: fastckpt.save's `f`, and the path that it is; None if it is none.
        fence, group, timeout_s, before_commit, on_error: as fastckpt.save's.
        started: when fastckpt.save was called.
    """
    shared, current = per_group.together(group), pipeline.current()
    if group is None:
        current.raise_unreported(path or "", "file", on_error)
    if path is None:
        _refuse_group(group, "to a file-like object")
        return save_to_object(asked.write, target, InnerHandle("", started, target))
    checks = asked.as_zip and shared.coordinator.rank == 0
    look = partial(_look, current.storage, path, checks)
    handled = sys.exc_info()[1]
    try:
        real, through, missing = looked_up(look, path, timeout_s)
    except StorageError as error:
        if on_error == "raise":
            raise
        handle = InnerHandle(path, started, on_error=on_error)
        current.refuse(handle, error, handled)
        return handle
    handle = InnerHandle(real, started, on_error=on_error)
    if through:
        _refuse_group(group, f"to {handle.path!r}, which is no regular file")
        asked.write(path)
        return finish_stock(handle)
    if asked.pickle_module is not pickle:  # refused as torch does
        torch_save(None, io.BytesIO(), asked.pickle_module, asked.pickle_protocol)
    if not asked.as_zip:
        _refuse_group(group, "in torch's legacy format")
        return save_stock(current, asked.write, handle, real, options.durable)
    agreement = shared.coordinator.begin(f"save to {handle.path!r}", timeout_s)
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
                fence == "step",
                devices.readable(),
            )
        except torch_pickle.SkipDataActive:
            _refuse_group(group, "under skip_data()")
            agreement.close()
            return save_stock(current, asked.write, handle, real, options.durable)
        if group is None:
            _warn_of_parts(captured, asked.obj, handle.path)
        agreed = None if group is None else shared
        place = FilePlace(current.storage, real, agreement, options.durable)
        plan = FilePlan(captured, asked.obj, agreed, devices, agreement, place, options)
        save = Save(
            handle,
            agreement,
            plan,
            place,
            options,
            before_commit,
            fence=fence,
            lane=real,
            payer=_PROCESS,
        )
    del captured
    return current.save(save)


def _warn_of_parts(captured: torch_pickle.Capture, obj: object, path: str) -> None:
    """Warns, once for each name, of a DTensor of which this rank, which saves alone, has a part."""
    pickled = next((its for name, its in captured.records if name == "data.pkl"), b"")
    if not isinstance(pickled, bytes) or b"DTensor\n" not in pickled:
        return
    name: str
    tensor: Any  # which may be a DTensor
    for name, tensor in named_tensors(obj):
        is_part = is_sharded(tensor) and any(not its.is_replicate() for its in tensor.placements)
        if is_part and tensor.device_mesh.size() > 1:
            if name not in _parts_told:
                log.warning(
                    "%r gets this rank's part alone of the DTensor %s, and perhaps of others: save "
                    "by a fastckpt.Checkpointer, on all ranks, or save what full_tensor() returns",
                    path,
                    name,
                )
            _parts_told.add(name)
            return


def _look(storage: Storage, path: str, checks: bool) -> tuple[str, bool, StorageError | None]:
    """Returns the path without symbolic links, whether it is no regular file, and what is to be
    raised if its directory is missing and that is checked.
    """
    real, through = real_path(path), is_written_through(path)
    try:
        if checks and not through:
            check_directory(storage, real)
    except StorageError as missing:
        return real, through, missing
    return real, through, None


def _refuse_group(group: Any, what: str) -> None:
    if group is not None:
        raise ValueError(f"group: several ranks cannot save together {what}")
