"""Saves whose bytes torch.save itself writes, before the call returns.

Responsible for the commit around it, and for the handle of a save that is over already.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable
from typing import IO, Any

from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly, settle

log = logging.getLogger("fastckpt")


def save_stock(
    pipeline: Pipeline,
    write: Callable[[IO[bytes]], None],
    handle: InnerHandle,
    path: str,
    durable: bool,
) -> InnerHandle:
    """Lets `write` write the file at a path now, and commits it; raises what `write` raises."""
    storage = pipeline.storage
    pipeline.wait_for(path)
    with atomic.temporary(storage, path) as (fd, name):
        with os.fdopen(os.dup(fd), "wb") as file:
            write(file)
        handle.mark_staged()
        handle.stats.written_s = handle.elapsed_s()
        handle.stats.nbytes = storage.fstat(fd).st_size
        atomic.take_permissions(storage, fd, name, path)
        settle(storage, fd, path, durable)
        replaced = atomic.publish(storage, name, path, durable, fd)
    if replaced is not None:
        close_quietly(storage, replaced)
    return finish_stock(handle)


def save_to_object(write: Callable[[Any], None], file: Any, handle: InnerHandle) -> InnerHandle:
    """Lets `write` write to a file-like object now; raises what it raises. The bytes are counted by
    the object's own position, so that nothing stands between the two.
    """
    before = _position(file)
    write(file)
    after = _position(file)
    if before is not None and after is not None:
        handle.stats.nbytes = max(0, after - before)
    return finish_stock(handle)


def _position(file: Any) -> int | None:
    """Returns the position of a file-like object; None if it does not tell."""
    try:
        return operator.index(file.tell())
    except Exception:  # others' classes may raise anything, and only messages need the number
        return None


def finish_stock(handle: InnerHandle) -> InnerHandle:
    """Completes the handle of a save that torch.save has done by itself."""
    handle.mark_staged()
    handle.stats.backend, handle.stats.why = "stock", "written by torch.save itself"
    handle.stats.stall_s = handle.stats.committed_s = handle.elapsed_s()
    handle.set_result(handle.stats)
    if handle.path and handle.stats.nbytes:  # else nothing was committed: an object, or a device
        log.info("saved %r: %s", handle.path, handle.stats)
    return handle
