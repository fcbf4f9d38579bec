"""The interface to the file system: all system calls that name a file, adapted to the type of the
file system, and functions that report or retry their errors.

The module must not know formats, tensors, or the order of a commit. Tests replace Storage by
doubles that record, fail, shorten or forget calls.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypeVar

from fastckpt import _engine
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StorageError, telling
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.storage import calls, lustre, policies
from fastckpt.storage.lustre_layout import Layout, Purpose
from fastckpt.storage.policies import LINGERING, REFUSALS, Policy

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2  # of renameat2(2)
# Its errors if the file system or the kernel does not support a flag.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
# Errors of a server or its network. All other errors come from checks before the change.
_LOST = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


def rename(source: str, target: str, replaces: bool = True) -> None:
    """Renames a file or directory, like rename(2).

    Args:
        replaces: whether an entry with the target's name is replaced. If not, its existence is an
            error. Where the file system cannot check this atomically, an entry that gets the name
            at the same moment is replaced.

    Raises:
        OSError: nothing has changed. ETIMEDOUT: it is unknown whether anything has changed.
    """
    try:
        if replaces:
            os.rename(source, target)
        else:
            _rename_to_free_name(source, target)
    except OSError as error:
        _raise_unless(error, lambda: _identity(source) is None and _identity(target) is not None)


def exchange(one: str, other: str) -> None:
    """Exchanges two names atomically by renameat2(2). Not every file system supports this. For
    errors see rename().
    """
    moved = _identity(one)
    try:
        _renameat2(one, other, _RENAME_EXCHANGE)
    except OSError as error:
        _raise_unless(error, lambda: moved is not None and _identity(other) == moved)


def _rename_to_free_name(source: str, target: str) -> None:
    try:
        _renameat2(source, target, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        if _identity(target) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)


def _renameat2(source: str, target: str, flag: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _raise_unless(error: OSError, is_done: Callable[[], bool]) -> None:
    """Raises the error of a change, except if the change was made despite the error."""
    if error.errno not in _LOST:
        raise error
    try:
        done = is_done()
    except OSError:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
    if not done:
        raise error


def _identity(path: str) -> tuple[int, int] | None:
    """Returns the device and inode of a path, or None if the path does not exist."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


T = TypeVar("T")
# The purposes of opening a file, see Storage.open().
Opening = Literal["read", "regular", "write", "lock", "directory"]


class NoRegularFile(OSError):
    """Raised if a path was examined and is not a regular file."""


# For how many seconds calls that a server refuses are repeated: an expired Kerberos ticket may be
# renewed, and then the save continues, since its bytes are still in memory.
PATIENCE_S = 60.0
_PAUSE_S = 0.25
# The pauses between attempts to read, in seconds.
REREAD_PAUSES_S = (0.02, 0.1, 0.4, 1.5, 3.0)
_LASTING = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP),
    errno.EBUSY,  # from listed_anew(), after many attempts
    *(errno.ETIMEDOUT, errno.EKEYREJECTED),  # after a long wait or many attempts
)
# Shortages of this process or machine: they say nothing about a disk.
OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
# Errors by which daemons that upload a file during its writes (rclone, mountpoint-s3, goofys)
# refuse a size, or an offset other than the next one.
_OUT_OF_SEQUENCE = frozenset(
    {errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.ENOSYS, errno.EOPNOTSUPP}
)
_SEQUENTIAL = (
    "this mount seems to accept sequential writes only, but a checkpoint is written in parallel: "
    "mount it with a cache for writes (rclone: --vfs-cache-mode writes), or save to another file "
    "system and copy the checkpoint"
)
# Pauses between attempts to read a file that another machine is replacing, in seconds.
_STALE_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
# For how many seconds a rank looks for a file that the first rank sees: NFS clients remember for up
# to 60 s that a name did not exist.
APPEARS_S = 75.0
# flock(2)'s errors if another process holds the lock (EACCES: CIFS), and if the file system has no
# locks at all.
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY})
# The mode of a new file: other users may not write to it until it is complete.
NEW_MODE = 0o664

# This process's descriptors, each with its file system once that is known. A child of fork() closes
# them, since its copies would keep locks and removed files alive.
_descriptors: dict[int, tuple[str, Policy] | None] = {}


def _registered(fd: int) -> int:
    _descriptors[fd] = None
    return fd


def _policy(fd: int) -> tuple[str, Policy]:
    entry = _descriptors.get(fd)
    if entry is None:
        entry = policies.policy_of(fd)
        if fd in _descriptors:
            _descriptors[fd] = entry
    return entry


def close_inherited() -> None:
    """Closes, in a child of fork(), the descriptors that the parent had open."""
    while _descriptors:
        with suppress(OSError):  # the parent closed it just before the fork
            os.close(_descriptors.popitem()[0])


@telling
def reported(error: BaseException, op: str, path: str, offset: int | None = None) -> None:
    """Converts the body's OSError to a StorageError that names the operation and the path."""
    if isinstance(error, OSError) and not isinstance(error, StorageError):
        raise StorageError(op, path, error.errno or errno.EIO, offset) from error


@telling
def shortage_told(error: BaseException, storage: Storage, fd: int, path: str, nbytes: int) -> None:
    """Converts the body's ENOSPC to a StorageError that states how much room is needed and free."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        detail = ""
        with suppress(OSError):  # the original error counts
            with calls.Call("status", path):
                allocated = os.fstat(fd).st_blocks * 512  # blocks may have been allocated in part
            detail = room_text(nbytes, storage.free_bytes(os.path.dirname(path)) + allocated)
        raise StorageError("allocate", path, errno.ENOSPC, detail=detail) from error


def room_text(needed: int, free: int) -> str:
    """Returns a text that states how much room is needed and how much is free."""
    return f"{shown_size(needed)} are needed, but {shown_size(free)} are free on the file system"


@telling
def naming(error: BaseException, path: str) -> None:
    """Prefixes the message of a format's error with the path."""
    if isinstance(error, StorageError) or str(error).startswith(repr(path)):
        return
    if isinstance(error, CheckpointError):
        raise type(error)(f"{path!r}: {error}") from None


def patiently(storage: Storage, fd: int, call: Callable[[], T]) -> T:
    """Calls an operation on an open file, and repeats it for at most PATIENCE_S while a remote
    server refuses it.

    A refused operation must change nothing. A sync is therefore never repeated: after a failed
    sync, the kernel may have dropped the bytes.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in REFUSALS or time.monotonic() >= until:
                raise
            if not storage.policy(fd)[1].remote:
                raise
        time.sleep(min(_PAUSE_S, max(0.0, until - time.monotonic())))


def persistently(read: Callable[[], T], path: str) -> T:
    """Calls a function that reads, and repeats it after REREAD_PAUSES_S if its error is not
    permanent. A failed read does not prove that the bytes are damaged, and should not end a load.

    Args:
        read: has no lasting effect if it fails.
        path: the path that it reads, for messages.

    Raises:
        StorageError: the last failure; ENOMEM for a MemoryError.
    """
    pauses = iter(REREAD_PAUSES_S)
    while True:
        try:
            return read()
        except (StorageError, MemoryError) as error:
            is_lasting = isinstance(error, StorageError) and error.errno in _LASTING
            pause_s = None if is_lasting else next(pauses, None)
            if pause_s is None:
                if isinstance(error, StorageError):
                    raise
                raise StorageError("allocate memory to read", path, errno.ENOMEM) from error
        time.sleep(pause_s)


def from_the_path(read: Callable[[], T]) -> T:
    """Calls a function that opens and reads a path, and repeats it a few times while it raises
    ESTALE. The error means that another machine has replaced the file, and the server no longer has
    the old one.
    """
    pauses = iter(_STALE_PAUSES_S)
    while True:
        try:
            return read()
        except OSError as error:  # a StorageError is one
            pause_s = next(pauses, None) if error.errno == errno.ESTALE else None
            if pause_s is None:
                raise
        time.sleep(pause_s)


class Storage:
    """The real file system. Methods raise the OSError of the system call, so use reported()."""

    def __init_subclass__(cls) -> None:
        calls.note(cls, Storage)

    def create(self, path: str, mode: int, purpose: Purpose | None = None) -> int:
        """Creates a new file for reading and writing; returns its descriptor. It is an error if the
        path exists. `purpose` determines the file's layout on Lustre.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link
        if purpose is None or not lustre.is_lustre(os.path.dirname(path)):
            return _registered(os.open(path, flags, mode))
        fd, why = lustre.create(path, flags, mode, purpose)
        name, policy = _policy(_registered(fd))
        _descriptors[fd] = name, policy._replace(why=f"{policy.why}; {why}")
        return fd

    def refusal(self, fd: int, number: int) -> Refusal:
        """Explains, from the errno, why a new file could not get its size or a block. Raises no
        error, so that the original error is reported.
        """
        try:
            name = _policy(fd)[0]
            if number == errno.ENOSPC and name == "lustre":
                return Refusal(lustre.targets_text(fd), lustre.another_layout(fd))
        except OSError:
            return Refusal("", None)
        is_sequential = name.startswith("fuse") and number in _OUT_OF_SEQUENCE
        return Refusal(_SEQUENTIAL if is_sequential else "", None)

    def open(self, file: str | int, how: Opening = "read") -> int:
        """Opens a file or directory, without waiting for the other end of a FIFO.

        Args:
            file: the path; or a descriptor, to open its file again without the descriptor's flags.
            how: the purpose. "read": to read. "regular": to read a regular file, but not through a
                symbolic link. "write": to read and write a file that another rank has created, but
                not through a link. "lock": to lock, and if possible also to write, because locks on
                NFS need a writable descriptor (flock(2)). "directory": to sync a directory.

        Raises:
            NoRegularFile: `how` is "regular", but the path is certainly not a regular file.
            OSError: the file cannot be opened. It may still be a regular file, whatever the error
                is.
        """
        path = f"/proc/self/fd/{file}" if isinstance(file, int) else file
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        if how == "regular":
            return _opened_regular(path, flags | os.O_NOFOLLOW)
        if how == "write":
            return _opened_to_write(path)
        if how == "lock":
            flags |= os.O_NOFOLLOW
            # Local file systems also lock files that are only open for reading.
            with suppress(PermissionError, IsADirectoryError):
                return _registered(os.open(path, os.O_RDWR | flags))
        if how == "directory":
            flags |= os.O_DIRECTORY
        return _registered(os.open(path, os.O_RDONLY | flags))

    def look_again(self, path: str) -> bool:
        """Makes this machine look up a path on the server again; returns False if the file system
        does not cache names.

        The method opens the directory. An NFS client then compares the directory's time with the
        server's, and drops its cache of missing names.
        """
        above = os.path.dirname(path)
        try:
            fd = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return above != path and Storage.look_again(self, above)
        try:
            if not policies.policy_of(fd)[1].caches_names:
                return False
        finally:
            os.close(fd)
        for directory in (above, path):
            with suppress(OSError):  # the path may be a file, or nothing
                os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        return True

    def close(self, fd: int) -> None:
        """Closes a descriptor and releases its lock, even if a child of fork() has a copy."""
        _descriptors.pop(fd, None)
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        """Takes the file's lock, exclusive or shared, without waiting; returns False if another
        process holds a conflicting lock.

        Raises OSError if the lock's state is unknown. An example is EBADF on NFS, where an
        exclusive lock needs a file that is open for writing.
        """
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno in _NO_LOCKS:
                return True
            raise
        return True

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        """Returns the content of a small regular file, at most nbytes_max bytes."""

        def read() -> bytes:
            fd = self.open(path, "regular")
            try:
                return self.read_at(fd, min(nbytes_max, self.fstat(fd).st_size), 0)
            finally:
                with suppress(OSError):  # no content is lost; the first error counts
                    self.close(fd)

        return from_the_path(read)

    def make_directory(self, path: str, *, parents: bool = False) -> None:
        """Creates a directory. With `parents`, it may already exist, and missing parents are
        created.
        """
        if parents:
            os.makedirs(path, exist_ok=True)
        else:
            os.mkdir(path)

    def remove_directory(self, path: str, *, content: bool = False) -> None:
        """Removes an empty directory. With `content`, removes a directory with all its content."""
        (shutil.rmtree if content else os.rmdir)(path)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Sets the file's size and allocates its blocks, so that direct writes need not extend the
        file.
        """
        if not _policy(fd)[1].allocates:
            os.ftruncate(fd, nbytes)
            return
        try:
            _engine.allocate(fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            os.ftruncate(fd, nbytes)

    def append(self, path: str, line: bytes) -> None:
        """Appends a line to a file in one write, and creates the file if it is missing. If a crash
        or a full disk cut off the previous line, that line is first ended.
        """
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            nbytes = os.fstat(fd).st_size
            if nbytes and os.pread(fd, 1, nbytes - 1) != b"\n":
                line = b"\n" + line
            if os.write(fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Makes the file's data and size durable. Reports write errors since the last call."""
        policy = _policy(fd)[1]
        (os.fsync if policy.syncs_all else os.fdatasync)(fd)
        if policy.remote:  # a daemon without fsync reports errors here: see flush()
            os.close(os.dup(fd))

    def flush(self, fd: int) -> None:
        """Makes a network file system report failed writes, which it does when any descriptor of
        the file is closed (close(2)). The method closes a duplicate, which does not release the
        file's lock.
        """
        os.close(os.dup(fd))

    def rename(self, source: str, target: str, *, replaces: bool = True) -> None:
        """Renames a file or directory. Without `replaces`, it is an error if the target's name is
        in use.
        """
        rename(source, target, replaces)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def exchange(self, one: str, other: str) -> None:
        """Exchanges two names atomically. Not every file system supports this."""
        exchange(one, other)

    def touch(self, path: str) -> None:
        os.utime(path)

    def sync_directory(self, directory: str | int) -> None:
        """Makes the entries of a directory durable. The directory is given by its path or
        descriptor.
        """
        if isinstance(directory, str):
            fd = Storage.open(self, directory, "directory")
            try:
                Storage.sync_directory(self, fd)
            finally:
                with suppress(OSError):  # the sync has already reported errors
                    Storage.close(self, fd)
            return
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some cannot sync directories
                raise

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_all(self, directory: str, names: Sequence[str]) -> None:
        """Removes files from a directory, ignoring missing ones. POSIX keeps the given order."""
        for name in names:
            with suppress(FileNotFoundError):  # another process has also removed it
                self.remove(os.path.join(directory, name))

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        """Returns the names in a directory, in no particular order. Files that were removed but are
        not yet freed are left out. With `directories`, returns only names of directories, without
        symbolic links.
        """
        if directories:
            with os.scandir(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return [name for name in os.listdir(directory) if not LINGERING.fullmatch(name)]

    def free_bytes(self, path: str) -> int:
        """Returns how many bytes can still be written to a path's file system."""
        statistics = os.statvfs(path)
        return statistics.f_bavail * statistics.f_frsize

    def fstat(self, fd: int) -> os.stat_result:
        """Returns fstat(2) of an open file."""
        return os.fstat(fd)

    def status(self, path: str, *, link: bool = False) -> os.stat_result | None:
        """Returns the stat(2) result for a path, or None if the path does not exist. With `link`,
        returns the status of a symbolic link itself.

        Raises NoRegularFile if the path is a symbolic link that forms a loop.
        """
        try:
            return os.stat(path, follow_symlinks=not link)
        except FileNotFoundError:
            return None
        except OSError as error:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                raise NoRegularFile(
                    errno.ELOOP, "a symbolic link that forms a loop", path
                ) from error
            raise

    def set_permissions(self, fd: int, like: os.stat_result | None) -> None:
        """Gives a file the permissions of another file, and its owner if this process may change
        it. If `like` is None, lets all users write to the file.
        """
        own = os.fstat(fd)
        if like is None:
            os.fchmod(fd, stat.S_IMODE(own.st_mode) | stat.S_IWOTH)
            return
        if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
            # Only root may change the owner, and not on every file system nor to an owner outside
            # its user namespace. Otherwise the file belongs to the user who saved it, as with cp.
            with suppress(OSError):
                os.fchown(fd, like.st_uid, like.st_gid)
        os.fchmod(fd, stat.S_IMODE(like.st_mode))

    def read_at(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Returns nbytes at an offset; fewer only at the end of the file. Meant for headers, not
        for bulk data.
        """
        parts = []
        while nbytes > 0:
            part = os.pread(fd, nbytes, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
            nbytes -= len(part)
        return b"".join(parts)

    def write_at(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Writes all of the data. With O_DIRECT, complete pages must be aligned in memory; a
        partial page is completed from the file and rewritten.
        """
        view = memoryview(data).cast("B")
        is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        if is_direct and (offset % PAGE_BYTES or len(view) % PAGE_BYTES):
            begin = offset // PAGE_BYTES * PAGE_BYTES
            end = -(-(offset + len(view)) // PAGE_BYTES) * PAGE_BYTES
            pages = memoryview(mmap.mmap(-1, end - begin))
            nbytes = os.preadv(fd, [pages], begin)
            if nbytes < offset + len(view) - begin:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            pages[offset - begin : offset - begin + len(view)] = view
            view, offset = pages[:nbytes], begin
        while view:
            written = os.pwrite(fd, view, offset)
            if written == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view, offset = view[written:], offset + written

    def policy(self, fd: int) -> tuple[str, Policy]:
        """Returns the name of an open file's file system, and its policy."""
        return _policy(fd)

    def set_direct(
        self, fd: int, *, writing: bool, offset: int | None = 0, cached_max: float = 1.0
    ) -> str | None:
        """Switches an open file to O_DIRECT; returns None if that works, otherwise the reason why
        not.

        If `offset` is given, tries to read the page there or, with `writing`, to fill it with
        zeros, so the page must not have content yet. If the page cache holds more than the share
        cached_max of the file, the method returns without trying.
        """
        if cached_max < 1.0 and cached_share(fd) > cached_max:
            return "most of the file is in the page cache"
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:  # without O_NONBLOCK: only the open needed it, and cuFile refuses it
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        except OSError as error:
            return f"open refused O_DIRECT: {os.strerror(error.errno or errno.EINVAL)}"
        if offset is None:
            return None
        with mmap.mmap(-1, PAGE_BYTES) as page:  # anonymous memory: aligned to a page
            try:
                os.pwritev(fd, [page], offset) if writing else os.preadv(fd, [page], offset)
            except OSError as error:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                return f"the first transfer refused O_DIRECT: {os.strerror(error.errno)}"
        return None


calls.note(Storage, Storage)


class Refusal(NamedTuple):
    """The reason why a new file could not get its size or a block, and a layout with which a new
    file may find room. The reason is "" if unknown; the layout is None if it makes no difference.
    """

    text: str
    layout: Layout | None


def scratch() -> int:
    """Creates an unnamed file in memory, which is freed when it is closed (memfd_create(2))."""
    return _registered(os.memfd_create("fastckpt", os.MFD_CLOEXEC))


def close_scratch(fd: int) -> None:
    """Closes a file that scratch() created."""
    _descriptors.pop(fd, None)
    os.close(fd)


def cached_share(fd: int) -> float:
    """Returns the share of a file that is in the page cache; 0.0 if the kernel does not report
    it.
    """
    nbytes = os.fstat(fd).st_size
    return max(0.0, _engine.cached_bytes(fd, nbytes) / nbytes) if nbytes else 0.0


def is_directory(storage: Storage, path: str) -> bool:
    """Returns whether path is a directory, and not a symbolic link to one."""
    status = storage.status(path, link=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


def known_status(storage: Storage, path: str, *, link: bool = False) -> os.stat_result | None:
    """Returns the status of a path, or None if it cannot be determined. For `link` see
    Storage.status().
    """
    try:
        return storage.status(path, link=link)
    except StorageError:  # an object store that refuses or does not respond must be reported
        raise
    except OSError:  # it cannot be determined
        return None


def _opened_regular(path: str, flags: int) -> int:
    try:
        fd = _registered(os.open(path, os.O_RDONLY | flags))
    except OSError as error:
        # A link (ELOOP), a socket (ENXIO), or a temporary failure with the same number.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise NoRegularFile(errno.EINVAL, "not a regular file", path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NoRegularFile(errno.EINVAL, "not a regular file", path)
    except OSError:
        _descriptors.pop(fd, None)
        os.close(fd)
        raise
    return fd


def _opened_to_write(path: str) -> int:
    if path.startswith("/proc/self/fd/"):  # the link to a file that is already open
        return _registered(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    path_fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:  # open it again, since a descriptor keeps O_NOFOLLOW, and cuFile refuses that flag
        return _registered(os.open(f"/proc/self/fd/{path_fd}", os.O_RDWR | os.O_CLOEXEC))
    finally:
        os.close(path_fd)
