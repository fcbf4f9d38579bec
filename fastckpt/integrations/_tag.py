"""A tag: files of all ranks that take their names together, and the file that names the latest.

Responsible for the order in which one rank's files become durable and visible beside those of the
others, and for nothing being replaced by a save that fails or is killed. It must not know whose
files they are, nor how one is written.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import fastckpt
from fastckpt.errors import CheckpointError, fate, is_visible
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
    """What is saved under the path of its handle, and where it belongs: its name in the tag, too,
    if it is in the draft.
    """

    handle: SaveHandle
    path: str
    name: str


class Tag:
    """The files of one tag that this rank saves, and their commit with those of the others.

    All ranks save into one hidden directory, the tag's draft. When all files are durable the first
    rank exchanges it with the tag's directory, at once, so a save that fails, or a job that is
    killed at whatever moment, leaves what the tag had before; then the first rank writes `latest`.
    Where ranks do not see each other's files (a directory on each node's own disk), or files cannot
    be linked, each rank renames its own.

    Args:
        directory: where `latest` is. The tag's own directory is in it.
        name: of the tag.
        agreement: the round of this tag.
        is_latest: whether `latest` is to name it.
        options: fastckpt.save's.

    Attributes:
        handle: of the tag as a whole; its path is the tag's directory.
    """

    def __init__(
        self, directory: str, name: str, agreement: Round, is_latest: bool, options: dict[str, Any]
    ) -> None:
        self.handle = SaveHandle(os.path.join(directory, name), time.perf_counter())
        self.handle.stats.ranks = agreement.world_size
        self._directory, self._agreement, self._options = directory, agreement, options
        self._durable: bool = options["durable"]
        self._latest = name if is_latest else None
        self._files: list[_File] = []
        self._error: BaseException | None = None
        self._gone: Latch | None = None  # what is done in the background
        self._lock: int | None = None  # on the draft: this process is alive
        self._unneeded: list[str] = []  # directories that hold nothing any more, when it is over
        # Where the tag's directory goes on file systems that cannot exchange two.
        self._replaced = temporary_path(self.handle.path)
        self._draft = temporary_path(self.handle.path)
        with self.keeping():
            self._make_draft()

    def _make_draft(self) -> None:
        """Makes the draft, under the name that the first rank gives it."""
        storage, agreement = pipeline.current().storage, self._agreement
        above = os.path.dirname(self.handle.path)
        if agreement.rank != 0:
            self._draft = os.path.join(above, os.fsdecode(agreement.get("draft")))
            with reported("make directory", self._draft):
                storage.make_directories(self._draft)  # where it has a disk of its own
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
        """Begins to save a file; an error is kept."""
        if self._error is not None:
            return
        with self.keeping():
            name = os.path.relpath(path, self.handle.path)
            if name.startswith(os.pardir):  # the tag's directory is a link to another
                directory, name = os.path.dirname(path), ""
                hidden = os.path.join(directory, f".{os.path.basename(path)}.saving")
            else:
                hidden = os.path.join(self._draft, name)
                pipeline.current().storage.make_directories(os.path.dirname(hidden))
            handle = fastckpt.save(obj, hidden, **self._options)
            handle.reported = True  # its error is the tag's
            self._files.append(_File(handle, path, name))

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """An error of the body is the tag's. Raised on this rank alone, it would leave the others
        where they wait for it.
        """
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def raise_mistake(self) -> None:
        """Raises an error that is the caller's, as torch.save would: what cannot be pickled."""
        if self._error is not None and not isinstance(self._error, CheckpointError | OSError):
            raise self._error

    def conclude(self, error: BaseException | None) -> None:
        """Commits in the background. With an error, which the caller knows, fails everywhere."""
        self._error = self._error or error
        self.handle.mark_staged()
        self.handle.stats.stall_s = self.handle.elapsed_s()
        name = f"fastckpt-tag-{os.path.basename(self.handle.path)}"
        self._gone = Latch()
        begun = Latch()
        if not start_thread(partial(self._run, begun), name):  # the interpreter is exiting, say
            self._run(begun)
        # The interpreter waits, as it ends, for threads that have begun, and for no others.
        begun.wait()

    def join(self) -> None:
        """Waits until nothing is left to do."""
        if self._gone is not None:
            self._gone.wait()

    def _run(self, begun: Latch) -> None:
        begun.set()
        try:
            try:
                self._commit()
            except BaseException as error:
                self._agreement.fail(error)
                # If it is visible, the draft holds what had the names before, for a crash may bring
                # them back. What was renamed and did not get its name back has no other one.
                if not is_visible(error):
                    self._unneeded = [self._draft]
                    self._discard()
                what = fate(error, "was not saved")
                log.error("tag %r %s: %s", self.handle.path, what, error)
                self.handle.set_exception(error)
            else:
                self._unneeded = [self._draft, self._replaced]
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
        except CheckpointError:
            agreement.check()  # if the tag has failed meanwhile, that is why
            raise
        stats, files = self.handle.stats, [file.handle.stats for file in self._files]
        stats.written_s = self.handle.elapsed_s()
        stats.nbytes = sum(its.nbytes for its in files)
        stats.staged_bytes_max = sum(its.staged_bytes_max for its in files)
        names = [file.name for file in self._files if file.name]
        agreement.put("written", json.dumps([names, stats.nbytes]).encode())
        with ExitStack() as naming:
            make_durable: Callable[[], None] | None = None
            if agreement.rank == 0:
                written = [json.loads(record) for record in agreement.gather("written")]
                stats.total_nbytes = sum(nbytes for _names, nbytes in written)
                drafted = {name for drafts, _nbytes in written for name in drafts}
                opened = naming_in(pipeline.current().storage, self._above(), self.handle.path)
                make_durable = naming.enter_context(opened)
                agreement.put("go", b"named" if self._complete_draft(drafted) else b"")
            named = agreement.get("go") != b""
            for file in self._files:
                if not (named and file.name):
                    self._publish(file.handle.path, file.path)

            def publish_all(_records: list[bytes]) -> None:
                assert make_durable is not None
                if named:
                    self._name_draft()
                make_durable()
                self._write_latest()

            agreement.conclude(b"", publish_all)

    def _complete_draft(self, names: set[str]) -> bool:
        """On the first rank, when all ranks' files are durable: puts into the draft what else the
        tag has. False if the draft, which lacks files of these names, cannot take its place.
        """
        storage, path, draft = pipeline.current().storage, self.handle.path, self._draft
        if not names or any(storage.status(os.path.join(draft, name)) is None for name in names):
            return False
        assert self._lock is not None, "the first rank has made it"
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
        assert self._lock is not None, "the first rank has made it"
        with reported("rename", path):
            publish_directory(storage, self._draft, path, self._replaced, self._lock)

    def _publish(self, name: str, path: str) -> None:
        publish(pipeline.current().storage, name, path, self._durable)

    def _above(self) -> list[str]:
        """Directories that the tag's name may be new in, or one that leads there, from below."""
        above, top = os.path.dirname(self.handle.path), os.path.dirname(self._directory)
        found: list[str] = []
        while self._durable and os.access(above, os.R_OK):  # else it was not made by this job
            found.append(above)
            if above in (top, os.sep):
                break
            above = os.path.dirname(above)
        return found

    def _write_latest(self) -> None:
        """Makes `latest` name the tag, atomically; what it names is durable by its name, too."""
        if self._latest is None:
            return
        storage = pipeline.current().storage
        path = os.path.join(self._directory, "latest")
        with temporary(storage, path) as (fd, name):
            with reported("write", path):
                storage.write_at(fd, self._latest.encode(), 0)
            settle(storage, fd, path, self._durable)
            self._publish(name, path)

    def _discard(self) -> None:
        """Removes what has no name yet; the errors of files are this tag's error."""
        storage = pipeline.current().storage
        for file in self._files:
            if file.handle.exception() is None:
                with suppress(OSError):  # has its name already, or went with the draft
                    storage.remove(file.handle.path)

    def _clear(self) -> None:
        """Removes the draft, which holds what it replaced by now, or what nobody wants."""
        storage = pipeline.current().storage
        if self._lock is None:
            with suppress(OSError):  # it is the first rank's to do, or of another node
                storage.remove_directory(self._draft)
            return
        for directory in self._unneeded:
            with suppress(OSError):  # other ranks may be removing theirs: what stays is debris
                storage.remove_tree(directory)
        close_quietly(storage, self._lock)


def _link(storage: Storage, source: str, target: str) -> None:
    """Gives what a directory holds names in another one too, but for what is there, or hidden."""
    for name in storage.names(source):
        old, new = os.path.join(source, name), os.path.join(target, name)
        if storage.is_directory(old):
            storage.make_directories(new)
            _link(storage, old, new)
        elif name[0] != "." and storage.status(new) is None:
            storage.link(old, new)
