"""Pins, which are files in a step's directory that prevent its removal; and removals by number.

pin() creates the file while it holds the step. A removal checks for the file while it has the step
locked. Either the removal finds the pin, or pin() finds that the step was removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from fastckpt.errors import CheckpointError
from fastckpt.formats.step_names import DELETED, PINNED
from fastckpt.steps.no_steps import no_such_step
from fastckpt.steps.store import Committed, StepStore
from fastckpt.storage.file_system import reported
from fastckpt.storage.vanishing import listed_anew

_NOTES_MAX = 1000  # of deleted steps, in a root


def pin(steps: StepStore, step: int) -> None:
    """Pins a step durably, so that it is not removed.

    Raises:
        CheckpointError: there is no such step.
        StorageError: the step cannot be pinned.
    """
    _change(steps, step, steps.make_mark, 1)


def unpin(steps: StepStore, step: int) -> None:
    """Unpins a step, including all replaced attempts at it. For errors see pin()."""

    def change(path: str) -> None:
        with suppress(FileNotFoundError):  # it is not pinned
            steps.storage.remove(path)

    _change(steps, step, change, None)


def newest_attempt(steps: StepStore, step: int) -> Committed:
    """Returns the newest committed attempt at a step. Raises CheckpointError if there is none, and
    StorageError.
    """
    attempts = _attempts(steps, step)
    if not attempts:
        raise _none([steps], step)
    return attempts[0]


def is_pinned(steps: StepStore, name: str) -> bool:
    """Returns whether a step is pinned; a file of any type is a pin. Raises StorageError."""
    path = steps.path(name, PINNED)
    with reported("open", path):
        return steps.storage.status(path, link=True) is not None


def delete(shelves: Sequence[StepStore], step: int) -> None:
    """Removes a step, including all replaced attempts at it, from a root and from other directories
    with copies of its steps.

    Raises:
        CheckpointError: there is no such step, it is pinned, it is being read, or
            another step is stored as a difference from it.
        StorageError: the step cannot be removed.
    """
    root, *others = shelves
    attempts = [(steps, item) for steps in (*others, root) for item in _attempts(steps, step)[::-1]]
    if not attempts:
        raise _none(shelves, step)
    if any(item.manifest.bases for _steps, item in attempts):
        attempts.reverse()  # a difference goes before the attempt that it was taken from
    for steps, (name, manifest) in attempts:
        if is_pinned(steps, name):
            raise CheckpointError(f"{steps.path(name)!r} is pinned: call unpin({step}) first")
        for item in steps.committed()[0]:
            if manifest.nonce in item.manifest.bases and item.manifest.step != step:
                raise CheckpointError(
                    f"{steps.path(item.name)!r} is stored as a difference from "
                    f"{steps.path(name)!r}: delete step {item.manifest.step} first"
                )
    # Nodes that this process does not see, or that only a later job uses, may have copies.
    nonces = {item.manifest.nonce for _steps, item in attempts} if others else set[str]()
    try:
        _note_deleted(root, nonces)
        for steps, (name, manifest) in attempts:
            is_gone = steps.remove(name, manifest.nonce)
            if not is_gone and name in [item.name for item in _attempts(steps, step)]:
                raise CheckpointError(f"{steps.path(name)!r} is being read and was not removed")
    except BaseException:
        for nonce in nonces:  # what was not removed must not vanish later
            with suppress(OSError):  # the note stays, and only nodes lose the step
                root.storage.remove(root.path(DELETED + nonce))
        raise


def deleted(root: StepStore) -> set[str]:
    """Returns the nonces of the steps that were deleted while nodes had copies. Raises
    StorageError.
    """
    with reported("list", root.root), suppress(FileNotFoundError):  # nothing was saved there yet
        entries = root.storage.names(root.root)
        return {name[len(DELETED) :] for name in entries if name.startswith(DELETED)}
    return set()


def _note_deleted(root: StepStore, nonces: set[str]) -> None:
    if nonces:
        root.make_root()
        for nonce in nonces:
            root.make_mark(root.path(DELETED + nonce))
        _forget_deleted(root, nonces)
        with reported("sync directory", root.root):
            root.storage.sync_directory(root.root)
        root.sync_grown()


def _forget_deleted(root: StepStore, new: set[str]) -> None:
    """Removes the older half of the notes about deleted steps if there are many: nodes have removed
    those steps by now.
    """
    old = [root.path(DELETED + nonce) for nonce in deleted(root) - new]
    if len(old) < _NOTES_MAX:
        return
    with suppress(OSError):  # the next deletion does it
        statuses = [(root.storage.status(path), path) for path in old]
        by_age = sorted((each.st_mtime_ns, path) for each, path in statuses if each is not None)
        for _when, path in by_age[: _NOTES_MAX // 2]:
            root.storage.remove(path)


def _change(steps: StepStore, step: int, change: Callable[[str], None], count: int | None) -> None:
    """Changes the pins of the last `count` attempts at a step; None means all attempts."""

    def changed() -> bool:
        attempts = _attempts(steps, step)
        for name, _manifest in attempts[:count]:
            with steps.hold(name), reported("pin", steps.path(name)):
                change(steps.path(name, PINNED))
                steps.storage.sync_directory(steps.path(name))
                steps.confirm(name)
        return bool(attempts)

    if not listed_anew(changed):  # retention may remove it meanwhile
        raise _none([steps], step)


def _attempts(steps: StepStore, step: int) -> list[Committed]:
    """Returns the committed attempts at a step, newest first."""
    return [item for item in steps.survey(step)[0] if item.manifest.step == step]


def _none(shelves: Sequence[StepStore], step: int) -> CheckpointError:
    surveys = [steps.survey() for steps in shelves]
    numbers = [item.manifest.step for committed, _faults in surveys for item in committed]
    detail = ""
    if len(shelves) > 1:
        detail = ", and this node holds none (steps of other nodes are only known after a restore)"
    return no_such_step(shelves[0], step, numbers, surveys[0][1], detail)
