"""MemoryBudget: how much of a node's memory the steps of a local tier on a tmpfs may take.

The module looks at the file system and at the limits of the machine and the container before
anything is written there.
"""

from __future__ import annotations

import os
import shlex
import threading
from contextlib import suppress

from fastckpt.arguments.environment import Memory
from fastckpt.arguments.quantities import shown_size
from fastckpt.formats.step_names import SPARES
from fastckpt.steps.store import StepStore
from fastckpt.storage.machine import memory_left_bytes
from fastckpt.storage.policies import magic_of, recognised

SPARE_BYTES = 16 << 20  # room for indexes and the manifest, beside shards and objects
_BLOCK = 512  # the unit of st_blocks, see stat(2)


class MemoryBudget:
    """The budget of one tier on this node.

    Args:
        memory: the caller's argument.
        steps: the steps of the tier.

    Attributes:
        nbytes: how many bytes the steps may take together.

    Raises:
        ValueError: the directory is not on a tmpfs, or there is less memory than the budget.
    """

    def __init__(self, memory: Memory, steps: StepStore) -> None:
        self._steps = steps
        self._promised: dict[str, int] = {}  # bytes of steps that are being written, by name
        self._lock = threading.Lock()  # held where they are looked at and changed
        path, asked = memory.path, memory.budget_bytes
        at, size_text = shlex.quote(path), "64g" if asked is None else f"{-(-asked >> 20)}m"
        there = path
        while not os.path.exists(there):  # it is made there with the first step
            there = os.path.dirname(there)
        kind = recognised(magic_of(there), None)
        if kind != "tmpfs" or not os.path.isdir(there):
            made = f"`mkdir -p {at} && mount -t tmpfs -o size={size_text} tmpfs {at}`"
            if os.path.isdir(path) and os.listdir(path):  # which a mount would hide
                made = "`mount -t tmpfs` on an empty one"
            raise ValueError(
                f"Memory(directory={path!r}): {there!r} is "
                f"{kind if os.path.isdir(there) else 'no directory'}, must be a tmpfs: pass a "
                "directory on one, such as one below /dev/shm, or make one by "
                f"{made} before the job, or a volume with medium: Memory; for storage of the node "
                f"pass local={path!r}"
            )
        found = os.statvfs(there)
        size, own = found.f_blocks * found.f_frsize, self.used()
        granted = memory_left_bytes() + own
        self.nbytes = asked or max(min(size, granted) // 2, SPARE_BYTES)
        self._told = shown_size(self.nbytes)
        if asked is None:
            self._told += f" (half of what {path!r}, a tmpfs of {shown_size(size)}, or memory has)"
        if self.nbytes <= SPARE_BYTES and asked is not None:
            raise ValueError(
                f"Memory(budget={memory.budget!r}): must be above {shown_size(SPARE_BYTES)}, which "
                "are kept for the index of a step"
            )
        if self.nbytes > granted:
            raise ValueError(
                f"Memory(budget={memory.budget!r}): the memory that is left to this process, or "
                f"taken by earlier steps, is {shown_size(granted)} by the limits of its cgroup and "
                f"machine; the budget needs {shown_size(self.nbytes)}: pass less"
            )
        if self.nbytes > size:
            while not os.path.ismount(there):
                there = os.path.dirname(there)
            raise ValueError(
                f"Memory(budget={memory.budget!r}): {there!r} is a tmpfs of {shown_size(size)}, "
                f"the budget needs {shown_size(self.nbytes)}: enlarge it by `mount -o remount,"
                f"size={size_text} {shlex.quote(there)}`, that of a container by --shm-size or a "
                "volume with medium: Memory"
            )

    def used(self) -> int:
        """Returns how many bytes the steps and spares take, with those promised to steps that are
        being written.
        """
        return sum(map(self._size_of, [*self._steps.names(), SPARES]))

    def _size_of(self, name: str) -> int:
        storage, path, nbytes = self._steps.storage, self._steps.path(name), 0
        with suppress(OSError):  # the step is being removed
            for entry in storage.names(path):
                status = storage.status(os.path.join(path, entry))
                nbytes += 0 if status is None else status.st_blocks * _BLOCK
        return max(nbytes, self._promised.get(name, 0))

    def awaits(self, name: str) -> bool:
        """Returns whether files of a step may still arrive."""
        return name in self._promised

    def settle(self, name: str) -> None:
        """Takes back what is left of the bytes promised to a step: all of it has arrived."""
        self._promised.pop(name, None)

    def take(self, name: str, nbytes: int, landed: int = 0) -> str:
        """Promises bytes to a step that is being written, `landed` of them in spares that it has
        taken; or says in words why not.
        """
        with self._lock:
            used = self.used()
            if used - landed + nbytes <= self.nbytes:
                there = {*self._steps.names()}
                kept = {each: its for each, its in self._promised.items() if each in there}
                self._promised = kept | {name: nbytes}
                return ""
        needed_mib = -(-(used - landed + nbytes) >> 20)
        return (
            f"has a budget of {self._told} on this node: the step needs {shown_size(nbytes)}, "
            f"{shown_size(SPARE_BYTES)} of it for indexes, and steps that have to stay take "
            f"{shown_size(used)}; Memory(budget='{needed_mib}MiB') would keep it there"
        )
