"""A tag: files of all ranks that take their names together, and the file that names the latest.

Responsible for the order in which one rank's files become durable and visible beside those of the
others, and for nothing being replaced by a save that fails. It must not know whose files they are,
nor how one is written.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fastckpt
from fastckpt import pipeline
from fastckpt.agreement import Round
from fastckpt.commit import close_quietly, publish, settle, temporary
from fastckpt.errors import CheckpointError, PeerFailed
from fastckpt.handle import SaveHandle
from fastckpt.storage import reported

log = logging.getLogger("fastckpt")


class Tag:
    """The files of one tag that this rank saves, and their commit with those of the others.

    Each is saved under a hidden name. When all ranks' are durable they are renamed, so a save that
    fails leaves what the tag had before; then the first rank writes `latest`.

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
        self._directory, self._agreement, self._options = directory, agreement, options
        self._durable: bool = options["durable"]
        self._latest = name if is_latest else None
        self._files: list[tuple[SaveHandle, str]] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def save(self, obj: Any, path: str) -> None:
        """Begins to save a file; an error is kept."""
        directory, name = os.path.split(path)
        with self.keeping():
            hidden = os.path.join(directory, f".{name}.saving")
            handle = fastckpt.save(obj, hidden, **self._options)
            handle.reported = True  # its error is the tag's
            self._files.append((handle, path))

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
        self._thread = threading.Thread(target=self._run, name=name)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is exiting: no thread is to be had
            self._thread = None
            self._run()

    def join(self) -> None:
        """Waits until nothing is left to do."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            try:
                self._commit()
            except BaseException as error:
                self._agreement.fail(error)
                self._discard()
                log.error("tag %r was not saved: %s", self.handle.path, error)
                self.handle.set_exception(error)
            else:
                stats, files = self.handle.stats, [handle.stats for handle, _path in self._files]
                stats.nbytes = sum(file.nbytes for file in files)
                stats.staged_bytes_max = sum(file.staged_bytes_max for file in files)
                stats.committed_s = self.handle.elapsed_s()
                self.handle.set_result(self.handle.stats)
        finally:
            self._agreement.close()

    def _commit(self) -> None:
        agreement = self._agreement
        if self._error is not None:
            raise self._error
        for handle, _path in self._files:
            handle.result()
        self.handle.stats.written_s = self.handle.elapsed_s()
        agreement.put("written", b"")
        if agreement.rank == 0:
            agreement.gather("written")
            agreement.put("go", b"")
        agreement.get("go")
        for handle, path in self._files:
            self._publish(handle.path, path)
        agreement.put("named", b"")
        if agreement.rank != 0:
            failure = agreement.get("outcome")
            if failure:
                raise PeerFailed(failure.decode(errors="replace"), (0,))
            return
        agreement.gather("named")
        agreement.decide()
        try:
            self._write_latest()
        except BaseException as error:
            text = f"rank 0 failed to commit: {type(error).__name__}: {error}"
            agreement.put("outcome", text.encode(errors="replace"))
            raise
        agreement.put("outcome", b"")

    def _publish(self, name: str, path: str) -> None:
        storage = pipeline.current().storage
        replaced = publish(storage, name, path, self._durable)
        if replaced is not None:
            close_quietly(storage, replaced)

    def _write_latest(self) -> None:
        """Makes `latest` name the tag, atomically; what it names is durable by its name, too."""
        storage = pipeline.current().storage
        above, top = os.path.dirname(self.handle.path), os.path.dirname(self._directory)
        while self._durable and os.access(above, os.R_OK):  # else it was not made by this job
            with reported("sync directory", above):
                storage.sync_directory(above)
            if above in (top, os.sep):
                break
            above = os.path.dirname(above)
        if self._latest is None:
            return
        path = os.path.join(self._directory, "latest")
        with temporary(storage, path) as (fd, name):
            with reported("write", path):
                storage.write_at(fd, self._latest.encode(), 0)
            settle(storage, fd, path, self._durable)
            self._publish(name, path)

    def _discard(self) -> None:
        """Removes what has no name yet; the errors of files are this tag's error."""
        storage = pipeline.current().storage
        for handle, _path in self._files:
            if handle.exception() is None:
                try:
                    storage.remove(handle.path)
                except OSError:
                    pass  # has its name already, or is replaced by the next save of this tag
