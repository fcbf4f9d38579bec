"""The seam to the file system: every system call that names a file, made as the kind of file system
needs it, and the ways to report or retry its errors. It must not know formats, tensors, or the
order of a commit. Tests replace Storage by doubles that record, fail, shorten or forget calls.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from fastckpt import _engine
from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError, StorageError, telling
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.storage import calls, lustre, policies, renames
from fastckpt.storage.direct_trial import DirectTrial
from fastckpt.storage.lustre_layout import Layout, Purpose
from fastckpt.storage.policies import LINGERING, REFUSALS, Policy

T = TypeVar("T")


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
    errno.ETIMEDOUT,  # it was waited for long enough
)
# Shortages of this process or machine, which say nothing about a disk.
OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
# How daemons that upload a file while it is written (rclone, mountpoint-s3, goofys) refuse a size
# or an offset that is not the next one.
_OUT_OF_SEQUENCE = frozenset(
    {errno.EPERM, errno.EINVAL, errno.ESPIPE, errno.ENOSYS, errno.EOPNOTSUPP}
)
_SEQUENTIAL = (
    "this mount seems to take files in sequence only, and a checkpoint is written in parallel: "
    "mount it with a cache for writes (rclone: --vfs-cache-mode writes), or save to another file "
    "system and copy"
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
# The mode of a new file, which others may not write to until it is whole: see Storage.widen().
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
    return f"{shown_size(needed)} are needed and {shown_size(left)} are left on the file system"


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
    """Calls a function that reads, and again after REREAD_PAUSES_S unless its error is lasting.

    A failed read says nothing about the bytes: descriptors or memory may have been short, a server
    may have restarted. So it must not pass for damage, nor end a load at once.

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
    """The real file system. Methods raise OSError as the system call does; callers use reported().

    Attributes:
        transfer: None, or a test double's function (kind, fd, memory, offset) -> bytes moved that
            replaces the engine's reads and writes; kind is "read" or "write". If there is one, the
            engine clones by clone_range(), too.
        direct_trial: measurements of file systems, which all storages of a process share.
    """

    transfer: Callable[[str, int, memoryview, int], int] | None = None
    direct_trial = DirectTrial()

    def __init_subclass__(cls) -> None:
        calls.note(cls, Storage)

    def create(self, path: str, mode: int, purpose: Purpose | None = None) -> int:
        """Creates a file, which must not exist, for reading and writing; returns its descriptor.

        Args:
            purpose: decides the layout of a file that may be long, where files have layouts.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # O_EXCL follows no link
        if purpose is None or not lustre.is_lustre(os.path.dirname(path)):
            return _noted(os.open(path, flags, mode))
        fd, why = lustre.create(path, flags, mode, purpose)
        _noted(fd)
        name, policy = _policy(fd)
        _descriptors[fd] = name, policy._replace(why=f"{policy.why}; {why}")
        return fd

    def another_layout(self, fd: int) -> Layout | None:
        """Returns a layout with which a file that found no room may find some when it is made anew;
        None where all files share the room.
        """
        return lustre.another_layout(fd) if _policy(fd)[0] == "lustre" else None

    def refusal_text(self, fd: int, number: int) -> str:
        """Explains the errno with which a new file was refused its size or a block: which part of
        the file system is full, or that the mount takes bytes in sequence only. Returns "" if
        nothing more is known, and raises nothing, since the error being explained counts.
        """
        try:
            name = _policy(fd)[0]
            if number == errno.ENOSPC:
                return lustre.targets_text(fd) if name == "lustre" else ""
        except OSError:
            return ""
        if name.startswith("fuse") and number in _OUT_OF_SEQUENCE:
            return _SEQUENTIAL
        return ""

    def open(self, path: str) -> int:
        """Opens a file for reading, without waiting for the other end of a FIFO."""
        return _noted(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))

    def open_known(self, path: str) -> int:
        """Opens for reading a file that was there a moment ago, or that another machine sees."""
        try:
            return self.open(path)
        except FileNotFoundError:
            if not self.look_again(path):
                raise
            return self.open(path)

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

    def open_to_lock(self, path: str) -> int:
        """Opens a file for lock(), for writing too if possible, as NFS needs it (flock(2))."""
        flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return _noted(os.open(path, os.O_RDWR | flags))
        except PermissionError:  # local file systems lock what is open for reading, too
            return _noted(os.open(path, os.O_RDONLY | flags))

    def open_to_write(self, path: str) -> int:
        """Opens a file that another rank has made, for reading and writing, through no link."""
        found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:  # anew, since a descriptor keeps O_NOFOLLOW, with which cuFile refuses it
            return _noted(os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_CLOEXEC))
        finally:
            os.close(found)

    def scratch(self) -> int:
        """Makes a file in memory, without a name, that is gone when closed (memfd_create(2))."""
        return _noted(os.memfd_create("fastckpt", os.MFD_CLOEXEC))

    def reopen(self, fd: int) -> int:
        """Opens a file once more, for reading and writing, with none of the descriptor's flags."""
        return _noted(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))

    def close(self, fd: int) -> None:
        """Closes a descriptor and releases its lock, even if a child of fork() has a copy."""
        _descriptors.pop(fd, None)
        self.direct_trial.closed(fd)
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Takes the file's lock, without waiting; returns False if another process holds it.

        Raises OSError if neither is known, as EBADF on NFS, which locks only what was opened for
        writing: see open_to_lock().
        """
        return _locked(fd, fcntl.LOCK_EX)

    def lock_shared(self, fd: int) -> bool:
        """Shares the file's lock, without waiting; returns False if another one has it alone."""
        return _locked(fd, fcntl.LOCK_SH)

    def identity(self, fd: int) -> tuple[int, int]:
        """Returns the device and the number that tell an open file from every other one."""
        status = os.fstat(fd)
        return status.st_dev, status.st_ino

    def is_removed(self, fd: int, path: str) -> bool:
        """Whether a file that was opened by its path has lost that name."""
        try:
            if os.fstat(fd).st_nlink == 0:
                return True
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS's word for a removed file
                raise
            return True
        # A client may keep it under another name (policies.LINGERING), which counts as a link.
        return self.status(path) is None

    def open_regular(self, path: str) -> int:
        """Opens a regular file for reading, not through a symbolic link.

        Raises:
            NoRegularFile: it was looked at, and is none.
            OSError: it cannot be opened; whatever the error says, it may be a regular file.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = _noted(os.open(path, flags))
        except OSError as error:
            # A link (ELOOP), a socket (ENXIO); or a refusal for the moment that only says so.
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise NoRegularFile(errno.EINVAL, "not a regular file", path) from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NoRegularFile(errno.EINVAL, "not a regular file", path)
        except OSError:
            Storage.close(self, fd)
            raise
        return fd

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        """Returns the content of a small regular file, nbytes_max of it at most."""

        def read() -> bytes:
            fd = self.open_regular(path)
            try:
                return self.read_at(fd, min(nbytes_max, self.size(fd)), 0)
            finally:
                with suppress(OSError):  # it loses nothing of what was read; the first error counts
                    self.close(fd)

        return from_the_path(read)

    def is_directory(self, path: str) -> bool:
        """Whether path is a directory, and no symbolic link to one."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False

    def leads_nowhere(self, path: str) -> bool:
        """Whether path is a symbolic link to nothing."""
        return os.path.islink(path) and not os.path.exists(path)

    def directories(self, path: str) -> list[str]:
        """Returns the names of a directory's directories, without symbolic links, in no order."""
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def make_directory(self, path: str) -> None:
        os.mkdir(path)

    def make_directories(self, path: str) -> None:
        """Makes a directory and its missing parents."""
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

    def clone_range(self, target: int, source: int, offset: int, nbytes: int) -> None:
        """Has a range of `target` share its blocks with the same range of `source`, until either is
        written to (ioctl_ficlonerange(2)). If the range ends off the blocks, it ends both files.
        """
        _engine.clone_range(target, source, offset, nbytes)

    def sync(self, fd: int) -> None:
        """Makes the file's data and size durable; reports write errors met since the last call."""
        policy = _policy(fd)[1]
        (os.fsync if policy.syncs_all else os.fdatasync)(fd)
        if policy.remote:  # a daemon without fsync tells of errors here: see flush()
            os.close(os.dup(fd))
        self.direct_trial.synced(fd, os.fstat(fd).st_size)

    def flush(self, fd: int) -> None:
        """Has a network file system report failed writes, which it does when a descriptor is
        closed (close(2)), be it a duplicate: closing that does not release the file's lock.
        """
        self.direct_trial.flushed(fd)
        os.close(os.dup(fd))

    def rename(self, source: str, target: str) -> None:
        renames.rename(source, target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def exchange(self, one: str, other: str) -> None:
        """Exchanges two names in one step, which not every file system can."""
        renames.exchange(one, other)

    def remove_tree(self, path: str) -> None:
        """Removes a directory and all that is in it."""
        shutil.rmtree(path)

    def touch(self, path: str) -> None:
        os.utime(path)

    def open_directory(self, path: str) -> int:
        """Opens a directory for a later sync_directory()."""
        return _noted(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def sync_directory(self, directory: str | int) -> None:
        """Makes the entries of a directory, given by its path or descriptor, durable."""
        if isinstance(directory, str):
            fd = Storage.open_directory(self, directory)
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

    def names(self, directory: str) -> list[str]:
        """Returns the names in a directory, without files that were removed and not freed yet."""
        return [name for name in os.listdir(directory) if not LINGERING.fullmatch(name)]

    def free_bytes(self, path: str) -> int:
        """Returns how many bytes may still be written to a path's file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def status(self, path: str) -> os.stat_result | None:
        """Returns stat(2) of a path, or None if nothing is there.

        Raises NoRegularFile if it is a symbolic link that leads in a circle.
        """
        try:
            return os.stat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if stat.S_ISLNK(os.lstat(path).st_mode):
                raise NoRegularFile(errno.ELOOP, "a link in a circle", path) from error
            raise

    def widen(self, fd: int) -> None:
        """Makes a file writable for everybody."""
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_IWOTH)

    def set_owner_and_mode(self, fd: int, like: os.stat_result) -> None:
        """Gives a file another one's permissions, and owner as far as this process may."""
        own = os.fstat(fd)
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
        """Writes all of data; with O_DIRECT its address, size and offset are aligned to pages."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view, offset)
            if written == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view, offset = view[written:], offset + written

    def patch(self, fd: int, content: bytes, offset: int) -> None:
        """Replaces a few bytes of a file by rewriting their pages, as O_DIRECT needs it."""
        begin = offset // PAGE_BYTES * PAGE_BYTES
        end = -(-(offset + len(content)) // PAGE_BYTES) * PAGE_BYTES
        pages = memoryview(mmap.mmap(-1, end - begin))
        nbytes = os.preadv(fd, [pages], begin)
        if nbytes < offset + len(content) - begin:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        pages[offset - begin : offset - begin + len(content)] = content
        self.write_at(fd, pages[:nbytes], begin)

    def policy(self, fd: int) -> tuple[str, Policy]:
        """Returns the name of an open file's file system, and its policy."""
        return _policy(fd)

    def set_direct(self, fd: int, *, writing: bool, offset: int | None = 0) -> str | None:
        """Switches an open file to O_DIRECT; returns None if that works, else why it does not.

        Tries one page at `offset`, if given: reads it, or with `writing` fills it with zeros, so
        that it must have no content yet.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:  # without O_NONBLOCK, which only the open needed, and with which cuFile refuses it
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
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
        """Returns the share of a file in the page cache, or 0.0 if the kernel does not tell it."""
        nbytes = self.size(fd)
        return max(0.0, _engine.cached_bytes(fd, nbytes) / nbytes) if nbytes else 0.0


calls.note(Storage, Storage)


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
