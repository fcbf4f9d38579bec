"""The plan of a directory: a rank writes the pending files of its draft, its part of the shared
files, and a list of all files, including those that fill() wrote at once.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import chain

from fastckpt.arguments.checks import Striping
from fastckpt.arguments.names import listed
from fastckpt.arguments.options import WriteOptions
from fastckpt.directories.draft import Draft
from fastckpt.directories.hidden_directory import names_in
from fastckpt.directories.place import DirectoryPlace
from fastckpt.directories.shared_files import SharedFile
from fastckpt.directories.verify import crc32_of
from fastckpt.engine.staging import combine_crcs
from fastckpt.formats import file_list
from fastckpt.formats.file_list import File
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.round import Round
from fastckpt.ranks.same_state import Description, compare
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pacing import Pace
from fastckpt.saving.plan import Output, Plan, WholeFile
from fastckpt.storage.atomic import close_quietly, settle
from fastckpt.storage.file_system import reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")

_LOSSY_MAX = 100  # names per file that a rank reports
_lossy_told = set[str]()  # names of tensors in earlier warnings


def tell_lossy(path: str, names: set[str]) -> None:
    """Logs a warning, once per tensor, for tensors whose numbers overflow the files' dtype."""
    untold = sorted(names - _lossy_told)
    _lossy_told.update(untold)
    if untold:
        log.warning(
            "%r: numbers of %s are too large for the files' dtype, and are not finite there: "
            "choose another dtype",
            path,
            listed(map(repr, untold)),
        )


class DirectoryPlan(Plan):
    """One rank's plan of a directory: the rank writes the pending files of its draft, and its part
    of the shared files.

    Args:
        handle, agreement: the save's handle and round.
        draft: this rank's files.
        place, options: the directory's place, and how files are written.
    """

    def __init__(
        self,
        handle: InnerHandle,
        agreement: Round,
        draft: Draft,
        place: DirectoryPlace,
        options: WriteOptions,
    ) -> None:
        super().__init__(draft.reads(), draft.watched)
        self._handle = handle
        self._agreement = agreement
        self._pending = draft.pending
        self._items = draft.items
        self._shared = draft.shared
        self._listed = draft.listed
        self._directory = draft.directory
        self._is_filled = draft.is_own  # fill() may have written files
        self._place = place
        self._options = options
        self._outputs: dict[str, WholeFile] = {}  # by name
        self._parts: dict[str, _SharedOutput] = {}  # by name
        self._files: dict[str, File] = {}  # of this rank
        self._filled: list[str] = []  # names of files that fill() wrote

    def lay_out(self, pace: Pace) -> list[Output]:
        # Listed before place.begin() lets other ranks move their files there.
        self._filled = self._listing() if self._is_filled else []
        striping = self._options.striping
        for pending in self._pending:
            image, make = pending.layout(), partial(self._place.made, pending.name)
            path = os.path.join(self._directory, pending.name)
            purpose = Purpose(image.nbytes, 1, striping)
            self._outputs[pending.name] = WholeFile(image, path, make, purpose)
        for items in self._items:
            for output in items.lay_out(pace):
                self._outputs[os.path.relpath(output.path, self._directory)] = output
        if self._shared is not None:
            agreement = self._agreement
            seed = zlib.crc32(agreement.name.encode())
            for file in self._shared.lay_out(agreement.rank, agreement.world_size, seed):
                path = os.path.join(self._directory, file.name)
                self._parts[file.name] = _SharedOutput(file, path, self._place, agreement, striping)
        return [*self._parts.values(), *self._outputs.values()]

    def samples(self) -> list[tuple[int, bytearray]]:
        return [] if self._shared is None else self._shared.contents.samples()

    def agree(self, pace: Pace, nbytes: int) -> None:
        super().agree(pace, nbytes)
        for items in self._items:
            items.agree_on_items()
        if self._shared is not None:  # before a rank writes into a shared file
            self._compare("files", self._shared.structure)

    def compare(self) -> None:
        if self._shared is not None:
            self._compare("state", self._shared.contents)

    def _compare(self, key: str, description: Description) -> None:
        assert self._shared is not None
        compare(self._agreement, key, description, self._handle.path, self._shared.differing)

    def record(self) -> bytes:
        for number, items in enumerate(self._items):
            self._agreement.put(f"items {number}", items.record())
        self._files = {name: _listed(output) for name, output in self._outputs.items()}
        self._list_others(self._filled, {*self._files, *self._parts})
        own = self._place.bring(self._files)
        parts = {name: File(*output.scatterer.written()) for name, output in self._parts.items()}
        written = [*own.values(), *parts.values()]
        self._handle.stats.nbytes = sum(file.nbytes for file in written)
        if self._parts:
            lossy = [sorted(each.lossy())[:_LOSSY_MAX] for each in self._parts.values()]
            self._agreement.put("lossy", json.dumps([*chain(*lossy)]).encode())
        return file_list.to_record(parts if self._agreement.rank == 0 else {**own, **parts})

    def _listing(self) -> list[str]:
        with reported("list", self._directory):
            return [*names_in(self._place.storage, self._directory)]

    def _list_others(self, names: Sequence[str], known: set[str]) -> None:
        """Syncs the files that this plan has not written, and adds them to the list."""
        for name in names:
            if name not in known:
                self._files[name] = self._settled(name)

    def _settled(self, name: str) -> File:
        """Syncs a file that was written at once, and returns its list entry."""
        storage, path = self._place.storage, os.path.join(self._directory, name)
        with reported("open", path):
            fd = storage.open(path)
        try:
            settle(storage, fd, path, self._options.durable)
        finally:
            close_quietly(storage, fd)
        return self._listed.get(name) or crc32_of(storage, path, name)

    def publish(self, records: list[bytes]) -> None:
        brought = [file_list.from_record(record) for record in records]
        for name, output in self._parts.items():
            self._files[name] = output.shared.joined([found.pop(name) for found in brought])
        if self._parts:
            gathered = map(json.loads, self._agreement.gather("lossy"))
            tell_lossy(self._handle.path, {*chain.from_iterable(gathered)})
        for number, items in enumerate(self._items):
            items.publish(self._agreement.gather(f"items {number}"))
        if self._items and self._is_filled:
            self._list_others(self._listing(), {*self._files}.union(*brought))
        for found in brought[1:]:  # of files with the same name, the lowest rank's is used
            self._files = {**found, **self._files}
        self._place.publish_listed(self._files)

    def forget(self) -> None:
        for pending in self._pending:
            pending.forget()
        for items in self._items:
            items.forget()
        for output in self._outputs.values():
            output.image.sources.clear()
        if self._shared is not None:
            self._shared.forget()

    def release(self) -> None:
        self.forget()
        for items in self._items:
            items.release()
        self._pending, self._items, self._shared = [], [], None
        self._outputs, self._parts = {}, {}


class _SharedOutput(Output):
    """This rank's part of a shared file, which the first rank creates."""

    def __init__(
        self,
        file: SharedFile,
        path: str,
        place: DirectoryPlace,
        agreement: Round,
        striping: Striping,
    ) -> None:
        super().__init__(file.image, path)
        self.scatterer = file.scatterer()
        self.shared = file
        self._place = place
        self._agreement = agreement
        self._striping = striping

    def lossy(self) -> set[str]:
        """Returns the names of tensors whose numbers in this rank's part overflowed in the
        conversion to the file's dtype.
        """
        return self.shared.names_of(self.file.transfer.lossy() | self.scatterer.lossy())

    def open(self) -> None:
        shared, place = self.shared, self._place
        if self._agreement.rank == 0:
            purpose = Purpose(shared.nbytes, self._agreement.world_size, self._striping)
            self.file.make(partial(place.made, shared.name), purpose, scatterer=self.scatterer)
        elif self.image.body_nbytes:
            self.file.join(place.joined(shared.name), self.path, scatterer=self.scatterer)

    def fill_in(self) -> None:
        pass  # sizes alone determine the header, which the first rank writes

    def end(self) -> None:
        self.file.end()
        self.file.close()


def _listed(output: WholeFile) -> File:
    """Returns the list entry of a written file."""
    image, tail = output.image, output.tail
    rest, crc = image.body_nbytes, 0
    for block in output.file.transfer.block_crcs():
        crc = combine_crcs(crc, block, min(rest, BLOCK_BYTES))
        rest -= BLOCK_BYTES
    return File(image.nbytes, combine_crcs(crc, zlib.crc32(tail), len(tail)))
