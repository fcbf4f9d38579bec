"""Making a written file visible, and removing what dead processes left behind.

Responsible for the names of temporaries and for the order rename / directory sync. It must not know
what the file contains or how it was written.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
from contextlib import suppress

from fastckpt.storage import Storage, reported

_NAME_BYTES_MAX = 150  # leaves room for the suffix below within the 255 bytes of a directory entry
_SUFFIX = re.compile(r"\.(?P<host>[^.]*)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp\Z")
_numbers = itertools.count()


def _prefix(path: str) -> str:
    name = os.path.basename(path)
    if len(os.fsencode(name)) > _NAME_BYTES_MAX:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname())[:40]


def _started(pid: int) -> int | None:
    """When the process began, in ticks since boot (proc(5), field 22 of stat); None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def temporary_path(path: str) -> str:
    """A new name beside path, in the same directory, that tells who owns it."""
    pid = os.getpid()
    suffix = f".{_host()}-{pid}-{_started(pid) or 0}-{next(_numbers)}.tmp"
    return os.path.join(os.path.dirname(path), _prefix(path) + suffix)


def remove_debris(storage: Storage, path: str) -> list[str]:
    """Removes temporaries of saves to path whose process is surely dead; returns their paths.

    Surely dead: the name says this host, no process with that pid and start time exists, and nobody
    holds the lock that a writer keeps on its temporary (which also covers other pid namespaces on
    this host).
    """
    directory, prefix = os.path.dirname(path), _prefix(path)
    removed = []
    try:
        names = storage.names(directory)
    except PermissionError:
        return []  # a directory that may be written to but not listed: debris stays
    for name in names:
        match = _SUFFIX.search(name)
        if match is None or name[: match.start()] != prefix or match["host"] != _host():
            continue
        alive = _started(int(match["pid"]))
        if alive is not None and alive == int(match["started"]):
            continue
        debris = os.path.join(directory, name)
        try:
            fd = storage.open(debris)
        except OSError:
            continue  # another process removed it, or it is not ours to touch
        try:
            if storage.lock(fd):
                storage.remove(debris)
                removed.append(debris)
        except OSError:
            continue  # as above: debris that stays costs space, not correctness
        finally:
            storage.close(fd)
    return removed


def publish(storage: Storage, temporary: str, path: str, durable: bool) -> int | None:
    """THE commit: gives the file, whose content is already durable, its final name.

    After rename every reader sees the new checkpoint, before it the old one. The directory is
    synced afterwards, for until then a crash may bring the old name's content back: still a whole
    checkpoint.

    Returns:
        A descriptor that keeps the replaced file, or None. Freeing its blocks takes a file system
            longer than the commit itself; it happens at close, which can wait until the commit was
            told.

    Raises:
        StorageError: of op "rename" or "sync directory".
    """
    try:
        replaced: int | None = storage.open(path)
    except OSError:
        replaced = None  # nothing there, or not readable: then rename itself frees the blocks
    try:
        with reported("rename", path):
            storage.rename(temporary, path)
        if durable:
            directory = os.path.dirname(path)
            with reported("sync directory", directory):
                storage.sync_directory(directory)
    except BaseException:
        if replaced is not None:
            with suppress(OSError):  # the error that brought us here is the one that counts
                storage.close(replaced)
        raise
    return replaced
