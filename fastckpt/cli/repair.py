"""`fastckpt repair`: lists what dead saves left in a directory, and removes it when told to.

The module must not know how a save is made. It never touches a committed step or checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from fastckpt.arguments.quantities import shown_size, shown_time
from fastckpt.arguments.urls import is_mounted
from fastckpt.cli.local_tiers import tiers_of
from fastckpt.cli.shared_arguments import is_there, real_root, shown_name, status_of
from fastckpt.formats.manifest import MANIFEST
from fastckpt.saving import pipeline
from fastckpt.steps.dead import left_in
from fastckpt.steps.lease import Lease
from fastckpt.steps.root import Steps
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, is_directory, reported
from fastckpt.storage.object_botocore import stale_uploads
from fastckpt.storage.owners import divided
from fastckpt.storage.vanishing import is_unlocked

_OF_ANOTHER = ", of another host"


class Debris(NamedTuple):
    """A file or directory that a save left.

    Attributes:
        path, nbytes: its path and size.
        what: what it is, in words.
        age_s: how many seconds ago something of it last changed.
        is_dead: whether its process was of this host, and is gone.
        remove: removes it unless somebody is seen to use it, and returns whether it did.
    """

    path: str
    nbytes: int
    what: str
    age_s: float
    is_dead: bool
    remove: Callable[[], bool]


def run(arguments: argparse.Namespace) -> int:
    storage, directory = pipeline.current().storage, real_root(arguments.directory)
    tiers = [steps.root for steps in tiers_of(storage, directory, arguments.local)]
    # The root is missing where all steps are in memory yet.
    roots = [*filter(is_there, (directory, *tiers))] or [directory]
    if arguments.takeover:
        for root in roots:
            Lease(storage, root).take_over()
            if not arguments.json:
                print(
                    f"{shown_name(root)} is free: the job that saves there next has it. If another "
                    "one lives, its next save there fails"
                )
    found = []
    for root in roots:
        with reported("list", root):
            found += [*_temporaries(storage, root), *_data_files(storage, root)]
            found += [*_uploads(root)]
    rows = []
    for each in found:
        may_go = arguments.yes and (each.is_dead or arguments.other_hosts)
        told = each._asdict() | {"removed": may_go and each.remove()}
        del told["remove"]
        rows.append(told)
        if not arguments.json:
            state = ", removed" if told["removed"] else ", not removed" if arguments.yes else ""
            if not (each.is_dead or arguments.other_hosts):
                state += "; nothing here tells whether its save lives: see --other-hosts"
            facts = f"{shown_size(each.nbytes)}, changed {shown_time(each.age_s)} ago"
            print(f"{shown_name(each.path)}: {each.what}, {facts}{state}")
    if arguments.json:
        print(
            json.dumps(
                {"directory": directory, "taken_over": arguments.takeover, "debris": rows}, indent=1
            )
        )
    elif not found:
        print(f"nothing to repair in {shown_name(directory)}")
    return int(not all(row["removed"] for row in rows))


def _temporaries(storage: Storage, directory: str) -> Iterator[Debris]:
    """Yields the steps that were not committed, and what has a temporary's name."""
    steps = Steps(storage, directory)
    for name in steps.incomplete():
        path = steps.path(name)
        if left_in(storage, path, 0.0, set()) is not None:
            left = atomic.temporaries(storage, steps.path(name, MANIFEST))
            is_ours = all(map(atomic.is_of_this_host, left))
            what = "a step that was never committed" + ("" if is_ours else _OF_ANOTHER)
            remove = partial(steps.remove_if_dead, name, others_after_s=0.0)
            yield _debris([path], path, what, is_ours, remove)
    lease = Lease(storage, directory)
    if lease.is_left():
        yield _debris([lease.path], lease.path, "the lease of a dead job", True, lease.remove_left)
    for name in sorted(storage.names(directory)):
        path, owner = os.path.join(directory, name), divided(name)[1]
        if owner is None or name[0] != ".":
            continue
        is_dead, is_ours = atomic.is_of_dead(storage, path), atomic.is_of_this_host(path)
        if (is_ours and not is_dead) or not is_unlocked(storage, path):
            continue
        whose = "" if is_ours else _OF_ANOTHER
        if is_directory(storage, path):
            remove = partial(atomic.remove_dead_directory, storage, path)
            what = f"a temporary directory{whose}"
            aside = atomic.moved_aside(storage, path)
            if aside is not None:
                name = shown_name(os.path.basename(aside))
                what = f"a temporary directory{whose} that holds {name}, which gets its name back"
        else:
            remove = partial(atomic.remove_dead_file, storage, path)
            what = f"a temporary file{whose}"
        yield _debris([path], path, what, is_ours, remove)


def _uploads(root: str) -> Iterator[Debris]:
    """Yields the uploads below a URL that were begun more than a day ago, and have not ended."""
    for each in stale_uploads(root, atomic.DEAD_AFTER_S) if is_mounted(root) else ():
        yield Debris(
            each.path, each.nbytes, "an upload that has not ended", each.age_s, True, each.abort
        )


def _data_files(storage: Storage, directory: str) -> Iterator[Debris]:
    """Yields the data files of DCP, in a directory and those in it, that no .metadata names: of a
    save that was killed or, on another host, has not committed yet. Those that a process of this
    host may still commit are left out.
    """
    inner = [name for name in storage.names(directory, directories=True) if name[0] != "."]
    for name in ["", *sorted(inner)]:
        path = os.path.join(directory, name) if name else directory
        files = _unnamed(storage, path)
        if files:
            what = f"{len(files)} data file{'s' * (len(files) > 1)} of DCP that no .metadata names"
            is_dead = _are_of_dead(files)
            remove = partial(_remove_unnamed, storage, path, files)
            yield _debris(files, path, what, is_dead, remove)


def _unnamed(storage: Storage, directory: str) -> list[str]:
    # Imports torch.distributed.checkpoint, which nothing else here needs.
    from fastckpt.directories import dcp_metadata

    return [
        os.path.join(directory, name)
        for name in dcp_metadata.unnamed(storage, directory)
        if dcp_metadata.is_of_dead(name) is not False
    ]


def _are_of_dead(files: Sequence[str]) -> bool:
    """Whether processes of this host made all of these data files, and are gone."""
    from fastckpt.directories import dcp_metadata

    return all(dcp_metadata.is_of_dead(os.path.basename(path)) for path in files)


def _remove_unnamed(storage: Storage, directory: str, files: Sequence[str]) -> bool:
    for path in {*files}.intersection(_unnamed(storage, directory)):
        with reported("remove", path), suppress(FileNotFoundError):  # somebody else removed it
            storage.remove(path)
    with suppress(OSError):  # it may hold other files
        storage.remove_directory(directory)
    return True


def _debris(
    paths: Sequence[str], path: str, what: str, is_dead: bool, remove: Callable[[], bool]
) -> Debris:
    """Returns the debris that consists of some files or directories."""
    age_s = max(0.0, time.time() - max(map(_changed, paths)))
    return Debris(path, sum(map(_nbytes, paths)), what, age_s, is_dead, remove)


def _files(path: str) -> Iterator[os.stat_result]:
    """Yields the status of a file, or of a directory and everything in it that can be looked at."""
    status = status_of(path, link=True)
    if status is None:
        return
    yield status
    if stat.S_ISDIR(status.st_mode):
        with suppress(OSError):  # it is only told
            for name in pipeline.current().storage.names(path):
                yield from _files(os.path.join(path, name))


def _changed(path: str) -> float:
    """Returns when a file, or anything in a directory or below it, last changed."""
    return max((each.st_mtime for each in _files(path)), default=0.0)


def _nbytes(path: str) -> int:
    """Returns the bytes of a file, or of all files in a directory and below that can be read."""
    return sum(each.st_size for each in _files(path) if not stat.S_ISDIR(each.st_mode))
