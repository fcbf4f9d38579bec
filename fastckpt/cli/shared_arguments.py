"""Arguments that commands share, for paths, quantities and JSON, and names as a terminal may have
them.
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import fastckpt
from fastckpt.arguments.names import listed
from fastckpt.arguments.quantities import NotAQuantity
from fastckpt.arguments.urls import path_of
from fastckpt.errors import CheckpointError
from fastckpt.formats.step_names import tier_name
from fastckpt.saving import pipeline
from fastckpt.steps.root import Committed, Steps, in_order
from fastckpt.storage.file_system import Storage, known_status, reported

# ---- The meaning of `--local DIR` to every command that has it: this node's part of a root's
# steps.

log = logging.getLogger("fastckpt")


def tiers_of(storage: Storage, root: str, directories: Sequence[str]) -> Iterator[Steps]:
    """Yields the steps of a root, given by its real path, that lie in some local tiers, each given
    as a Checkpointer's `local`, or as the directory in it that is this root's.

    A tier that has steps, but none of this root, is warned of: the root may have another path here.

    Raises:
        StorageError: one of the directories cannot be listed.
    """
    for directory in directories:
        given = os.path.realpath(directory)
        with reported("list", given):
            names = storage.names(given)
        name = tier_name(root)
        own = given if os.path.basename(given) == name else os.path.join(given, name)
        if own != given and name not in names and (others := roots_in(storage, given)):
            told = ", ".join(sorted(map(os.path.basename, others)))
            log.warning("%r has no step of %r, but of other roots: %s", given, root, told)
        yield Steps(storage, own)


def roots_in(storage: Storage, directory: str) -> list[str]:
    """Returns the directories in a local tier, or itself, that have steps of a root.

    Raises:
        StorageError: it cannot be listed.
    """
    if Steps(storage, directory).names():
        return [directory]
    with reported("list", directory):
        below = sorted(storage.names(directory, directories=True))
    paths = (os.path.join(directory, name) for name in below)
    return [path for path in paths if Steps(storage, path).names()]


def opened(
    path: str, directories: Sequence[str], rename: Mapping[Any, Any] | None = None
) -> fastckpt.LazyTensors:
    """Opens a checkpoint as fastckpt.open; of a root, the newest step that is whole in it or, with
    all its files, in one of these local tiers; `rename` as fastckpt.open's.
    """
    storage, root = pipeline.current().storage, os.path.realpath(path)
    shelves = [Steps(storage, root), *tiers_of(storage, root, directories)]
    if not any(steps.names() for steps in shelves[1:]):
        return fastckpt.open(path, rename=rename)
    found: list[tuple[tuple[int, int], str]] = []
    for steps in shelves:
        try:
            with fastckpt.open(steps.root) as tensors:
                name = os.path.basename(tensors.path)
                found.append((in_order(Committed(name, steps.read(name))), tensors.path))
        except CheckpointError as error:
            log.warning("passing over %s: %s", steps.root, error)
    return fastckpt.open(max(found)[1] if found else path, rename=rename)


def path_argument(text: str, check: Callable[[str, str], str] = path_of) -> str:
    """Returns a checked path for argparse, which ends the process with status 2 if it is wrong."""
    try:
        return check("it", text)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def status_of(path: str, *, link: bool = False) -> os.stat_result | None:
    """Returns what lies at a path, if that can be told; `link` is as Storage.status()'s."""
    from fastckpt.saving import pipeline  # which imports torch

    return known_status(pipeline.current().storage, path, link=link)


def is_there(path: str, *, link: bool = False) -> bool:
    """Whether something lies at a path, be it a link to nothing if `link`."""
    return status_of(path, link=link) is not None


def is_directory(path: str) -> bool:
    """Whether a path leads to a directory."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def real_root(text: str) -> str:
    """Returns the real path of a root, which may be missing. Raises CheckpointError if it is no
    directory.
    """
    path = os.path.realpath(text)
    if is_there(path) and not is_directory(path):
        raise CheckpointError(
            f"{path!r} is no directory, as a root is: `fastckpt inspect` and `fastckpt verify` "
            "take files"
        )
    return path


def quantity_argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a type for argparse that refuses an argument in the words of `read`, which is one of
    those in arguments/quantities.py.
    """

    def argument(text: str) -> Any:
        try:
            return read(text)
        except NotAQuantity as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    argument.__name__ = read.__name__  # argparse names it in its message about a wrong integer
    return argument


def shown_name(name: str) -> str:
    """Returns a name from a file for a terminal: what could steer the terminal is escaped, and an
    empty one is shown as such.
    """
    if not name:
        return repr(name)
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def shown_text(text: str) -> str:
    """Returns a text of one or more lines for a terminal, escaped as shown_name() does."""
    return "\n".join(line and shown_name(line) for line in text.split("\n"))


def shown_others(others: Mapping[str, int]) -> str:
    """Returns what a checkpoint holds beside its tensors in words; "" if that is nothing."""
    if not others:
        return ""
    kinds = (f"{count} of {shown_name(name)}" for name, count in others.items())
    return f"not looked into: {listed(kinds)}"
