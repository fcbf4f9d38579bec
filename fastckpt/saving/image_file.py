"""The only code that makes a file from an image. It stages the image and writes it to a file with a
route and enough room; then it adds the tail, which depends on checksums, truncates the file to its
size and makes it durable.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from fastckpt.arguments.options import WriteOptions
from fastckpt.engine.devices import DeviceSources
from fastckpt.engine.gds import GdsDevice
from fastckpt.engine.save_stats import SaveStats
from fastckpt.engine.slot import Slot
from fastckpt.engine.staging import Allowance, Route, Scatterer
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.errors import StorageError
from fastckpt.plan.image import PAGE_BYTES, PORTION_BYTES, Image
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.atomic import close_quietly, cut, settle
from fastckpt.storage.file_system import reported
from fastckpt.storage.input_files import PosixFile
from fastckpt.storage.lustre_layout import Layout, Purpose
from fastckpt.storage.object_upload import Upload


def write_portions(
    pipeline: Pipeline,
    portions: Iterator[bytearray],
    path: str,
    options: WriteOptions,
    pace: Pace,
    make: Make,
    purpose: Purpose,
) -> None:
    """Makes a file like ImageFile.make() and writes it; returns when it is complete.

    Args:
        portions: the file's bytes. A portion may reuse the memory of the one before the previous.
        path, options: see ImageFile.
        make, purpose: see ImageFile.make().
        pace: the limit on the rate of its writes.

    Raises:
        StorageError: the file could not be written. PeerFailed: another rank failed.
        Exception: any error of `portions`.
    """
    with ExitStack() as files, _UnderWay(pace) as moving:
        allowance = pipeline.staging.allowance(2 * PORTION_BYTES)
        file = files.enter_context(
            ImageFile(pipeline, Image.tailless(), path, options, allowance, pace.timeout_s)
        )
        file.make(make, purpose)
        file.begin(0, pace)
        offset = 0
        for portion in portions:
            image = Image.of_bytes(portion)
            transfer = file.transfer_of(image)
            transfer.write_to(file.fd, offset, file.route)
            moving.follow(transfer)
            offset += len(portion)
        moving.follow(None)
        file.end(offset)


class _UnderWay:
    """The current portion. Leaving the context cancels its write and waits for the end."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._transfer: ImageTransfer | None = None

    def __enter__(self) -> _UnderWay:
        return self

    def follow(self, transfer: ImageTransfer | None) -> None:
        """Makes a portion that has been started the current one, and waits for the previous one,
        whose memory is then free.
        """
        before, self._transfer = self._transfer, transfer
        if before is not None:
            with before:
                self._pace.wait_one(before)

    def __exit__(self, *_: object) -> None:
        if self._transfer is not None:
            self._transfer.__exit__()


log = logging.getLogger("fastckpt")

# Makes a file, as (descriptor, name), or begins an object.
Make = Callable[[Purpose], AbstractContextManager[tuple[int | Upload, str]]]
Transfer = Callable[[str, int, memoryview, int], int]  # as Staging.through()'s


class _Full(Exception):
    """The file system had no room for a file, but may have room if it has this other layout."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout


class ImageFile:
    """The transfer of an image, or of one rank's part of it, into a file.

    The order of the calls is make() or join(), begin(), then complete() or add(), and end().
    Leaving the context waits for transfers in flight, starts no more, and closes the file.

    Args:
        pipeline: has the storage and the staging memory.
        image: the image, which may be empty; its body is staged at once.
        path: the file's path, for messages.
        options: the options of the save.
        allowance: the staging blocks for this file and the save's other files together.
        timeout_s: see ImageTransfer.
        stagers: the largest number of threads that copy.
        reads: the memory on devices.
        direct: the GPU's blocks for GPUDirect writes straight to the file, where these are
            possible.
        stats: the save's statistics, which receive the route.
        slot: see ImageTransfer; also an attribute.

    Attributes:
        transfer: the transfer of the body.
        is_open: whether the file is open.
        target, fd, route: the open file or upload, its descriptor and its route.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        image: Image,
        path: str,
        options: WriteOptions,
        allowance: Allowance,
        timeout_s: float,
        stagers: int = 1,
        reads: DeviceSources | None = None,
        direct: GdsDevice | None = None,
        stats: SaveStats | None = None,
        slot: Slot | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._image = image
        self._path = path
        self._options = options
        self._allowance, self._timeout_s = allowance, timeout_s
        self._stats = stats
        self._pace: Pace | None = None
        self._files = ExitStack()
        self.is_open = self._is_slot = False
        self.slot = slot
        self.transfer = ImageTransfer(
            pipeline.staging, image, path, allowance, stagers, reads, direct, slot, timeout_s
        )

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *failure: Any) -> None:
        # Wait for blocks in flight before the close: then the descriptor may be another file's.
        self.transfer.__exit__()
        hung = self._pipeline.staging.hung
        if not (self.is_open and hung.take_over(self.fd, self._files)):
            self._files.__exit__(*failure)

    def make(
        self,
        make: Make,
        purpose: Purpose,
        path: str = "",
        *,
        allocates: bool = True,
        scatterer: Scatterer | None = None,
    ) -> str:
        """Makes the file, with room for purpose.nbytes. If one part of the file system is full,
        makes the file again in another part.

        Args:
            make: makes the file, and removes it if its context is left with an error.
            purpose: the purpose of the file.
            path: the file's path, if it was not known before.
            allocates: whether to allocate purpose.nbytes before the first write.
            scatterer: writes each block to its positions, which may be anywhere in the file.

        Returns:
            The file's name.

        Raises:
            BackendUnavailable, StorageError: see Staging.route(); or there is no room.
        """
        self._path = path or self._path
        while True:
            try:
                with ExitStack() as making:
                    target, name = making.enter_context(make(purpose))
                    route = self._ready(target, purpose, allocates, scatterer is None)
                    self._files.push(making.pop_all())
                self._take(target, route or self._scatter_route(target, scatterer))
                return name
            except _Full as full:
                layout = full.layout
                log.warning(
                    "no room for %r: the file is created again with %s", self._path, layout.text()
                )
                purpose = purpose._replace(instead=layout)

    def join(
        self,
        fd: int,
        path: str,
        *,
        writing: bool = True,
        offset: int | None = 0,
        scatterer: Scatterer | None = None,
    ) -> None:
        """Uses a file that another rank has made and this rank has opened for writing, and closes
        it at the end. For `writing` and `offset` see Staging.route(), for `scatterer` make().
        """
        self._files.callback(close_quietly, self._pipeline.storage, fd)
        self._path = path
        if scatterer is not None:
            self._take(fd, self._scatter_route(fd, scatterer))
            return
        backend = self._options.backend
        route = self._pipeline.staging.route(fd, path, backend, writing=writing, offset=offset)
        self._take(fd, route)

    def use_slot(self, fd: int, path: str) -> None:
        """Uses the slot as the file, like join(); `fd` is another descriptor of the slot."""
        self.join(fd, path, offset=None)
        self._is_slot = True
        if self._stats is not None:
            self._stats.why += "; copied straight into the file"

    def _take(self, target: int | Upload, route: Route) -> None:
        storage, path = self._pipeline.storage, self._path
        self.target = target if isinstance(target, Upload) else PosixFile(storage, target, path)
        self.fd, self.route, self.is_open, self._is_slot = self.target.fd, route, True, False
        stats = self._stats
        if stats is not None:
            stats.backend, stats.direct, stats.why = route.sink.name, route.direct, route.why

    def through(self, transfer: Transfer) -> None:
        """Passes blocks to a function that writes them, like Staging.through()."""
        self.route = self._pipeline.staging.through(self.fd, transfer, self.route.refusal)

    def _scatter_route(self, fd: int | Upload, scatterer: Scatterer | None) -> Route:
        assert isinstance(fd, int) and scatterer is not None
        return self._pipeline.staging.scatter_route(fd, self._path, scatterer, self._files)

    def close(self) -> None:
        """Closes the file after all its transfers; then another file may be made or joined."""
        self.is_open = False
        self._files.close()

    def _ready(
        self, fd: int | Upload, purpose: Purpose, allocates: bool, has_route: bool
    ) -> Route | None:
        """Chooses the route of a new file, if it has one, and allocates room for it."""
        if isinstance(fd, Upload):
            return self._pipeline.staging.upload_route(fd, self._options.backend)
        storage, path = self._pipeline.storage, self._path
        try:
            staging, backend = self._pipeline.staging, self._options.backend
            route = None
            if has_route:
                route = staging.route(fd, path, backend, writing=True)
            padded = -(-purpose.nbytes // PAGE_BYTES) * PAGE_BYTES
            if allocates:
                with reported("allocate", path):
                    is_direct = route is not None and route.direct
                    self._pipeline.allocate(fd, padded if is_direct else purpose.nbytes, path)
            return route
        except StorageError as error:
            number = error.errno or errno.EIO
            detail, layout = storage.refusal(fd, number)
            if layout is not None and purpose.instead is None:
                raise _Full(layout) from None
            if not detail:
                raise
            detail = f"{error.detail}; {detail}" if error.detail else detail
            raise StorageError(error.op, error.path, number, error.offset, detail) from error

    def begin(self, offset: int = 0, pace: Pace | None = None) -> None:
        """Begins to write the staged bytes at an offset in the file, at this pace."""
        self._pace = pace
        if self._is_slot:
            self.transfer.use_slot(self.fd, self._path)
            return
        if pace is not None:
            self.route = pace.route(self.route)
        self.transfer.write_to(self.fd, offset, self.route, self._path)

    def complete(self) -> bytearray:
        """Writes the tail of an image that this rank writes alone, and returns it. Call this after
        everything has been staged.
        """
        image, transfer = self._image, self.transfer
        tail = bytearray(image.tail(transfer.block_crcs(), transfer.slot_crcs()))
        if tail:
            self.add(Image.of_bytes(tail), image.body_nbytes)
        return tail

    def add(self, image: Image, offset: int) -> None:
        """Writes a small image, outside the pages of the body, and waits for it."""
        with self.transfer_of(image) as added:
            added.write_to(self.fd, offset, self.route)
            self._wait(added)

    def transfer_of(self, image: Image) -> ImageTransfer:
        """Returns a transfer of another image into this file."""
        staging, allowance = self._pipeline.staging, self._allowance
        return ImageTransfer(staging, image, self._path, allowance, 1, timeout_s=self._timeout_s)

    def wait_written(self) -> None:
        """Waits until the body has been written.

        Raises:
            StorageError, DeviceError: it could not be written. PeerFailed: another rank failed.
        """
        if self._image.body_nbytes:
            self._wait(self.transfer)

    def _wait(self, transfer: ImageTransfer) -> None:
        if self._pace is None:
            transfer.wait_written()
        else:
            self._pace.wait_written(transfer)

    def end(self, nbytes: int | None = None) -> None:
        """Waits until the file is complete: on the disk, or in the file system if not durable.

        Args:
            nbytes: the size to which the file is truncated; None: another rank truncates it.
        """
        self.wait_written()
        storage = self._pipeline.storage
        if isinstance(self.target, Upload):
            if self.target.ends_with_file:
                with reported("write", self._path):
                    self.target.finish()
            return
        if nbytes is not None and self.route.direct:  # O_DIRECT writes whole pages
            cut(storage, self.fd, self._path, nbytes)  # before the sync, which also covers the size
        settle(storage, self.fd, self._path, self._options.durable)
