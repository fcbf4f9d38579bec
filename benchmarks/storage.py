"""What the harness itself does to files: make them durable, make them cold, take them away.

It knows paths and system calls. It must not know which library wrote a file or what is in it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

# The share of the cost of a deletion (journal commit, discard) that trails the call itself.
SETTLE_S = 0.1


def files_under(path: Path) -> Iterator[Path]:
    """Yield `path` itself if it is a file, else every regular file below it."""
    if path.is_dir():
        yield from (child for child in sorted(path.rglob("*")) if child.is_file())
    else:
        yield path


def fsync_path(path: Path) -> None:
    """Flush one file or one directory to stable storage."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: Path) -> None:
    """Flush every file below `path`, every directory, and the entry of `path` in its parent."""
    for file in files_under(path):
        fsync_path(file)
    if path.is_dir():
        for directory in sorted(child for child in path.rglob("*") if child.is_dir()):
            fsync_path(directory)
        fsync_path(path)
    fsync_path(path.parent)


def drop_page_cache(path: Path) -> str:
    """Evict the pages of every file below `path`; returns how that was done."""
    for file in files_under(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return "posix_fadvise"
    return "posix_fadvise + drop_caches"


def size_of(path: Path) -> int:
    """Return the bytes of all files below `path`."""
    return sum(file.stat().st_size for file in files_under(path))


def remove(path: Path) -> None:
    """Delete `path` and commit the deletion, so that its cost does not land in the next timing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    fsync_path(path.parent)
    time.sleep(SETTLE_S)
