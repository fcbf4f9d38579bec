"""The rule of which checkpoints under a directory may go when another one has been committed.

Every retention asks it, and the answer follows from the entries alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import isfinite
from typing import NamedTuple


class Entry(NamedTuple):
    """One checkpoint, as the rule sees it.

    Attributes:
        name: its name.
        number: its step, where there may be several of one step: together they count once.
        counts: whether older ones may go on its account, since it is known to be whole and durable.
        is_pinned: whether it stays in any case.
        is_useless: whether it goes unless it is pinned, whatever others there are; it does not
            count.
        score: how good it is, a higher number being better; one that is no finite number, or None,
            is no score.
    """

    name: str
    number: int | None = None
    counts: bool = True
    is_pinned: bool = False
    score: float | None = None
    is_useless: bool = False

    @property
    def key(self) -> Hashable:
        """The key that entries share which count once."""
        return self.name if self.number is None else self.number


class Policy(NamedTuple):
    """The rule by which checkpoints stay.

    Attributes:
        last: how many stay of those that count, at least 1: the ones committed last. What does not
            count stays while fewer than so many newer ones count.
        every: those whose number is a multiple of this stay, too.
        best: the name of one that stays, and is one of the `last`, but does not take the place of
            the newest.
        top: how many stay, too, of those that count: the first of best_first(). What does not count
            stays while fewer than so many better ones count.
    """

    last: int
    every: int | None = None
    best: str | None = None
    top: int = 0


def victims(entries: Sequence[Entry], policy: Policy) -> list[str]:
    """Returns the names of the checkpoints that need not stay.

    Args:
        entries: the checkpoints, the one committed last first: it stays, and is one of the `last`
            if it counts.
        policy: says how many stay, and which.
    """
    last, every, best, top = policy
    on_top = set()
    for entry in best_first(entries):
        if top > 0:
            on_top.add(entry.name)
        top -= entry.counts
    counted = {entry.key for entry in entries if entry.name == best}
    going = []
    for place, entry in enumerate(entries):
        if entry.is_useless:
            going += [] if entry.is_pinned else [entry.name]
            continue
        stays = entry.is_pinned or entry.name == best or (best is not None and place == 0)
        stays = stays or (entry.key not in counted and len(counted) < last)
        stays = stays or bool(every and entry.number is not None and entry.number % every == 0)
        if entry.counts:
            counted.add(entry.key)
        if not stays and entry.name not in on_top:
            going.append(entry.name)
    return going


def best_first(entries: Sequence[Entry]) -> list[Entry]:
    """Returns the checkpoints that have a score, the best first, and of equal ones the one that was
    committed first. One that another of its number has replaced, which counts, is left out.
    """
    scored: list[tuple[float, Entry]] = []
    replaced = set[Hashable]()
    for entry in entries:
        if entry.score is not None and isfinite(entry.score) and entry.key not in replaced:
            scored.append((entry.score, entry))
        if entry.counts:
            replaced.add(entry.key)
    return [entry for _score, entry in sorted(reversed(scored), key=lambda pair: -pair[0])]
