"""save_directory(): saves a directory of files in other libraries' formats with an atomic commit.

The caller fills a hidden directory, partly at once and partly in the background.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastckpt.arguments.checks import check_path
from fastckpt.arguments.options import SaveOptions, WriteOptions, check_options
from fastckpt.directories.directory_plan import DirectoryPlan
from fastckpt.directories.draft import Draft
from fastckpt.directories.place import DirectoryPlace
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.ranks import per_group
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.save import Save
from fastckpt.storage import atomic
from fastckpt.storage.calls import real_path
from fastckpt.storage.file_system import is_directory, reported

log = logging.getLogger("fastckpt")

FROM_THE_HOST = "the files of a directory are assembled in host memory"  # not in a GPU's


def save_directory(
    path: str,
    fill: Callable[[Draft], None],
    *,
    group: Any = None,
    beside: str | None = None,
    options: SaveOptions = SaveOptions(),
    retain: Callable[[], None] | None = None,
    replaces: bool = True,
    later: bool = False,
    lease: str = "",
) -> InnerHandle:
    """Saves a directory in the background and commits it atomically.

    Until the commit, path is unchanged; a crash leaves the old or the new directory, never a part
    of one. Directories with the same parent commit in the order of the calls.

    Args:
        path: the path of the directory. An existing checkpoint, whose list names its files, is
            replaced completely. Foreign files stay, but the save fails if it needs the name of one
            of them.
        fill: called before this returns, with the Draft to add files to.
        group: a torch.distributed process group whose ranks all call this with the same path, each
            with its own files; of files with the same name, the lowest rank's is used. Ranks
            communicate over the job's store; no collective runs. None: this process alone.
        beside: a directory on the same file system, in which the new directory is assembled under a
            hidden name; None: the parent of path.
        options: how to save, except `staging`. With on_error="raise", an error before this returns
            is raised here; with "warn", it is logged and stored in the handle.
        retain: called in the background on the first rank, after the commit, to remove directories
            that are no longer needed.
        replaces: whether an old directory is replaced; if False, an existing directory fails the
            save.
        later: whether the directory is created in the background, because fill() writes nothing at
            once.
        lease: a directory that no other job may save to from now on, like a Checkpointer's root;
            "": no lease.

    Returns:
        A SaveHandle; its result() returns the SaveStats when the directory is committed on all
        ranks.

    Raises:
        ValueError, TypeError: staging is "gds"; `options` is not a SaveOptions; or this process is
            not in group.
        CheckpointError: with on_error="raise", an earlier save failed and its error was not raised
            yet.
        Exception: with on_error="raise", any error of fill().
    """
    check_options(options, staging=FROM_THE_HOST)
    on_error, timeout_s = options.on_error, options.timeout_s
    given, handled = check_path("path", path), sys.exc_info()[1]

    def made(path: str) -> InnerHandle:
        return InnerHandle(path, time.perf_counter(), kind=os.path.dirname(path), on_error=on_error)

    try:
        path = real_path(given, timeout_s)
    except StorageError as error:
        if on_error == "raise":
            raise
        pipeline.current().refuse(handle := made(os.path.abspath(given)), error, handled)
        return handle
    handle = made(path)
    agreement = per_group.together(group).coordinator.begin(f"save of {path!r}", timeout_s)
    try:
        how = WriteOptions.of(options)
        job = _begun(handle, agreement, fill, beside, how, retain, replaces, later, lease)
    except Exception as error:
        if on_error == "raise":
            raise
        pipeline.current().refuse(handle, error, handled)
        return handle
    return pipeline.current().save(job)


def _begun(
    handle: InnerHandle,
    agreement: Round,
    fill: Callable[[Draft], None],
    beside: str | None,
    options: WriteOptions,
    retain: Callable[[], None] | None,
    replaces: bool,
    later: bool,
    lease: str,
) -> Save:
    """Captures the state before the caller may change it, and returns the save."""
    with agreement.failing():
        current = pipeline.current()
        if options.on_error == "raise":
            current.raise_unreported(handle.path, handle.kind)
        draft = Draft(
            current.storage,
            current.staging.devices,
            handle.path,
            beside,
            options,
            agreement,
            later=later,
        )
        try:
            fill(draft)
            if not later and not is_directory(current.storage, draft.directory):
                raise CheckpointError(f"fill() added no files to {draft.directory!r}")
            path = handle.path
            place = DirectoryPlace(
                current.storage,
                path,
                agreement,
                options.durable,
                draft=draft,
                lease=lease and os.path.realpath(lease),
                retain=retain,
                replaces=replaces,
            )
            plan = DirectoryPlan(handle, agreement, draft, place, options)
            queue = os.path.dirname(path)
            return Save(handle, agreement, plan, place, options, queue=queue)
        except BaseException:
            draft.discard()
            raise


def wait_for_directories(parent: str) -> None:
    """Waits for saves of directories in `parent`, and for their removals afterwards."""
    pipeline.current().wait_for(os.path.realpath(check_path("parent", parent)), ended=True)


def remove_directory(path: str, beside: str | None = None) -> None:
    """Removes a directory, if it exists. A crash leaves it intact, or under a hidden name in
    `beside` (see save_directory), where the next save_directory() removes it.
    """
    storage, path = pipeline.current().storage, os.path.realpath(check_path("path", path))
    beside = beside or os.path.dirname(path)
    hidden = atomic.temporary_path(os.path.join(beside, os.path.basename(path)))
    # An earlier save's retain() may have removed it.
    with reported("remove", path), suppress(FileNotFoundError):
        atomic.remove_directory(storage, path, hidden)
