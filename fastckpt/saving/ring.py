"""Ring: the memory that a directory on a tmpfs may take, and the removed files there whose mapped
pages are used again.

The module must not know what the files hold.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeGuard

from fastckpt.arguments.environment import Memory
from fastckpt.arguments.quantities import shown_size
from fastckpt.engine.slot import Slot
from fastckpt.errors import StorageError
from fastckpt.plan.image import PAGE_BYTES
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Storage
from fastckpt.storage.machine import memory_left_bytes
from fastckpt.storage.policies import magic_of, recognised

__all__ = ["SMALL_BYTES", "Ring", "Slot"]

SMALL_BYTES = 16 << 20  # room for small files beside the large ones whose sizes are known
_BYTES_MIN = 1 << 20  # of a file that is worth the trouble
_BLOCK = 512  # the unit of st_blocks, see stat(2)


class Ring:
    """The memory of one directory, as this process sees it. Several processes may use it.

    What lies in the directories in it counts. One of these has the recycled files: a file is in use
    as long as somebody has its lock. Its name is that of the file it was, the `label`, and its
    inode's number: a process finds by it those that it has mapped, and two processes that map the
    same file keep each other from it.

    Args:
        storage, directory: the seam to the file system, and the directory.
        recycled: the name of the directory in it for recycled files, made when first needed.

    Attributes:
        nbytes: how many bytes may lie there, and (in words) why so many; see limit().
        recycled_max: how many of them recycled files may take while nobody uses them.
    """

    def __init__(self, storage: Storage, directory: str, recycled: str) -> None:
        self._storage, self._directory = storage, directory
        self._recycled = os.path.join(directory, recycled)
        self.nbytes, self.why = 0, ""
        self.recycled_max = 0
        # Also held to look which are in use, which takes their locks for a moment.
        self._lock = threading.Lock()
        self._slots: dict[int, Slot] = {}  # under _lock, by inode; also of files in use elsewhere
        self._reserving = threading.Lock()
        self._reserved: dict[str, int] = {}  # bytes of directories that are being filled, by name

    # ---- the budget

    def limit(self, memory: Memory) -> None:
        """Sets `nbytes`, once the file system and the limits of the machine and the container have
        been looked at.

        Raises:
            ValueError: the directory is not on a tmpfs, or there is less memory than the budget.
            StorageError: it cannot be listed.
        """
        path, asked = memory.path, memory.budget_bytes
        at, size_text = shlex.quote(path), "64g" if asked is None else f"{-(-asked >> 20)}m"
        there = path
        while not os.path.exists(there):  # it is made there with the first step
            there = os.path.dirname(there)
        kind = recognised(magic_of(there), None)
        if kind != "tmpfs" or not os.path.isdir(there):
            made = f"`mkdir -p {at} && mount -t tmpfs -o size={size_text} tmpfs {at}`"
            if os.path.isdir(path) and os.listdir(path):  # which a mount would hide
                made = "`mount -t tmpfs` on an empty directory"
            raise ValueError(
                f"Memory(directory={path!r}): {there!r} is "
                f"{kind if os.path.isdir(there) else 'not a directory'}, must be a tmpfs: pass a "
                "directory on a tmpfs, such as one below /dev/shm, or create a tmpfs before the "
                f"job, with {made} or as a volume with medium: Memory; to use other storage of the "
                f"node, pass local={path!r}"
            )
        found = os.statvfs(there)
        size, own = found.f_blocks * found.f_frsize, self.used()
        granted = memory_left_bytes() + own
        self.nbytes = self.recycled_max = asked or max(min(size, granted) // 2, SMALL_BYTES)
        self.why = shown_size(self.nbytes)
        if asked is None:
            self.why += f" (half of the tmpfs {path!r}, {shown_size(size)}, or of free memory)"
        if self.nbytes <= SMALL_BYTES and asked is not None:
            raise ValueError(
                f"Memory(budget={memory.budget!r}): must be above {shown_size(SMALL_BYTES)}, which "
                "are reserved for the index of a step"
            )
        if self.nbytes > granted:
            raise ValueError(
                f"Memory(budget={memory.budget!r}): the cgroup and the machine leave "
                f"{shown_size(granted)} to this process, including earlier steps, but the budget "
                f"needs {shown_size(self.nbytes)}: pass a smaller budget"
            )
        if self.nbytes > size:
            while not os.path.ismount(there):
                there = os.path.dirname(there)
            raise ValueError(
                f"Memory(budget={memory.budget!r}): {there!r} is a tmpfs of {shown_size(size)}, "
                f"but the budget needs {shown_size(self.nbytes)}: enlarge it with `mount -o "
                f"remount,size={size_text} {shlex.quote(there)}`, or in a container with "
                "--shm-size or a volume with medium: Memory"
            )

    def used(self) -> int:
        """Returns how many bytes lie there or are reserved. Raises StorageError."""
        return sum(self._used().values())

    def _used(self) -> dict[str, int]:
        storage, root, found = self._storage, self._directory, dict[str, int]()
        try:
            names = storage.names(root, directories=True)
        except FileNotFoundError:
            return found
        except OSError as error:
            raise StorageError("list", root, error.errno or errno.EIO) from error
        # Recycled files last: one that is kept meanwhile is counted, if twice.
        for name in sorted(names, key=os.path.basename(self._recycled).__eq__):
            path, nbytes = os.path.join(root, name), 0
            with suppress(OSError):  # it is being removed
                for entry in storage.names(path):
                    status = storage.status(os.path.join(path, entry))
                    nbytes += 0 if status is None else _nbytes(status)
            found[name] = max(nbytes, self._reserved.get(name, 0))
        return found

    def reserve(self, name: str, nbytes: int, recycled: int = 0) -> int | None:
        """Reserves bytes for a directory that is being filled, `recycled` of them in slots that are
        taken; returns None, or how many bytes are used if so many more are not left.
        """
        with self._reserving:
            used = self._used()
            total = sum(used.values())
            if total - recycled + nbytes > self.nbytes:
                return total
            kept = {each: its for each, its in self._reserved.items() if each in used}
            self._reserved = kept | {name: nbytes}
            return None

    def is_reserved(self, name: str) -> bool:
        """Returns whether files may still come into a directory."""
        return name in self._reserved

    def settle(self, name: str) -> None:
        """Takes back what is left of the bytes reserved for a directory: all of it has come."""
        self._reserved.pop(name, None)

    def make_room(self, used_max: int) -> bool:
        """Removes recycled files that nobody uses, the oldest first, while they take too much, or
        more than so many bytes are used in all; returns whether that is so no more. Raises
        StorageError.
        """
        with self._lock:
            found = self._found("")
            recycled = sum(_nbytes(its) for _, its in found)
            while found and (recycled > self.recycled_max or self.used() > used_max):
                path, its = found.pop()
                recycled -= _nbytes(its)
                self._remove(path)
            self._sweep()
        return self.used() <= used_max

    # ---- recycled files

    def keep(self, directory: str, names: Sequence[str]) -> list[str]:
        """Takes the files that can be recycled out of a directory that is being removed; returns
        the rest of the names.
        """
        rest = []
        for name in names:
            path = os.path.join(directory, name)
            try:
                status = self._storage.status(path, link=True)
                if name.startswith(".") or not _is_whole(status):
                    rest.append(name)
                    continue
                self._storage.make_directory(self._recycled, parents=True)
                self._storage.rename(path, self._path(f"{name}.{status.st_ino}"))
            except OSError:  # it is gone, or is removed as ever
                rest.append(name)
        return rest

    def take(self, label: str, nbytes: int) -> Slot | None:
        """Returns a recycled file with this label and as many pages, to be staged in; or None."""
        with self._lock:
            self._sweep()
            for path, status in self._found(label, nbytes):
                with suppress(OSError):  # somebody else was faster
                    slot = self._mapped(path, status)
                    if slot.take(path, nbytes):
                        return slot
        return None

    def has(self, label: str, nbytes: int) -> bool:
        """Returns whether there is a file that take() would look at."""
        with self._lock:
            return bool(self._found(label, nbytes))

    @contextmanager
    def lent(self, label: str, nbytes: int, path: str) -> Iterator[int | None]:
        """Gives the path to a recycled file as take() would return it, not mapped, and yields its
        descriptor; or None, with no file of that label left, instead of which one may be made.
        """
        with ExitStack() as lending:
            fd = None
            with self._lock:
                for found, _status in self._found(label, nbytes):
                    with suppress(OSError):  # somebody else was faster
                        slot = Slot(self._storage, found)
                        lending.callback(slot.close)
                        if slot.take(found, nbytes):
                            lending.callback(slot.release)
                            self._storage.rename(found, path)
                            fd = slot.fd
                            break
                if fd is None:
                    for found, _status in self._found(label):
                        self._remove(found)
            yield fd

    def prepare(self, label: str) -> None:
        """Maps the files with a label, so that no save has to wait for that."""
        with self._lock:
            for path, status in self._found(label):
                with suppress(OSError):  # a save that needs it finds out
                    self._mapped(path, status)

    def sweep(self) -> None:
        """Lets go of the memory of files that were removed."""
        with self._lock:
            self._sweep()

    def clear(self) -> None:
        """Removes all recycled files that nobody uses."""
        with self._lock:
            for path, _status in self._found(""):
                self._remove(path)
            self._sweep()

    def close(self) -> None:
        """Lets go of all that is not in use."""
        with self._lock:
            self._sweep(all_of_them=True)

    def _path(self, name: str) -> str:
        return os.path.join(self._recycled, name)

    def _found(self, label: str, nbytes: int | None = None) -> list[tuple[str, os.stat_result]]:
        """Returns recycled files with a label, or all, that nobody uses, with as many pages if a
        size is given; the newest first.
        """
        found = []
        with suppress(OSError):  # what cannot be looked at is not used
            for name in self._storage.names(self._recycled):
                if name.startswith(f"{label}.") or not label:
                    status = self._storage.status(self._path(name), link=True)
                    if not _is_whole(status) or self._is_used(status.st_ino, name):
                        continue
                    if nbytes is None or _pages(status.st_size) == _pages(nbytes):
                        found.append((self._path(name), status))
        return sorted(found, key=lambda pair: -pair[1].st_ctime_ns)

    def _is_used(self, inode: int, name: str) -> bool:
        slot = self._slots.get(inode)
        if slot is not None and slot.is_taken:
            return True
        with suppress(OSError):  # it is gone, or not ours to touch
            fd = self._storage.open(self._path(name), "lock")
            try:
                return not self._storage.lock(fd)
            finally:
                close_quietly(self._storage, fd)
        return True

    def _mapped(self, path: str, status: os.stat_result) -> Slot:
        slot = self._slots.get(status.st_ino)
        if slot is not None and _pages(slot.of_engine.nbytes) != _pages(status.st_size):
            slot.close()
            slot = None
        if slot is None:
            slot = Slot(self._storage, path)
            try:
                slot.map(status.st_size)
            except OSError:
                slot.close()
                raise
            self._slots[status.st_ino] = slot
        return slot

    def _remove(self, path: str) -> None:
        with suppress(OSError):  # it is gone
            fd = self._storage.open(path, "lock")
            try:
                if self._storage.lock(fd):
                    self._storage.remove(path)
            finally:
                close_quietly(self._storage, fd)

    def _sweep(self, all_of_them: bool = False) -> None:
        for inode, slot in [*self._slots.items()]:
            with suppress(OSError):  # then a later call looks again
                if not slot.is_taken and (all_of_them or slot.is_removed):
                    del self._slots[inode]
                    slot.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES)


def _nbytes(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK


def _is_whole(status: os.stat_result | None) -> TypeGuard[os.stat_result]:
    """Returns whether a file is worth the trouble, has this one name, and lacks no page, which
    there may be no memory for when it is touched.
    """
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and status.st_size >= _BYTES_MIN
        and _nbytes(status) == _pages(status.st_size) * PAGE_BYTES
    )
