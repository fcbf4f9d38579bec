"""The judgement of step directories without a manifest: is the save surely over?

The module looks at names, owners and locks.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress

from fastckpt.formats.manifest import MANIFEST
from fastckpt.formats.step_names import OURS
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, is_directory
from fastckpt.storage.vanishing import is_unlocked

log = logging.getLogger("fastckpt")


def may_be_committed(storage: Storage, directory: str) -> bool:
    """Returns whether a directory has a manifest, or may have one that cannot be read now."""
    try:
        return storage.status(os.path.join(directory, MANIFEST)) is not None
    except OSError:
        return True


def left_in(
    storage: Storage, directory: str, others_after_s: float, told: set[str]
) -> list[str] | None:
    """Returns what is in a directory without a manifest if its save is surely over; else None.

    That is so if no temporary manifest is left, which a save removes last, or none whose owner may
    live: its process on this host is gone, or another host wrote it `others_after_s` ago, and
    nobody is seen to have locked it. A directory that holds anything that no save makes stays.
    `told` gets the directories of which it was logged that they stay for another host's sake.
    """
    with suppress(OSError):  # removed meanwhile, or not to be read
        # Only what is there now is removed, so a save that begins meanwhile keeps its files.
        if not is_directory(storage, directory) or may_be_committed(storage, directory):
            return None
        entries = storage.names(directory)
        if MANIFEST in entries or not all(map(OURS.fullmatch, entries)):
            return None
        for left in atomic.temporaries_among(entries, MANIFEST):
            path = os.path.join(directory, left)
            is_dead = atomic.is_of_dead(storage, path) and is_unlocked(storage, path)
            if not is_dead and not _is_of_other_dead(storage, path, others_after_s, told):
                return None
        if not may_be_committed(storage, directory):  # nor has it committed meanwhile
            return entries
    return None


def _is_of_other_dead(storage: Storage, temporary: str, after_s: float, told: set[str]) -> bool:
    """Returns whether a temporary manifest is another host's, so old, and not locked."""
    status = storage.status(temporary)
    if status is None or atomic.is_of_this_host(temporary):
        return False
    if not after_s or time.time() - status.st_mtime >= after_s:  # clocks may differ
        return is_unlocked(storage, temporary)
    directory = os.path.dirname(temporary)
    if directory not in told:
        told.add(directory)
        log.warning(
            "%s was begun on another host and not committed: it is removed a day after that, or by "
            "you",
            directory,
        )
    return False
