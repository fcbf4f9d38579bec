"""The plan of a directory: one rank writes the files that fill() has left to the background, and a
list of these and of those that fill() has written by itself. It must not know what files mean.
"""

from __future__ import annotations

import os
import zlib
from functools import partial

from fastckpt.directories.draft import CapturedFile, Draft
from fastckpt.directories.swap_place import SwapPlace, names_in
from fastckpt.directories.verify import crc32_of
from fastckpt.engine.staging import combine_crcs
from fastckpt.formats import file_list
from fastckpt.formats.file_list import File
from fastckpt.handle import SaveHandle
from fastckpt.options import WriteOptions
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.round import Round
from fastckpt.saving.pacing import Pace
from fastckpt.saving.plan import Plan, WholeFile
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.file_system import reported
from fastckpt.storage.lustre_layout import Purpose


class SwapPlan(Plan):
    """One rank's plan of a directory: it writes the files that are pending in the draft."""

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        draft: Draft,
        place: SwapPlace,
        options: WriteOptions,
    ) -> None:
        super().__init__(draft.reads(), draft.watched)
        self._handle = handle
        self._agreement = agreement
        self._directory = draft.directory
        self._pending: list[CapturedFile] = draft.pending
        self._listed = draft.listed
        self._place = place
        self._options = options
        self._outputs: dict[str, WholeFile] = {}  # by name
        self._files: dict[str, File] = {}  # of this rank

    def lay_out(self, pace: Pace) -> list[WholeFile]:
        for pending in self._pending:
            image, make = pending.layout(), partial(self._place.made, pending.name)
            path = os.path.join(self._directory, pending.name)
            purpose = Purpose(image.nbytes, 1, self._options.striping)
            self._outputs[pending.name] = WholeFile(image, path, make, purpose)
        return [*self._outputs.values()]

    def record(self) -> bytes:
        storage, directory = self._place.storage, self._directory
        self._files = {name: _listed(output) for name, output in self._outputs.items()}
        with reported("list", directory):
            others = [name for name in names_in(storage, directory) if name not in self._files]
        for name in others:
            self._files[name] = self._settled(name)
        own = self._place.bring(self._files)
        self._handle.stats.nbytes = sum(file.nbytes for file in own.values())
        return file_list.to_record(own) if self._agreement.rank else b""

    def _settled(self, name: str) -> File:
        """Makes a file durable that fill() has written by itself, and returns its list entry."""
        storage, path = self._place.storage, os.path.join(self._directory, name)
        with reported("open", path):
            fd = storage.open(path)
        try:
            settle(storage, fd, path, self._options.durable)
        finally:
            close_quietly(storage, fd)
        return self._listed.get(name) or crc32_of(storage, path, name)

    def publish(self, records: list[bytes]) -> None:
        brought = [file_list.from_record(record) for record in records[1:]]
        self._place.publish(self._files, brought)

    def forget(self) -> None:
        for pending in self._pending:
            pending.forget()
        for output in self._outputs.values():
            output.image.sources.clear()

    def release(self) -> None:
        self.forget()
        self._pending, self._outputs = [], {}


def _listed(output: WholeFile) -> File:
    """Returns the list entry of a file that has arrived."""
    image, tail = output.image, output.tail
    left, crc = image.body_nbytes, 0
    for block in output.file.transfer.block_crcs():
        crc = combine_crcs(crc, block, min(left, BLOCK_BYTES))
        left -= BLOCK_BYTES
    return File(image.nbytes, combine_crcs(crc, zlib.crc32(tail), len(tail)))
