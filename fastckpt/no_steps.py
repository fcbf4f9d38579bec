"""What a root without committed steps holds instead, in words: it may be mistyped.

Responsible for saying so, and for warning of it once. It must not know who asked for a step.
"""

from __future__ import annotations

import logging
import os

from fastckpt.errors import StorageError
from fastckpt.formats.manifest import MANIFEST
from fastckpt.formats.step_names import NAME
from fastckpt.steps import Steps
from fastckpt.storage import reported

log = logging.getLogger("fastckpt")

_NAMES_TOLD = 3  # entries of a directory that one message names
_ENTRIES_TRIED = 50  # of a directory without steps: whether these have some


def what_is_there(steps: Steps) -> str:
    """What the root holds, where no step is committed.

    Raises:
        StorageError: it cannot be listed.
    """
    root, storage = steps.root, steps.storage
    with reported("list", root):
        if storage.status(root) is None:
            return "there is no such directory"
        entries = sorted(storage.names(root))
    if MANIFEST in entries:
        return f"it is a step itself: give {os.path.dirname(root)!r}"
    saves = [name for name in entries if NAME.match(name)]
    if saves:
        return f"there are only saves that did not come to their commit: {_listed(saves)}"
    if not entries:
        return "the directory is empty"
    below = entries[:_ENTRIES_TRIED]
    roots = [entry for entry in below if _has_steps(Steps(storage, steps.path(entry)))]
    if roots:
        return f"there are steps further down, in {_listed(roots)}"
    return f"there is no step, but {_listed(entries)}"


def warn_once(steps: Steps) -> None:
    """Warns that nothing is committed, and says what is there."""
    if not steps.told_empty:
        steps.told_empty = True
        log.warning("%r holds no committed step: %s", steps.root, what_is_there(steps))


def _has_steps(steps: Steps) -> bool:
    """Whether a directory has something in it that is a step by its name."""
    try:
        return bool(steps.names())
    except StorageError:
        return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return ", ".join(map(repr, names[:_NAMES_TOLD])) + more
