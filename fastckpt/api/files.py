"""fastckpt.save, load and prepare: their signatures, and the calls that they leave to torch."""

from __future__ import annotations

import errno
import os
import pickle
import time
from typing import IO, Any

import torch

from fastckpt.arguments.checks import (
    STAGINGS,
    StagingWay,
    Stripe,
    check_callable,
    check_choice,
    check_flag,
    check_seconds,
    check_size,
    optional,
)
from fastckpt.arguments.options import Pacing, WriteOptions, check_options
from fastckpt.arguments.options import SaveOptions as SaveOptions
from fastckpt.arguments.urls import StorageOptions, path_of, refuse_for_url
from fastckpt.errors import NoPath, telling
from fastckpt.files.load import TorchLoad, load_alone, load_together
from fastckpt.files.save import TorchSave, begin_save
from fastckpt.ranks.round import TIMEOUT_S
from fastckpt.saving import pipeline
from fastckpt.saving.handle import SaveHandle
from fastckpt.saving.save import Veto

DEFAULT_PROTOCOL = torch.serialization.DEFAULT_PROTOCOL


def save(
    obj: object,
    f: str | os.PathLike[str] | IO[bytes],
    pickle_module: Any = pickle,
    pickle_protocol: int = DEFAULT_PROTOCOL,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    *,
    options: SaveOptions = SaveOptions(),
    stripe: Stripe = "auto",
    drain_rate: float | str | None = None,
    group: Any = None,
    before_commit: Veto | None = None,
    storage_options: StorageOptions | None = None,
) -> SaveHandle:
    """Saves an object as torch.save does, but in the background, and commits the file atomically.

    The file is a torch zip that torch.load opens (weights_only, mmap and map_location included).
    Until the commit the path keeps its old content; a crash leaves the old file or the new one.
    Several saves may be in flight; saves to one path commit in the order they were begun.

    Args:
        obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization,
            _disable_byteorder_record: as torch.save's. If f is a file-like object or a path that is
            no regular file (/dev/null), or the format is torch's legacy one, torch.save itself
            writes before this call returns.
        options: the fence, what becomes of errors, and how files are written (see SaveOptions).
        stripe: how a new file on Lustre is laid out over the storage targets (OSTs); ignored on
            other file systems. "auto": a large file gets several stripes if its directory's layout
            has one stripe; any other layout that the directory or the administrator has set is
            kept. "keep": the directory's layout. (count, size): so many stripes of so many bytes, a
            multiple of 64 KiB. All ranks of a group pass the same.
        drain_rate: the most bytes per second that this process writes (with group: that a node
            writes) in all saves with a drain_rate together, that of the latest; a number or a text
            such as "2GB/s". None: this save has no limit.
        group: a torch.distributed process group whose ranks all hold the same object and all call
            save() with the same path; each writes its part of the one file. Storages below 1 MiB
            and everything that is no tensor are taken from the group's first rank, and not
            compared. The ranks compare names, shapes and dtypes of the tensors, and samples of
            their contents (64 KiB in all). Where these differ, this save raises RanksDisagree, and
            later ones take the first rank's tensor, with a warning while they differ. Ranks talk
            over the job's store; no collective runs on the group. None: this process saves alone,
            whatever other ranks do.
        before_commit: called on every rank, on the thread of the save, when all that the rank
            writes has arrived, with the SaveStats so far and a digest of the rank's bytes: the
            SHA-256, in hexadecimal digits, of the CRC-32s of its blocks, so equal tensors have
            equal digests (with group, of tensors from 1 MiB on alone). If it raises on any rank,
            nothing is committed: result() raises CheckpointError there, PeerFailed elsewhere. What
            it returns is ignored. It must not wait for this save, nor for one that was begun later.
            Not called if torch.save itself writes. Default: none.
        storage_options: as Checkpointer's, where f is a URL of an object store.

    Returns:
        A SaveHandle; its result() returns the SaveStats when the checkpoint is committed. With
            group it may raise RanksDisagree, which names the tensor and the ranks, or PeerFailed
            if another rank failed, is missing or saves something else.

    Raises:
        Exception: what torch.save raises for an object that cannot be pickled; nothing was written.
        CheckpointError: an earlier save() failed and nobody asked for its error, which is the
            __cause__ of this one (on_error="raise"). This save was not begun.
        StorageError: the directory of f does not exist, or f is ""; or the look at f has not
            returned for timeout_s (on_error="raise"). All other errors of the file system are
            raised by result().
        KeyboardInterrupt: the call was interrupted. Unless everything had been copied by then,
            nothing is committed.
        DeviceError: a GPU refused, or its current stream is being captured into a graph.
        ValueError, TypeError: f is a URL, or another argument is unknown or out of range; this
            process is not in the group; or a group is given for a target or format that torch.save
            writes itself, or for an object with DTensors.
    """
    started = time.perf_counter()
    optional(check_callable, "before_commit", before_commit)
    pacing = Pacing(drain_rate)
    how = WriteOptions.of(check_options(options), stripe=stripe, pacing=pacing)
    request = TorchSave(
        obj,
        pickle_module,
        pickle_protocol,
        _use_new_zipfile_serialization,
        _disable_byteorder_record,
    )
    path = _checked_path(f, storage_options, how.timeout_s)
    refuse_for_url(path or "", staging=how.staging, backend=how.backend)
    return begin_save(request, f, path, how, group, before_commit, started)


def prepare(nbytes: int | str) -> None:
    """Takes staging memory ahead, so that the first save of a process stalls no longer than others.

    Returns at once: a thread of the lowest priority takes the memory and keeps it for saves. It is
    host memory that is not pinned; the first save from a GPU still pins it.

    Args:
        nbytes: how many bytes this process will save, as a number or a text such as "20GB"; at most
            the budget of staging memory is taken.

    Raises:
        ValueError, TypeError: nbytes is below 1, or no size.
    """
    pipeline.current().prepare(check_size("nbytes", nbytes))


def _checked_path(f: Any, storage_options: StorageOptions | None, timeout_s: float) -> str | None:
    """Returns f as a checked path; None if it is a file-like object, or nothing torch takes."""
    if isinstance(f, str | os.PathLike) and isinstance(path := os.fspath(f), str):
        if not path:  # torch raises no ValueError for it
            raise NoPath("open", path, errno.ENOENT, detail="f is '', must be a path")
        return path_of("f", f, storage_options, timeout_s)
    if storage_options is not None:
        raise ValueError("storage_options apply to URLs only, but f is not a path")
    return None


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: Any = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    verify: bool = True,
    staging: StagingWay = "host",
    group: Any = None,
    timeout_s: float = TIMEOUT_S,
    storage_options: StorageOptions | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Loads what fastckpt.save, torch.save or safetensors wrote, with torch.load's semantics.

    A file that fastckpt wrote is read in parallel blocks, and every byte is checked against its
    CRC-32 before anything is returned. Any other file goes to torch.load. If a save to the path is
    in flight in this process, the load waits for it.

    Args:
        f, map_location, pickle_module, weights_only, mmap, pickle_load_args: as torch.load's, with
            its defaults and environment switches; f may be a URL (s3://, gs://, az://), too. With
            mmap=True the file is read once to verify it and then mapped; pass verify=False to map
            without reading.
        verify: check the checksums of a file that fastckpt wrote.
        staging: how large storages come to a GPU. "host": through pinned memory. "gds": by
            GPUDirect Storage, with checksums computed on the GPU; what cuFile refuses comes through
            the host, with a warning. "gds" has no effect with group, with mmap=True or with a
            map_location that is code.
        group: a torch.distributed process group whose ranks all load this file: each reads a share
            of it and they broadcast the blocks over the group, which nothing else may use
            meanwhile. Not with mmap=True or a file-like object.
        timeout_s: with group, how many seconds ranks wait for each other to begin at most; default:
            600. After that the group's own timeout applies. Of a URL also how long to wait for an
            answer.
        storage_options: as Checkpointer's, where f is a URL.

    Returns:
        The object.

    Raises:
        CorruptCheckpoint: the file is damaged or truncated; the message names the record.
        IncompatibleCheckpoint: a newer fastckpt wrote the file.
        StorageError: a read failed, or memory or address space is too short (ENOMEM).
        PeerFailed, RanksDisagree: with group, another rank failed, or found another file.
        ValueError: with group, mmap is true or f is a file-like object.
        Exception: what torch.load raises, for the same reasons.
    """
    check_choice("staging", staging, STAGINGS)
    check_flag("verify", verify)
    check_seconds("timeout_s", timeout_s)
    path = _checked_path(f, storage_options, timeout_s)
    if path is not None and path != str(f):  # torch's messages tell the types of paths apart
        f = path
    options = {"weights_only": weights_only, "mmap": mmap, **pickle_load_args}
    request = TorchLoad(f, map_location, pickle_module, options)
    maps = mmap if mmap is not None else _mmap_is_default()
    if group is not None and (mmap or not isinstance(f, str | os.PathLike)):
        raise ValueError(
            "group: several ranks cannot load together with mmap=True or from a file-like object"
        )
    with _directory_told(f):
        if group is not None:
            return load_together(request, verify, group, timeout_s)
        return load_alone(request, verify, maps, staging)


@telling
def _directory_told(error: BaseException, f: Any) -> None:
    """Adds to the error about a directory which call loads it, if it is a checkpoint."""
    if isinstance(error, IsADirectoryError):
        from fastckpt.lazy.kinds import hint_for_load  # which few loads need

        if hint := hint_for_load(os.fspath(f)):
            why = f"{os.strerror(errno.EISDIR)}; {hint}"
            raise IsADirectoryError(errno.EISDIR, why, f) from error


def _mmap_is_default() -> bool:
    """Returns whether torch.load maps files by default (torch.utils.serialization.config)."""
    try:
        from torch.utils.serialization import config
    except ImportError:  # torch 2.6 and older
        return False
    return bool(config.load.mmap)
