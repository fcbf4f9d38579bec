"""Verifies a checkpoint directory: compares the bytes of its files with its list.

Responsible for comparing a directory with its list, and for choosing the newest undamaged
directory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pickle import UnpicklingError
from typing import Any

from fastckpt.engine.staging import crc32
from fastckpt.errors import CorruptCheckpoint, IncompatibleCheckpoint, StorageError, Vanished
from fastckpt.formats import file_list
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.ranks.per_group import together
from fastckpt.ranks.round import TIMEOUT_S
from fastckpt.ranks.search import Candidate, Search, Trial
from fastckpt.reading.verified import opened_regular, read_small
from fastckpt.saving import pipeline
from fastckpt.storage.file_system import Storage, is_directory, persistently, reported
from fastckpt.storage.vanishing import listed_anew

COMMON, COMMON_CRC = "common.pt", "fastckpt.common.pt.crc32"  # in Megatron's iterations


def check(path: str, storage: Storage | None = None, rank: int = 0, world_size: int = 1) -> bool:
    """Reads a checkpoint directory completely and compares it with its list. Returns whether it has
    a list; only fastckpt writes one.

    Args:
        path, storage: the directory, and access to its file system.
        rank, world_size: this process's rank, and the number of processes that share the reading.

    Raises:
        CorruptCheckpoint: a file is missing, or its size or bytes differ; the message names it.
            IncompatibleCheckpoint: a newer fastckpt wrote it. StorageError: a read failed.
    """
    storage = storage or pipeline.current().storage
    with reported("open", path):
        if not is_directory(storage, os.path.realpath(path)):
            raise NotADirectoryError(errno.ENOTDIR, "not a directory")
    try:
        if not (files := persistently(partial(list_of, path, storage), path)):
            return False
        largest_first = sorted(files.items(), key=lambda item: -item[1].nbytes)
        for name, file in largest_first[rank::world_size]:
            inside = os.path.join(path, name)
            contents = persistently(partial(crc32_of, storage, inside, name, file.nbytes), inside)
            if contents != file:
                raise CorruptCheckpoint(
                    f"{name!r} has {contents.nbytes} bytes with CRC-32 {contents.crc32:08x}, but "
                    f"{file.nbytes} with {file.crc32:08x} were written"
                )
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{path!r} is damaged: {error}") from None
    return True


def list_of(path: str, storage: Storage) -> dict[str, file_list.File]:
    """Returns the list of a checkpoint directory, empty if it is missing; raises check()'s
    errors.
    """
    listed = os.path.join(path, file_list.NAME)
    try:
        content = read_small(storage, listed, file_list.NBYTES_MAX + 1)
    except StorageError as error:
        if error.errno == errno.ENOENT:
            return {}
        raise
    return file_list.from_bytes(content)


def is_of_others(path: str, storage: Storage) -> bool:
    """Returns whether the file with the list's name in a directory belongs to another program."""
    listed = os.path.join(path, file_list.NAME)
    return file_list.is_of_others(read_small(storage, listed, file_list.NBYTES_MAX + 1))


def crc32_of(storage: Storage, path: str, name: str, expected: int | None = None) -> file_list.File:
    """Reads a file, and returns its size and CRC-32. `name` is its name in messages. A file whose
    size is not `expected` is not read, because it may be sparse and have terabytes.

    Raises:
        CorruptCheckpoint: it is missing, is not a regular file, or has another size. StorageError:
            a read failed.
    """
    missing = f"{name!r} is missing"
    with opened_regular(storage, path, missing) as file, reported("read", path):
        size = file.nbytes()
        if expected not in (None, size):
            raise CorruptCheckpoint(f"{name!r} has {size} bytes, but {expected} were written")
        nbytes = crc = 0
        while part := file.read_at(BLOCK_BYTES, nbytes):
            crc = crc32(part, crc)
            nbytes += len(part)
    return file_list.File(nbytes, crc)


def check_common(path: str, crc32: int, planner_data: Any) -> bool:
    """Compares the CRC-32 of Megatron's common.pt with the one in planner_data of the `.metadata`
    next to it. Returns False if planner_data has none; raises CorruptCheckpoint if they differ.
    """
    expected = planner_data.get(COMMON_CRC) if isinstance(planner_data, dict) else None
    if expected not in (None, crc32):
        raise CorruptCheckpoint(
            f"{path!r} is damaged, or belongs to another save: its CRC-32 is {crc32}, but "
            f".metadata says {expected}"
        )
    return expected is not None


def verified_common(path: str, storage: Storage) -> int | None:
    """Reads Megatron's common.pt and returns its size; None if no `.metadata` has its checksum.

    Raises:
        CorruptCheckpoint: common.pt or `.metadata` is damaged. StorageError: a read failed.
    """
    # Imports torch.distributed.checkpoint, which only this function needs.
    from fastckpt.directories import dcp_metadata

    directory, name = os.path.split(path)
    try:
        described = dcp_metadata.read(storage, os.path.join(directory, dcp_metadata.NAME), True)
    except (FileNotFoundError, UnpicklingError, IncompatibleCheckpoint):
        return None
    contents = crc32_of(storage, path, name)
    return contents.nbytes if check_common(path, contents.crc32, described.planner_data) else None


def newest_whole(
    paths: Callable[[], Sequence[str]], group: Any = None, timeout_s: float = TIMEOUT_S
) -> str | None:
    """Returns the first undamaged directory, with a warning for each damaged one before it; returns
    None if there are no directories.

    Args:
        paths: a function that lists the directories from the newest to the oldest. It is called
            again if a directory is gone when it is read, because a newer one must have been saved.
            A directory without a list counts as undamaged.
        group: a torch.distributed process group whose ranks all call this. Each rank reads some of
            the files, and all ranks return the same directory. They communicate over the job's
            store.
        timeout_s: the longest time that ranks wait for each other, in seconds.

    Raises:
        CorruptCheckpoint: all directories are damaged; the message describes the first one.
            StorageError: one could not be read in several attempts, but may be undamaged.
            PeerFailed: another rank could not read one.
    """
    agreement = together(group).coordinator.begin(
        "choice of a directory", timeout_s, "nothing was loaded"
    )

    def checked(path: str) -> str:
        try:
            check(path, rank=agreement.rank, world_size=agreement.world_size)
        except StorageError:
            if os.path.lexists(path):
                raise
            raise Vanished(path) from None
        return path

    def trial_of(place: Candidate) -> Trial[str]:
        path = place[1]
        return Trial(path, [partial(checked, path)], lambda: not os.path.lexists(path))

    with agreement.failing():
        search = Search(agreement, lambda: [(0, path) for path in paths()], trial_of)
        choice = listed_anew(search.look)
        if choice is None and search.damaged:
            raise CorruptCheckpoint(next(iter(search.damaged.values())))
    agreement.close()
    return choice
