"""The one way in which an image becomes a file: it is staged, written to a file that has a route
and room for it, completed by what depends on its checksums, cut to its size and made durable.

It must not know what the image is of, what its file is called in the end, or how that is committed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

from fastckpt.engine.devices import Reads
from fastckpt.engine.gds import Direct
from fastckpt.engine.staging import Route
from fastckpt.engine.transfer import Transfer
from fastckpt.errors import StorageError
from fastckpt.handle import SaveStats
from fastckpt.plan.image import PAGE_BYTES, Image
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.atomic import cut, settle
from fastckpt.storage.file_system import reported
from fastckpt.storage.lustre_layout import Layout, Purpose

log = logging.getLogger("fastckpt")

Make = Callable[[Purpose], AbstractContextManager[tuple[int, str]]]


class _Full(Exception):
    """There was no room, and there may be some in this layout."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout


class ImageFile:
    """An image, or one rank's part of it, on its way into a file.

    The order of the calls is make() or join(), begin(), then complete(), or add() and end().
    Leaving the context waits until nothing is in flight any more; what was not written by then
    never is.

    Args:
        pipeline: whose storage and staging are used.
        image: its body is staged at once; it may be empty.
        path: of the file, for messages.
        blocks_limit: the most blocks of the budget that the body may hold; at least 1.
        stagers: the most threads that copy.
        reads: says which of its memory is on devices.
        direct: writes what it can from a GPU straight to the file.

    Attributes:
        transfer: of the body.
        nbytes: of the image.
        is_open: whether there is a file yet.
        fd, route: of the file, once it is open.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        image: Image,
        path: str,
        blocks_limit: int,
        stagers: int = 1,
        reads: Reads | None = None,
        direct: Direct | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._image = image
        self.nbytes = image.nbytes
        self._path = path
        self._limit = max(1, blocks_limit)
        self._pace: Pace | None = None
        self.is_open = False
        staging = pipeline.staging
        self.transfer = Transfer(staging, image, path, self._limit, stagers, reads, direct)

    def __enter__(self) -> ImageFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.transfer.__exit__()

    def make(
        self,
        files: ExitStack,
        make: Make,
        purpose: Purpose,
        backend: str,
        stats: SaveStats | None,
        path: str = "",
        *,
        allocates: bool = True,
        timed: bool = False,
    ) -> str:
        """Makes the file, with room for purpose.nbytes; where the file system is full in one part
        and not in others, makes it anew in another one, once.

        Args:
            files: keeps it open.
            make: makes it, as (descriptor, name); leaving the context with an error undoes that.
            purpose: what the file is for.
            backend: as fastckpt.save's.
            stats: are told the route; None: nobody is.
            path: of the file, where it was not known before.
            allocates: whether its size is known, and room is to be had before the first write.
            timed: it is written at once, by this process alone, so that its time tells of the way
                it went (Policy.measured).

        Returns:
            The file's name.

        Raises:
            BackendUnavailable, StorageError: as Staging.route's; or there is no room.
        """
        self._path = path or self._path
        while True:
            try:
                with ExitStack() as making:
                    fd, name = making.enter_context(make(purpose))
                    route = self._ready(fd, purpose, backend, allocates, timed)
                    files.push(making.pop_all())
                    self.join(fd, route, stats)
                    return name
            except _Full as full:
                layout = full.layout
                log.warning("no room for %r: it is made anew, in %s", self._path, layout.text())
                purpose = purpose._replace(instead=layout)

    def _ready(
        self, fd: int, purpose: Purpose, backend: str, allocates: bool, timed: bool
    ) -> Route:
        """Chooses the route of a new file, and has room allocated for it."""
        storage, path = self._pipeline.storage, self._path
        try:
            nbytes = purpose.nbytes if timed else None
            staging = self._pipeline.staging
            route = staging.route(fd, path, backend, writing=True, nbytes=nbytes)
            padded = -(-purpose.nbytes // PAGE_BYTES) * PAGE_BYTES
            if allocates:
                with reported("allocate", path):
                    self._pipeline.allocate(fd, padded if route.direct else purpose.nbytes, path)
            return route
        except StorageError as error:
            number = error.errno or errno.EIO
            if number == errno.ENOSPC and purpose.instead is None:
                layout = storage.another_layout(fd)
                if layout is not None:
                    raise _Full(layout) from None
            detail = storage.refusal_text(fd, number)
            if not detail:
                raise
            detail = f"{error.detail}; {detail}" if error.detail else detail
            raise StorageError(error.op, error.path, number, error.offset, detail) from error

    def join(self, fd: int, route: Route, stats: SaveStats | None) -> None:
        """Takes a file that is open, and stays so until the context is left."""
        self.fd, self.route, self.is_open = fd, route, True
        if stats is not None:
            stats.backend, stats.direct, stats.why = route.backend.name, route.direct, route.why

    def begin(self, offset: int = 0, pace: Pace | None = None) -> None:
        """Lets what is staged go to the file, from an offset on, at this pace."""
        self._pace = pace
        if pace is not None:
            self.route = pace.route(self.route)
        self.transfer.write_to(self.fd, offset, self.route)

    def complete(self, durable: bool) -> bytearray:
        """Writes the tail of an image that this rank writes all of.

        Returns:
            The tail, when the whole file has arrived.
        """
        image, transfer = self._image, self.transfer
        tail = bytearray(image.tail(transfer.block_crcs(), transfer.slot_crcs()))
        if tail:
            self.add(Image.of_bytes(tail), image.body_nbytes)
        self.end(durable, self.nbytes)
        return tail

    def add(self, image: Image, offset: int) -> None:
        """Writes something small beside the body, and waits until that was written."""
        if self._limit == 1:  # of which this needs that one block
            self.wait_written()
        with Transfer(self._pipeline.staging, image, self._path, 1, 1) as added:
            added.write_to(self.fd, offset, self.route)
            self._wait(added)

    def wait_written(self) -> None:
        """Waits until the body was written.

        Raises:
            StorageError, DeviceError: it was not. PeerFailed: another rank failed meanwhile.
        """
        if self._image.body_nbytes:
            self._wait(self.transfer)

    def _wait(self, transfer: Transfer) -> None:
        if self._pace is None:
            transfer.wait_written()
        else:
            self._pace.wait_written(transfer)

    def end(self, durable: bool, nbytes: int | None = None) -> None:
        """Waits for the body, and until all that was written to the file has arrived.

        Args:
            durable: on the device; or else with the file system.
            nbytes: of the file, which is given that size; None: another rank does that.
        """
        self.wait_written()
        storage = self._pipeline.storage
        if nbytes is not None and self.route.direct:  # written by whole pages
            cut(storage, self.fd, self._path, nbytes)
        settle(storage, self.fd, self._path, durable)
