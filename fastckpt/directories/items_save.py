"""Saves of a directory in which each rank writes one file of items, and one file commits them.

Responsible for the order of the stages: items are laid out and staged, the file is written and
synced under a name of its own, and when every rank has done so the first one commits; what nothing
names any more is removed last. It must not know the bytes of the format, how a block moves, how
ranks talk, or what the committing file says.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from fastckpt.engine.devices import Reads
from fastckpt.engine.gds_trial import Choice
from fastckpt.formats import distcp
from fastckpt.handle import SaveHandle
from fastckpt.options import WriteOptions
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.round import Round
from fastckpt.saving.fence import Watched
from fastckpt.saving.image_file import ImageFile
from fastckpt.saving.pipeline import Job, Pipeline
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")

Places = list[tuple[int, int]]  # offset and size of each item


@dataclass
class Content:
    """The items that one rank writes; nothing of them changes until they were staged.

    Attributes:
        items: contiguous tensors, and bytes.
        reads: what of it lies on devices.
        watched: what must not change before it was copied.
    """

    items: list[torch.Tensor | bytes]
    reads: Reads
    watched: list[Watched]


class ItemsSave(Job):
    """One rank's file of items.

    Args:
        handle, agreement, fence: as Job's; the handle's path is the directory.
        content: what is written; without items no file is made.
        options: how.
        conclude: called when the file is durable, with this job and the places of its items;
            returns when they are committed.

    Attributes:
        name: of the file, new in its directory: "__RANK_TOKEN.distcp", RANK the number given.
    """

    def __init__(
        self,
        handle: SaveHandle,
        agreement: Round,
        content: Content,
        options: WriteOptions,
        conclude: Callable[[ItemsSave, Places], None],
        *,
        fence: str,
        rank: int,
    ) -> None:
        super().__init__(
            handle, agreement, content.reads, content.watched, fence=fence, lane=handle.path
        )
        self.name = f"__{rank}_{secrets.token_hex(8)}.distcp"
        self.path = os.path.join(handle.path, self.name)
        self.content: Content | None = content
        self.options = options
        self.replaced: int | None = None  # a descriptor that keeps what the commit replaced
        self.unneeded: list[str] = []  # paths that nothing names any more
        self._conclude: Callable[[ItemsSave, Places], None] | None = conclude
        self._is_made = False

    def release(self) -> None:
        self.content = self._conclude = None

    def forget(self) -> None:
        assert self.content is not None
        self.content.items.clear()

    def write(self, pipeline: Pipeline) -> None:
        self.wait_for_previous()  # what they leave is known before anything new is made
        places = self._write_items(pipeline)
        assert self._conclude is not None
        self._conclude(self, places)

    def abandon(self, storage: Storage) -> None:
        if self._is_made:
            atomic.remove_files(storage, [self.path])

    def end(self, pipeline: Pipeline) -> None:
        if self.replaced is not None:
            close_quietly(pipeline.storage, self.replaced)
        atomic.remove_files(pipeline.storage, self.unneeded)
        super().end(pipeline)

    def _write_items(self, pipeline: Pipeline) -> Places:
        assert self.content is not None
        if not self.content.items:
            self.copying.wait()
            self.handle.stats.written_s = self.handle.elapsed_s()
            return []
        image, places = distcp.layout(self.content.items)
        sources, image.sources = image.sources, []  # kept by the content until they were copied
        staging, stats = pipeline.staging, self.handle.stats
        limit_bytes = self.options.limit_bytes
        limit, stagers = self.take_budget(staging, image.body_nbytes, limit_bytes)
        # Whatever happens, blocks in flight arrive before the file they go to is closed.
        with ExitStack() as files, ExitStack() as moving:
            self.choice = Choice(pipeline.storage, staging, self.options.staging, self.reads)
            direct = self.choice.direct(self.handle.path, stats)
            file = moving.enter_context(
                ImageFile(pipeline, image, self.path, limit - 1, stagers, self.reads, direct)
            )
            self.copying.transfers.append(file.transfer)
            self.copying.watch()
            make = partial(self._made, pipeline.storage)
            purpose = Purpose(image.nbytes, 1, self.options.striping)
            file.make(files, make, purpose, self.options.backend, stats)
            stats.nbytes = image.nbytes
            file.begin()
            self.copying.wait()
            sources.clear()
            file.complete(self.options.durable)
            held = file.transfer.staged_bytes_max() + BLOCK_BYTES
            stats.staged_bytes_max = min(held, limit * BLOCK_BYTES)
            stats.written_s = self.handle.elapsed_s()
        return places

    @contextmanager
    def _made(self, storage: Storage, purpose: Purpose) -> Iterator[tuple[int, str]]:
        """The file, and its directory where that is missing."""
        path = self.path

        def create(purpose: Purpose) -> int:
            try:
                return storage.create(path, 0o666, purpose)
            except FileExistsError:  # there was no room for it
                storage.remove(path)
                return storage.create(path, 0o666, purpose)

        with reported("open", path):
            try:
                fd = create(purpose)
            except FileNotFoundError:
                self.agreement.check()  # if the save has failed meanwhile, that is why
                atomic.make_directory(storage, self.handle.path, self.options.durable)
                fd = create(purpose)
        self._is_made = True
        try:
            yield fd, path
        finally:
            close_quietly(storage, fd)
