"""Checkpoint directories of a run, by the numbers in their names: which there are, which may go.

It must not know what the files mean, nor how a directory is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from fastckpt.directories.save import remove_directory
from fastckpt.storage.keep import Entry, may_go


def numbered(parent: str, names: re.Pattern[str]) -> list[str]:
    """Returns the paths of the directories in `parent` whose names match, the one with the highest
    number first: that is the pattern's first group. There are none if `parent` does not exist.
    """
    listed = os.listdir(parent) if os.path.isdir(parent) else []
    found = [(int(match[1]), match.string) for match in map(names.match, listed) if match]
    paths = [os.path.join(parent, name) for _number, name in sorted(found, reverse=True)]
    return [path for path in paths if os.path.isdir(path)]


def retain(
    newest_first: Sequence[str], last: int, *, best: str | None = None, beside: str | None = None
) -> None:
    """Removes all of these directories but the `last` ones. `best` is as may_go()'s, `beside` as
    remove_directory()'s.
    """
    for path in may_go([Entry(path) for path in newest_first], last, best=best):
        remove_directory(path, beside)
