"""The iterations of a run in Megatron's layout: iter_0001000/ and the tracker that names the last.

Responsible for names, for finding complete iterations, for updating the tracker atomically, and for
removing old iterations.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastckpt.directories import dcp_metadata
from fastckpt.directories.save import remove_directory
from fastckpt.directories.shelf import numbered
from fastckpt.directories.verify import COMMON as COMMON
from fastckpt.errors import StorageError
from fastckpt.formats.distcp import METADATA as METADATA
from fastckpt.formats.distcp import TRACKER as TRACKER
from fastckpt.saving import pipeline
from fastckpt.storage import atomic
from fastckpt.storage.file_system import NoRegularFile
from fastckpt.storage.keep import Entry, Policy, victims
from fastckpt.storage.owners import divided

log = logging.getLogger("fastckpt")

RELEASE = "release"
NON_PERSISTENT = "non_persistent"
CONFIG = "metadata.json"
_TRACKER_BYTES_MAX = 64
LEGACY_PREFIX = "mp_rank_"  # directories of the format "torch"
_TORCH_TEMPORARY = ".metadata.tmp"  # torch renames it to `.metadata`
_NAME = re.compile(r"iter_(\d{7,})\Z")


@dataclass(frozen=True)
class Retention:
    """The rule that selects the iterations to keep after a commit.

    Attributes:
        keep_last: the number of complete iterations to keep, including the newest; at least 1.
            None: all.
        keep_every: iterations that are multiples of this number are also kept.
    """

    keep_last: int | None = None
    keep_every: int | None = None


def directory_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def root_of(directory: str) -> str:
    """Returns the run's directory for an iteration's directory; a directory with another name is
    returned itself.
    """
    return os.path.dirname(directory) if _NAME.match(os.path.basename(directory)) else directory


def is_complete(directory: str) -> bool:
    """Whether a save to this directory has committed: `.metadata` is written last."""
    return os.path.isfile(os.path.join(directory, METADATA))


def is_part(name: str) -> bool:
    """Whether a file of this name in an iteration's directory belongs to a torch_dist save."""
    return name in (COMMON, CONFIG, METADATA) or dcp_metadata.is_data_file(name)


def _is_debris(directory: str) -> bool:
    """Whether a directory without `.metadata` holds only the remains of an aborted save, and no
    files of a job that may still run. Other directories may be intact checkpoints, because
    Megatron's formats "torch" and "zarr" have no `.metadata`.
    """
    try:
        with os.scandir(directory) as entries:
            return all(
                entry.is_file(follow_symlinks=False) and _is_left(entry.path) for entry in entries
            )
    except OSError:  # it cannot be listed, or is not a directory
        return False


def _is_left(path: str) -> bool:
    """Whether a file may be left by an aborted save, and belongs to no live process."""
    storage, name = pipeline.current().storage, os.path.basename(path)
    if dcp_metadata.is_data_file(name):
        return dcp_metadata.is_left(storage, path)
    owner = divided(name)[1]
    if owner is not None:
        return owner.is_gone if owner.is_beside_this else atomic.is_old(storage, path)
    return is_part(name) or name == _TORCH_TEMPORARY


def tracked(root: str) -> int | str | None:
    """Returns the iteration in the tracker: a number or "release"; None if it is missing or
    invalid.
    """
    text = _tracker_text(root)
    if text == RELEASE:
        return text
    return int(text) if text is not None and text.isdecimal() else None


def _tracker_text(root: str) -> str | None:
    """Returns the tracker's text; None if it is missing. Raises StorageError if it cannot be read
    or is not a regular file.
    """
    storage, tracker = pipeline.current().storage, os.path.join(root, TRACKER)
    try:
        content = storage.read_file(os.path.realpath(tracker), _TRACKER_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        detail = "it is not a regular file" if isinstance(error, NoRegularFile) else ""
        raise StorageError("read", tracker, error.errno or errno.EIO, detail=detail) from error
    return content.decode(errors="replace").strip()


def candidates(root: str, *others: str) -> list[tuple[int, str]]:
    """Returns (iteration, directory) pairs that can be loaded, in order of preference. If the
    tracker names a release, returns only the release. Otherwise returns the complete iterations:
    first the one that the tracker names, then the others from the last commit backwards.

    Args:
        root: the run's directory.
        others: other directories with iterations of the same run and their own trackers; the
            tracker that was written last is used.

    Raises:
        StorageError: like numbered().
    """
    if tracked(root) == RELEASE:
        return [(0, os.path.join(root, RELEASE))]
    last = (0, "")
    for place in (root, *others):
        named = tracked(place)
        if isinstance(named, int) and (place == root or last[1]):
            moved_ns = _changed_ns(os.path.join(place, TRACKER))
            last = max(last, (moved_ns, os.path.join(place, directory_name(named))))
    return in_order((root, *others), last[1])


def in_order(roots: Sequence[str], first: str) -> list[tuple[int, str]]:
    """Returns the (iteration, directory) pairs of all complete iterations in these directories:
    `first`, then the others from the last commit backwards.
    """
    iterations = [each for root in roots for each in numbered(root, _NAME, is_complete)]

    def order(choice: tuple[int, str]) -> tuple[bool, int, int]:
        number, path = choice
        return path == first, _changed_ns(os.path.join(path, METADATA)), number

    return sorted(iterations, key=order, reverse=True)


def _changed_ns(path: str) -> int:
    """Returns the time of a file's last change, in ns; 0 if it is missing."""
    status = pipeline.current().storage.status(path)
    return 0 if status is None else status.st_mtime_ns


def disagreement(root: str, number: int, damaged: Collection[str] = ()) -> str | None:
    """Returns the reason why this iteration is loaded although the tracker does not name it; None
    if the tracker names it. `damaged` are directories that are known to be damaged.
    """
    latest, text = tracked(root), _tracker_text(root)
    if latest in (number, RELEASE):
        return None
    if not isinstance(latest, int):
        content = "is missing" if text is None else f"holds {text!r}, which is not an iteration"
        why = f"{TRACKER} {content}"
    else:
        path = os.path.join(root, directory_name(latest))
        what = f"has no {METADATA}" if os.path.isdir(path) else "is missing"
        what = "is damaged" if path in damaged else what
        why = f"iteration {latest}, which {TRACKER} names, {what}"
    return f"iteration {number}, the last other one that was committed, is loaded because {why}"


def is_legacy(directory: str) -> bool:
    """Whether a directory holds a checkpoint in Megatron's format "torch"."""
    try:
        return any(name.startswith(LEGACY_PREFIX) for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False


def track(root: str, iteration: int) -> None:
    """Makes the tracker name an iteration, atomically and durably.

    Raises:
        StorageError: the tracker is unchanged; or, if the error is `visible`, it names the
            iteration, but a crash may undo that.
    """
    storage, path = pipeline.current().storage, os.path.join(root, TRACKER)
    replaced = atomic.replace_file(storage, path, str(iteration).encode(), durable=True)
    if replaced is not None:
        atomic.close_quietly(storage, replaced)


def retain(
    root: str,
    newest: int,
    retention: Retention,
    in_flight: Collection[str] = (),
) -> list[int]:
    """Removes old iterations, including the remains of aborted saves; returns their numbers.
    Symbolic links stay. An iteration that cannot be removed stays, with a warning.

    Args:
        newest: the iteration committed last; neither it nor a later one is removed.
        in_flight: directories of running saves, which are not removed.
    """
    if retention.keep_last is None:
        return []
    iterations = numbered(root, _NAME)
    entries = list[Entry]()
    for number, path in iterations:
        is_pinned = number == newest or path in in_flight or os.path.islink(path)
        if number <= newest and is_complete(path):
            entries.append(Entry(path, number, is_pinned=is_pinned))
        elif number < newest and not is_pinned and _is_debris(path):
            entries.append(Entry(path, number, is_useless=True))
    going = victims(entries, Policy(retention.keep_last, retention.keep_every))
    removed = []
    for number, path in reversed(iterations):
        try:
            if path in going:
                remove_directory(path)
                removed.append(number)
        except StorageError as error:
            log.warning("old iteration %r could not be removed: %s", path, error)
    return removed
