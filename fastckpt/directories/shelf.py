"""Checkpoint directories of a run, by the numbers in their names: which there are, which may go."""

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
    """Returns (number, path) of what `is_whole` in `parent`, the highest number first: that is the
    first group of `names`, which they match. There are none if there is no `parent`. Raises
    StorageError if, each time it is tried, all that is listed is gone when it is looked at.
    """

    def look() -> list[tuple[int, str]] | None:
        listed = os.listdir(parent) if os.path.isdir(parent) else []
        matches = [match for match in map(names.match, listed) if match]
        entries = [(int(match[1]), os.path.join(parent, match.string)) for match in matches]
        whole = [each for each in entries if is_whole(each[1])]
        vanished = [path for _number, path in entries if not os.path.lexists(path)]
        if vanished and not whole:  # a newer one was there before they were removed
            raise Vanished(vanished[-1])
        return sorted(whole, reverse=True) or None

    return listed_anew(look) or []


def committed_first(committed: str, found: Sequence[str]) -> list[str]:
    """Returns `found`, directories in the order in which they are to stay, for retain(): but first
    the one just committed, since a run may have gone back to lower numbers. One before it that is
    not older is left out: it was committed meanwhile. There are none if `committed` is gone.
    """
    if committed not in found:  # somebody has removed it, and may be about to remove others
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
    """Removes all of these directories but the `last` ones. `best` is as Policy's, `beside` as
    remove_directory()'s.
    """
    for path in victims([Entry(path) for path in newest_first], Policy(last, best=best)):
        remove_directory(path, beside)
