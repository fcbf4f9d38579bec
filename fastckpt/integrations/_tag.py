"""A tag: files of all ranks that take their names together, and the file that names the latest."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from fastckpt.arguments.options import WriteOptions
from fastckpt.directories.draft import CapturedFile, Zip
from fastckpt.directories.hidden_directory import HiddenDirectory, explaining
from fastckpt.directories.swap_plan import CapturedPlan
from fastckpt.errors import CheckpointError
from fastckpt.formats import torch_pickle
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle, log_failure
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.saving.plan import Output, Place
from fastckpt.saving.save import Save
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")


class Tag:
    """The files of one tag that this rank saves.

    Args:
        path: the tag's directory, without symbolic links.
        latest: the path of the file that is to have `content` when the tag is saved; "": none.
        options: how the files are written, and what becomes of an error; with the call fence.

    Attributes:
        handle: the SaveHandle of the whole tag; its path is the tag's directory.
        content: as given.
    """

    def __init__(
        self,
        path: str,
        latest: str,
        content: str,
        options: WriteOptions,
    ) -> None:
        on_error = options.on_error
        self.handle = InnerHandle(path, time.perf_counter(), kind="tag", on_error=on_error)
        if on_error == "raise":
            self.handle.add_done_callback(log_failure)
        self.content, self._latest, self._options = content, latest, options
        self._files: list[CapturedFile] = []
        self._error: BaseException | None = None

    def add(self, obj: object, name: str) -> None:
        """Adds the file that torch.save would write of an object. Keeps an error; after one, does
        nothing. The object's memory must not change until conclude() returns.
        """
        if self._error is None:
            with self.keeping():
                protocol = torch.serialization.DEFAULT_PROTOCOL
                readable = pipeline.current().staging.devices.readable()
                captured = torch_pickle.capture(obj, pickle, protocol, False, False, readable)
                self._files.append(Zip(name, captured))

    def keeping(self) -> AbstractContextManager[object]:
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

    def conclude(self, agreement: Round, error: BaseException | None) -> None:
        """Begins to save the files, and returns when they are copied; with an error, the tag fails
        on all ranks.

        Args:
            agreement: the round of this tag, in which no rank has said a word yet.
            error: that of this rank, if it has one.
        """
        handle, options, storage = self.handle, self._options, pipeline.current().storage
        place = TagPlace(
            storage, handle.path, agreement, options.durable, self._latest, self.content
        )
        plan = TagPlan(self._files, error or self._error, place, options)
        job = Save(handle, agreement, plan, place, options, lane=handle.path)
        pipeline.current().save(job)


class TagPlan(CapturedPlan):
    """One rank's plan of a tag, or the error for which this rank has none."""

    def __init__(
        self,
        files: list[CapturedFile],
        error: BaseException | None,
        place: TagPlace,
        options: WriteOptions,
    ) -> None:
        devices = pipeline.current().staging.devices
        reads = devices.reads([storage for file in files for storage in file.storages()])
        super().__init__(files, reads, (), place.directory, place.made, options)
        self._error = error
        self._place = place

    def lay_out(self, pace: Pace) -> list[Output]:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return super().lay_out(pace)

    def record(self) -> bytes:
        self._place.arrive()
        return b"files" if self._outputs else b""

    def publish(self, records: list[bytes]) -> None:
        self._place.publish(any(records))


class TagPlace(Place):
    """A tag's directory. All ranks write into one hidden directory, which the first rank exchanges
    with it; then `latest` is replaced.

    Where ranks do not see each other's files (each node has a disk of its own), one rank of each
    node exchanges the node's directory, once the files of all ranks are durable.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        agreement: Round,
        durable: bool,
        latest: str,
        content: str,
    ) -> None:
        self.directory = path
        self._storage = storage
        self._agreement = agreement
        self._durable = durable
        self._latest, self._content = latest, content
        self._hidden: HiddenDirectory | None = None

    def begin(self) -> None:
        if self._agreement.rank == 0:
            hidden = self._hide("")
            self._agreement.put("hidden", os.fsencode(hidden.name))

    def _hide(self, name: str) -> HiddenDirectory:
        """Makes the hidden directory, unless this rank sees that another one has made it."""
        storage = self._storage
        self._hidden = hidden = HiddenDirectory(storage, self.directory, name=name)
        if hidden.is_own:
            atomic.remove_dead_directories(storage, hidden.beside)
        return hidden

    @contextmanager
    def made(self, name: str, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """Makes a file of the tag, as (descriptor, path); an error removes it."""
        with ExitStack() as making:
            with explaining(self._agreement):
                hidden = self._hidden
                if hidden is None:
                    hidden = self._hide(os.fsdecode(self._agreement.get("hidden")))
                file = making.enter_context(hidden.made(name, purpose))
            yield file

    def arrive(self) -> None:
        """Tells the first rank that this rank's files are durable; commits those of a node that the
        first rank does not see, when all are.
        """
        agreement = self._agreement
        agreement.put("arrived", b"")
        if agreement.rank == 0:
            agreement.gather("arrived")
            agreement.put("all arrived", b"")
        elif self._hidden is not None and self._hidden.is_own:
            agreement.get("all arrived")
            self._hidden.replace(self._durable)

    def publish(self, has_files: bool) -> None:
        """Commits, on the first rank, when no rank can fail any more.

        Args:
            has_files: whether any rank has a file in the tag.
        """
        if has_files:
            assert self._hidden is not None, "the first rank has made it"
            self._hidden.replace(self._durable)
        if not self._latest:
            return
        try:
            content, durable = self._content.encode(), self._durable
            replaced = atomic.replace_file(self._storage, self._latest, content, durable)
        except CheckpointError as error:
            if not error.visible:
                error.reword(
                    f"{error}; {self.directory!r} is whole and has its name, but {self._latest!r} "
                    "is as it was"
                )
                error.visible = True
            raise
        if replaced is not None:
            close_quietly(self._storage, replaced)

    def abandon(self) -> None:
        if self._hidden is not None:
            self._hidden.discard()

    def end(self, pipeline: Pipeline, failure: BaseException | None) -> None:
        self.abandon()
