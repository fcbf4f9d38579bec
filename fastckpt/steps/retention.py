"""Retention: the choice of the steps to remove when another one has been committed.

The module must not know how a step is removed, or what it holds.
"""

from __future__ import annotations

import logging

from fastckpt.errors import StorageError
from fastckpt.steps.options import StepOptions
from fastckpt.steps.root import Committed, Steps

log = logging.getLogger("fastckpt")


def tidy(steps: Steps, keep: str, step: int, options: StepOptions) -> None:
    """Removes steps that a commit has made superfluous, and warns of those it cannot remove.

    Args:
        steps, keep: as retain()'s.
        step: the number of the step just committed.
        options: say which steps stay.
    """
    # Listing takes time on network file systems: not unless there may be something to remove.
    keep_last = options.keep_last
    if keep_last is None and not steps.has_another(keep, step):
        return
    try:
        found, _faults = steps.committed()
        supersede(steps, found, keep, step)
        if keep_last is not None:
            retain(steps, found, keep, keep_last, options.keep_every)
        steps.remove_left()
    except (StorageError, OSError) as error:
        log.warning("old steps could not be removed: %s", error)


def retain(
    steps: Steps, found: list[Committed], keep: str, keep_last: int, keep_every: int | None
) -> list[str]:
    """Removes the committed steps that need not stay; returns their names.

    A step that somebody reads (see Steps.hold) stays until a later call. One that could not be read
    here stays, too, as long as nothing else is known: it may be the newest that is whole.

    Args:
        steps: the root.
        found: the committed steps, the one committed last first.
        keep: the name of the step just committed. It stays, and so do all committed after it.
        keep_last: how many steps stay, those committed last, not counting those that are known to
            be damaged or may not be durable.
        keep_every: multiples of this stay.
    """
    own = next((item.manifest.sequence for item in found if item.name == keep), 0)
    whole: set[int] = set()  # attempts at a step count once, however saves overlap
    removed = []
    for item in found:
        known = steps.known(item.name)
        if known.is_unread:
            continue
        again = item.manifest.step in whole
        kept = (len(whole) < keep_last and not again) or item.manifest.sequence >= own
        if known.may_stay_alone():
            whole.add(item.manifest.step)
        if kept or (keep_every and item.manifest.step % keep_every == 0):
            continue
        if steps.remove_unread(item.name):
            removed.append(item.name)
    return removed


def supersede(steps: Steps, found: list[Committed], keep: str, step: int) -> None:
    """Removes all attempts at a step but the last. This is the one just committed as `keep`, unless
    that was drained so late that a later attempt was committed before it.
    """
    attempts = [
        item
        for item in found
        if item.manifest.step == step and not steps.known(item.name).is_unread
    ]
    last = max(
        (
            item.manifest.sequence
            for item in attempts
            if item.name == keep or steps.known(item.name).may_stay_alone()
        ),
        default=0,
    )
    for item in attempts:
        if item.manifest.sequence < last:
            steps.remove_unread(item.name)
