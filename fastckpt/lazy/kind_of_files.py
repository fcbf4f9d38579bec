"""Files of tensors as kinds of checkpoints: a file of torch.save or fastckpt.save, a safetensors
file, and a directory that has such files and nothing that says what they are together.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pickle import UnpicklingError

from fastckpt.arguments.urls import is_mounted
from fastckpt.directories import verify as directory_check
from fastckpt.directories.items_load import contents_of
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats import distcp, file_list
from fastckpt.formats.hugging_face import INDEX_SUFFIX
from fastckpt.formats.step_names import OURS
from fastckpt.lazy.kind import OF_ANOTHER, Debris, Kind, Part, Place, WithoutChecksums, bounded
from fastckpt.lazy.kind_of_steps import is_named_step, verify_file_of_step
from fastckpt.lazy.safetensors_files import safetensors_file
from fastckpt.lazy.source import Source
from fastckpt.lazy.torch_file import torch_file
from fastckpt.reading.verified import Body, opened_regular
from fastckpt.reading.verified_file import open_verified
from fastckpt.steps.no_steps import is_step
from fastckpt.storage import atomic
from fastckpt.storage.file_system import is_directory, reported
from fastckpt.storage.object_botocore import stale_uploads
from fastckpt.storage.owners import divided
from fastckpt.storage.vanishing import is_unlocked

_ZIP, _JSON_AT = b"PK\x03\x04", 8
SAFETENSORS = ".safetensors"
_OF_TENSORS = (".pt", ".pth", ".ckpt", SAFETENSORS)


class File(Kind):
    """A single file: of torch.save or fastckpt.save, of safetensors, or a file of a checkpoint that
    is a directory, which is verified with what that says of it.
    """

    def recognise(self, place: Place) -> bool:
        return not place.is_directory

    def open(self, place: Place) -> tuple[str, Source]:
        storage, path = place.storage, place.path
        with ExitStack() as files:
            fd = files.enter_context(opened_regular(storage, path))
            with reported("read", path):
                head = storage.read_at(fd, min(storage.fstat(fd).st_size, _JSON_AT + 1), 0)
            if not head:
                raise CorruptCheckpoint(
                    f"{path!r} is empty: nothing was written to it, or it was lost"
                )
            if head.startswith(_ZIP):
                make = torch_file
            elif path.endswith(SAFETENSORS) or head[_JSON_AT:] == b"{":
                make = safetensors_file
            else:
                raise CheckpointError(
                    f"{path!r} is neither a zip file of torch.save (from before version 1.6, they "
                    "are none) nor a safetensors file: pass the checkpoint's directory, if it is "
                    "of one"
                )
            closing = ExitStack()
            source = make(storage, place.staging, fd, path, closing.close)
            closing.push(files.pop_all())
            return path, source

    def verify(self, place: Place) -> Iterator[Part]:
        yield Part(place.path, partial(self.verify_file, place))

    def verify_file(self, place: Place) -> int:
        """Verifies the file, and returns its size."""
        directory, file = os.path.split(place.path)
        above = Place(place.storage, place.staging, directory)
        if OURS.fullmatch(file) and (is_named_step(above) or is_step(directory)):
            return verify_file_of_step(place, directory, file)
        with opened_regular(place.storage, place.path) as fd:
            if file.endswith(distcp.SUFFIX):
                return _verify_distcp(place, fd)
            opened = open_verified(place.storage, place.staging, fd, place.path, True)
            if opened is not None:
                with opened:
                    opened.verify_all()
                    return opened.nbytes
        if file == directory_check.COMMON:
            nbytes = directory_check.verified_common(place.path, place.storage)
            if nbytes is not None:
                return nbytes
        self._look_at_stock(place)
        raise WithoutChecksums(f"{place.path!r} was not written by fastckpt: it has no checksums")

    def _look_at_stock(self, place: Place) -> None:
        """Raises CorruptCheckpoint for a file without checksums that is evidently cut or damaged,
        and WithoutChecksums for one in a format that is not known.
        """
        try:
            self.open(place)[1].close()
        except (CorruptCheckpoint, StorageError):
            raise
        except (CheckpointError, UnpicklingError, NotImplementedError) as error:
            raise WithoutChecksums(f"{error}; it has no checksums") from None


def _verify_distcp(place: Place, fd: int) -> int:
    contents = contents_of(place.storage, fd, place.path)
    if contents is None:
        raise WithoutChecksums(f"{place.path!r} was not written by fastckpt: it has no checksums")
    Body(place.staging, fd, place.path, contents.index).verify()
    return contents.index.body_nbytes + len(contents.index.tail)


class Files(Kind):
    """A directory with files of tensors; opened is one that has a single safetensors file."""

    hint = (
        "it is a directory of safetensors files, as Hugging Face's are: load it by "
        "fastckpt.load_into(state, {path!r}), or read single tensors by fastckpt.open({path!r})"
    )

    def __init__(self, file: File) -> None:
        self._file = file

    def recognise(self, place: Place) -> bool:
        return sum(name.endswith(SAFETENSORS) for name in place.names) == 1

    def open(self, place: Place) -> tuple[str, Source]:
        (name,) = (name for name in place.names if name.endswith(SAFETENSORS))
        real = Place(place.storage, place.staging, os.path.realpath(place.inside(name)))
        return place.inside(name), self._file.open(real)[1]

    def verify(self, place: Place) -> Iterator[Part]:
        if place.has(file_list.NAME, link=True):  # a list tells of all the files of a directory
            return
        names = place.files
        by_name = [name for name in names if name.endswith((*_OF_TENSORS, INDEX_SUFFIX))]
        by_head, passed_over = bounded(place.path, [*{*names} - {*by_name}])
        for name in sorted((*by_name, *by_head)):  # in a cache of the Hugging Face hub: links
            if _has_tensors(place, name):
                real = Place(place.storage, place.staging, os.path.realpath(place.inside(name)))
                yield Part(place.inside(name), partial(self._file.verify_file, real))
        yield from passed_over

    def debris(self, place: Place) -> Iterator[Debris]:
        """Yields all that has a temporary's name, whatever it was to be; and, of a URL, uploads
        below it that were begun more than a day ago, and have not ended.
        """
        storage = place.storage
        for name in sorted(storage.names(place.path)):
            path, owner = place.inside(name), divided(name)[1]
            if owner is None or name[0] != ".":
                continue
            is_dead, is_ours = atomic.is_of_dead(storage, path), atomic.is_of_this_host(path)
            if (is_ours and not is_dead) or not is_unlocked(storage, path):
                continue
            whose = "" if is_ours else OF_ANOTHER
            if is_directory(storage, path):
                remove = partial(atomic.remove_dead_directory, storage, path)
                what = f"a temporary directory{whose}"
                aside = atomic.moved_aside(storage, path)
                if aside is not None:
                    what += f" that holds {os.path.basename(aside)}, which gets its name back"
            else:
                remove = partial(atomic.remove_dead_file, storage, path)
                what = f"a temporary file{whose}"
            yield place.debris([name], path, what, is_ours, remove)
        if not is_mounted(place.path):
            return
        for each in stale_uploads(place.path, atomic.DEAD_AFTER_S):
            what = "an upload that has not ended"
            yield Debris(each.path, each.nbytes, what, each.age_s, True, each.abort)


def _has_tensors(place: Place, name: str) -> bool:
    """Returns whether this is a file of tensors, by its name, or else by how it begins; or stands
    for the index of such files, and is no file.
    """
    path = place.inside(name)
    if name.endswith(INDEX_SUFFIX):  # it has no checksum: it is told only if it is no file
        status = place.status(name)
        return status is None or not stat.S_ISREG(status.st_mode)
    is_other = name[0] == "." or name.endswith(distcp.SUFFIX)
    if is_other or (not is_mounted(path) and place.below(name).is_directory):
        return False
    if name.endswith(_OF_TENSORS):
        return True
    try:
        return place.storage.read_file(path, len(_ZIP)) == _ZIP
    except OSError:  # a file of another name is none of tensors, as far as anybody can tell
        return False
