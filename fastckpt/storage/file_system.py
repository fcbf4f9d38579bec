"""The seam to the file system: every system call that names a file, made as the kind of file system
needs it, and the ways to report or retry its errors. It must not know formats, tensors, or the
order of a commit. Tests replace Storage by doubles that record, fail, shorten or forget calls.
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
# Its errors where the file system, or the kernel, does not know a flag.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
# Errors of a server, or of the way to it: all others are checks, which come before the change.
_LOST = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


def rename(source: str, target: str, replaces: bool = True) -> None:
    """Renames a file or directory, as rename(2) does.

    Args:
        replaces: whether something may have the target's name. If not, that is an error; where the
            file system cannot promise it, what gets the name at this very moment is replaced.

    Raises:
        OSError: nothing has changed. ETIMEDOUT: nobody knows whether it has.
    """
    try:
        if replaces:
            os.rename(source, target)
        else:
            _rename_to_free_name(source, target)
    except OSError as error:
        _raise_unless(error, lambda: _identity(source) is None and _identity(target) is not None)


def exchange(one: str, other: str) -> None:
    """Exchanges two names in one step: renameat2(2), which not every file system has. Raises as
    rename().
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
    """Raises the error of a change, unless it is seen that the change was made."""
    if error.errno not in _LOST:
        raise error
    try:
        done = is_done()
    except OSError:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
    if not done:
        raise error


def _identity(path: str) -> tuple[int, int] | None:
    """Returns the device and inode of what has this name, or None."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


T = TypeVar("T")
# The purposes of opening a file, see Storage.open().
Opening = Literal["read", "regular", "write", "lock", "directory"]


class NoRegularFile(OSError):
    """Raised if a path was looked at, and stands for something other than a regular file."""


# For how many seconds a server that begins to refuse is asked again: an expired Kerberos ticket may
# be renewed, and then a save goes on, for its bytes are still in memory.
PATIENCE_S = 60.0
_PAUSE_S = 0.25
# The pauses between attempts to read, in seconds.
REREAD_PAUSES_S = (0.02, 0.1, 0.4, 1.5, 3.0)
_LASTING = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP),
    errno.EBUSY,  # from listed_anew(), which has tried often enough
    *(errno.ETIMEDOUT, errno.EKEYREJECTED),  # it was waited for, or asked, long enough
)
# Shortages of this process or machine, which say nothing about a disk.
OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
# How daemons that upload a file while it is written (rclone, mountpoint-s3, goofys) refuse a size
# or an offset that is not the next one.
_OUT_OF_SEQUENCE = frozenset(
    {errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.ENOSYS, errno.EOPNOTSUPP}
)
_SEQUENTIAL = (
    "this mount seems to accept sequential writes only, but a checkpoint is written in parallel: "
    "mount it with a cache for writes (rclone: --vfs-cache-mode writes), or save to another file "
    "system and copy the checkpoint"
)
# Pauses between attempts to read a file that another machine replaces meanwhile, in seconds.
_STALE_PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
# For how many seconds a rank looks for what the first rank has found: clients of NFS remember for
# up to 60 s that a name did not exist.
APPEARS_S = 75.0
# flock(2)'s errors where another process holds the lock (EACCES: CIFS), and where the file system
# has no locks, so that nobody holds one.
_HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.ENOTTY})
# The mode of a new file, which others may not write to until it is whole.
NEW_MODE = 0o664

# This process's descriptors, which a child of fork() closes, since they would keep locks and
# removed files alive there; with the file system of each, once that was found out.
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
    """Closes, in a child of fork(), the descriptors that the parent had open."""
    while _descriptors:
        with suppress(OSError):  # the parent closed it just before the fork
            os.close(_descriptors.popitem()[0])


@telling
def reported(error: BaseException, op: str, path: str, offset: int | None = None) -> None:
    """Turns the body's OSError into a StorageError that names the operation and the path."""
    if isinstance(error, OSError) and not isinstance(error, StorageError):
        raise StorageError(op, path, error.errno or errno.EIO, offset) from error


@telling
def shortage_told(error: BaseException, storage: Storage, fd: int, path: str, nbytes: int) -> None:
    """Turns the body's ENOSPC into a StorageError that says how much room is needed and left."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        detail = ""
        with suppress(OSError):  # the error being explained counts
            with calls.Call("status", path):
                taken = os.fstat(fd).st_blocks * 512  # blocks may have been allocated in part
            detail = room_text(nbytes, storage.free_bytes(os.path.dirname(path)) + taken)
        raise StorageError("allocate", path, errno.ENOSPC, detail=detail) from error


def room_text(needed: int, left: int) -> str:
    """Returns both sides of a shortage, in words."""
    return f"{shown_size(needed)} are needed, but {shown_size(left)} are free on the file system"


@telling
def naming(error: BaseException, path: str) -> None:
    """Puts the path in front of the message of a format's error."""
    if isinstance(error, StorageError) or str(error).startswith(repr(path)):
        return
    if isinstance(error, CheckpointError):
        raise type(error)(f"{path!r}: {error}") from None


def patiently(storage: Storage, fd: int, call: Callable[[], T]) -> T:
    """Calls an operation on an open file, and again while a remote server refuses it, for
    PATIENCE_S at most.

    The operation must change nothing when it is refused. So it is no sync, after whose failure the
    kernel may have dropped the bytes.
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
    """Calls a function that reads, and again after REREAD_PAUSES_S unless its error is lasting: a
    failed read says nothing about the bytes, so it must not pass for damage, nor end a load.

    Args:
        read: has no lasting effect if it fails.
        path: what it reads, for messages.

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
    """Calls a function that opens a path and reads it, and again a few times while that raises
    ESTALE: another machine has replaced the file, and the server no longer knows the old one.
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
    """The real file system. Methods raise OSError as the system call does, so use reported()."""

    def __init_subclass__(cls) -> None:
        calls.note(cls, Storage)

    def create(self, path: str, mode: int, purpose: Purpose | None = None) -> int:
        """Creates a file, which must not exist, for reading and writing; returns its descriptor.
        The purpose decides the layout of a file that may be long.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link
        if purpose is None or not lustre.is_lustre(os.path.dirname(path)):
            return _noted(os.open(path, flags, mode))
        fd, why = lustre.create(path, flags, mode, purpose)
        name, policy = _policy(_noted(fd))
        _descriptors[fd] = name, policy._replace(why=f"{policy.why}; {why}")
        return fd

    def refusal(self, fd: int, number: int) -> Refusal:
        """Explains the errno with which a new file was refused its size or a block. Raises nothing,
        since the error being explained counts.
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
            file: its path; or its descriptor, to open it once more, with none of that one's flags.
            how: "read"; "regular": to read a regular file, through no symbolic link; "write": for
                reading and writing what another rank has made, through no link; "lock": for lock(),
                for writing too if possible, as NFS needs it (flock(2)); "directory": for
                sync_directory().

        Raises:
            NoRegularFile: "regular" was asked for, it was looked at, and is none.
            OSError: it cannot be opened; whatever the error says, it may be a regular file.
        """
        path = f"/proc/self/fd/{file}" if isinstance(file, int) else file
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        if how == "regular":
            return _opened_regular(path, flags | os.O_NOFOLLOW)
        if how == "write":
            return _opened_to_write(path)
        if how == "lock":
            flags |= os.O_NOFOLLOW
            # Local file systems lock what is open for reading, too; directories are never written.
            with suppress(PermissionError, IsADirectoryError):
                return _noted(os.open(path, os.O_RDWR | flags))
        if how == "directory":
            flags |= os.O_DIRECTORY
        return _noted(os.open(path, os.O_RDONLY | flags))

    def look_again(self, path: str) -> bool:
        """Makes this machine ask the server again what a path names; returns False where the file
        system caches no names.

        Opening a directory does so: a client of NFS then compares the directory's time with the
        server's, and forgets which names it did not find there before.
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
        """Takes the file's lock, alone or shared, without waiting; returns False if another process
        holds it, so that this one cannot.

        Raises OSError if neither is known, as EBADF on NFS, which locks only what was opened for
        writing, unless it is shared.
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
        """Returns the content of a small regular file, nbytes_max of it at most."""

        def read() -> bytes:
            fd = self.open(path, "regular")
            try:
                return self.read_at(fd, min(nbytes_max, self.fstat(fd).st_size), 0)
            finally:
                with suppress(OSError):  # it loses nothing of what was read; the first error counts
                    self.close(fd)

        return from_the_path(read)

    def make_directory(self, path: str, *, parents: bool = False) -> None:
        """Makes a directory; with `parents`, it may be there, and those above it are made, too."""
        if parents:
            os.makedirs(path, exist_ok=True)
        else:
            os.mkdir(path)

    def remove_directory(self, path: str, *, content: bool = False) -> None:
        """Removes a directory that is empty, or with all that is in it."""
        (shutil.rmtree if content else os.rmdir)(path)

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

    def append(self, path: str, line: bytes) -> None:
        """Adds a line to a file, which is made if it is missing, by one write; if a crash or a full
        disk has cut the line before, it gets its end first.
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
        """Makes the file's data and size durable; reports write errors met since the last call."""
        policy = _policy(fd)[1]
        (os.fsync if policy.syncs_all else os.fdatasync)(fd)
        if policy.remote:  # a daemon without fsync tells of errors here: see flush()
            os.close(os.dup(fd))

    def flush(self, fd: int) -> None:
        """Has a network file system report failed writes, which it does when a descriptor is
        closed (close(2)), be it a duplicate: closing that does not release the file's lock.
        """
        os.close(os.dup(fd))

    def rename(self, source: str, target: str, *, replaces: bool = True) -> None:
        """Renames a file or directory; without `replaces` it is an error if something has the
        target's name.
        """
        rename(source, target, replaces)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def exchange(self, one: str, other: str) -> None:
        """Exchanges two names in one step, which not every file system can."""
        exchange(one, other)

    def touch(self, path: str) -> None:
        os.utime(path)

    def sync_directory(self, directory: str | int) -> None:
        """Makes the entries of a directory, given by its path or descriptor, durable."""
        if isinstance(directory, str):
            fd = Storage.open(self, directory, "directory")
            try:
                Storage.sync_directory(self, fd)
            finally:
                with suppress(OSError):  # the sync has reported every error that counts
                    Storage.close(self, fd)
            return
        try:
            os.fsync(directory)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some sync no directories
                raise

    def remove(self, path: str) -> None:
        os.unlink(path)

    def remove_all(self, directory: str, names: Sequence[str]) -> None:
        """Removes files of a directory, in this order where there is one; some may be gone."""
        for name in names:
            with suppress(FileNotFoundError):  # somebody else removes it, too
                self.remove(os.path.join(directory, name))

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        """Returns the names in a directory, in no order, without files that were removed and not
        freed yet; with `directories` only those of directories, symbolic links being none.
        """
        if directories:
            with os.scandir(directory) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return [name for name in os.listdir(directory) if not LINGERING.fullmatch(name)]

    def free_bytes(self, path: str) -> int:
        """Returns how many bytes may still be written to a path's file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def fstat(self, fd: int) -> os.stat_result:
        """Returns fstat(2) of an open file."""
        return os.fstat(fd)

    def status(self, path: str, *, link: bool = False) -> os.stat_result | None:
        """Returns stat(2) of a path, or None if nothing is there; with `link` that of a symbolic
        link itself.

        Raises NoRegularFile if it is a symbolic link that leads in a circle.
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
        """Gives a file another one's permissions, and owner as far as this process may; without
        another one, lets everybody write to it.
        """
        own = os.fstat(fd)
        if like is None:
            os.fchmod(fd, stat.S_IMODE(own.st_mode) | stat.S_IWOTH)
            return
        if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
            # Only root may give files away, not on every file system, and not to owners outside its
            # user namespace. The file then belongs to whoever saved it, as after cp.
            with suppress(OSError):
                os.fchown(fd, like.st_uid, like.st_gid)
        os.fchmod(fd, stat.S_IMODE(like.st_mode))

    def read_at(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Returns nbytes at an offset, fewer only at the end of the file: for headers, not bulk."""
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
        """Writes all of data. With O_DIRECT, whole pages have to be aligned in memory; of parts of
        pages, which must be in the file, the pages are rewritten.
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
        """Switches an open file to O_DIRECT; returns None if that works, else why it does not.

        Tries one page at `offset`, if given: reads it, or with `writing` fills it with zeros, so
        that it must have no content yet. Of a file of which a larger share than cached_max is in
        the page cache, nothing is tried.
        """
        if cached_max < 1.0 and cached_share(fd) > cached_max:
            return "most of the file is in the page cache"
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:  # without O_NONBLOCK, which only the open needed, and with which cuFile refuses it
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
    """The reason why a new file was refused its size or a block, in words, "" if it is not known;
    and a layout with which it may find room when it is made anew, None where all share the room.
    """

    text: str
    layout: Layout | None


def scratch() -> int:
    """Makes a file in memory, without a name, that is gone when closed (memfd_create(2))."""
    return _noted(os.memfd_create("fastckpt", os.MFD_CLOEXEC))


def close_scratch(fd: int) -> None:
    """Closes what scratch() has made."""
    _descriptors.pop(fd, None)
    os.close(fd)


def cached_share(fd: int) -> float:
    """Returns the share of a file in the page cache, or 0.0 if the kernel does not tell it."""
    nbytes = os.fstat(fd).st_size
    return max(0.0, _engine.cached_bytes(fd, nbytes) / nbytes) if nbytes else 0.0


def is_directory(storage: Storage, path: str) -> bool:
    """Whether path is a directory, and no symbolic link to one."""
    status = storage.status(path, link=True)
    return status is not None and stat.S_ISDIR(status.st_mode)


def known_status(storage: Storage, path: str, *, link: bool = False) -> os.stat_result | None:
    """Returns what lies at a path, if that can be told; `link` is as Storage.status()'s."""
    try:
        return storage.status(path, link=link)
    except StorageError:  # of a store that does not answer, or refuses: that is not nothing
        raise
    except OSError:  # nobody can tell
        return None


def _opened_regular(path: str, flags: int) -> int:
    try:
        fd = _noted(os.open(path, os.O_RDONLY | flags))
    except OSError as error:
        # A link (ELOOP), a socket (ENXIO); or a refusal for the moment that only says so.
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
    if path.startswith("/proc/self/fd/"):  # the link to what is open already
        return _noted(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:  # anew, since a descriptor keeps O_NOFOLLOW, with which cuFile refuses it
        return _noted(os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC))
    finally:
        os.close(found)
