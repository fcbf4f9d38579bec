"""A process keeps here what it shares with the ranks of a group, from one save to the next.

Responsible for one connection to the store for each group. It must not know what is saved.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from fastckpt.ranks.coordinator import Coordinator

log = logging.getLogger("fastckpt")


class Together:
    """Ranks of one group keep what they have agreed on, for the files that they save together.

    Args:
        coordinator: speaks to the other ranks.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._lock = threading.Lock()
        self._unequal: frozenset[str] = frozenset()

    def unequal(self) -> frozenset[str]:
        """Names of tensors whose contents were found to differ: rank 0's count."""
        return self._unequal

    def note_unequal(self, names: set[str]) -> None:
        with self._lock:
            self._unequal |= names
        for name in sorted(names):
            log.warning("%s differs between ranks: from now on it is saved from rank 0", name)


_alone = Together(Coordinator.alone())


_groups: weakref.WeakKeyDictionary[Any, Together] = weakref.WeakKeyDictionary()


_groups_lock = threading.Lock()


def together(group: Any) -> Together:
    """Returns what this process shares with the ranks of a group (None: with nobody)."""
    if group is None:
        return _alone
    with _groups_lock:
        if group not in _groups:
            _groups[group] = Together(Coordinator.of_group(group, "files"))
        return _groups[group]
