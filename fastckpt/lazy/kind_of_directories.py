"""Directories in the formats of others as kinds of checkpoints: one with a list of its files, of
torch.distributed.checkpoint, of Hugging Face, and a run of Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from fastckpt.directories import verify as directory_check
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, Vanished
from fastckpt.formats import distcp, file_list
from fastckpt.formats.hugging_face import INDEX, INDEX_SUFFIX
from fastckpt.lazy.kind import Debris, Kind, LeftOver, Part, Place, WithoutChecksums, refused
from fastckpt.lazy.kind_of_files import File, Files
from fastckpt.lazy.safetensors_files import hugging_face_directory
from fastckpt.lazy.source import Source
from fastckpt.storage.file_system import Storage, reported


class Listed(Kind):
    """A directory with a list of its files and their checksums. It is opened as what else it is."""

    def recognise(self, place: Place) -> bool:
        return False

    def verify(self, place: Place) -> Iterator[Part]:
        if place.has(file_list.NAME, link=True):
            check = partial(_verify_listed, place)
            yield Part(place.path, _unless_replaced(place, file_list.NAME, check))


def _verify_listed(place: Place) -> int:
    directory_check.check(place.path, place.storage)
    listed = directory_check.list_of(place.path, place.storage)
    return sum(file.nbytes for file in listed.values())


def _unless_replaced(place: Place, record: str, check: Callable[[], int]) -> Callable[[], int]:
    """Returns the check of a part of what a commit record stands for. It raises Vanished if it
    fails, and a save has replaced or removed the record since this call.
    """
    before = place.version(record)

    def checked() -> int:
        try:
            return check()
        except (CorruptCheckpoint, StorageError):
            if place.version(record) != before:
                raise Vanished(place.inside(record)) from None
            raise

    return checked


class Dcp(Kind):
    """A checkpoint of torch.distributed.checkpoint, or an iteration of Megatron."""

    hint = "it is a checkpoint of torch.distributed.checkpoint: load it by that module's load()"

    def __init__(self, file: File) -> None:
        self._file = file

    def recognise(self, place: Place) -> bool:
        return distcp.METADATA in place.names

    def open(self, place: Place) -> tuple[str, Source]:
        # Imports torch.distributed.checkpoint, which nothing else here needs.
        from fastckpt.lazy.items import ItemsSource

        return place.path, ItemsSource(place.storage, place.staging, place.path)

    def verify(self, place: Place) -> Iterator[Part]:
        files = [name for name in place.files if name.endswith(distcp.SUFFIX)]
        checks = {
            name: _unless_replaced(
                place, distcp.METADATA, partial(self._file.verify_file, place.below(name))
            )
            for name in files
        }
        # One, or one for each rank.
        metadata = [name for name in place.files if name.endswith(distcp.METADATA)]
        if files and not metadata:
            why = f"{place.path!r} has no {distcp.METADATA}: no checkpoint was committed there"
            yield refused(place.path, why)
        for name in metadata:
            check = partial(_verify_metadata, place, name)
            yield Part(place.inside(name), _unless_replaced(place, name, check))
        left = _left_over(place) if files and metadata else []
        for name in files:
            yield Part(place.inside(name), _leave if name in left else checks[name])

    def debris(self, place: Place) -> Iterator[Debris]:
        """Yields the data files, in a directory and those in it, that no .metadata names: of a save
        that was killed or, on another host, has not committed yet. Those that a process of this
        host may still commit are left out.
        """
        storage = place.storage
        inner = [name for name in storage.names(place.path, directories=True) if name[0] != "."]
        for name in ["", *sorted(inner)]:
            path = place.inside(name)
            if files := _unnamed(storage, path):
                count = f"{len(files)} data file{'s' * (len(files) > 1)}"
                what = f"{count} of DCP that no {distcp.METADATA} names"
                remove = partial(_remove_unnamed, storage, path, files)
                names = [os.path.join(name, file) for file in files]
                yield place.debris(names, path, what, _are_of_dead(files), remove)


def _verify_metadata(place: Place, name: str) -> int:
    """Verifies a .metadata file, and that the .distcp files which it commits exist."""
    from fastckpt.directories import dcp_metadata

    path = place.inside(name)
    content = dcp_metadata.content_of(place.storage, path)
    if not dcp_metadata.check(content, path):
        raise WithoutChecksums(f"{path!r} was not written by fastckpt: it has no checksum")
    for file in sorted(dcp_metadata.named_files(content)):
        if not place.has(file):
            raise CorruptCheckpoint(f"{file!r}, which {path!r} names, is missing")
    return len(content)


def _left_over(place: Place) -> list[str]:
    """Returns the data files that no .metadata names, as far as these can be read."""
    from fastckpt.directories import dcp_metadata

    try:
        return dcp_metadata.unnamed(place.storage, place.path)
    except CheckpointError:  # whose own verdict says so
        return []


def _leave() -> int:
    raise LeftOver(
        f"no {distcp.METADATA} names it: its save was killed, or has not committed yet; see "
        "`fastckpt repair`"
    )


def _unnamed(storage: Storage, directory: str) -> list[str]:
    from fastckpt.directories import dcp_metadata

    names = dcp_metadata.unnamed(storage, directory)
    return [name for name in names if dcp_metadata.is_of_dead(name) is not False]


def _are_of_dead(files: list[str]) -> bool:
    """Whether processes of this host made all of these data files, and are gone."""
    from fastckpt.directories import dcp_metadata

    return all(map(dcp_metadata.is_of_dead, files))


def _remove_unnamed(storage: Storage, directory: str, files: list[str]) -> bool:
    for name in {*files}.intersection(_unnamed(storage, directory)):
        path = os.path.join(directory, name)
        with reported("remove", path), suppress(FileNotFoundError):  # somebody else removed it
            storage.remove(path)
    with suppress(OSError):  # it may hold other files
        storage.remove_directory(directory)
    return True


class HuggingFace(Kind):
    """A directory of safetensors files with an index."""

    hint = Files.hint

    def recognise(self, place: Place) -> bool:
        return any(name.endswith(INDEX_SUFFIX) for name in place.names)

    def open(self, place: Place) -> tuple[str, Source]:
        indexes = sorted(name for name in place.names if name.endswith(INDEX_SUFFIX))
        index = INDEX if INDEX in indexes else indexes[0]
        found = hugging_face_directory(place.storage, place.staging, place.path, index)
        return place.path, found


class MegatronRun(Kind):
    """A directory of Megatron's iterations: opened is the newest that is complete."""

    def __init__(self, dcp: Dcp) -> None:
        self._dcp = dcp

    def recognise(self, place: Place) -> bool:
        return distcp.TRACKER in place.names

    def open(self, place: Place) -> tuple[str, Source]:
        from fastckpt.directories import iterations  # as torch.distributed.checkpoint above

        choices = iterations.candidates(place.path)
        if not choices:
            raise CorruptCheckpoint(f"{place.path!r} holds no complete iteration of Megatron's")
        return self._dcp.open(Place(place.storage, place.staging, choices[0][1]))
