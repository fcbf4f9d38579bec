"""The seam to the file system: every call that names a file.

Responsible for turning OSError into StorageError, and for doing each call as the kind of file
system asks for. It must not know formats, tensors, or in which order a commit calls it. Tests
replace Storage by doubles that record, fail, shorten or forget what they are told.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from fastckpt import _engine
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StorageError
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.storage import lustre, policies
from fastckpt.storage.direct_choice import DirectChoice
from fastckpt.storage.lustre_layout import Layout, Purpose
from fastckpt.storage.policies import LINGERING, REFUSALS, Policy

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)
T = TypeVar("T")

# How long a server that refuses what it just did is asked again, in seconds: a ticket of Kerberos
# that has expired may be renewed, and a save whose bytes are still there goes on then.
PATIENCE_S = 60.0
_PAUSE_S = 0.25
# How long to wait before a read that failed is tried again, in seconds.
REREAD_PAUSES_S = (0.02, 0.1, 0.4, 1.5, 3.0)
# What these say of a name was read: there is something else than a regular file.
NO_FILE = (errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)
_LASTING = (
    *(*NO_FILE, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG),
    errno.EBUSY,  # of listed_anew(), which has tried often enough
)
# What this process, or its machine, is short of says nothing about a disk.
OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
# What a daemon that uploads a file as it is written answers to a size or an offset that is not
# where it has come to: rclone, mountpoint-s3, goofys.
_OUT_OF_SEQUENCE = frozenset(
    {errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.ENOSYS, errno.EOPNOTSUPP}
)
_SEQUENTIAL = (
    "this mount seems to take files in sequence only, and a checkpoint is written in parallel: "
    "mount it with a cache for writes (rclone: --vfs-cache-mode writes), or save to another file "
    "system and copy"
)
# Between attempts at a file that others replace while it is read, in seconds.
_STALE_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
# How long a rank looks for what the first rank has found, in seconds: clients of NFS remember for
# up to 60 that something was not there.
APPEARS_S = 75.0
# What flock(2) says where another process has the lock (EACCES: CIFS), and where there are none, so
# that nobody has.
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY})
# Of a new file; who wants more than the world to read it widens it when it is whole.
NEW_MODE = 0o664

# Descriptors of this process, for a child of fork() to close: it would keep locks and removed files
# alive by them; and the file system of each, once it was looked at.
_descriptors: dict[int, tuple[str, Policy] | None] = {}


def _noted(fd: int) -> int:
    _descriptors[fd] = None
    return fd


def _policy(fd: int) -> tuple[str, Policy]:
    found = _descriptors.get(fd)
    if found is None:
        found = policies.policy_of(fd)
        if fd in _descriptors:
            _descriptors[fd] = found
    return found


def close_inherited() -> None:
    """In a child of fork(), closes what the parent had open."""
    while _descriptors:
        with suppress(OSError):  # closed by the parent just then
            os.close(_descriptors.popitem()[0])


@contextmanager
def reported(op: str, path: str, offset: int | None = None) -> Iterator[None]:
    """Turns an OSError of the body into a StorageError that names the operation and the path."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(op, path, error.errno or errno.EIO, offset) from error


@contextmanager
def shortage_told(storage: Storage, fd: int, path: str, nbytes: int) -> Iterator[None]:
    """Says how much room a file needs that the body could not give it, and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        detail = ""
        with suppress(OSError):  # the error that it is to explain is the one that counts
            taken = os.fstat(fd).st_blocks * 512  # it may have been allocated in part
            detail = room_text(nbytes, storage.free_bytes(os.path.dirname(path)) + taken)
        raise StorageError("allocate", path, errno.ENOSPC, detail=detail) from error


def room_text(needed: int, left: int) -> str:
    """Both sides of a shortage, in words."""
    return f"{shown_size(needed)} are needed and {shown_size(left)} are left on the file system"


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Puts the path in front of what a format says is wrong."""
    try:
        yield
    except CheckpointError as error:
        if isinstance(error, StorageError):
            raise
        raise type(error)(f"{path!r}: {error}") from None


def patiently(storage: Storage, fd: int, call: Callable[[], T]) -> T:
    """Calls what is done to an open file, again while a server refuses it, for PATIENCE_S at most.

    Only for calls that change nothing when they are refused, on what was open or writable a moment
    ago: so no sync, after whose failure the kernel may have dropped the bytes.
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
    """Calls what only reads, again after a pause while it fails, a few times at most; but not where
    waiting will not help.

    A read that failed says nothing of the bytes: descriptors or memory may have been short, a
    server may have restarted. So nobody may take it for damage, nor give up at the first.

    Args:
        read: what is called. It has no lasting effect if it fails.
        path: what it reads, for the message.

    Raises:
        StorageError: the last failure; a MemoryError as ENOMEM.
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
    """Calls what opens a path and reads it, from the beginning again where the server says that it
    no longer knows the file (ESTALE): another machine has replaced it meanwhile. A few times at
    most, then the error is the caller's.
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
    """The real file system. Methods raise OSError as the system call does; callers use reported().

    Attributes:
        transfer: None, or a function (kind, fd, memory, offset) -> bytes moved that replaces the
            engine's reads and writes. A test double sets it; kind is "read" or "write".
        direct_choice: what was measured of file systems; all storages of a process share it.
    """

    transfer: Callable[[str, int, memoryview, int], int] | None = None
    direct_choice = DirectChoice()

    def create(self, path: str, mode: int, purpose: Purpose | None = None) -> int:
        """Makes a new file for reading and writing; it must not exist. Returns its descriptor.

        Args:
            path, mode: as open(2)'s.
            purpose: what for, if it may be long, for file systems on which that decides how it is
                laid out.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        if purpose is None or not lustre.is_lustre(os.path.dirname(path)):
            return _noted(os.open(path, flags, mode))
        fd, why = lustre.create(path, flags, mode, purpose)
        _noted(fd)
        name, policy = _policy(fd)
        _descriptors[fd] = name, policy._replace(why=f"{policy.why}; {why}")
        return fd

    def another_layout(self, fd: int) -> Layout | None:
        """Where a file that found no room might find some: the layout of another one to be made in
        its place. None where all files share the room.
        """
        return lustre.another_layout(fd) if _policy(fd)[0] == "lustre" else None

    def refusal_text(self, fd: int, number: int) -> str:
        """What is known of why a new file could not be given its size, or a block: where the room
        was short, if not everywhere; or that the mount takes bytes in sequence only. Else "". It
        raises nothing: the error that it is to explain is the one that counts.

        Args:
            fd: the file.
            number: the error's errno.
        """
        try:
            name = _policy(fd)[0]
            if number == errno.ENOSPC:
                return lustre.targets_text(fd) if name == "lustre" else ""
        except OSError:
            return ""  # nothing is known
        if name.startswith("fuse") and number in _OUT_OF_SEQUENCE:
            return _SEQUENTIAL
        return ""

    def open(self, path: str) -> int:
        """Opens a file for reading; does not wait for the other end of a FIFO."""
        return _noted(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))

    def open_known(self, path: str) -> int:
        """Opens for reading what was there a moment ago, or is as another machine sees it."""
        try:
            return self.open(path)
        except FileNotFoundError:
            if not self.look_again(path):
                raise
            return self.open(path)

    def look_again(self, path: str) -> bool:
        """Makes this machine ask anew what a path names, where it may remember what another machine
        has changed; False where it does not.

        Opening a directory does that: a client of NFS compares its time with the server's then, and
        forgets which names it did not find there before.
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

    def open_to_lock(self, path: str) -> int:
        """Opens a file for lock(): for writing too, where that is allowed, without which a client
        of NFS refuses (flock(2)).
        """
        flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return _noted(os.open(path, os.O_RDWR | flags))
        except PermissionError:  # then no more than reading is needed, but on a network file system
            return _noted(os.open(path, os.O_RDONLY | flags))

    def open_to_write(self, path: str) -> int:
        """Opens a file that another rank has made."""
        return _noted(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))

    def scratch(self) -> int:
        """A file without a name, in memory; gone when it is closed (memfd_create(2))."""
        return _noted(os.memfd_create("fastckpt", os.MFD_CLOEXEC))

    def open_of(self, pid: int, fd: int) -> int:
        """Opens once more what another process has open, if this one may see its memory."""
        return _noted(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def close(self, fd: int) -> None:
        """Closes a descriptor; its lock is gone then, even where a child of fork() has a copy."""
        _descriptors.pop(fd, None)
        self.direct_choice.closed(fd)
        with suppress(OSError):  # where locks do not exist nobody holds one
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Takes the file's lock without waiting; False if another process holds it.

        An OSError tells neither, as EBADF of NFS, where only what was opened for writing, as by
        open_to_lock(), can be locked like this.
        """
        return _locked(fd, fcntl.LOCK_EX)

    def lock_shared(self, fd: int) -> bool:
        """Shares the file's lock, without waiting; False if another process holds it alone."""
        return _locked(fd, fcntl.LOCK_SH)

    def identity(self, fd: int) -> tuple[int, int]:
        """Returns what tells an open file from every other one, whatever its name."""
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def is_removed(self, fd: int, path: str) -> bool:
        """Whether a file that was opened by its path has lost that name."""
        try:
            if os.fstat(fd).st_nlink == 0:
                return True
        except OSError as error:
            if error.errno != errno.ESTALE:  # by which NFS says the same
                raise
            return True
        # A client that keeps it under another name (policies.LINGERING) counts that as a link.
        return self.status(path) is None

    def open_regular(self, path: str) -> int:
        """Opens a regular file, not through a symbolic link, for reading."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        fd = _noted(os.open(path, flags))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            Storage.close(self, fd)
            raise OSError(errno.EINVAL, "not a regular file")
        return fd

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        """The content of a small regular file, at most so much of it."""

        def read() -> bytes:
            fd = self.open_regular(path)
            try:
                return self.read_at(fd, min(nbytes_max, self.size(fd)), 0)
            finally:
                with suppress(OSError):  # what was read was read; the first error counts
                    self.close(fd)

        return from_the_path(read)

    def is_directory(self, path: str) -> bool:
        """Whether path is a directory, and no symbolic link to one."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False

    def leads_nowhere(self, path: str) -> bool:
        """Whether path is a symbolic link, and nothing is where it leads to."""
        return os.path.islink(path) and not os.path.exists(path)

    def directories(self, path: str) -> list[str]:
        """Names of the directories in a directory, in no order; symbolic links are none."""
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def make_directories(self, path: str) -> None:
        """Makes a directory and those it lies in, where they are missing."""
        os.makedirs(path, exist_ok=True)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Gives the file its size and its blocks, so that direct writes need not extend it."""
        if not _policy(fd)[1].allocates:
            os.ftruncate(fd, nbytes)
            return
        try:
            _engine.allocate(fd, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            os.ftruncate(fd, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """Makes the file's data and size durable; reports write errors met since the last call."""
        (os.fsync if _policy(fd)[1].syncs_all else os.fdatasync)(fd)
        self.direct_choice.synced(fd, os.fstat(fd).st_size)

    def flush(self, fd: int) -> None:
        """Lets the file system report what it could not write. A network file system does so when a
        descriptor is closed, even a duplicate, which leaves the file's lock alone: close(2).
        """
        self.direct_choice.flushed(fd)
        os.close(os.dup(fd))

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def exchange(self, one: str, other: str) -> None:
        """Swaps what two paths name, at once: renameat2(2), which not every file system has."""
        libc = ctypes.CDLL(None, use_errno=True)
        names = (os.fsencode(one), os.fsencode(other))
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def remove_tree(self, path: str) -> None:
        """Removes a directory with all that is in it."""
        shutil.rmtree(path)

    def touch(self, path: str) -> None:
        os.utime(path)

    def open_directory(self, path: str) -> int:
        """Opens a directory, to sync it later."""
        return _noted(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def sync_directory(self, directory: str | int) -> None:
        """Makes the entries of a directory durable. It is given as a path, or as open."""
        if isinstance(directory, str):
            fd = Storage.open_directory(self, directory)
            try:
                Storage.sync_directory(self, fd)
            finally:
                with suppress(OSError):  # the sync has told what there was to tell
                    Storage.close(self, fd)
            return
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without the notion
                raise

    def remove(self, path: str) -> None:
        os.unlink(path)

    def names(self, directory: str) -> list[str]:
        """Returns what is in a directory, but for files that are removed and not gone yet."""
        return [name for name in os.listdir(directory) if not LINGERING.fullmatch(name)]

    def free_bytes(self, path: str) -> int:
        """Returns how much may still be written to the file system that a path lies on."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def status(self, path: str) -> os.stat_result | None:
        """stat(2) of what path names, or None if nothing is there."""
        try:
            return os.stat(path)
        except FileNotFoundError:
            return None

    def widen(self, fd: int) -> None:
        """Lets everybody write to a file."""
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IWOTH)

    def set_owner_and_mode(self, fd: int, like: os.stat_result) -> None:
        """Gives a file the permissions of another, and its owner as far as this process may."""
        own = os.fstat(fd)
        if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
            try:
                os.fchown(fd, like.st_uid, like.st_gid)
            except OSError:
                # Only root gives files away, not to owners that a user namespace does not map, and
                # not on every file system: the file is then the saver's, as after cp.
                pass
        os.fchmod(fd, stat.S_IMODE(like.st_mode))

    def read_at(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Up to nbytes at offset, fewer only at the end of the file. For headers, not for bulk."""
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
        """Writes all of data, which is aligned to pages if the file was opened for O_DIRECT."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view, offset)
            if written == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view, offset = view[written:], offset + written

    def patch(self, fd: int, content: bytes, offset: int) -> None:
        """Replaces a few bytes of a file, direct or not, by rewriting the pages they lie in."""
        begin = offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(offset + len(content)) // PAGE_BYTES) * PAGE_BYTES
        pages = memoryview(mmap.mmap(-1, end - begin))
        nbytes = os.preadv(fd, [pages], begin)
        if nbytes < offset + len(content) - begin:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        pages[offset - begin : offset - begin + len(content)] = content
        self.write_at(fd, pages[:nbytes], begin)

    def policy(self, fd: int) -> tuple[str, Policy]:
        """Name of the file system the open file lies on, and its policy."""
        return _policy(fd)

    def set_direct(self, fd: int, *, writing: bool, offset: int | None = 0) -> str | None:
        """Switches an open file to O_DIRECT and, given an offset, tries one page; with `writing` by
        zeros, before there is content. Returns None if it works, or why not.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError as error:
            return f"O_DIRECT refused by open: {os.strerror(error.errno or errno.EINVAL)}"
        if offset is None:
            return None
        with mmap.mmap(-1, PAGE_BYTES) as page:  # anonymous memory: aligned to a page
            try:
                os.pwritev(fd, [page], offset) if writing else os.preadv(fd, [page], offset)
            except OSError as error:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                return f"O_DIRECT refused by the first transfer: {os.strerror(error.errno)}"
        return None

    def cached_share(self, fd: int) -> float:
        """Share of the file that is in the page cache, 0.0 where the kernel does not tell."""
        nbytes = self.size(fd)
        cached: int = _engine.cached_bytes(fd, nbytes)
        return max(0.0, cached / nbytes) if nbytes else 0.0


def _locked(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        if error.errno in _NO_LOCKS:
            return True
        raise
    return True


def is_written_through(path: str) -> bool:
    """Whether a path names what must be written to and cannot be replaced.

    That is a device, FIFO or socket, and anything named by a descriptor (/dev/fd, /proc/self/fd).
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # nothing there, or not reachable: opening it tells
    if os.path.realpath(os.path.dirname(os.path.abspath(path))).startswith("/proc/"):
        return True
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
