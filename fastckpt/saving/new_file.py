"""A new file that is ready to be written: made, with a route for its bytes, and with room for them.

Responsible for the second attempt where a file system is full in one part and not in others. It
must not know what is written, nor what the file is called in the end.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

from fastckpt.engine.staging import Route
from fastckpt.errors import StorageError
from fastckpt.handle import SaveStats
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import reported
from fastckpt.storage.lustre_layout import Layout, Purpose

log = logging.getLogger("fastckpt")

Make = Callable[[Purpose], AbstractContextManager[tuple[int, str]]]


class NewFile(NamedTuple):
    """An open file, its name, and how its bytes go there."""

    fd: int
    name: str
    route: Route


class _Full(Exception):
    """There was no room, and there may be some in this layout."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout


def new_file(
    pipeline: Pipeline,
    files: ExitStack,
    make: Make,
    purpose: Purpose,
    path: str,
    backend: str,
    *,
    allocates: bool = True,
    timed: bool = False,
) -> NewFile:
    """Makes a file of purpose.nbytes.

    Args:
        pipeline: whose storage and staging are used.
        files: keeps it open.
        make: makes it, as (descriptor, name); leaving the context with an error undoes that.
        purpose: what the file is for.
        path: its name in messages.
        backend: as fastckpt.save's.
        allocates: whether its size is known, and room is to be had before the first write.
        timed: it is written at once, by this process alone, so that its time tells of the way it
            went (Policy.measured).

    Raises:
        BackendUnavailable, StorageError: as Staging.route's; or there is no room.
    """
    while True:
        try:
            with ExitStack() as making:
                fd, name = making.enter_context(make(purpose))
                route = _ready(pipeline, fd, path, backend, purpose, allocates, timed)
                files.push(making.pop_all())
                return NewFile(fd, name, route)
        except _Full as full:
            log.warning("no room for %r: it is made anew, in %s", path, full.layout.text())
            purpose = purpose._replace(instead=full.layout)


def _ready(
    pipeline: Pipeline,
    fd: int,
    path: str,
    backend: str,
    purpose: Purpose,
    allocates: bool,
    timed: bool,
) -> Route:
    storage, nbytes = pipeline.storage, purpose.nbytes if timed else None
    try:
        route = pipeline.staging.route(fd, path, backend, writing=True, nbytes=nbytes)
        padded = -(-purpose.nbytes // PAGE_BYTES) * PAGE_BYTES
        if allocates:
            with reported("allocate", path):
                pipeline.allocate(fd, padded if route.direct else purpose.nbytes, path)
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


def note_route(stats: SaveStats, route: Route) -> None:
    """Tells what was decided."""
    stats.backend, stats.direct, stats.why = route.backend.name, route.direct, route.why
