"""What the harness itself does to files: make them durable, make them cold, take them away.

It knows paths and system calls. It must not know which library wrote a file or what is in it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from fastckpt.cli.bench.machine import fsync_path, make_cold

# The share of the cost of a deletion (journal commit, discard) that trails the call itself.
SETTLE_S = 0.1


def files_under(path: Path) -> Iterator[Path]:
    """Yield `path` itself if it is a file, else every regular file below it."""
    if path.is_dir():
        yield from (child for child in sorted(path.rglob("*")) if child.is_file())
    else:
        yield path


def fsync_tree(path: Path) -> None:
    """Flush all below `path`, itself, and its entry in its parent."""
    for child in [*path.rglob("*"), path] if path.is_dir() else [path]:
        fsync_path(child)
    fsync_path(path.parent)


def size_of(path: Path) -> int:
    """Return the bytes of all files below `path`."""
    return sum(file.stat().st_size for file in files_under(path))


def drop_page_cache(path: Path) -> str:
    """Evict the pages of every file below `path`; returns how that was done."""
    return " or ".join(sorted({make_cold(file) for file in files_under(path)}))


def remove(path: Path) -> None:
    """Delete `path` and commit the deletion, so that its cost does not land in the next timing."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    fsync_path(path.parent)
    time.sleep(SETTLE_S)
