"""The rule of which checkpoints under a directory may go when another one has been committed.

Every retention asks it, and the answer follows from the entries alone. It must not know what a
checkpoint is, in which order its kind was committed, or how one is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """One checkpoint, as the rule sees it.

    Attributes:
        name: its name.
        number: its step, where there may be several of one step: together they count once.
        counts: whether older ones may go on its account, since it is known to be whole and durable.
        is_pinned: whether it stays in any case.
    """

    name: str
    number: int | None = None
    counts: bool = True
    is_pinned: bool = False


def may_go(
    entries: Sequence[Entry], last: int, every: int | None = None, best: str | None = None
) -> list[str]:
    """Returns the names of the checkpoints that need not stay.

    Args:
        entries: the checkpoints, the one committed last first: it stays, and is one of the `last`
            if it counts.
        last: how many stay of those that count, at least 1: the ones committed last. What does not
            count stays as long as there are not yet so many newer ones.
        every: those whose number is a multiple of this stay, too.
        best: the name of one that stays, and is one of the `last`, but does not take the place of
            the newest.
    """
    keys = [entry.name if entry.number is None else entry.number for entry in entries]
    counted = {key for entry, key in zip(entries, keys, strict=True) if entry.name == best}
    going = []
    for place, (entry, key) in enumerate(zip(entries, keys, strict=True)):
        stays = entry.is_pinned or entry.name == best or (best is not None and place == 0)
        stays = stays or (key not in counted and len(counted) < last)
        stays = stays or bool(every and entry.number is not None and entry.number % every == 0)
        if entry.counts:
            counted.add(key)
        if not stays:
            going.append(entry.name)
    return going
