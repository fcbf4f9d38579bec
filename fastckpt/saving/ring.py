"""Ring: the memory budget of a directory on a tmpfs, and its recycled files: removed files whose
mapped pages are used again.

The module must not know the contents of the files.
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

SMALL_BYTES = 16 << 20  # room for small files, in addition to large ones of known sizes
_BYTES_MIN = 1 << 20  # the least size of a file that is worth recycling
_BLOCK = 512  # the unit of st_blocks, see stat(2)


class Ring:
    """The memory of one directory, for this process. Several processes may use the directory.

    Files in the directory's subdirectories count. One subdirectory holds the recycled files. A
    recycled file is in use while a process has locked it. Its name consists of the `label`, which
    is the file's former name, and the inode number, by which a process recognises the files that it
    has mapped. If two processes map the same file, the lock permits only one of them to use it.

    Args:
        storage, directory: the Storage, and the directory.
        recycled: the name of the subdirectory for recycled files, which is created when first
            needed.

    Attributes:
        nbytes: the budget in bytes; `why` is the reason for it as a text. See limit().
        recycled_max: how many bytes of the budget unused recycled files may take.
    """

    def __init__(self, storage: Storage, directory: str, recycled: str) -> None:
        self._storage, self._directory = storage, directory
        self._recycled = os.path.join(directory, recycled)
        self.nbytes, self.why = 0, ""
        self.recycled_max = 0
        # Also held for the check whether files are in use, which locks each for a moment.
        self._lock = threading.Lock()
        self._slots: dict[
            int, Slot
        ] = {}  # under _lock, by inode; includes files in use by other processes
        self._reserving = threading.Lock()
        self._reserved: dict[str, int] = {}  # bytes reserved for incomplete directories, by name

    # ---- the budget

    def limit(self, memory: Memory) -> None:
        """Checks the file system and the machine's and container's limits, and sets `nbytes`.

        Raises:
            ValueError: the directory is not on a tmpfs, or there is less memory than the budget.
            StorageError: the directory cannot be listed.
        """
        path, budget = memory.path, memory.budget_bytes
        at, size_text = shlex.quote(path), "64g" if budget is None else f"{-(-budget >> 20)}m"
        there = path
        while not os.path.exists(there):  # the first step makes the directory
            there = os.path.dirname(there)
        kind = recognised(magic_of(there), None)
        if kind != "tmpfs" or not os.path.isdir(there):
            command = f"`mkdir -p {at} && mount -t tmpfs -o size={size_text} tmpfs {at}`"
            if os.path.isdir(path) and os.listdir(path):  # a mount would hide its content
                command = "`mount -t tmpfs` on an empty directory"
            raise ValueError(
                f"Memory(directory={path!r}): {there!r} is "
                f"{kind if os.path.isdir(there) else 'not a directory'}, must be a tmpfs: pass a "
                "directory on a tmpfs, such as one below /dev/shm, or create a tmpfs before the "
                f"job, with {command} or as a volume with medium: Memory; to use other storage of "
                f"the node, pass local={path!r}"
            )
        statistics = os.statvfs(there)
        size, own = statistics.f_blocks * statistics.f_frsize, self.used()
        granted = memory_left_bytes() + own
        self.nbytes = self.recycled_max = budget or max(min(size, granted) // 2, SMALL_BYTES)
        self.why = shown_size(self.nbytes)
        if budget is None:
            self.why += f" (half of the tmpfs {path!r}, {shown_size(size)}, or of free memory)"
        if self.nbytes <= SMALL_BYTES and budget is not None:
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
                f"but the budget needs {shown_size(self.nbytes)}: run `mount -o "
                f"remount,size={size_text} {shlex.quote(there)}`; in a container, use --shm-size, "
                'or in Kubernetes an emptyDir volume with "medium: Memory"'
            )

    def used(self) -> int:
        """Returns how many bytes are used or reserved. Raises StorageError."""
        return sum(self._used().values())

    def _used(self) -> dict[str, int]:
        storage, root, sizes = self._storage, self._directory, dict[str, int]()
        try:
            names = storage.names(root, directories=True)
        except FileNotFoundError:
            return sizes
        except OSError as error:
            raise StorageError("list", root, error.errno or errno.EIO) from error
        # Recycled files last: a file that is moved there now is counted, perhaps twice.
        for name in sorted(names, key=os.path.basename(self._recycled).__eq__):
            path, nbytes = os.path.join(root, name), 0
            with suppress(OSError):  # it is being removed
                for entry in storage.names(path):
                    status = storage.status(os.path.join(path, entry))
                    nbytes += 0 if status is None else _nbytes(status)
            sizes[name] = max(nbytes, self._reserved.get(name, 0))
        return sizes

    def reserve(self, name: str, nbytes: int, recycled: int = 0) -> int | None:
        """Reserves bytes for a new directory, of which `recycled` are in slots that are already
        taken. Returns None; or, if the budget does not suffice, the number of used bytes.
        """
        with self._reserving:
            used = self._used()
            total = sum(used.values())
            if total - recycled + nbytes > self.nbytes:
                return total
            reservations = {each: size for each, size in self._reserved.items() if each in used}
            self._reserved = reservations | {name: nbytes}
            return None

    def is_reserved(self, name: str) -> bool:
        """Returns whether a directory is still incomplete."""
        return name in self._reserved

    def settle(self, name: str) -> None:
        """Ends the reservation for a directory that is now complete."""
        self._reserved.pop(name, None)

    def make_room(self, used_max: int) -> bool:
        """Removes unused recycled files, the oldest first, while they take too much memory or more
        than used_max bytes are used in total; returns whether at most used_max are used now. Raises
        StorageError.
        """
        with self._lock:
            files = self._unused("")
            recycled = sum(_nbytes(status) for _, status in files)
            while files and (recycled > self.recycled_max or self.used() > used_max):
                path, status = files.pop()
                recycled -= _nbytes(status)
                self._remove(path)
            self._sweep()
        return self.used() <= used_max

    # ---- recycled files

    def keep(self, directory: str, names: Sequence[str]) -> list[str]:
        """Moves files that can be recycled out of a directory that is about to be removed; returns
        the names of the other files.
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
            except OSError:  # it is gone, or must be removed
                rest.append(name)
        return rest

    def take(self, label: str, nbytes: int) -> Slot | None:
        """Returns a recycled file with this label and size in pages, for staging; or None."""
        with self._lock:
            self._sweep()
            for path, status in self._unused(label, nbytes):
                with suppress(OSError):  # another process was faster
                    slot = self._mapped(path, status)
                    if slot.take(path, nbytes):
                        return slot
        return None

    def has(self, label: str, nbytes: int) -> bool:
        """Returns whether take() would find a candidate."""
        with self._lock:
            return bool(self._unused(label, nbytes))

    @contextmanager
    def lent(self, label: str, nbytes: int, path: str) -> Iterator[int | None]:
        """Renames a recycled file to this path and yields its descriptor. Chooses the file like
        take(), but does not map it. If there is none, removes all files with this label to make
        room for a new file, and yields None.
        """
        with ExitStack() as lending:
            fd = None
            with self._lock:
                for file, _status in self._unused(label, nbytes):
                    with suppress(OSError):  # another process was faster
                        slot = Slot(self._storage, file)
                        lending.callback(slot.close)
                        if slot.take(file, nbytes):
                            lending.callback(slot.release)
                            self._storage.rename(file, path)
                            fd = slot.fd
                            break
                if fd is None:
                    for file, _status in self._unused(label):
                        self._remove(file)
            yield fd

    def prepare(self, label: str) -> None:
        """Maps the files with a label, so that no save has to wait for the mapping."""
        with self._lock:
            for path, status in self._unused(label):
                with suppress(OSError):  # a save that needs the file gets the error
                    self._mapped(path, status)

    def sweep(self) -> None:
        """Frees the memory of files that were removed."""
        with self._lock:
            self._sweep()

    def clear(self) -> None:
        """Removes all unused recycled files."""
        with self._lock:
            for path, _status in self._unused(""):
                self._remove(path)
            self._sweep()

    def close(self) -> None:
        """Unmaps all files that are not in use."""
        with self._lock:
            self._sweep(all_of_them=True)

    def _path(self, name: str) -> str:
        return os.path.join(self._recycled, name)

    def _unused(self, label: str, nbytes: int | None = None) -> list[tuple[str, os.stat_result]]:
        """Returns the unused recycled files with a label ("": any), newest first. If a size is
        given, returns only files with the same number of pages.
        """
        files = []
        with suppress(OSError):  # skip files that cannot be examined
            for name in self._storage.names(self._recycled):
                if name.startswith(f"{label}.") or not label:
                    status = self._storage.status(self._path(name), link=True)
                    if not _is_whole(status) or self._is_used(status.st_ino, name):
                        continue
                    if nbytes is None or _pages(status.st_size) == _pages(nbytes):
                        files.append((self._path(name), status))
        return sorted(files, key=lambda pair: -pair[1].st_ctime_ns)

    def _is_used(self, inode: int, name: str) -> bool:
        slot = self._slots.get(inode)
        if slot is not None and slot.is_taken:
            return True
        with suppress(OSError):  # it is gone, or may not be touched
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
            with suppress(OSError):  # a later call tries again
                if not slot.is_taken and (all_of_them or slot.is_removed):
                    del self._slots[inode]
                    slot.close()


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES)


def _nbytes(status: os.stat_result) -> int:
    return status.st_blocks * _BLOCK


def _is_whole(status: os.stat_result | None) -> TypeGuard[os.stat_result]:
    """Returns whether a file is large enough, has only one name, and has all its pages. If a page
    is missing, there may be no memory for it at the first access.
    """
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and status.st_size >= _BYTES_MIN
        and _nbytes(status) == _pages(status.st_size) * PAGE_BYTES
    )
