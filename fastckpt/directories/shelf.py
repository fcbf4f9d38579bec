"""The checkpoint directories of a run, by the numbers in their names: listing and retention."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from fastckpt.directories.save import remove_directory
from fastckpt.errors import Vanished
from fastckpt.saving import pipeline
from fastckpt.storage.keep import Entry, Policy, victims
from fastckpt.storage.vanishing import listed_anew


def numbered(
    parent: str, names: re.Pattern[str], is_whole: Callable[[str], bool] = os.path.isdir
) -> list[tuple[int, str]]:
    """Returns the (number, path) pairs of entries in `parent` that match `names` and satisfy
    `is_whole`, in descending order. The number is the first group of `names`. Returns none if
    `parent` is missing. Raises StorageError if, in every attempt, the listed entries are gone when
    they are examined.
    """

    def look() -> list[tuple[int, str]] | None:
        listed = os.listdir(parent) if os.path.isdir(parent) else []
        matches = [match for match in map(names.match, listed) if match]
        entries = [(int(match[1]), os.path.join(parent, match.string)) for match in matches]
        whole = [each for each in entries if is_whole(each[1])]
        vanished = [path for _number, path in entries if not os.path.lexists(path)]
        if vanished and not whole:  # a newer entry existed before they were removed
            raise Vanished(vanished[-1])
        return sorted(whole, reverse=True) or None

    return listed_anew(look) or []


def committed_first(committed: str, found: Sequence[str]) -> list[str]:
    """Returns `found`, directories in their order for retain(), with the directory just committed
    moved to the front, because a run may have returned to lower numbers. A directory before it that
    is not older is omitted, because it was committed later. Returns none if `committed` is gone.
    """
    if committed not in found:  # another process has removed it, and may remove others
        return []
    storage, place = pipeline.current().storage, found.index(committed)
    own = storage.status(committed) if place else None
    older = []
    for path in found[:place]:
        status = storage.status(path)
        if own is not None and status is not None and status.st_mtime_ns < own.st_mtime_ns:
            older.append(path)
    return [committed, *older, *found[place + 1 :]]


def retain(
    newest_first: Sequence[str], last: int, *, best: str | None = None, beside: str | None = None
) -> None:
    """Removes all but the first `last` directories. `best` is like Policy's, `beside` like
    remove_directory()'s.
    """
    for path in victims([Entry(path) for path in newest_first], Policy(last, best=best)):
        remove_directory(path, beside)
