"""Makes written files and directories visible, and removes the leftovers of dead processes.

The module defines the names of temporaries, and the order of sync, rename and directory sync. It
must not know what a file contains or how it was written.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from fastckpt.errors import StorageError, telling
from fastckpt.storage.file_system import NEW_MODE, Storage, is_directory, patiently, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.owners import Owner, divided

log = logging.getLogger("fastckpt")

_NAME_BYTES_MAX = 150  # leaves room for the suffix below within the 255 bytes of a directory entry
# The errors of a file system that cannot exchange two names, or give a file another one.
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
# An uncommitted save of this age counts as dead if there is no other sign of whether it is alive.
DEAD_AFTER_S = 24 * 3600.0
# The name, inside a hidden directory, of a directory while it is being replaced.
REPLACED = ".replaced"
_KEPT_OPEN = (errno.EPERM, errno.EBUSY)
_CLOSED_S, _CLOSED_POLL_S = 0.5, 0.05


def _prefix(path: str) -> str:
    name = os.path.basename(path)
    if len(os.fsencode(name)) > _NAME_BYTES_MAX:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return f".{name}"


def temporary_path(path: str) -> str:
    """Returns a new name in path's directory that identifies this process as its owner."""
    return os.path.join(os.path.dirname(path), _prefix(path) + Owner.this().suffix())


def temporaries(storage: Storage, path: str) -> list[str]:
    """Returns the temporaries of all processes' saves to path."""
    directory = os.path.dirname(path)
    try:
        names = storage.names(directory)
    except OSError:
        return []
    return [os.path.join(directory, name) for name in temporaries_among(names, path)]


def temporaries_among(names: Iterable[str], path: str) -> list[str]:
    """Returns the names, among names in path's directory, of temporaries of saves to path."""
    prefix = _prefix(path)
    return [name for name in names if name.startswith(prefix) and _is_of(name, prefix)]


def _is_of(name: str, prefix: str) -> bool:
    return divided(name)[1] is not None and divided(name)[0] == prefix


def others_at_work(storage: Storage, path: str) -> list[int]:
    """Returns the pids of other live processes of this host that are saving to path."""
    owners = (divided(os.path.basename(name))[1] for name in temporaries(storage, path))
    beside = [owner for owner in owners if owner and owner.is_beside_this and not owner.is_gone]
    return sorted({owner.pid for owner in beside} - {os.getpid()})


def is_of_this_host(temporary: str) -> bool:
    """Returns whether a temporary's name identifies a process of this host as its owner."""
    owner = divided(os.path.basename(temporary))[1]
    return owner is not None and owner.is_of_this_host


def is_of_dead(storage: Storage, temporary: str) -> bool:
    """Returns whether a dead process of this host made a temporary, judging by the name.

    A name from another pid namespace of this host, or from before its last boot, identifies no
    process here. On local file systems the lock then decides. Other file systems may keep locks
    within each client, and several hosts may share a name. On them, the temporary must also be
    unchanged for DEAD_AFTER_S.
    """
    name = os.path.basename(temporary)
    owner = divided(name)[1]
    if owner is None or not owner.is_of_this_host or not name.startswith("."):
        return False
    if owner.is_beside_this:
        return owner.is_gone
    with suppress(OSError):  # it was removed in the meantime, or may not be touched
        fd = storage.open(temporary, "lock")
        try:
            may_be = is_old(storage, temporary) or not storage.policy(fd)[1].remote
            return may_be and storage.lock(fd)
        finally:
            close_quietly(storage, fd)
    return False


def is_old(storage: Storage, path: str) -> bool:
    """Returns whether a file of an uncommitted save has been unchanged for so long that the save is
    dead.
    """
    with suppress(OSError):  # its age is unknown
        status = storage.status(path)
        return status is not None and time.time() - status.st_mtime >= DEAD_AFTER_S
    return False


def remove_debris(storage: Storage, path: str) -> list[str]:
    """Removes temporaries of saves to path whose process is certainly dead; returns their paths.

    A process is certainly dead if is_of_dead() is true and no process locks the temporary. Where
    writers hold no lock (see claim()), the name alone decides.
    """
    directory = os.path.dirname(path)
    removed = []
    try:
        names = storage.names(directory)
    except (PermissionError, FileNotFoundError):
        return []  # the directory is missing or may not be listed: debris stays
    for name in temporaries_among(names, path):
        debris = os.path.join(directory, name)
        if is_of_dead(storage, debris) and remove_dead_file(storage, debris):
            removed.append(debris)
    return removed


def remove_dead_file(storage: Storage, debris: str) -> bool:
    """Removes a temporary whose name identifies a dead process; returns whether it was removed."""
    try:
        fd = storage.open(debris, "lock")
    except OSError:
        return False  # another process removed it, or it may not be touched
    try:
        is_dead = storage.lock(fd)
        if is_dead:
            storage.remove(debris)
        return is_dead
    except OSError:
        return False  # as above: debris that stays costs space, not correctness
    finally:
        close_quietly(storage, fd)


def claim(storage: Storage, fd: int, path: str) -> None:
    """Locks a file or directory that this process is creating, to mark that it is not debris.

    Where locks are mandatory, no lock is taken, because other ranks could not write to a locked
    file. There, and where the lock is refused, only the name protects the file.

    Raises:
        StorageError: the type of the file system cannot be determined (op "open").
    """
    with reported("open", path):
        is_mandatory = storage.policy(fd)[1].mandatory_locks
    if not is_mandatory:
        with suppress(OSError):  # the name still says that its process lives
            storage.lock(fd)


@contextmanager
def temporary(
    storage: Storage, path: str, purpose: Purpose | None = None
) -> Iterator[tuple[int, str]]:
    """Creates and claims a file next to path, for the body to write and rename.

    Yields the file's descriptor and name. The descriptor stays open and locked until the body ends.
    If the body fails, the file is removed.

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
        # The replaced file may have another owner, group or mode. Until the new file has the same
        # ones, only this user may open it; all ranks run as this user.
        mode = NEW_MODE if replaced is None else 0o600
        with _creating(storage, path):
            fd = storage.create(name, mode, purpose)
    try:
        claim(storage, fd, path)
        yield fd, name
    except BaseException:
        # Some daemons rename an open file or refuse to remove it: close it first.
        try:
            served = _is_served(storage, fd)
        finally:
            close_quietly(storage, fd)
        _remove_closed(storage, name, served)
        raise
    close_quietly(storage, fd)


@telling
def _creating(error: BaseException, storage: Storage, path: str) -> None:
    """Explains ENOENT for a new file in an existing directory: the file system, for example /proc,
    does not create files.
    """
    above = os.path.dirname(path)
    if isinstance(error, FileNotFoundError) and storage.status(above) is not None:
        detail = f"directory {above!r} exists, but its file system refuses to create a file there"
        raise StorageError("open", path, errno.ENOENT, detail=detail) from None


def _is_served(storage: Storage, fd: int) -> bool:
    """Returns whether a FUSE daemon serves a file's file system."""
    try:
        return storage.policy(fd)[0].startswith("fuse")
    except OSError:
        return False  # the earlier error counts


def _remove_closed(storage: Storage, name: str, served: bool) -> None:
    """Removes a file that was just closed.

    If a daemon serves the file, the removal is repeated for _CLOSED_S, because the daemon receives
    the close(2) later. Until then, it may refuse the removal, or create the file again afterwards
    (rclone uploads even an empty file).
    """
    until = time.monotonic() + _CLOSED_S
    while True:
        try:
            storage.remove(name)
        except OSError as error:
            # The file was renamed, or the next save removes it; the earlier error counts.
            if not served or error.errno not in (*_KEPT_OPEN, errno.ENOENT):
                return
        if not served or time.monotonic() >= until:
            return
        time.sleep(_CLOSED_POLL_S)


def settle(storage: Storage, fd: int, path: str, durable: bool) -> None:
    """Makes a file durable. Without `durable`, only reports errors of earlier writes."""
    with reported("sync" if durable else "flush", path):
        (storage.sync if durable else storage.flush)(fd)


def cut(storage: Storage, fd: int, path: str, nbytes: int) -> None:
    """Truncates a file that was written in complete pages to its size."""
    with reported("truncate", path):
        patiently(storage, fd, lambda: storage.truncate(fd, nbytes))


def real_path(path: str) -> str:
    """Returns the path without symbolic links, keeping a trailing separator."""
    real = os.path.realpath(path)
    return os.path.join(real, "") if path.endswith(os.sep) else real


def check_directory(storage: Storage, path: str) -> None:
    """Raises StorageError if a file's directory is missing, so that save() itself can fail. Other
    faults are only found when the background thread opens the file.
    """
    try:
        is_missing = storage.status(os.path.dirname(path)) is None
    except OSError:  # it may be temporary; opening the file decides
        return
    if is_missing:
        raise StorageError("open", path, errno.ENOENT, detail="create the directory first")


def close_quietly(storage: Storage, fd: int) -> None:
    """Closes a file whose content is already written out or no longer needed. An error loses no
    data, so it is only logged.
    """
    try:
        storage.close(fd)
    except OSError as error:
        log.warning("closing a file failed, but no data is lost: %s", error)


def take_permissions(storage: Storage, fd: int, temporary: str, path: str) -> None:
    """Sets the permissions of a temporary, open as fd, to those of the file that it will replace.
    If there is no such file, sets the permissions that the umask permits for a new file.

    The temporary may become read-only, so call this after the last rank has opened it.

    Raises:
        StorageError: op "open" or "set mode".
    """
    with reported("open", path):
        replaced = storage.status(path)
    if replaced is None and _umask() & stat.S_IWOTH:
        return
    with reported("set mode", temporary):
        storage.set_permissions(fd, replaced)


def publish(
    storage: Storage, temporary: str, path: str, durable: bool, fd: int | None = None
) -> int | None:
    """THE commit: renames a temporary, whose content is already durable, to its final name.

    Before the rename every reader sees the old checkpoint, and after it the new one. Until the
    directory is synced, a crash may restore the old checkpoint, which is still intact.

    Args:
        durable: whether the directory is synced.
        fd: the temporary, if it is open. The rename is then repeated while a server refuses it
            (patiently()).

    Returns:
        A descriptor of the replaced file; always None on network file systems. Closing it frees the
            file's blocks, which may take longer than the commit itself (up to 0.15 s/GiB on ext4
            with discard). So close it after the result of the save is set.

    Raises:
        StorageError: op "open directory" or "rename": nothing has changed. Op "sync directory": the
            error is `visible`.
    """
    with naming_in(storage, [os.path.dirname(path)] if durable else [], path) as make_durable:
        replaced = None if fd is None else _open_replaced(storage, fd, path)
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


def rename_to_free_name(storage: Storage, temporary: str, path: str) -> None:
    """Renames a file; raises OSError if the name is in use. On a file system without hard links, a
    file that gets the name at the same moment is replaced.
    """
    try:
        storage.link(temporary, path)
        with suppress(OSError):  # the file has its name; a later save removes the temporary
            storage.remove(temporary)
    except OSError as error:
        if error.errno not in _NOT_HERE or storage.status(path) is not None:
            raise
        storage.rename(temporary, path)


def _open_replaced(storage: Storage, fd: int, path: str) -> int | None:
    """Returns a descriptor of the file that fd's file is about to replace, on local file systems.

    On other file systems, the replacement of an open file is not atomic. An NFS client first
    renames the old file away, so for a moment no file has the name, or forever if the client dies
    at that moment. A CIFS client removes the old file, and its server refuses the rename until the
    old file is closed everywhere. Until then, neither file has the name.
    """
    with reported("open", path):
        if storage.policy(fd)[1].remote:
            return None
    try:
        return storage.open(path)
    except OSError:
        return None  # it is missing or not readable: the rename itself frees its blocks


@contextmanager
def naming_in(
    storage: Storage, directories: Collection[str], path: str
) -> Iterator[Callable[[], None]]:
    """Opens directories to be synced, before the body gives a checkpoint its name. An error at this
    point changes nothing.

    Args:
        directories: the directories in which names change; empty if the name need not be durable.
        path: the checkpoint's path, for messages.

    Yields:
        A function that syncs the directories, for the body to call after the rename. Its
            StorageError is `visible`, because every reader sees the checkpoint at that point.

    Raises:
        StorageError: op "open directory".
    """
    with ExitStack() as closing:
        opened = {}
        for directory in directories:
            with reported("open directory", directory):
                opened[directory] = storage.open(directory, "directory")
            closing.callback(close_quietly, storage, opened[directory])

        def make_durable() -> None:
            for directory, fd in opened.items():
                try:
                    storage.sync_directory(fd)
                except OSError as error:
                    number = error.errno or errno.EIO
                    detail = (
                        f"{path!r} is the new checkpoint and complete, but a crash of the machine "
                        "may undo the commit: keep older checkpoints, and save again"
                    )
                    raise StorageError(
                        "sync directory", directory, number, detail=detail, visible=True
                    ) from error

        yield make_durable


def replace_file(
    storage: Storage,
    path: str,
    content: bytes,
    durable: bool,
    *,
    commits: bool = True,
    names_are_durable: bool = False,
) -> int | None:
    """Replaces a file's content atomically: after a crash, the file has either the old or the new
    content.

    Args:
        durable: whether the content is synced before the rename.
        commits: whether this file makes a checkpoint visible. If so, and `durable`, the directory
            is synced before and after the rename.
        names_are_durable: whether the directory need not be synced before.

    Returns:
        A descriptor of the replaced file, or None; see publish().

    Raises:
        StorageError: the file has its old content. If the error is `visible`, it has the new
            content, but perhaps not durably.
    """
    directory = os.path.dirname(path)
    with temporary(storage, path) as (fd, name):
        with reported("write", path):
            patiently(storage, fd, lambda: storage.write_at(fd, content, 0))
        take_permissions(storage, fd, name, path)
        settle(storage, fd, path, durable)
        if (
            durable and commits and not names_are_durable
        ):  # a commit record may only name files whose names are durable
            with reported("sync directory", directory):
                storage.sync_directory(directory)
        return publish(storage, name, path, durable and commits, fd)


def make_directory(storage: Storage, path: str, durable: bool) -> None:
    """Creates a directory and its missing parents. If durable, syncs the parent of each.

    Raises:
        StorageError: op "make directory" or "sync directory".
    """
    missing = [path]
    with reported("make directory", path):
        while (parent := os.path.dirname(missing[-1])) and storage.status(parent) is None:
            missing.append(parent)
        storage.make_directory(path, parents=True)
    for directory in reversed(missing if durable else []):
        with reported("sync directory", os.path.dirname(directory)):
            storage.sync_directory(os.path.dirname(directory))


def remove_files(storage: Storage, paths: Sequence[str]) -> None:
    """Removes files that are no longer needed. If a removal fails, the next save removes the
    file.
    """
    for path in paths:
        try:
            storage.remove(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%r could not be removed: %s", path, error)


def publish_directory(
    storage: Storage, directory: str, path: str, aside: str, fd: int, *, replaces: bool = True
) -> None:
    """THE commit of a directory, whose content is already durable: gives it its final name.

    If a directory already has that name, the two directories exchange their names. Where the file
    system does not support this, the old directory is first moved into `aside`, and for a moment no
    directory has the name. If renaming the new directory then fails, the old directory is moved
    back. If this process is killed, remove_dead_directories() moves it back.

    Args:
        directory, path: the new directory's present and final path.
        aside: a temporary_path() of path; it need not exist.
        fd: any file open on that file system, for patiently().
        replaces: whether another directory may be replaced; if not, its existence is an error.
    """

    def exchange() -> bool:
        """Exchanges the two names; returns False if the file system does not support this."""
        try:
            storage.exchange(directory, path)
        except OSError as error:
            if error.errno in _NOT_HERE:
                return False
            raise
        return True

    def rename(source: str, target: str) -> None:
        patiently(storage, fd, lambda: storage.rename(source, target))

    if patiently(storage, fd, lambda: storage.status(path)) is None:
        rename(directory, path)
    elif not replaces:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    elif not patiently(storage, fd, exchange):
        storage.make_directory(aside, parents=True)
        replaced = os.path.join(aside, REPLACED)
        rename(path, replaced)
        try:
            rename(directory, path)
        except OSError:
            with suppress(OSError):  # the first error counts; the caller checks the name
                rename(replaced, path)
                storage.remove_directory(aside)
            raise


def remove_directory(storage: Storage, path: str, hidden: str) -> None:
    """Renames a directory to a hidden name and then removes it, so that no reader sees a half
    removed directory.
    """
    storage.rename(path, hidden)
    # Without this sync, a power cut might bring back the name but not all of the content.
    storage.sync_directory(os.path.dirname(path))
    storage.remove_directory(hidden, content=True)


def sync_directories(storage: Storage, directory: str) -> None:
    """Makes the entries of a directory, and of all directories below it, durable."""
    with reported("list", directory):
        paths = [os.path.join(directory, name) for name in storage.names(directory)]
        inner = [path for path in paths if is_directory(storage, path)]
    for path in inner:
        sync_directories(storage, path)
    with reported("sync directory", directory):
        storage.sync_directory(directory)


def remove_dead_directories(storage: Storage, parent: str) -> None:
    """Removes directories with temporary names whose process is dead, by the rules of
    remove_debris(). If such a process moved a directory aside but did not replace it, that
    directory is renamed back.
    """
    # The parent may be missing, or may be writable but not readable: then nothing is removed.
    with reported("list", parent), suppress(PermissionError, FileNotFoundError):
        for name in storage.names(parent):
            path = os.path.join(parent, name)
            if is_of_dead(storage, path) and is_directory(storage, path):
                remove_dead_directory(storage, path)


def remove_dead(storage: Storage, path: str) -> None:
    """Removes a temporary file or directory, assuming that its process is dead. Raises OSError if
    it cannot be determined which of the two it is.
    """
    (remove_dead_directory if is_directory(storage, path) else remove_dead_file)(storage, path)


def remove_dead_directory(storage: Storage, path: str) -> bool:
    """Removes a directory with a temporary name whose process is dead; returns whether it was
    removed.
    """
    with suppress(OSError):  # another process may also remove it; a leftover only costs space
        fd = storage.open(path)
        try:
            if storage.lock(fd):
                _put_back(storage, path)
                storage.remove_directory(path, content=True)
                return True
        finally:
            close_quietly(storage, fd)
    return False


def moved_aside(storage: Storage, aside: str) -> str | None:
    """Returns the original path of a directory that a killed save moved into `aside`; None if there
    is no such directory, or if that path is in use.
    """
    if not is_directory(storage, os.path.join(aside, REPLACED)):
        return None
    # A name that was too long for _prefix() is a hash here: still better than no name.
    path = os.path.join(os.path.dirname(aside), divided(os.path.basename(aside))[0][1:])
    return path if storage.status(path) is None else None


def _put_back(storage: Storage, aside: str) -> None:
    """Renames a directory that was moved aside back to its original name, if the name is free."""
    path = moved_aside(storage, aside)
    if path is not None:
        storage.rename(os.path.join(aside, REPLACED), path)
        log.warning("%r was renamed back: the save that was replacing it was killed", path)


def _umask() -> int:
    """Returns this process's umask from proc(5), because umask(2) would change it for all
    threads.
    """
    try:
        with open("/proc/thread-self/status", encoding="ascii", errors="replace") as status:
            return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration, ValueError):
        return stat.S_IWOTH  # the umask is unknown: give too few permissions rather than too many
