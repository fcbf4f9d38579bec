"""The option `--local DIR`, for all commands that have it: a root's steps in this node's local
tiers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fastckpt
from fastckpt.errors import CheckpointError
from fastckpt.formats.step_names import tier_name
from fastckpt.saving import pipeline
from fastckpt.steps.root import store_at
from fastckpt.steps.store import Committed, StepStore, in_order
from fastckpt.storage.file_system import Storage, reported

log = logging.getLogger("fastckpt")


def tiers_of(storage: Storage, root: str, directories: Sequence[str]) -> Iterator[StepStore]:
    """Yields the steps of a root (a real path) in some local tiers. Each tier is given like a
    Checkpointer's `local`, or as this root's directory in it.

    A tier that has only steps of other roots is logged as a warning, because the root may have
    another path on this machine.

    Raises:
        StorageError: one of the directories cannot be listed.
    """
    for directory in directories:
        local = os.path.realpath(directory)
        with reported("list", local):
            names = storage.names(local)
        name = tier_name(root)
        own = local if os.path.basename(local) == name else os.path.join(local, name)
        if own != local and name not in names and (others := roots_in(storage, local)):
            roots = ", ".join(sorted(map(os.path.basename, others)))
            log.warning("%r has no step of %r, only steps of other roots: %s", local, root, roots)
        yield store_at(storage, own)


def roots_in(storage: Storage, directory: str) -> list[str]:
    """Returns the directories with a root's steps: a local tier's subdirectories, or `directory`
    itself.

    Raises:
        StorageError: the directory cannot be listed.
    """
    if store_at(storage, directory).names():
        return [directory]
    with reported("list", directory):
        below = sorted(storage.names(directory, directories=True))
    paths = (os.path.join(directory, name) for name in below)
    return [path for path in paths if store_at(storage, path).names()]


def opened(
    path: str, directories: Sequence[str], rename: Mapping[Any, Any] | None = None
) -> fastckpt.LazyTensors:
    """Opens a checkpoint like fastckpt.open. If the path is a root, opens the newest step that is
    complete in the root or in one of these local tiers. `rename` is fastckpt.open's.
    """
    storage, root = pipeline.current().storage, os.path.realpath(path)
    shelves = [store_at(storage, root), *tiers_of(storage, root, directories)]
    if not any(steps.names() for steps in shelves[1:]):
        return fastckpt.open(path, rename=rename)
    candidates: list[tuple[tuple[int, int], str]] = []
    for steps in shelves:
        try:
            with fastckpt.open(steps.root) as tensors:
                name = os.path.basename(tensors.path)
                candidates.append((in_order(Committed(name, steps.read(name))), tensors.path))
        except CheckpointError as error:
            log.warning("skipping %s: %s", steps.root, error)
    return fastckpt.open(max(candidates)[1] if candidates else path, rename=rename)
