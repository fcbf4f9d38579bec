"""Making a written file visible, and removing what dead processes left behind.

Responsible for temporaries and their names, and for the order sync / rename / directory sync. It
must not know what the file contains or how it was written.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from fastckpt.errors import StorageError
from fastckpt.storage.file_system import NEW_MODE, Storage, patiently, reported
from fastckpt.storage.lustre_layout import Purpose

log = logging.getLogger("fastckpt")

_NAME_BYTES_MAX = 150  # leaves room for the suffix below within the 255 bytes of a directory entry
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
_SUFFIX = re.compile(r"\.(?P<host>[^.]*)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp\Z")
_numbers = itertools.count()
# The name, in a hidden directory, of one that had the name which the hidden one is made of.
REPLACED = ".replaced"
_KEPT_OPEN = (errno.EPERM, errno.EBUSY)
_CLOSED_S, _CLOSED_POLL_S = 0.5, 0.05


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


def temporaries(storage: Storage, path: str) -> list[str]:
    """Temporaries of saves to path, whoever made them."""
    directory = os.path.dirname(path)
    try:
        names = storage.names(directory)
    except OSError:
        return []
    return [os.path.join(directory, name) for name in temporaries_among(names, path)]


def temporaries_among(names: Iterable[str], path: str) -> list[str]:
    """Those of the names in path's directory that are temporaries of saves to it."""
    prefix = _prefix(path)
    found = ((name, _SUFFIX.search(name)) for name in names)
    return [name for name, match in found if match and name[: match.start()] == prefix]


def others_at_work(storage: Storage, path: str) -> list[int]:
    """Other processes of this host, which live, that are saving to path now: their pids."""
    matches = (
        _SUFFIX.search(name)
        for name in temporaries(storage, path)
        if is_of_this_host(name) and not is_of_dead(name)
    )
    return sorted({int(match["pid"]) for match in matches if match} - {os.getpid()})


def is_of_this_host(temporary: str) -> bool:
    """Whether a temporary's name says that a process of this host made it."""
    match = _SUFFIX.search(os.path.basename(temporary))
    return match is not None and match["host"] == _host()


def is_of_dead(temporary: str) -> bool:
    """Whether its name says that a process of this host made it which is gone."""
    match = _SUFFIX.search(os.path.basename(temporary))
    if match is None or match["host"] != _host():
        return False
    alive = _started(int(match["pid"]))
    return alive is None or alive != int(match["started"])


def remove_debris(storage: Storage, path: str) -> list[str]:
    """Removes temporaries of saves to path whose process is surely dead; returns their paths.

    Surely dead: the name says this host, no process with that pid and start time exists, and nobody
    holds the lock that a writer keeps on its temporary (which also covers other pid namespaces on
    this host; where a writer keeps none, see claim(), the name alone tells).
    """
    directory, prefix = os.path.dirname(path), _prefix(path)
    removed = []
    try:
        names = storage.names(directory)
    except PermissionError:
        return []  # a directory that may be written to but not listed: debris stays
    for name in names:
        match = _SUFFIX.search(name)
        if match is None or name[: match.start()] != prefix or not is_of_dead(name):
            continue
        debris = os.path.join(directory, name)
        try:
            fd = storage.open_to_lock(debris)
        except OSError:
            continue  # another process removed it, or it is not ours to touch
        try:
            if storage.lock(fd):
                storage.remove(debris)
                removed.append(debris)
        except OSError:
            continue  # as above: debris that stays costs space, not correctness
        finally:
            close_quietly(storage, fd)
    return removed


def claim(storage: Storage, fd: int, path: str) -> None:
    """Locks what this process has begun to make, open as fd, so that nobody takes it for debris.

    Not where locks are mandatory, for other ranks could not write to it then. There, and where the
    lock is refused, its name alone tells that it is not: it has the host, the process, and when
    that began.

    Raises:
        StorageError: of op "open": the file system does not tell what it is.
    """
    with reported("open", path):
        is_mandatory = storage.policy(fd)[1].mandatory_locks
    if not is_mandatory:
        with suppress(OSError):  # the name tells
            storage.lock(fd)


@contextmanager
def temporary(
    storage: Storage, path: str, purpose: Purpose | None = None
) -> Iterator[tuple[int, str]]:
    """A new claimed file beside path, as (descriptor, name), which the body writes and renames.

    The descriptor, and with it the lock, is kept until then. The file is removed if the body fails.

    Raises:
        StorageError: path is a directory, or its directory is missing, full or not writable.
    """
    with reported("open", path):
        replaced = storage.status(path)
        is_file = replaced is None or stat.S_ISREG(replaced.st_mode)
        if not is_file or not os.path.basename(path):
            raise IsADirectoryError(errno.EISDIR, "not a regular file")
        remove_debris(storage, path)
        name = temporary_path(path)
        # Until it is whole nobody else may open what replaces a file that has another owner, group
        # or mode, and never may all the world write to it. Other ranks have the same owner.
        mode = NEW_MODE if replaced is None else 0o600
        with _creating(storage, path):
            fd = storage.create(name, mode, purpose)
    try:
        claim(storage, fd, path)
        yield fd, name
    except BaseException:
        # Closed first: some daemons keep an open file under another name, or refuse to remove it.
        try:
            served = _is_served(storage, fd)
        finally:
            close_quietly(storage, fd)
        _remove_closed(storage, name, served)
        raise
    close_quietly(storage, fd)


@contextmanager
def _creating(storage: Storage, path: str) -> Iterator[None]:
    """Says of a file system that has no such name, as /proc, and whose directory is there, that it
    makes none.
    """
    try:
        yield
    except FileNotFoundError:
        above = os.path.dirname(path)
        if storage.status(above) is None:
            raise
        detail = f"directory {above!r} exists, but its file system refuses to create a file there"
        raise StorageError("open", path, errno.ENOENT, detail=detail) from None


def _is_served(storage: Storage, fd: int) -> bool:
    """Whether a daemon serves the file system of a file."""
    try:
        return storage.policy(fd)[0].startswith("fuse")
    except OSError:
        return False  # the error that brought us here is the one that counts


def _remove_closed(storage: Storage, name: str, served: bool) -> None:
    """Removes a file that was closed just now.

    Args:
        storage, name: whose file.
        served: a daemon serves it, which hears of a close(2) later, and may refuse until then, or
            make the file anew (rclone uploads what is closed, be it empty).
    """
    until = time.monotonic() + _CLOSED_S
    while True:
        try:
            storage.remove(name)
        except OSError as error:
            # Gone by the rename, or left for the next save to remove: the first error counts.
            if not served or error.errno not in (*_KEPT_OPEN, errno.ENOENT):
                return
        if not served or time.monotonic() >= until:
            return
        time.sleep(_CLOSED_POLL_S)


def settle(storage: Storage, fd: int, path: str, durable: bool) -> None:
    """Makes sure that what was written has arrived: on the device, or else with the file system."""
    with reported("sync" if durable else "flush", path):
        (storage.sync if durable else storage.flush)(fd)


def cut(storage: Storage, fd: int, path: str, nbytes: int) -> None:
    """Gives a file that was written by whole pages its size."""
    with reported("truncate", path):
        patiently(storage, fd, lambda: storage.truncate(fd, nbytes))


def real_path(path: str) -> str:
    """Returns where a path leads to."""
    real = os.path.realpath(path)
    # realpath drops the claim to be a directory
    return os.path.join(real, "") if path.endswith(os.sep) else real


def check_directory(storage: Storage, path: str) -> None:
    """Raises StorageError, at once and in the caller's own call, if a file's directory is missing.

    What else prevents a save is found out when its file is opened, in the background.
    """
    try:
        is_missing = storage.status(os.path.dirname(path)) is None
    except OSError:  # it may pass, and opening the file is tried again where that helps
        return
    if is_missing:
        raise StorageError("open", path, errno.ENOENT)


def close_quietly(storage: Storage, fd: int) -> None:
    """Closes a file whose content has settled or no longer matters: no error means a loss."""
    try:
        storage.close(fd)
    except OSError as error:
        log.warning("close failed: %s", error)


def take_permissions(storage: Storage, fd: int, temporary: str, path: str) -> None:
    """Gives a temporary, open as fd, the permissions of the file it will replace, if there is one.

    Call it when no rank has to open the temporary any more: it may become read-only.

    Raises:
        StorageError: of op "open" or "set mode".
    """
    with reported("open", path):
        replaced = storage.status(path)
    if replaced is None and _umask() & stat.S_IWOTH:
        return
    with reported("set mode", temporary):
        if replaced is None:
            storage.widen(fd)
        else:
            storage.set_owner_and_mode(fd, replaced)


def publish(
    storage: Storage, temporary: str, path: str, durable: bool, fd: int | None = None
) -> int | None:
    """THE commit: gives the file, whose content is already durable, its final name.

    Args:
        storage, temporary, path: rename one to the other.
        durable: sync the directory.
        fd: of the file, if it is open: a server that refuses is then asked again (patiently()).

    After rename every reader sees the new checkpoint, before it the old one. The directory is
    synced afterwards, for until then a crash may bring the old name's content back: still a whole
    checkpoint.

    Returns:
        A descriptor that keeps the replaced file, or None. Freeing its blocks takes a file system
            longer than the commit itself (ext4 that discards them, up to 0.15 s/GiB); it happens at
            close, which can wait until the commit was told. Always None on a file system that is
            not local.

    Raises:
        StorageError: of op "open directory" or "rename", and nothing has changed; or of op "sync
            directory", and the error is `visible`.
    """
    with naming_in(storage, [os.path.dirname(path)] if durable else [], path) as make_durable:
        replaced = None if fd is None else _kept(storage, fd, path)
        try:
            with reported("rename", path):
                if fd is None:
                    storage.rename(temporary, path)
                else:
                    patiently(storage, fd, lambda: storage.rename(temporary, path))
            make_durable()
        except BaseException:
            if replaced is not None:
                close_quietly(storage, replaced)
            raise
    return replaced


def _kept(storage: Storage, fd: int, path: str) -> int | None:
    """A descriptor of what path names, if the file open as fd is about to replace that on a local
    file system.

    Elsewhere a file that is open cannot be replaced at once. A client of NFS first renames it away,
    so that for a moment nothing has the name, and for good if the client dies then. A client of
    CIFS is refused, removes it, is refused until nobody has it open, and then neither is there.
    """
    with reported("open", path):
        if storage.policy(fd)[1].remote:
            return None
    try:
        return storage.open(path)
    except OSError:
        return None  # nothing there, or not readable: then rename itself frees the blocks


@contextmanager
def naming_in(
    storage: Storage, directories: Collection[str], path: str
) -> Iterator[Callable[[], None]]:
    """Opens the directories in which the body gives a checkpoint its name, before it does so: what
    can fail without having changed anything fails here.

    Args:
        directories: none, if the name need not be durable.
        path: the name.

    Yields:
        A function for the body to call when the name has been given: makes that durable. It raises
            a StorageError that is `visible`, since every reader sees the checkpoint by then.

    Raises:
        StorageError: of op "open directory".
    """
    with ExitStack() as closing:
        opened = {}
        for directory in directories:
            with reported("open directory", directory):
                opened[directory] = storage.open_directory(directory)
            closing.callback(close_quietly, storage, opened[directory])

        def make_durable() -> None:
            for directory, fd in opened.items():
                try:
                    storage.sync_directory(fd)
                except OSError as error:
                    number = error.errno or errno.EIO
                    detail = (
                        f"{path!r} is the new checkpoint and whole, but a crash of the machine may "
                        "undo that: keep older checkpoints, and save again"
                    )
                    raise StorageError(
                        "sync directory", directory, number, detail=detail, visible=True
                    ) from error

        yield make_durable


def replace_file(
    storage: Storage, path: str, content: bytes, durable: bool, *, commits: bool = True
) -> int | None:
    """Gives a path new content at once: after a crash it has the old or the new one, whole.

    Args:
        storage, path, content: what is written where.
        durable: the content is synced before the path has it.
        commits: this makes a checkpoint visible: all names in the directory are durable before, and
            this one afterwards. False: another file does that later.

    Returns:
        A descriptor that keeps the file replaced, or None; closing it takes a while.

    Raises:
        StorageError: the path has what it had; or if the error is `visible`, the new content, but
            perhaps not durably.
    """
    directory = os.path.dirname(path)
    with temporary(storage, path) as (fd, name):
        with reported("write", path):
            patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        take_permissions(storage, fd, name, path)
        settle(storage, fd, path, durable)
        if durable and commits:
            with reported("sync directory", directory):
                storage.sync_directory(directory)
        return publish(storage, name, path, durable and commits, fd)


def make_directory(storage: Storage, path: str, durable: bool) -> None:
    """Makes a directory and those it lies in, where they are missing, each durably.

    Raises:
        StorageError: of op "make directory" or "sync directory".
    """
    missing = [path]
    with reported("make directory", path):
        while (parent := os.path.dirname(missing[-1])) and storage.status(parent) is None:
            missing.append(parent)
        storage.make_directories(path)
    for made in reversed(missing if durable else []):
        with reported("sync directory", os.path.dirname(made)):
            storage.sync_directory(os.path.dirname(made))


def remove_files(storage: Storage, paths: Sequence[str]) -> None:
    """Removes files that nothing needs; one that stays costs space, and the next save tries."""
    for path in paths:
        try:
            storage.remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%r could not be removed: %s", path, error)


def publish_directory(storage: Storage, directory: str, path: str, aside: str, fd: int) -> None:
    """THE commit of a directory, all in which is durable: gives it its final name.

    What had that name is in its place afterwards. Where a file system cannot exchange two names it
    is moved to `aside` first, and in between nothing has the name; it gets its name back if the new
    one is refused it, or, if this process is killed, by remove_dead_directories().

    Args:
        storage, directory, path: which is to be renamed to what.
        aside: a temporary_path() of path, be it there or not.
        fd: something open on that file system, whose server is asked again when it refuses
            (patiently()).
    """

    def exchange() -> bool:
        """False where the file system has no such call."""
        try:
            storage.exchange(directory, path)
        except OSError as error:
            if error.errno in _NO_EXCHANGE:
                return False
            raise
        return True

    def rename(source: str, target: str) -> None:
        patiently(storage, fd, lambda: storage.rename(source, target))

    if patiently(storage, fd, lambda: storage.status(path)) is None:
        rename(directory, path)
    elif not patiently(storage, fd, exchange):
        storage.make_directories(aside)
        replaced = os.path.join(aside, REPLACED)
        rename(path, replaced)
        try:
            rename(directory, path)
        except OSError:
            with suppress(OSError):  # the first error counts; the caller looks whether it is there
                rename(replaced, path)
                storage.remove_directory(aside)
            raise


def remove_directory(storage: Storage, path: str, hidden: str) -> None:
    """Removes a directory by way of a hidden name, so that no part of it ever has its own."""
    storage.rename(path, hidden)
    # Else a power cut might bring the name back, but not all that was removed of the directory.
    storage.sync_directory(os.path.dirname(path))
    storage.remove_tree(hidden)


def sync_directories(storage: Storage, directory: str) -> None:
    """Makes the entries of a directory and of those below it durable."""
    for name in storage.names(directory):
        path = os.path.join(directory, name)
        if storage.is_directory(path):
            sync_directories(storage, path)
    with reported("sync directory", directory):
        storage.sync_directory(directory)


def remove_dead_directories(storage: Storage, parent: str) -> None:
    """Removes directories under temporary names whose process is dead: see remove_debris(). What
    such a process had begun to replace, and did not, gets its name back.
    """
    with suppress(PermissionError):  # may be written to but not listed: they stay
        for name in storage.names(parent):
            path = os.path.join(parent, name)
            if not is_of_dead(path) or not storage.is_directory(path):
                continue
            with suppress(OSError):  # another process removes it: they only cost space
                fd = storage.open(path)
                try:
                    if storage.lock(fd):
                        _put_back(storage, path)
                        storage.remove_tree(path)
                finally:
                    close_quietly(storage, fd)


def _put_back(storage: Storage, aside: str) -> None:
    """Gives what is in a hidden directory its name back, if nothing has that."""
    replaced = os.path.join(aside, REPLACED)
    if not storage.is_directory(replaced):
        return
    # (Of a name that is too long for _prefix() this is a hash: better a strange name than none.)
    path = os.path.join(os.path.dirname(aside), _SUFFIX.sub("", os.path.basename(aside))[1:])
    if storage.status(path) is None:
        storage.rename(replaced, path)
        log.warning("%r is there again: a save was killed as it replaced that", path)


def _umask() -> int:
    """This process's, by proc(5): umask(2) tells it only by changing it, for all threads."""
    try:
        with open("/proc/thread-self/status", encoding="ascii", errors="replace") as status:
            return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration, ValueError):
        return stat.S_IWOTH  # not known: rather too little
