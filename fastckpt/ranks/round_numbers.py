"""The numbers of the rounds that this process has begun in one group under one name.

Responsible for numbering the rounds of a label, and for telling other ranks of them. It must not
know the store, nor what a round is for.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from typing import Any

_REMEMBERED = 4096  # the last rounds, and labels, of a run that saves for ever


class RoundNumbers:
    """The rounds of one rank, over the life of its process.

    The training thread begins rounds without their final numbers. They get these in the background,
    where a rank that missed a call skips the numbers that the others are through with.

    Attributes:
        prefix: the prefix of the keys in the store; "" until a first connection has found it.
        lock: guards state that only the background uses.
        pid: the number of the process.
        stops: numbers the agreements on a stop (see stop.py), which are no rounds.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.stops = itertools.count()
        # begin() takes no lock: after a fork, a thread that no longer exists could hold it.
        self._next: dict[str, int] = {}
        self._order: dict[str, int] = {}
        self._begun = itertools.count()
        self._last: str | None = None
        self._why = ""
        self._under_way: set[str] = set()
        self._taken: dict[str, set[int]] = {}  # under lock

    def begin(self, label: str) -> int:
        """Returns the number of a new round of a label."""
        number = self._next.pop(label, 0)
        self._next[label] = number + 1  # taken out and put in again, so that it is the newest
        _forget_oldest(self._next)
        self._note(name_of(label, number))
        return number

    def _note(self, name: str) -> None:
        self._under_way.add(name)
        self._order[name] = next(self._begun)
        self._last = name
        _forget_oldest(self._order)

    def take(self, label: str, number: int) -> int:
        """Returns the final number of a round that was begun with this one."""
        with self.lock:
            taken = self._taken[label] = self._taken.pop(label, set())
            _forget_oldest(self._taken)
            if number in taken:  # by an earlier round that skipped some
                number = max(taken) + 1
            self._keep(label, number)
            return number

    def move(self, label: str, number: int, later: int) -> None:
        """Moves a round from its number, which nobody waits at, to a later one."""
        with self.lock:
            self._under_way.discard(name_of(label, number))
            self._keep(label, later)

    def _keep(self, label: str, number: int) -> None:
        taken, name = self._taken.setdefault(label, set()), name_of(label, number)
        taken.add(number)
        taken.discard(min(taken) if len(taken) > _REMEMBERED else -1)
        self._next[label] = max(self._next.get(label, 0), number + 1)
        if name not in self._order:
            self._note(name)

    def is_taken(self, label: str, number: int) -> bool:
        """Returns whether this is the final number of a round of this rank."""
        return number in self._taken.get(label, ())

    def end(self, label: str, number: int) -> None:
        """Notes that a round is over."""
        self._under_way.discard(name_of(label, number))

    def leave(self, why: str = "") -> None:
        """Notes that no rounds will follow, unless some are still under way, and why, if that is
        news to other ranks.
        """
        if not self._under_way:
            self._last, self._why = None, why

    def record(self) -> bytes:
        """Returns a record for the others: the round that was begun last, those under way, and why
        none will follow.
        """
        last = self._last  # read first: rounds begun before it are among the following
        return json.dumps([last, sorted(self._under_way.copy()), self._why]).encode()

    def is_past(self, name: str, other: str) -> bool:
        """Returns whether a rank at `other` has passed `name`; rounds not begun here are ahead."""
        return self._order.get(other, 1 << 62) > self._order.get(name, -1)


def _forget_oldest(known: dict[str, Any]) -> None:
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)))


def name_of(label: str, number: int) -> str:
    """Returns a round's name, which is equal on all ranks."""
    return f"{label}#{number}"


def numbers_in(record: bytes, label: str) -> list[int]:
    """Returns the numbers of the rounds of a label that a record() tells of, ascending."""
    last, under_way, _why = json.loads(record)
    parted = (name.rpartition("#") for name in {last, *under_way} if name is not None)
    return sorted(int(number) for its, _, number in parted if its == label)
