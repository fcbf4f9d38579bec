"""The objects that a process shares with the ranks of a group, from one save to the next.

The module keeps one connection to the store for each group.
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
    """Facts about saves to one file that the ranks of a group keep for their next saves.

    Attributes:
        told: the names of rank-specific values for which a warning was logged.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._lock = threading.Lock()
        self._unequal: frozenset[str] = frozenset()
        self.told = set[str]()

    def unequal(self) -> frozenset[str]:
        """Returns the names of tensors that differed between ranks, of which only rank 0's contents
        are saved.
        """
        return self._unequal

    def note_unequal(self, names: set[str]) -> None:
        with self._lock:
            self._unequal |= names
        for name in sorted(names):
            log.warning("%s differs between ranks: from now on, rank 0's contents are saved", name)


class PerGroup(Generic[T]):
    """One object for each group of ranks, kept as long as the group exists.

    Args:
        name: separates the keys of these objects from other keys in the store.
        make: creates the object at its first use, from the Coordinator of the group.
    """

    def __init__(self, name: str, make: Callable[[Coordinator], T]) -> None:
        self._name, self._make = name, make
        self._alone = make(Coordinator.alone())
        self._kept: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, group: Any) -> T:
        """Returns the object of a group; for None, the object of this process alone."""
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
    """Returns the memo that this process shares with the ranks of a group; for None, its own
    memo.
    """
    return _files.of(group)
