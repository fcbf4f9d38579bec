"""Messages about a path that may be mistyped: a root without steps, or a step given as a root."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Sequence
from functools import partial
from math import inf

from fastckpt.arguments.urls import is_mounted
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats import file_list
from fastckpt.formats.manifest import MANIFEST, is_manifest
from fastckpt.formats.step_names import DELETED, NAME
from fastckpt.saving import pipeline
from fastckpt.saving.lease import LEASE_FILE
from fastckpt.steps.root import store_at
from fastckpt.steps.store import Fault, StepStore
from fastckpt.storage.calls import looked_up
from fastckpt.storage.calls import real_path as real_path
from fastckpt.storage.file_system import Storage, reported

log = logging.getLogger("fastckpt")

_STEPS_SHOWN = 10  # the newest ones, in an error
_NAMES_SHOWN = 3  # entries of a directory that one message names
_HEAD_BYTES = 64  # the first bytes of a file, which show whether it is a manifest
_ENTRIES_TRIED = 50  # entries of a directory without steps that are searched for steps


def what_is_there(steps: StepStore) -> str:
    """Returns a text that describes the contents of a root without a committed step. Raises
    StorageError if the root cannot be listed.
    """
    root, storage = steps.root, steps.storage
    with reported("list", root):
        if storage.status(root) is None:
            return f"there is no {'object below it' if is_mounted(root) else 'such directory'}"
        prefixes = (LEASE_FILE, DELETED)
        entries = sorted(name for name in storage.names(root) if not name.startswith(prefixes))
    saves = [name for name in entries if NAME.match(name) and not holds_export(steps, name)]
    if saves:
        return f"all saves in it are uncommitted: {_listed(saves)}"
    if not entries:
        return "the directory is empty"
    below = entries[:_ENTRIES_TRIED]
    roots = [entry for entry in below if _has_steps(store_at(storage, steps.path(entry)))]
    if roots:
        return f"its subdirectories contain steps: {_listed(roots)}"
    return f"it holds only {_listed(entries)}"


def no_such_step(
    steps: StepStore, step: int, numbers: Sequence[int], faults: Sequence[Fault], detail: str = ""
) -> CheckpointError:
    """Returns the error for a step that a root does not hold.

    Args:
        numbers: of the steps that it holds.
        faults: of the root. If the step is one of them, the error is CorruptCheckpoint.
        detail: follows the step's number.
    """
    of_step = [fault for fault in faults if fault.step == step]
    text = f"{steps.root!r} holds no committed step {step}{detail}"
    if numbers:
        text += f": the newest steps are {sorted(set(numbers))[-_STEPS_SHOWN:]}"
    if faults:
        text += f"; {(of_step or faults)[0].error}"
    elif not numbers:
        text += f": {what_is_there(steps)}"
    is_damaged = bool(of_step) and isinstance(of_step[0].error, CorruptCheckpoint)
    return CorruptCheckpoint(text) if is_damaged else CheckpointError(text)


def holds_export(steps: StepStore, name: str) -> bool:
    """Returns whether a directory without a manifest has a list of its files, like an export."""
    return steps.storage.status(steps.path(name, file_list.NAME), link=True) is not None


def no_directories(steps: StepStore, directories: Collection[str]) -> list[str]:
    """Returns the links and files that are named like steps. They are not steps, because this root
    may not remove the target of a link. `directories` are names already known as directories.
    Raises StorageError if the root cannot be listed.
    """
    if steps.is_step or is_mounted(steps.root):
        return []
    try:
        names = sorted(filter(NAME.match, steps.storage.names(steps.root)))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError("list", steps.root, error.errno or errno.EIO) from error
    named = [name for name in names if name not in directories]
    there = steps.names() if named else []
    return [name for name in named if name not in there and _is_there(steps, name)]


def _is_there(steps: StepStore, name: str) -> bool:
    """Returns whether a listed name still exists: a save may have removed its step."""
    return steps.storage.status(steps.path(name), link=True) is not None


def it_is_a_step(root: str) -> str:
    """Returns the error text for a root that is itself a step; the text suggests the likely
    root.
    """
    above, name = os.path.split(root)
    meant = repr(above) if NAME.match(name) else "another directory"
    return f"it is itself a step: pass {meant} instead"


def steps_at(storage: Storage, root: str) -> StepStore:
    """Returns the steps under a root, or the step that the root itself is. For errors see
    is_step().
    """
    steps = store_at(storage, root)
    steps.is_step = is_step(root)
    return steps


def is_step(root: str, timeout_s: float = inf) -> bool:
    """Returns whether the root is itself a step.

    Raises:
        ValueError: the root is not a directory.
        StorageError: the store of the root fails, or does not answer within timeout_s.
    """
    path, storage = os.path.join(root, MANIFEST), pipeline.current().storage
    try:
        read = partial(storage.read_file, path, _HEAD_BYTES)
        return is_manifest(looked_up(read, root, timeout_s))
    except NotADirectoryError:
        raise ValueError(
            f"root is {root!r}, must be a directory: this path or a parent of it is a file"
        ) from None
    except StorageError:  # of a store
        raise
    except OSError:  # the root does not exist yet, or a save or restore will raise this again
        return False


def warn_once(steps: StepStore) -> None:
    """Warns, only the first time, that no step is committed, and describes the contents of the
    root.
    """
    if not steps.warned_of_empty:
        steps.warned_of_empty = True
        log.warning("%r holds no committed step: %s", steps.root, what_is_there(steps))


def _has_steps(steps: StepStore) -> bool:
    try:
        return bool(steps.names())
    except StorageError:
        return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
