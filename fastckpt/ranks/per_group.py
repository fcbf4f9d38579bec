"""The things that a process shares with the ranks of a group, from one save to the next.

Responsible for one connection to the store for each group.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from fastckpt.ranks.coordinator import Coordinator

log = logging.getLogger("fastckpt")

T = TypeVar("T")


class GroupMemo:
    """Facts that the ranks of a group keep from one file that they save together to the next.

    Attributes:
        told: the names of values that were warned of, as ranks have them of their own.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._lock = threading.Lock()
        self._unequal: frozenset[str] = frozenset()
        self.told = set[str]()

    def unequal(self) -> frozenset[str]:
        """Returns the names of tensors that were found to differ, so that only rank 0's count."""
        return self._unequal

    def note_unequal(self, names: set[str]) -> None:
        with self._lock:
            self._unequal |= names
        for name in sorted(names):
            log.warning("%s differs between ranks: from now on it is saved from rank 0", name)


class PerGroup(Generic[T]):
    """One object for each group of ranks, kept for as long as the group exists.

    Args:
        name: tells the keys of these objects from others' in the store.
        make: makes the object at its first use, given the Coordinator of the group.
    """

    def __init__(self, name: str, make: Callable[[Coordinator], T]) -> None:
        self._name, self._make = name, make
        self._alone = make(Coordinator.alone())
        self._kept: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, group: Any) -> T:
        """Returns the object of a group, or that of this process alone (None)."""
        if group is None:
            return self._alone
        with self._lock:
            if group not in self._kept:
                self._kept[group] = self._make(Coordinator.of_group(group, self._name))
            return self._kept[group]


_files = PerGroup("files", GroupMemo)


def group_of_job() -> Any:
    """Returns the group of all ranks of the job; None if this process is the only one."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


def together(group: Any) -> GroupMemo:
    """Returns what this process shares with the ranks of a group (None: with nobody)."""
    return _files.of(group)
