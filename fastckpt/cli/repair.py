"""`fastckpt repair`: lists what dead saves left in a directory, and removes it when told to.

The module must not know how a save is made. It never touches a committed step or checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.shared_arguments import shown_name
from fastckpt.saving import pipeline
from fastckpt.steps.root import Steps
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, reported


class Debris(NamedTuple):
    """A file or directory that a save left: its path and size, what it is in words, and a function
    that removes it unless somebody still uses it, and returns whether it did.
    """

    path: str
    nbytes: int
    what: str
    remove: Callable[[], bool]


def run(arguments: argparse.Namespace) -> int:
    storage, directory = pipeline.current().storage, os.path.realpath(arguments.directory)
    with reported("list", directory):
        found = [*_debris(storage, directory)]
    rows = [
        {
            "path": each.path,
            "nbytes": each.nbytes,
            "what": each.what,
            "removed": arguments.yes and each.remove(),
        }
        for each in found
    ]
    if arguments.json:
        print(json.dumps({"directory": directory, "debris": rows}, indent=1))
    else:
        for each, row in zip(found, rows, strict=True):
            kept = ", not removed" if arguments.yes else ""
            state = ", removed" if row["removed"] else kept
            print(f"{shown_name(each.path)}: {each.what}, {shown_size(each.nbytes)}{state}")
        if not found:
            print(f"nothing to repair in {directory}")
    return int(not all(row["removed"] for row in rows))


def _debris(storage: Storage, directory: str) -> Iterator[Debris]:
    steps = Steps(storage, directory)
    for name in steps.incomplete():
        path = steps.path(name)
        if steps.is_dead(name):
            what = "a step that was never committed"
            yield Debris(path, _nbytes(path), what, partial(steps.remove_if_dead, name))
    for name in sorted(storage.names(directory)):
        path = os.path.join(directory, name)
        if not atomic.is_of_dead(storage, path):
            continue
        if storage.is_directory(path):
            remove = partial(atomic.remove_dead_directory, storage, path)
            what = "a temporary directory"
            aside = atomic.moved_aside(storage, path)
            if aside is not None:
                name = shown_name(os.path.basename(aside))
                what = f"a temporary directory that holds {name}, which gets its name back"
            yield Debris(path, _nbytes(path), what, remove)
        else:
            remove = partial(atomic.remove_dead_file, storage, path)
            yield Debris(path, _nbytes(path), "a temporary file", remove)


def _nbytes(path: str) -> int:
    """Returns the bytes of a file, or of all files in a directory and below that can be read."""
    nbytes = 0
    with suppress(OSError):  # it is only told
        nbytes = os.lstat(path).st_size
        if os.path.isdir(path) and not os.path.islink(path):
            nbytes = sum(_nbytes(os.path.join(path, name)) for name in os.listdir(path))
    return nbytes
