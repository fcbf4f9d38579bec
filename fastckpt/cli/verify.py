"""`fastckpt verify`: reads every byte of files and steps, and compares checksums.

The module reports the damaged files.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.local_tiers import roots_in, tiers_of
from fastckpt.cli.shared_arguments import is_there, shown_name
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, Vanished
from fastckpt.lazy.kind import LeftOver, NotCommitted, Part, Place, WithoutChecksums, refused
from fastckpt.lazy.kinds import RUN, parts_at
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import persistently

_DAMAGED, _UNREAD, _UNCHECKED = 1, 3, 4  # exit statuses; argparse's for invalid arguments is 2


class Verdict(NamedTuple):
    """The verdict on a part of a checkpoint.

    Attributes:
        kind: "ok", "no step", "left over", "removed", "unread", "unchecked", "damaged" or "FAILED".
        path: the part's path.
        text: the part's size, or a description of the fault.
        nbytes: the part's size, if kind is "ok".
        status: the exit status for this verdict.
    """

    kind: str
    path: str
    text: str
    nbytes: int | None = None
    status: int = 0


def run(arguments: argparse.Namespace) -> int:
    if not arguments.paths and not arguments.local:
        arguments.error("the following arguments are required: PATH, or --local DIR")
    verdicts = []
    for verdict in _all_verdicts(arguments.paths, arguments.local):
        verdicts.append(verdict)
        if not arguments.json:
            print(f"{verdict.kind:9} {shown_name(verdict.path)}: {verdict.text}", flush=True)
    if arguments.json:
        print(json.dumps({"parts": [verdict._asdict() for verdict in verdicts]}, indent=1))
    statuses = {verdict.status for verdict in verdicts}
    return next((each for each in (_DAMAGED, _UNREAD, _UNCHECKED) if each in statuses), 0)


def _all_verdicts(paths: Sequence[str], local: Sequence[str]) -> Iterator[Verdict]:
    """Yields the verdicts on paths and their copies in local tiers; without paths, on the whole
    tiers.
    """
    for path in paths:
        real = os.path.realpath(path)
        yield from _verdicts(real, _parts(real))
        for steps in tiers_of(pipeline.current().storage, real, local):
            yield from _verdicts(steps.root, RUN.verify(_place(steps.root), is_local=True))
    for directory in local if not paths else ():
        real = os.path.realpath(directory)
        yield from _verdicts(real, _parts_of_tier(real))


def _verdicts(path: str, parts: Iterator[Part]) -> Iterator[Verdict]:
    """Yields the verdicts on the parts of a path as they are found."""
    try:
        for part in parts:
            yield _verdict(*part)
    except (StorageError, OSError) as error:  # a directory cannot be listed
        yield Verdict("unread", path, str(error), status=_UNREAD)


def _verdict(name: str, check: Callable[[], int]) -> Verdict:
    try:
        nbytes = persistently(check, name)
    except NotCommitted as note:
        return Verdict("no step", name, str(note))
    except LeftOver as note:
        return Verdict("left over", name, str(note))
    except WithoutChecksums as note:
        return Verdict("unchecked", name, str(note), status=_UNCHECKED)
    except Vanished:
        return Verdict("removed", name, "by a save, while other files were read")
    except (StorageError, OSError) as error:
        return Verdict("unread", name, str(error), status=_UNREAD)
    except CheckpointError as error:
        kind = "damaged" if isinstance(error, CorruptCheckpoint) else "FAILED"
        return Verdict(kind, name, str(error), status=_DAMAGED)
    return Verdict("ok", name, shown_size(nbytes), nbytes)


def _place(path: str) -> Place:
    current = pipeline.current()
    return Place(current.storage, current.staging, path)


def _parts(path: str) -> Iterator[Part]:
    """Yields the parts of a path."""
    if is_there(path):
        yield from parts_at(_place(path))
    else:
        yield refused(path, f"{path!r} does not exist")


def _parts_of_tier(directory: str) -> Iterator[Part]:
    """Yields the parts of all roots in a local tier."""
    roots = roots_in(pipeline.current().storage, directory)
    for root in roots:
        yield from RUN.verify(_place(root), is_local=True)
    if not roots:
        yield refused(directory, f"{directory!r} holds no step of any root")
