"""fastckpt.save, load and prepare: their signatures, and the choice of calls left to torch."""

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
    """Saves an object like torch.save, but in the background and with an atomic commit.

    The file is a torch zip that torch.load opens (weights_only, mmap and map_location included).
    Until the commit the path keeps its old content, so a crash leaves either the old file or the
    new one. Several saves may be in flight; saves to the same path commit in the order of their
    calls.

    Args:
        obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization,
            _disable_byteorder_record: like torch.save's. If f is a file-like object or not a
            regular file (/dev/null), or if the legacy format is requested, torch.save itself writes
            before this call returns.
        options: the fence, the handling of errors and the way files are written (see SaveOptions).
        stripe: the layout of a new file on Lustre over the storage targets (OSTs); ignored on other
            file systems. "auto": a large file gets several stripes if its directory's layout has
            one stripe; any other layout set by the directory or the administrator is kept. "keep":
            the directory's layout. (count, size): the number of stripes and their size in bytes, a
            multiple of 64 KiB. All ranks of a group must pass the same value.
        drain_rate: the limit in bytes per second, a number or a text such as "2GB/s", on the writes
            of all saves with a drain_rate in this process together (with group: on this node). The
            latest save's value applies to all of them. None: no limit for this save.
        group: a torch.distributed process group whose ranks all hold the same object and all call
            save() with the same path; each rank writes its part of the one file. Storages below 1
            MiB and all values other than tensors are taken from the group's first rank without a
            comparison. The ranks compare names, shapes and dtypes of the tensors, and samples of
            their contents (64 KiB in all). If these differ, this save raises RanksDisagree; later
            saves write the first rank's tensor, with a warning while the contents differ. Ranks
            communicate over the job's store; no collective runs on the group. None: this process
            saves alone, independently of other ranks.
        before_commit: a function that is called on every rank, on the thread of the save, after the
            rank's bytes were written. Its arguments are the SaveStats so far and a digest of these
            bytes: the SHA-256, in hexadecimal digits, of the CRC-32s of the blocks, so equal
            tensors have equal digests (with group, only tensors of at least 1 MiB count). If the
            function raises on any rank, nothing is committed: result() raises CheckpointError on
            that rank and PeerFailed on the others. The return value is ignored. The function must
            not wait for this save or a later one. It is not called if torch.save itself writes.
            Default: none.
        storage_options: see Checkpointer; for an f that is a URL of an object store.

    Returns:
        A SaveHandle; its result() returns the SaveStats when the checkpoint is committed. If a
            group is passed, result() may also raise RanksDisagree, which names the tensor and the
            ranks, or PeerFailed if another rank failed, is missing or saves another object.

    Raises:
        Exception: the error of torch.save for an object that cannot be pickled; nothing was
            written.
        CheckpointError: an earlier save() failed, and its error, the __cause__ of this one, was not
            retrieved (on_error="raise"). This save was not begun. Or other code resized a storage
            of obj during the call.
        StorageError: the directory of f does not exist, or f is ""; or the check of f did not
            return within timeout_s (on_error="raise"). result() raises all other errors of the file
            system.
        KeyboardInterrupt: the call was interrupted. The save is committed only if everything had
            already been copied.
        DeviceError: a GPU refused a request, or its current stream is being captured into a graph.
        ValueError, TypeError: an argument is unknown or out of range, or cannot be used with a URL;
            this process is not in the group; or a group is passed for a target or format that
            torch.save writes itself, or for an object with DTensors.
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
    """Allocates staging memory in advance, so that the first save stalls no longer than others.

    Returns at once; a thread of the lowest priority allocates the memory, which is kept for saves.
    The memory is not pinned yet: the first save from a GPU pins it.

    Args:
        nbytes: how many bytes this process will save, as a number or a text such as "20GB"; at most
            the budget of staging memory is allocated.

    Raises:
        ValueError, TypeError: nbytes is below 1 or not a size.
    """
    pipeline.current().prepare(check_size("nbytes", nbytes))


def _checked_path(f: Any, storage_options: StorageOptions | None, timeout_s: float) -> str | None:
    """Returns f as a checked path; None if it is not a path, such as a file-like object."""
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
    """Loads a file of fastckpt.save, torch.save or safetensors, with torch.load's semantics.

    A file that fastckpt wrote is read in parallel blocks, and every byte is checked against its
    CRC-32 before anything is returned. Any other file is loaded by torch.load. The load waits for a
    save to the same path that is in flight in this process.

    Args:
        f, map_location, pickle_module, weights_only, mmap, pickle_load_args: like torch.load's,
            with its defaults and environment switches; f may also be a URL (s3://, gs://, az://).
            With mmap=True the file is read once to verify it and then mapped; pass verify=False to
            map it without reading it.
        verify: check the checksums of a file that fastckpt wrote.
        staging: the path of large storages to a GPU. "host": through pinned host memory. "gds": by
            GPUDirect Storage, with checksums computed on the GPU; if cuFile refuses a request, the
            data goes through the host, with a warning. "gds" has no effect with group, with
            mmap=True or with a map_location that is a function.
        group: a torch.distributed process group whose ranks all load this file. Each rank reads a
            share of the file and broadcasts its blocks over the group; the group must not be used
            otherwise during the load. Not with mmap=True or a file-like object.
        timeout_s: with group, the most seconds that ranks wait for each other to begin; then the
            group's own timeout applies. For a URL, also the longest wait for an answer. Default:
            600.
        storage_options: see Checkpointer; for an f that is a URL.

    Returns:
        The object.

    Raises:
        CorruptCheckpoint: the file is damaged or truncated; the message names the record.
        IncompatibleCheckpoint: a newer fastckpt wrote the file.
        StorageError: a read failed, or there is too little memory or address space (ENOMEM).
        PeerFailed, RanksDisagree: with group, another rank failed, or ranks found different files.
        ValueError: with group, mmap is true or f is a file-like object.
        Exception: the errors of torch.load, for the same reasons.
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
    """Adds to the error about a checkpoint directory the name of the function that loads it."""
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
