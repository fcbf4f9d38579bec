"""These texts say what a directory is that was given for another thing: it may be mistyped.

Responsible for saying what a root without committed steps holds, for warning of it once, and for
what a directory is that was given as a file, or a step that was given as a root. It must not know
who asked for a step.
"""

from __future__ import annotations

import logging
import os

from fastckpt.errors import StorageError
from fastckpt.formats.manifest import MANIFEST
from fastckpt.formats.step_names import NAME
from fastckpt.steps.root import Steps
from fastckpt.storage.file_system import Storage, reported

log = logging.getLogger("fastckpt")

_METADATA = ".metadata"  # of a checkpoint of torch.distributed.checkpoint
_NAMES_TOLD = 3  # entries of a directory that one message names
_ENTRIES_TRIED = 50  # of a directory without steps: whether these have some


def what_is_there(steps: Steps) -> str:
    """Says what the root holds, where no step is committed.

    Raises:
        StorageError: it cannot be listed.
    """
    root, storage = steps.root, steps.storage
    with reported("list", root):
        if storage.status(root) is None:
            return "there is no such directory"
        entries = sorted(storage.names(root))
    if MANIFEST in entries:
        return it_is_a_step(root)
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


def it_is_a_step(root: str) -> str:
    """Says which root is meant by a directory that is a step."""
    return f"it is a step itself: give {os.path.dirname(root)!r}"


def is_step(root: str) -> bool:
    """Whether what was given as a root is a step.

    Raises:
        ValueError: it is no directory.
    """
    try:
        os.stat(os.path.join(root, MANIFEST))  # one look tells both
        return True
    except NotADirectoryError:
        raise ValueError(f"root is {root!r}, which is no directory: there is a file") from None
    except OSError:  # it is not there yet, or a save or restore meets this again
        return False


def hint_for_load(path: str) -> str:
    """How a directory is loaded that was given as a file; "" if it is no checkpoint that is known.

    Args:
        path: a directory.
    """
    storage = Storage()
    try:
        entries = storage.names(path)
    except OSError:  # that it is a directory was told
        return ""
    if MANIFEST in entries and (match := NAME.match(os.path.basename(os.path.realpath(path)))):
        above = os.path.dirname(os.path.realpath(path))
        return f"it is a step: load it by fastckpt.Checkpointer({above!r}).load({int(match[1])})"
    if any(NAME.match(name) for name in entries):
        return f"it is a root: load it by fastckpt.Checkpointer({path!r}).load() or restore()"
    if _METADATA in entries:
        return "it is a checkpoint of torch.distributed.checkpoint: load it by that module's load()"
    return ""


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
