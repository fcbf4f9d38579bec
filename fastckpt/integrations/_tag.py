"""A tag: the files of all ranks, committed together, and the `latest` file that names the tag."""

from __future__ import annotations

import pickle
import time
from contextlib import AbstractContextManager, ExitStack

import torch

from fastckpt.arguments.options import WriteOptions
from fastckpt.directories.directory_plan import DirectoryPlan
from fastckpt.directories.draft import CapturedFile, Draft, Zip
from fastckpt.directories.place import DirectoryPlace
from fastckpt.errors import CheckpointError
from fastckpt.formats import torch_pickle
from fastckpt.ranks.round import Round
from fastckpt.saving import pipeline
from fastckpt.saving.handle import InnerHandle, log_failure
from fastckpt.saving.save import Save


class Tag:
    """The files of one tag that this rank saves.

    Args:
        path: the tag's directory, without symbolic links.
        latest: the path of the file that gets `content` when the tag is committed; "": no such
            file.
        options: how files are written and errors handled; the fence must be "call".
        lease: the directory that no other job may save to; "": no lease is taken.

    Attributes:
        handle: the SaveHandle of the tag; its path is the tag's directory.
        content: the new content of `latest`.
    """

    def __init__(
        self,
        path: str,
        latest: str,
        content: str,
        options: WriteOptions,
        lease: str = "",
    ) -> None:
        on_error = options.on_error
        self.handle = InnerHandle(path, time.perf_counter(), kind="tag", on_error=on_error)
        if on_error == "raise":
            self.handle.add_done_callback(log_failure)
        self.content, self._latest, self._options = content, latest, options
        self._lease = lease
        self._files: list[CapturedFile] = []
        self._error: BaseException | None = None

    def add(self, obj: object, name: str) -> None:
        """Adds a file with the bytes that torch.save would write for an object. Stores an error
        instead of raising it, and does nothing after an error. The object's memory must not change
        until conclude() returns.
        """
        if self._error is None:
            with self.keeping():
                protocol = torch.serialization.DEFAULT_PROTOCOL
                readable = pipeline.current().staging.devices.readable()
                captured = torch_pickle.capture(obj, pickle, protocol, False, False, readable)
                self._files.append(Zip(name, captured))

    def keeping(self) -> AbstractContextManager[object]:
        """Stores an error of the body as the tag's error, because an error raised on one rank alone
        would leave the other ranks waiting.
        """

        def kept(_kind: object, error: BaseException | None, _traceback: object) -> bool:
            if isinstance(error, Exception):
                self._error = self._error or error
            return isinstance(error, Exception)

        keeping = ExitStack()
        keeping.push(kept)
        return keeping

    def raise_mistake(self) -> None:
        """Raises an error that the caller made, such as an object that cannot be pickled."""
        if self._error is not None and not isinstance(self._error, CheckpointError | OSError):
            raise self._error

    def conclude(self, agreement: Round, error: BaseException | None) -> None:
        """Begins to save the files, and returns when they are copied. After an error the tag fails
        on all ranks.

        Args:
            agreement: the round of this tag, in which no rank has sent a message yet.
            error: this rank's error, if any.
        """
        handle, options, current = self.handle, self._options, pipeline.current()
        devices, error = current.staging.devices, error or self._error
        draft = Draft(current.storage, devices, handle.path, None, options, agreement, later=True)
        draft.pending = self._files
        if error is not None:
            draft.fail(error)
        place = DirectoryPlace(
            current.storage,
            handle.path,
            agreement,
            options.durable,
            draft=draft,
            per_node=True,
            pointer=(self._latest, self.content) if self._latest else None,
            lease=self._lease,
        )
        plan = DirectoryPlan(handle, agreement, draft, place, options)
        current.save(Save(handle, agreement, plan, place, options, queue=handle.path))
