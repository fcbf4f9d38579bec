"""A tag: files of all ranks that take their names together, and the file that names the latest.

Responsible for the order in which the ranks' files become durable and visible, so that a save that
fails or is killed replaces nothing. It must not know whose files they are, nor how one is written.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import fastckpt
from fastckpt.errors import CheckpointError, StorageError, fate
from fastckpt.handle import SaveHandle
from fastckpt.latch import Latch, start_thread
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.storage.atomic import (
    claim,
    close_quietly,
    naming_in,
    publish,
    publish_directory,
    remove_dead_directories,
    settle,
    sync_directories,
    temporary,
    temporary_path,
)
from fastckpt.storage.file_system import Storage, reported

log = logging.getLogger("fastckpt")


class _File(NamedTuple):
    """A file that is being saved under a hidden name, the path of its handle."""

    handle: SaveHandle
    path: str  # where it belongs
    name: str  # in the tag; "" if it is not in the draft


class Tag:
    """The files of one tag that this rank saves, and their commit with those of the others.

    All ranks save into one hidden directory, the tag's draft. When all files are durable, the first
    rank exchanges the draft with the tag's directory in one act, then writes `latest`: a save that
    fails, or a job killed at any moment, leaves what the tag had before. Where ranks do not see
    each other's files (each node has a disk of its own), or files cannot be linked, each rank
    renames its own.

    Args:
        directory: the parent of the tag's directory; `latest` is in it.
        name: of the tag.
        agreement: the round of this tag.
        is_latest: whether `latest` is to name the tag.
        options: fastckpt.save's.

    Attributes:
        handle: the SaveHandle of the whole tag; its path is the tag's directory.
    """

    def __init__(
        self, directory: str, name: str, agreement: Round, is_latest: bool, options: dict[str, Any]
    ) -> None:
        self.handle = SaveHandle(os.path.join(directory, name), time.perf_counter())
        self.handle.stats.ranks = agreement.world_size
        agreement.is_cancelled = self.handle.is_cancelled
        self._directory, self._agreement, self._options = directory, agreement, options
        self._durable: bool = options["durable"]
        self._latest = name if is_latest else None
        self._files: list[_File] = []
        self._error: BaseException | None = None
        self._gone: Latch | None = None  # set at the end of the work in the background
        self._lock: int | None = None  # on the draft: tells that this process is alive
        self._unneeded: list[str] = []  # directories to remove in the end
        # The tag's directory goes here on file systems that cannot exchange two directories.
        self._replaced = temporary_path(self.handle.path)
        self._draft = temporary_path(self.handle.path)
        with self.keeping():
            self._make_draft()

    def _make_draft(self) -> None:
        """Makes the draft, under a name that the first rank chooses."""
        storage, agreement = pipeline.current().storage, self._agreement
        above = os.path.dirname(self.handle.path)
        if agreement.rank != 0:
            self._draft = os.path.join(above, os.fsdecode(agreement.get("draft")))
            with reported("make directory", self._draft):
                storage.make_directories(self._draft)  # it is new if this node has its own disk
            return
        try:
            with reported("make directory", self._draft):
                storage.make_directories(self._draft)
                remove_dead_directories(storage, above)
                self._lock = storage.open(self._draft)
                claim(storage, self._lock, self._draft)
        except CheckpointError as error:
            agreement.fail(error)  # the others wait for the name
            raise
        agreement.put("draft", os.fsencode(os.path.basename(self._draft)))

    def save(self, obj: Any, path: str) -> None:
        """Begins to save a file. Keeps an error; after one, does nothing."""
        if self._error is not None:
            return
        with self.keeping():
            name = os.path.relpath(path, self.handle.path)
            if name.startswith(os.pardir):  # the tag's directory is a link to another
                directory, name = os.path.dirname(path), ""
                hidden = os.path.join(directory, f".{os.path.basename(path)}.saving")
            else:
                hidden = os.path.join(self._draft, name)
                with reported("make directory", os.path.dirname(hidden)):
                    pipeline.current().storage.make_directories(os.path.dirname(hidden))
            handle = fastckpt.save(obj, hidden, **self._options)
            handle.reported = True  # its error is the tag's
            self._files.append(_File(handle, path, name))

    def keeping(self) -> ExitStack:
        """Keeps an error of the body as the tag's: raised on this rank alone, it would leave the
        others waiting for it.
        """

        def kept(_kind: object, error: BaseException | None, _traceback: object) -> bool:
            if isinstance(error, Exception):
                self._error = self._error or error
            return isinstance(error, Exception)

        keeping = ExitStack()
        keeping.push(kept)
        return keeping

    def raise_mistake(self) -> None:
        """Raises an error that is the caller's, as torch.save does: an object is not picklable."""
        if self._error is not None and not isinstance(self._error, CheckpointError | OSError):
            raise self._error

    def conclude(self, error: BaseException | None) -> None:
        """Begins the commit in the background; with an error, the failure on all ranks."""
        self._error = self._error or error
        self.handle.mark_staged()
        self.handle.stats.stall_s = self.handle.elapsed_s()
        name = f"fastckpt-tag-{os.path.basename(self.handle.path)}"
        self._gone = Latch()
        begun = Latch()
        if not start_thread(partial(self._run, begun), name):  # the interpreter is exiting, say
            self._run(begun)
        # As it ends, the interpreter waits for threads that have begun, and for no others.
        begun.wait()

    def join(self) -> None:
        """Waits until all work in the background has ended."""
        if self._gone is not None:
            self._gone.wait()

    def _run(self, begun: Latch) -> None:
        begun.set()
        try:
            try:
                self._commit()
            except BaseException as error:
                agreement = self._agreement
                agreement.fail(error)
                # The first rank may publish what this one has said to be durable, also if this one
                # does not hear of it. If the tag is visible, but perhaps not durable, the draft
                # holds what had the names before, and stays. What is in `_replaced` has no other
                # name: it stays, too.
                if not agreement.may_be_visible:
                    self._unneeded = [self._draft]
                    self._discard()
                what = fate(error, "was not saved")
                log.error("tag %r %s: %s", self.handle.path, what, error)
                self.handle.set_exception(error)
            else:
                self.handle.stats.committed_s = self.handle.elapsed_s()
                self.handle.set_result(self.handle.stats)
        finally:
            try:
                self._clear()
            finally:
                self._agreement.close()  # the first rank waits for the others to
                if self._gone is not None:
                    self._gone.set()

    def _commit(self) -> None:
        agreement = self._agreement
        if self._error is not None:
            raise self._error
        try:
            for file in self._files:
                file.handle.result()
        except CheckpointError as error:
            agreement.check()  # if another rank's failure ended the round, that is the cause
            if isinstance(error, StorageError) and error.visible:  # under its hidden name alone
                raise StorageError(error.op, error.path, error.errno or errno.EIO) from error
            raise
        stats, files = self.handle.stats, [file.handle.stats for file in self._files]
        stats.written_s = self.handle.elapsed_s()
        stats.nbytes = sum(its.nbytes for its in files)
        stats.staged_bytes_max = sum(its.staged_bytes_max for its in files)
        names = [file.name for file in self._files]
        agreement.put("written", json.dumps([names, stats.nbytes]).encode())
        with ExitStack() as naming:
            make_durable: Callable[[], None] | None = None
            if agreement.rank == 0:
                written = [json.loads(record) for record in agreement.gather("written")]
                stats.total_nbytes = sum(nbytes for _names, nbytes in written)
                every = {name for names, _nbytes in written for name in names}
                opened = naming_in(pipeline.current().storage, self._above(), self.handle.path)
                make_durable = naming.enter_context(opened)
                named = self._complete_draft(every - {""})
                agreement.put("go", json.dumps([named, not named or "" in every]).encode())
            named, one_by_one = json.loads(agreement.get("go"))
            if one_by_one:
                self._rename_files([f for f in self._files if not (named and f.name)])

            def publish_all(_records: list[bytes]) -> None:
                assert make_durable is not None
                if named:
                    self._name_draft()
                make_durable()
                self._unneeded = [self._draft, self._replaced]
                self._write_latest()

            agreement.conclude(b"", publish_all)

    def _rename_files(self, files: list[_File]) -> None:
        """Gives this rank's files their names one by one, once no rank has failed before that: a
        rank that did may have removed its files.
        """
        agreement = self._agreement
        agreement.put("ready", b"")
        if agreement.rank == 0:
            agreement.gather("ready")
            agreement.put("rename", b"")
        agreement.get("rename")
        for file in files:
            self._publish(file.handle.path, file.path)

    def _complete_draft(self, names: set[str]) -> bool:
        """Links the other files of the tag into the draft, on the first rank, when all ranks' files
        are durable. Returns False if the draft cannot take the tag's place: it lacks one of these
        names, which other nodes then have on disks of their own, or files cannot be linked.
        """
        storage, path, draft = pipeline.current().storage, self.handle.path, self._draft
        with reported("open", draft):
            paths = [os.path.join(draft, name) for name in sorted(names)]
            are_there = [storage.status(path) is not None for path in paths]
        if not names or not all(are_there):
            return False
        assert self._lock is not None, "the first rank has locked the draft"
        with reported("open", path):
            before = storage.status(path)
        if before is not None:
            try:
                _link(storage, path, draft)
            except OSError as error:
                log.warning("files of %r are replaced one by one: %s", path, error)
                return False
            with reported("set mode", draft):
                storage.set_owner_and_mode(self._lock, before)
        if self._durable:
            sync_directories(storage, draft)
        return True

    def _name_draft(self) -> None:
        """Gives the draft the tag's name, when no rank can fail any more."""
        storage, path = pipeline.current().storage, self.handle.path
        assert self._lock is not None, "the first rank has locked the draft"
        with reported("rename", path):
            publish_directory(storage, self._draft, path, self._replaced, self._lock)

    def _publish(self, name: str, path: str) -> None:
        publish(pipeline.current().storage, name, path, self._durable)

    def _above(self) -> list[str]:
        """Returns directories in which the tag's name, or one that leads to it, may be new."""
        above, top = os.path.dirname(self.handle.path), os.path.dirname(self._directory)
        found: list[str] = []
        while self._durable and os.access(above, os.R_OK):  # no job made what it cannot read
            found.append(above)
            if above in (top, os.sep):
                break
            above = os.path.dirname(above)
        return found

    def _write_latest(self) -> None:
        """Makes `latest` name the tag, atomically, after the tag's own name is durable."""
        if self._latest is None:
            return
        storage = pipeline.current().storage
        path = os.path.join(self._directory, "latest")
        try:
            with temporary(storage, path) as (fd, name):
                with reported("write", path):
                    storage.write_at(fd, self._latest.encode(), 0)
                settle(storage, fd, path, self._durable)
                self._publish(name, path)
        except CheckpointError as error:
            if not error.visible:
                tag = self.handle.path
                error.reword(
                    f"{error}; {tag!r} is whole and has its name, but {path!r} is as it was"
                )
                error.visible = True
            raise

    def _discard(self) -> None:
        """Removes files that have no name yet."""
        storage = pipeline.current().storage
        for file in self._files:
            if file.handle.exception() is None:
                with suppress(OSError):  # it has its name already, or lay in the draft
                    storage.remove(file.handle.path)

    def _clear(self) -> None:
        """Removes the draft, which by now holds what it replaced, or files of a failed save."""
        storage = pipeline.current().storage
        if self._lock is None:
            with suppress(OSError):  # not empty, or gone: the first rank removes it
                storage.remove_directory(self._draft)
            return
        for directory in self._unneeded:
            with suppress(OSError):  # other ranks may remove theirs too: what stays is debris
                storage.remove_tree(directory)
        close_quietly(storage, self._lock)


def _link(storage: Storage, source: str, target: str) -> None:
    """Links the files below one directory into another, but for hidden and existing names."""
    for name in storage.names(source):
        old, new = os.path.join(source, name), os.path.join(target, name)
        if storage.is_directory(old):
            storage.make_directories(new)
            _link(storage, old, new)
        elif name[0] != "." and storage.status(new) is None:
            storage.link(old, new)
