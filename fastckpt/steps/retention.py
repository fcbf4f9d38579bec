"""Retention: the choice of the steps to remove when another one has been committed.

The module must not know how a step is removed, or what it holds.
"""

from __future__ import annotations

import logging

from fastckpt.errors import StorageError
from fastckpt.steps.options import StepOptions
from fastckpt.steps.root import Committed, Steps
from fastckpt.storage.keep import Entry, may_go

log = logging.getLogger("fastckpt")


def tidy(steps: Steps, keep: str, options: StepOptions) -> None:
    """Removes steps that a commit has made superfluous, after the result was told. One that
    somebody reads (see Steps.hold) stays until a later call.
    `steps` and `keep` are as superfluous()'s; `options` say which steps stay.
    """
    # Listing takes time on network file systems: not unless there may be something to remove.
    if options.keep_last is None and not steps.has_another(keep):
        return
    try:
        found, _faults = steps.committed()
        for name in superfluous(steps, found, keep, options.keep_last, options.keep_every):
            steps.remove_unread(name)
        steps.remove_left()
    except (StorageError, OSError) as error:
        log.warning("old steps could not be removed: %s", error)


def superfluous(
    steps: Steps, found: list[Committed], keep: str, keep_last: int | None, keep_every: int | None
) -> list[str]:
    """Returns the names of the committed steps that need not stay: what is beyond keep_last, and
    all attempts at the step just committed but the last, which is another one if that was drained
    late. A step that is damaged or may not be durable, as far as is known, does not count; one that
    could last not be read does not either, and stays: it may be the newest that is whole.

    Args:
        steps: the root.
        found: the committed steps, the one committed last first.
        keep: the name of the step just committed. It stays, and so do all committed after it.
        keep_last, keep_every: how many of the last ones stay (None: all), and which multiples.
    """
    own = next((item.manifest for item in found if item.name == keep), None)
    if own is None:  # somebody has removed it, and may be about to remove others
        return []

    def entry(item: Committed, is_pinned: bool) -> Entry:
        known = steps.known(item.name)
        is_pinned = is_pinned or known.is_unread
        return Entry(item.name, item.manifest.step, known.may_stay_alone(), is_pinned)

    attempts = [entry(item, False) for item in found if item.manifest.step == own.step]
    going = may_go(attempts, 1)
    if keep_last is not None:
        rest = [item for item in found if item.name not in going]
        pinned = [entry(item, item.manifest.sequence >= own.sequence) for item in rest]
        going += may_go(pinned, keep_last, keep_every)
    return going
