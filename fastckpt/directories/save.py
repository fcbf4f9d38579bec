"""Saves of a directory of files in formats of others, visible under its name when all is there.

Responsible for the order of the stages: whoever calls fills a directory under another name, partly
at once and partly in the background; then every file is durable, ranks bring theirs together, a
list of the files is written, and one rename commits. It must not know what the files mean, nor
which directories stay.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

from fastckpt.arguments.checks import (
    FENCES,
    ON_ERROR,
    BackendName,
    Fence,
    OnError,
    check_choice,
    check_path,
)
from fastckpt.directories.check import crc32_of, list_of
from fastckpt.directories.draft import Draft, Pending
from fastckpt.engine.staging import combine_crcs
from fastckpt.errors import CheckpointError, fate
from fastckpt.formats import file_list
from fastckpt.formats.file_list import File
from fastckpt.handle import SaveHandle
from fastckpt.options import WriteOptions
from fastckpt.plan.image import BLOCK_BYTES, Image
from fastckpt.ranks import groups
from fastckpt.ranks.round import TIMEOUT_S, Round
from fastckpt.saving import pipeline
from fastckpt.saving.image_file import ImageFile
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.file_system import Storage, patiently, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")


def save_directory(
    path: str,
    fill: Callable[[Draft], None],
    *,
    group: Any = None,
    beside: str | None = None,
    fence: Fence = "call",
    backend: BackendName = "auto",
    durable: bool = True,
    staging_bytes: int | str | None = None,
    on_error: OnError = "raise",
    timeout_s: float = TIMEOUT_S,
    retain: Callable[[], None] | None = None,
) -> SaveHandle:
    """Saves a directory in the background and commits it atomically.

    Until the commit, path stays what it was; a crash leaves that or the new directory, never a part
    of it. Directories with the same parent commit in the order of these calls.

    Args:
        path: of the directory, which is replaced as a whole, but only if what it holds is known to
            be of a checkpoint: it is in the list there, or has the name of a file that is saved.
        fill: called before this returns, with the Draft to put files into.
        group: a torch.distributed process group whose ranks all call this with the same path, each
            with files of its own; of files with the same name the lowest rank's counts. Ranks talk
            over the job's store; no collective runs. None: this process alone.
        beside: a directory of the same file system where it is put together, under a hidden name;
            default: the one that path lies in.
        fence, backend, durable, staging_bytes, timeout_s: as fastckpt.save's.
        on_error: "raise": an error before this returns is raised, and one that comes later by
            result(), or else by the next save. "warn": both are logged; the handle has them.
        retain: called in the background on the first rank once this has been committed; removes
            what is no longer needed.

    Returns:
        A SaveHandle; result() returns its SaveStats when the directory is committed on all ranks.

    Raises:
        ValueError, TypeError: an unknown fence, backend or on_error; staging_bytes < 1 or no size;
            a group that this process is not in.
        CheckpointError: with on_error="raise", of an earlier save whose failure nobody asked for.
        Exception: with on_error="raise", what fill() raises, or of what cannot be pickled.
    """
    check_choice("fence", fence, FENCES)
    check_choice("on_error", on_error, ON_ERROR)
    options = WriteOptions(backend, durable, staging_bytes)
    path = os.path.realpath(check_path("path", path))
    handle = SaveHandle(path, time.perf_counter())
    agreement = groups.together(group).coordinator.begin(f"save of {path!r}", timeout_s)
    try:
        job = _begun(handle, agreement, fill, beside, fence, options, on_error, retain)
    except Exception as error:
        if on_error == "raise":
            raise
        handle.mark_staged()
        handle.set_exception(error)
        _warn(handle)
        return handle
    if on_error == "warn":
        handle.add_done_callback(lambda _future: _warn(handle))
    return pipeline.current().save(job)


def _begun(
    handle: SaveHandle,
    agreement: Round,
    fill: Callable[[Draft], None],
    beside: str | None,
    fence: str,
    options: WriteOptions,
    on_error: str,
    retain: Callable[[], None] | None,
) -> DirectorySave:
    """Captures the state, before the caller may go on and change it."""
    with agreement.failing():
        current = pipeline.current()
        if on_error == "raise":
            current.raise_unreported(handle.path)
        draft = Draft(current.storage, current.staging.devices, handle.path, beside, fence)
        try:
            fill(draft)
            if not current.storage.is_directory(draft.directory):
                raise CheckpointError(f"nothing was put into {draft.directory!r}")
            return DirectorySave(handle, agreement, draft, options, retain, fence)
        except BaseException:
            draft.discard()
            raise


def _warn(handle: SaveHandle) -> None:
    error = handle.exception(0)  # counts as asked for
    if error is not None:
        what = fate(error, "was not saved")
        log.warning("%r %s: %s: %s", handle.path, what, type(error).__name__, error)


class DirectorySave(Job):
    """One directory. Each rank runs its own, for the same one.

    Args:
        handle, agreement, fence: as Job's.
        draft: what this rank puts into it.
        options: how its files are written.
        retain: as save_directory's.
    """

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        draft: Draft,
        options: WriteOptions,
        retain: Callable[[], None] | None,
        fence: str,
    ) -> None:
        lane = os.path.dirname(handle.path)
        super().__init__(handle, agreement, draft.reads(), draft.watched, fence=fence, lane=lane)
        self.draft = draft
        self.options = options
        self.retain = retain
        self.committed = False
        self._pending: list[Pending] = draft.pending
        self._sources: list[list[object]] = []

    def forget(self) -> None:
        for pending in self._pending:
            pending.forget()
        for sources in self._sources:
            sources.clear()

    def release(self) -> None:
        self.forget()
        self._pending, self._sources = [], []

    def end(self, pipeline: Pipeline) -> None:
        self.draft.discard()
        if self.committed and self.retain is not None:
            try:
                self.retain()
            except Exception as error:
                log.warning("after %r nothing older was removed: %s", self.handle.path, error)
        super().end(pipeline)

    def write(self, pipeline: Pipeline) -> None:
        storage, directory = pipeline.storage, self.draft.directory
        files = self._written(pipeline)
        with reported("list", directory):
            others = [name for name in _names(storage, directory) if name not in files]
        for name in others:
            files[name] = self._settled(storage, name)
        self.handle.stats.written_s = self.handle.elapsed_s()
        if self.agreement.rank == 0:
            self.agreement.put("place", os.fsencode(self.draft.name))
            own, record = files, b""
        else:
            own = self._brought(storage, files)
            record = file_list.to_record(own)
        self.handle.stats.nbytes = sum(file.nbytes for file in own.values())
        self.conclude(record, lambda records: self._publish(storage, files, records))
        self.committed = self.agreement.rank == 0

    def _written(self, pipeline: Pipeline) -> dict[str, File]:
        """Stages and writes what fill() left to the background."""
        # Whatever happens, blocks in flight arrive before the files they go to are closed.
        with ExitStack() as files, ExitStack() as moving:
            images = {pending.name: pending.layout() for pending in self._pending}
            self._sources = [image.sources for image in images.values()]
            nbytes = sum(image.nbytes for image in images.values())
            limit_bytes = self.options.limit_bytes
            limit, stagers = self.take_budget(pipeline.staging, nbytes, limit_bytes)
            begun = {}
            for name, image in images.items():
                path = os.path.join(self.draft.directory, name)
                file = ImageFile(pipeline, image, path, limit - 1, stagers, self.reads)
                begun[name] = moving.enter_context(file)
            self.copying.transfers += [file.transfer for file in begun.values()]
            self.copying.watch()
            for name, file in begun.items():
                make = partial(self._made, pipeline.storage, name)
                purpose = Purpose(file.nbytes, 1, self.options.striping)
                file.make(files, make, purpose, self.options.backend, self.handle.stats)
                file.begin()
            self.copying.wait()
            found = {name: self._finished(file, images[name]) for name, file in begun.items()}
            held = sum(file.transfer.staged_bytes_max() for file in begun.values())
            self.handle.stats.staged_bytes_max = min(held, limit * BLOCK_BYTES)
            return found

    @contextmanager
    def _made(self, storage: Storage, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """A file of the draft."""
        path = os.path.join(self.draft.directory, name)
        with reported("open", path):
            storage.make_directories(os.path.dirname(path))
            fd = storage.create(path, 0o666, purpose)
        try:
            yield fd, path
        except BaseException:
            with suppress(OSError):  # it is removed with the draft then
                storage.remove(path)
            raise
        finally:
            close_quietly(storage, fd)

    def _finished(self, file: ImageFile, image: Image) -> File:
        """Writes what depends on checksums; returns when the file is durable."""
        tail = file.complete(self.options.durable)
        left, crc = image.body_nbytes, 0
        for block in file.transfer.block_crcs():
            crc = combine_crcs(crc, block, min(left, BLOCK_BYTES))
            left -= BLOCK_BYTES
        return File(image.nbytes, combine_crcs(crc, zlib.crc32(tail), len(tail)))

    def _settled(self, storage: Storage, name: str) -> File:
        """Makes a file durable that fill() has written by itself."""
        path = os.path.join(self.draft.directory, name)
        with reported("open", path):
            fd = storage.open(path)
        try:
            settle(storage, fd, path, self.options.durable)
        finally:
            close_quietly(storage, fd)
        return crc32_of(storage, path, name)

    def _brought(self, storage: Storage, files: Mapping[str, File]) -> dict[str, File]:
        """Moves this rank's files to where the first rank has its own; tells which."""
        inner = os.path.basename(self.draft.directory)
        target = os.path.join(self.draft.beside, os.fsdecode(self.agreement.get("place")), inner)
        brought = {}
        for name, file in files.items():
            path = os.path.join(target, name)
            try:
                with reported("rename", path):
                    if storage.status(path) is not None:
                        continue  # written by every rank: the first one's counts
                    if "/" in name:
                        storage.make_directories(os.path.dirname(path))
                    storage.rename(os.path.join(self.draft.directory, name), path)
            except CheckpointError:
                self.agreement.check()  # if the save has failed meanwhile, that is why
                raise
            brought[name] = file
        if self.options.durable:
            atomic.sync_directories(storage, target)
        return brought

    def _publish(self, storage: Storage, files: Mapping[str, File], records: list[bytes]) -> None:
        """THE commit: the directory, whose files are durable by now, gets its name."""
        directory, path = self.draft.directory, self.handle.path
        brought = [file_list.from_record(record) for record in records[1:]]
        merged = dict(chain(*(found.items() for found in [*reversed(brought), files])))
        listed = os.path.join(directory, file_list.NAME)
        with reported("write", listed):
            with suppress(FileNotFoundError):  # only an earlier list that fill() has copied
                storage.remove(listed)
            fd = storage.create(listed, 0o666)
            try:
                content = file_list.to_bytes(merged)
                patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
                settle(storage, fd, listed, self.options.durable)
            finally:
                close_quietly(storage, fd)
        if self.options.durable:
            atomic.sync_directories(storage, directory)
        self._refuse_others(storage, merged)
        changed = {os.path.dirname(path), self.draft.beside, *self.draft.grown}
        with atomic.naming_in(
            storage, changed if self.options.durable else (), path
        ) as make_durable:
            with reported("rename", path):
                storage.touch(directory)  # so that times are in the order of the commits
                aside = os.path.join(self.draft.root, "replaced")
                try:
                    atomic.publish_directory(storage, directory, path, aside)
                except OSError:
                    self.draft.is_kept = True
                    with suppress(OSError):  # what had the name may have got it back
                        self.draft.is_kept = storage.is_directory(aside)
                    raise
            self.draft.is_kept = True  # what was replaced, which a crash may yet bring back
            make_durable()
            self.draft.is_kept = False

    def _refuse_others(self, storage: Storage, files: Mapping[str, File]) -> None:
        """Raises CheckpointError if what is there holds files that would be lost."""
        path = self.handle.path
        if not storage.is_directory(path):
            if storage.status(path) is not None:
                raise CheckpointError(f"{path!r} is a file, which is not replaced by a directory")
            return
        with reported("list", path):
            others = {*_names(storage, path, links=True)} - files.keys()
        if others:
            with suppress(CheckpointError):  # a list that is damaged tells nothing
                others -= list_of(path, storage).keys()
        if others:
            raise CheckpointError(
                f"{path!r} holds files that are of no checkpoint ({', '.join(sorted(others)[:5])}) "
                "and is not replaced: save to a directory of its own"
            )


def _names(
    storage: Storage, directory: str, under: str = "", *, links: bool = False
) -> Iterator[str]:
    """Files in a directory and those below it, relative to it; with `links` symbolic ones too."""
    for name in sorted(storage.names(os.path.join(directory, under))):
        relative = f"{under}/{name}" if under else name
        path = os.path.join(directory, relative)
        if storage.is_directory(path):
            yield from _names(storage, directory, relative, links=links)
        elif relative != file_list.NAME and (links or not os.path.islink(path)):
            yield relative


def wait_for_directories(parent: str) -> None:
    """Waits for saves of directories in this one, and for what they remove afterwards."""
    pipeline.current().wait_for(os.path.realpath(check_path("parent", parent)), ended=True)


def remove_directory(path: str, beside: str | None = None) -> None:
    """Removes a directory, if it is there. A crash leaves it whole, or under a name that nobody
    takes for it.

    Args:
        path: of the directory.
        beside: where it gets that name, as save_directory's, whose next call finds it there.
    """
    storage, path = pipeline.current().storage, os.path.realpath(check_path("path", path))
    beside = beside or os.path.dirname(path)
    hidden = atomic.temporary_path(os.path.join(beside, os.path.basename(path)))
    # An earlier save, which removes old ones after its commit, may have been first.
    with reported("remove", path), suppress(FileNotFoundError):
        storage.rename(path, hidden)
        storage.remove_tree(hidden)
