"""Iterations of a run as Megatron lays them out: iter_0001000/ and the tracker that names the last.

Responsible for names, for which iterations are complete, for moving the tracker atomically, and for
removing old ones. Must not know what is in a checkpoint, nor Megatron, torch or ranks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from dataclasses import dataclass

from fastckpt.saving import pipeline
from fastckpt.storage import atomic
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.vanishing import Vanished, listed_anew

log = logging.getLogger("fastckpt")

TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
NON_PERSISTENT = "non_persistent"
COMMON, CONFIG, METADATA = "common.pt", "metadata.json", ".metadata"
_TRACKER_BYTES_MAX = 64
LEGACY_PREFIX = "mp_rank_"  # of what the format "torch" has in place of `.metadata`
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class Retention:
    """A retention says which old iterations stay when a newer one was committed.

    Attributes:
        keep_last: how many complete ones stay, with the newest; at least 1. None: all.
        keep_every: multiples of this stay too.
        superseded_only: whether only iterations are removed that the tracker named before, as
            Megatron does. False: all older ones.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    superseded_only: bool = False


def directory_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def is_complete(directory: str) -> bool:
    """Whether a save to this directory was committed: `.metadata` is written last."""
    return os.path.isfile(os.path.join(directory, METADATA))


def complete_iterations(root: str) -> list[int]:
    """Iterations that were committed, ascending.

    Raises:
        StorageError: all that is listed is gone when it is looked at, however often that is tried.
    """

    def look() -> list[int] | None:
        listed = _iterations(root)
        found = [number for number, complete in listed if complete]
        paths = [os.path.join(root, directory_name(number)) for number, _ in listed]
        gone = [path for path in paths if not os.path.lexists(path)]
        if gone and not found:  # a newer one was complete before they were removed
            raise Vanished(gone[-1])
        return found or None

    return listed_anew(look) or []


def tracked(root: str) -> int | str | None:
    """Returns what the tracker says: a number, "release", or None if it is missing or garbage."""
    text = _tracker_text(root)
    if text == RELEASE:
        return text
    return int(text) if text is not None and text.isdecimal() else None


def _tracker_text(root: str) -> str | None:
    """Returns what is in the tracker; None: it is missing."""
    try:
        with open(os.path.join(root, TRACKER), "rb") as file:
            return file.read(_TRACKER_BYTES_MAX).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def candidates(root: str) -> list[tuple[int, str]]:
    """(iteration, directory) worth loading, best first.

    That is the release, where the tracker names it, or the complete iterations, newest first. One
    that is newer than the tracker was committed too: its job was killed before the tracker moved.
    """
    if tracked(root) == RELEASE:
        return [(0, os.path.join(root, RELEASE))]
    found = complete_iterations(root)
    return [(number, os.path.join(root, directory_name(number))) for number in reversed(found)]


def disagreement(root: str, number: int) -> str | None:
    """Says why the newest complete iteration is loaded, if the tracker does not name it."""
    latest = tracked(root)
    if latest in (number, RELEASE):
        return None
    if latest is None:
        text = _tracker_text(root)
        how = "is missing" if text is None else f"holds {text!r}, which is no iteration"
        return f"iteration {number} is loaded, the newest that is complete: {TRACKER} {how}"
    if int(latest) < number:
        return (
            f"iteration {number} is loaded: it is complete, and newer than iteration {latest}, "
            f"which {TRACKER} names; to go back to iteration {latest}, ask for it (--ckpt-step "
            f"{latest})"
        )
    path = os.path.join(root, directory_name(int(latest)))
    how = f"has no {METADATA}" if os.path.isdir(path) else "is not there"
    return (
        f"iteration {number} is loaded, the newest that is complete: iteration {latest}, which "
        f"{TRACKER} names, {how}"
    )


def is_legacy(directory: str) -> bool:
    """Whether a directory holds a checkpoint in Megatron's format "torch"."""
    try:
        return any(name.startswith(LEGACY_PREFIX) for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False


def track(root: str, iteration: int) -> None:
    """Makes the tracker name an iteration, atomically and durably.

    Raises:
        StorageError: it names what it named before; or if the error is `visible`, the iteration,
            but a crash may bring back what it named before.
    """
    storage, path = pipeline.current().storage, os.path.join(root, TRACKER)
    replaced = atomic.replace_file(storage, path, str(iteration).encode(), durable=True)
    if replaced is not None:
        close_quietly(storage, replaced)


def retain(
    root: str,
    newest: int,
    retention: Retention,
    in_flight: Collection[int] = (),
    superseded: Collection[int] = (),
) -> list[int]:
    """Removes old iterations, which are complete or what aborted saves have left.

    Args:
        newest: the iteration committed last; none from it on is removed.
        in_flight: iterations that are being saved, which are left alone.
        superseded: iterations that the tracker named before.

    Returns:
        The iterations removed. Links, and what cannot be removed, stay (with a warning).
    """
    if retention.keep_last is None:
        return []
    known = _iterations(root)
    complete = [number for number, is_whole in known if is_whole and number <= newest]
    every = retention.keep_every
    kept = {newest, *complete[-retention.keep_last :], *in_flight}
    kept |= {number for number in complete if every and number % every == 0}
    if retention.superseded_only:
        kept |= {number for number, _ in known} - {*superseded}
    removed, storage = [], pipeline.current().storage
    for number, _is_whole in known:
        path = os.path.join(root, directory_name(number))
        if number >= newest or number in kept or os.path.islink(path):
            continue
        try:
            # First what makes it complete, so that nobody takes the rest for a checkpoint.
            if is_complete(path):
                storage.remove(os.path.join(path, METADATA))
                storage.sync_directory(path)  # a power cut does not bring it back, either
            storage.remove_tree(path)
            removed.append(number)
        except OSError as error:
            log.warning("old iteration %d stays: %s", number, error)
    return removed


def _iterations(root: str) -> list[tuple[int, bool]]:
    """(iteration, whether it is complete) of all directories named so, ascending."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    numbers = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    return [(number, is_complete(os.path.join(root, directory_name(number)))) for number in numbers]
