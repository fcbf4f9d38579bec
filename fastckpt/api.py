"""save and load: the drop-in for torch.save and torch.load.

Responsible for their signatures and for what is delegated to torch. It must not know how a save or
a load is done.
"""

from __future__ import annotations

import errno
import io
import operator
import os
import pickle
import time
from typing import IO, Any

import safetensors.torch
import torch

from fastckpt import pipeline
from fastckpt.errors import StorageError
from fastckpt.formats import torch_pickle
from fastckpt.handle import SaveHandle
from fastckpt.reader import open_verified
from fastckpt.staging import BACKENDS, FENCES
from fastckpt.storage import is_written_through

DEFAULT_PROTOCOL = torch.serialization.DEFAULT_PROTOCOL


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    fence: str = "call",
    backend: str = "auto",
    durable: bool = True,
    staging_bytes: int | None = None,
) -> SaveHandle:
    """Saves an object as torch.save does, in the background, and commits it atomically.

    The file is a torch zip that torch.load opens (weights_only, mmap and map_location included).
    Until the commit, path keeps its old content; a crash leaves the old file or the new one.
    Several saves may be in flight; those to one path commit in order.

    Args:
        obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization,
            _disable_byteorder_record: as torch.save's. A file-like f, a path that is no regular
            file (/dev/null) and torch's legacy format are written by torch.save itself before the
            call returns.
        fence: when the caller may go on. "call": save() returns when everything was copied, so obj
            may be mutated at once. "step": save() returns at once; the next step() of any torch
            optimizer waits until everything was copied. Changing a tensor in place by other means
            before wait_staged() fails this save with StagingConflict (version counters are
            compared, which `.data` bypasses).
        backend: "auto" picks by file system and probe; "io_uring" and "threads" insist.
        durable: sync the file and its directory to the device before the commit counts. False
            leaves that to the kernel: still atomic against a crash of the process, not against one
            of the machine.
        staging_bytes: the most staging memory this save may hold, at least one block of 8 MiB;
        default: the process's budget (half of the memory available at the first save, or
            $FASTCKPT_STAGING_BYTES). A save that needs more waits for its own writes.

    Returns:
        A SaveHandle; result() returns its SaveStats when the checkpoint is committed.

    Raises:
        Exception: what torch.save raises for an object that cannot be pickled; nothing was written.
        CheckpointError: of an earlier save whose failure nobody asked for. This save was not begun.
        ValueError, TypeError: an unknown fence or backend; staging_bytes < 1 or no integer.
    """
    started = time.perf_counter()
    if fence not in FENCES:
        raise ValueError(f"fence is {fence!r}, must be one of {FENCES}")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, must be one of {BACKENDS}")
    if staging_bytes is not None and operator.index(staging_bytes) < 1:
        raise ValueError(f"staging_bytes is {staging_bytes}, must be at least 1")
    current = pipeline.current()
    current.raise_unreported()

    def save_by_torch(target: Any) -> None:
        torch.save(
            obj,
            target,
            pickle_module,
            pickle_protocol,
            _use_new_zipfile_serialization,
            _disable_byteorder_record,
        )

    if not isinstance(f, str | os.PathLike) or not isinstance(os.fspath(f), str):
        save_by_torch(f)
        return pipeline.finish_stock(SaveHandle("", started))
    path = os.path.realpath(f)
    if os.fspath(f).endswith(os.sep):
        path = os.path.join(path, "")  # realpath drops the claim to be a directory
    handle = SaveHandle(path, started)
    if is_written_through(os.fspath(f)):
        save_by_torch(f)
        return pipeline.finish_stock(handle)
    if pickle_module is not pickle:
        torch.save(None, io.BytesIO(), pickle_module, pickle_protocol)  # refused as torch does
    if not _use_new_zipfile_serialization:
        return pipeline.save_stock(current, save_by_torch, handle, durable)
    try:
        captured = torch_pickle.capture(
            obj, pickle_module, pickle_protocol, _disable_byteorder_record, fence == "step"
        )
    except torch_pickle.SkipData:
        return pipeline.save_stock(current, save_by_torch, handle, durable)
    job = pipeline.Save(
        handle,
        captured,
        obj if fence == "step" else None,
        fence=fence,
        backend=backend,
        durable=durable,
        staging_bytes=staging_bytes,
    )
    del captured
    return current.save(job)


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool = True,
    **pickle_load_args: Any,
) -> Any:
    """Loads what fastckpt.save, torch.save or safetensors wrote, with torch.load's semantics.

    A file that fastckpt wrote is read in parallel blocks and every byte is checked against its
    CRC-32 before anything is returned. Any other file goes to torch.load. A load of a path whose
    save is in flight in this process waits for that save.

    Args:
        f, map_location, pickle_module, weights_only, mmap, pickle_load_args: as torch.load's, with
            its defaults and environment switches. With mmap=True the file is read once to verify it
            and then mapped; pass verify=False to map without reading.
        verify: check the checksums of a file that fastckpt wrote.

    Returns:
        The object.

    Raises:
        CorruptCheckpoint: the file is damaged or truncated; the message names the record.
        IncompatibleCheckpoint: a newer fastckpt wrote it.
        StorageError: a read failed.
        Exception: what torch.load raises, for the same reasons.
    """

    def load_by_torch(source: Any) -> Any:
        simple = map_location is None or isinstance(map_location, str | torch.device)
        if isinstance(f, str | os.PathLike) and simple and str(f).endswith(".safetensors"):
            # As torch.load does by itself since it knows the suffix.
            return safetensors.torch.load_file(f, device=str(map_location or "cpu"))
        return torch.load(
            source,
            map_location,
            pickle_module,
            weights_only=weights_only,
            mmap=mmap,
            **pickle_load_args,
        )

    opened = _open_regular(f)
    if opened is None:
        return load_by_torch(f)
    fd, path = opened
    current = pipeline.current()
    try:
        file = open_verified(current.storage, current.staging, fd, path, verify)
        if file is None:
            return load_by_torch(f)
        with file:
            if mmap if mmap is not None else _mmap_is_default():
                if not verify or not isinstance(f, str | os.PathLike):
                    return load_by_torch(f)
                file.verify_all()
                # By descriptor: a save may commit another file under the path in between.
                return load_by_torch(f"/proc/self/fd/{fd}")
            # torch reads from `file` what it would read from f, and leaves both at the same place.
            try:
                obj = load_by_torch(file)
            except Exception:
                if file.error is not None:  # torch's reader may have put another error in its place
                    raise file.error from None
                raise
            if file.error is not None:
                raise file.error
            if not isinstance(f, str | os.PathLike):
                f.seek(file.tell())
            file.verify_end()
            return obj
    finally:
        current.storage.close(fd)


def _open_regular(f: Any) -> tuple[int, str] | None:
    """A descriptor of our own for a path or an open file at its beginning, and its name; None for
    torch to open.

    torch.load also raises the errors for what cannot be opened.
    """
    current = pipeline.current()
    if isinstance(f, str | os.PathLike):
        path = os.path.realpath(f)
        current.wait_for(path)
        if not os.path.isfile(path):
            return None
        try:
            return current.storage.open(path), path
        except (FileNotFoundError, PermissionError):
            return None
        except OSError as error:  # no descriptor left, say: torch would load it unverified
            raise StorageError("open", path, error.errno or errno.EIO) from error
    try:
        if isinstance(f, io.TextIOBase) or f.tell() != 0:
            return None
        # A description of our own: reading must not change the position or the flags of the
        # caller's.
        fd = current.storage.open(f"/proc/self/fd/{f.fileno()}")
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None
    return fd, str(getattr(f, "name", fd))


def _mmap_is_default() -> bool:
    """Whether torch.load maps files when it is not told (torch.utils.serialization.config)."""
    try:
        from torch.utils.serialization import config
    except ImportError:  # torch 2.6 and older
        return False
    return bool(config.load.mmap)
