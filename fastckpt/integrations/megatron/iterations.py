"""Iterations of a run as Megatron lays them out: iter_0001000/ and the tracker that names the last.

Responsible for names, for which iterations are complete, for moving the tracker atomically, and for
removing old ones. Must not know what is in a checkpoint, nor Megatron, torch or ranks.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection

log = logging.getLogger("fastckpt")

TRACKER = "latest_checkpointed_iteration.txt"
NON_PERSISTENT = "non_persistent"
COMMON, CONFIG, METADATA = "common.pt", "metadata.json", ".metadata"
_NAME = re.compile(r"iter_(\d{7,})")


def directory_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def is_complete(directory: str) -> bool:
    """Whether a save to this directory was committed: `.metadata` is written last."""
    return os.path.isfile(os.path.join(directory, METADATA))


def complete_iterations(root: str) -> list[int]:
    """Iterations that were committed, ascending."""
    return [number for number, complete in _iterations(root) if complete]


def tracked(root: str) -> int | str | None:
    """What the tracker says: an iteration, "release", or None where it is missing or garbage."""
    try:
        with open(os.path.join(root, TRACKER), encoding="utf-8") as file:
            text = file.read().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s of %s cannot be read: %s", TRACKER, root, error)
        return None
    if text == "release":
        return text
    if not text.isdecimal():
        log.warning("%s of %s holds no iteration but %r", TRACKER, root, text[:80])
        return None
    return int(text)


def candidates(root: str) -> list[tuple[int, str]]:
    """(iteration, directory) worth loading, best first.

    That is what the tracker names, then the complete iterations, newest first. One that is newer
    than the tracker was committed too: its job was killed before the tracker moved.
    """
    latest = tracked(root)
    if latest == "release":
        return [(0, os.path.join(root, "release"))]
    found = complete_iterations(root)
    if isinstance(latest, int) and latest not in found:
        log.warning("%s names iteration %d, which is not complete", TRACKER, latest)
    return [(number, os.path.join(root, directory_name(number))) for number in reversed(found)]


def track(root: str, iteration: int) -> None:
    """Makes the tracker name an iteration, atomically and durably."""
    replace_file(os.path.join(root, TRACKER), str(iteration).encode())
    sync_directory(root)


def replace_file(path: str, content: bytes) -> None:
    """Gives a file its content so that after a crash it has the old or the new one, whole.

    Which one is certain when its directory is synced.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise


def sync_directory(path: str) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def retain(
    root: str,
    newest: int,
    keep_last: int,
    keep_every: int | None = None,
    in_flight: Collection[int] = (),
) -> list[int]:
    """Removes old iterations, which are complete or what aborted saves have left.

    Args:
        newest: the iteration committed last; none from it on is removed.
        keep_last: how many complete ones are kept, with `newest`; at least 1.
        keep_every: multiples of this are kept too.
        in_flight: iterations that are being saved, which are left alone.

    Returns:
        The iterations removed. Links, and what cannot be removed, stay (with a warning).
    """
    known = _iterations(root)
    complete = [number for number, is_whole in known if is_whole and number <= newest]
    kept = {newest, *complete[-keep_last:], *in_flight}
    kept |= {number for number in complete if keep_every and number % keep_every == 0}
    removed = []
    for number, _is_whole in known:
        path = os.path.join(root, directory_name(number))
        if number >= newest or number in kept or os.path.islink(path):
            continue
        try:
            # First what makes it complete, so that nobody takes the rest for a checkpoint.
            if is_complete(path):
                os.unlink(os.path.join(path, METADATA))
            shutil.rmtree(path)
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
