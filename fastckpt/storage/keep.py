"""The rule that decides which checkpoints in a directory are removed after a commit.

All kinds of retention use it. Its result depends only on the entries.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import isfinite
from typing import NamedTuple


class Entry(NamedTuple):
    """One checkpoint, as input of the rule.

    Attributes:
        name: its name.
        number: its step, if several checkpoints may have the same step; such checkpoints count once
            together.
        counts: whether it counts toward the number to keep. If so, it is complete and durable, and
            older checkpoints may be removed.
        is_pinned: whether it stays in any case.
        is_useless: whether it does not count and is removed, regardless of other checkpoints. Being
            pinned takes precedence.
        score: its quality, where higher is better. None or a number that is not finite means no
            score.
    """

    name: str
    number: int | None = None
    counts: bool = True
    is_pinned: bool = False
    score: float | None = None
    is_useless: bool = False

    @property
    def key(self) -> Hashable:
        """The key that entries have in common if they count once together."""
        return self.name if self.number is None else self.number


class Policy(NamedTuple):
    """The numbers and names of checkpoints to keep.

    Attributes:
        last: how many of the newest checkpoints that count stay, at least 1. A checkpoint that does
            not count stays while fewer than `last` newer ones count.
        every: checkpoints whose number is a multiple of this also stay.
        best: the name of a checkpoint that stays and, if it counts, takes one of the `last` places,
            but never the place of the newest checkpoint.
        top: how many of the best checkpoints that count also stay, in the order of best_first(). A
            checkpoint that does not count stays while fewer than `top` better ones count.
    """

    last: int
    every: int | None = None
    best: str | None = None
    top: int = 0


def victims(entries: Sequence[Entry], policy: Policy) -> list[str]:
    """Returns the names of the checkpoints to remove.

    Args:
        entries: the checkpoints, newest first. The newest stays, and takes one of the `last` places
            if it counts.
        policy: determines which checkpoints stay.
    """
    last, every, best, top = policy
    on_top = set()
    for entry in best_first(entries):
        if top > 0:
            on_top.add(entry.name)
        top -= entry.counts
    counted = {entry.key for entry in entries if entry.name == best and entry.counts}
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
    """Returns the checkpoints that have a score, best first. Among equal scores, the oldest comes
    first. A checkpoint is left out if a newer checkpoint with the same number counts.
    """
    scored: list[tuple[float, Entry]] = []
    replaced = set[Hashable]()
    for entry in entries:
        if entry.score is not None and isfinite(entry.score) and entry.key not in replaced:
            scored.append((entry.score, entry))
        if entry.counts:
            replaced.add(entry.key)
    return [entry for _score, entry in sorted(reversed(scored), key=lambda pair: -pair[0])]
