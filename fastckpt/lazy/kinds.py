"""The list of all kinds of checkpoints, by which a path is opened and verified, and remains of
saves are removed. No other module distinguishes kinds. The kinds of steps are in
lazy/kind_of_steps.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pickle import UnpicklingError

from fastckpt.arguments.urls import is_mounted
from fastckpt.directories import verify as directory_check
from fastckpt.directories.items_load import contents_of
from fastckpt.errors import (
    CheckpointError,
    CorruptCheckpoint,
    IncompatibleCheckpoint,
    StorageError,
    Vanished,
)
from fastckpt.formats import distcp, file_list
from fastckpt.formats.hugging_face import INDEX, INDEX_SUFFIX
from fastckpt.formats.step_names import NAME, OURS
from fastckpt.lazy.kind import (
    OF_ANOTHER,
    Debris,
    Kind,
    LeftOver,
    Part,
    Place,
    WithoutChecksums,
    bounded,
    refused,
)
from fastckpt.lazy.kind_of_steps import (
    DamagedStep,
    Run,
    Step,
    UncommittedStep,
    is_export,
    is_named_step,
    mention,
    verify_file_of_step,
)
from fastckpt.lazy.safetensors_files import hugging_face_directory, safetensors_file
from fastckpt.lazy.source import Source
from fastckpt.lazy.torch_file import torch_file
from fastckpt.reading.verified import Body, open_verified, opened_regular
from fastckpt.saving import pipeline
from fastckpt.saving.lease import Lease
from fastckpt.steps.no_steps import is_step, what_is_there
from fastckpt.steps.root import store_at
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, is_directory, reported
from fastckpt.storage.input_files import InputFile
from fastckpt.storage.object_botocore import stale_uploads
from fastckpt.storage.owners import divided
from fastckpt.storage.vanishing import is_unlocked

_ZIP, _JSON_AT = b"PK\x03\x04", 8
_SAFETENSORS = ".safetensors"
_OF_TENSORS = (".pt", ".pth", ".ckpt", _SAFETENSORS)


class File(Kind):
    """A single file: of torch.save, fastckpt.save or safetensors, or a file of a checkpoint
    directory, which is verified with the directory's checksums.
    """

    def recognise(self, place: Place) -> bool:
        return not place.is_directory

    def open(self, place: Place) -> tuple[str, Source]:
        storage, path = place.storage, place.path
        with ExitStack() as files:
            file = files.enter_context(opened_regular(storage, path))
            with reported("read", path):
                head = file.read_at(min(file.nbytes(), _JSON_AT + 1), 0)
            if not head:
                raise CorruptCheckpoint(
                    f"{path!r} is empty: nothing was written to it, or its contents were lost"
                )
            if head.startswith(_ZIP):
                make = torch_file
            elif path.endswith(_SAFETENSORS) or head[_JSON_AT:] == b"{":
                make = safetensors_file
            else:
                raise CheckpointError(
                    f"{path!r} is neither a zip file of torch.save (version 1.6 or later) nor a "
                    "safetensors file: if it belongs to a checkpoint that is a directory, pass "
                    "the directory"
                )
            closing = ExitStack()
            source = make(place.staging, file, closing.close)
            closing.push(files.pop_all())
            return path, source

    def verify(self, place: Place) -> Iterator[Part]:
        yield Part(place.path, partial(self.verify_file, place))

    def verify_file(self, place: Place) -> int:
        """Verifies the file, and returns its size. Raises CheckpointError."""
        directory, file = os.path.split(place.path)
        above = Place(place.storage, place.staging, directory)
        if OURS.fullmatch(file) and (is_named_step(above) or is_step(directory)):
            return verify_file_of_step(place, directory, file)
        with opened_regular(place.storage, place.path) as opened:
            if file.endswith(distcp.SUFFIX):
                return _verify_distcp(place, opened)
            verified = open_verified(place.staging, opened, True, outcome="")
            if verified is not None:
                with verified:
                    verified.verify_all()
                    return verified.nbytes
        if file == directory_check.COMMON:
            nbytes = directory_check.verified_common(place.path, place.storage)
            if nbytes is not None:
                return nbytes
        self._look_at_stock(place)
        raise WithoutChecksums(f"{place.path!r} has no checksums, since fastckpt did not write it")

    def _look_at_stock(self, place: Place) -> None:
        """Raises CorruptCheckpoint for a file without checksums that is evidently truncated or
        damaged, and WithoutChecksums for a file of an unknown format.
        """
        try:
            self.open(place)[1].close()
        except (CorruptCheckpoint, StorageError):
            raise
        except (CheckpointError, UnpicklingError, NotImplementedError) as error:
            raise WithoutChecksums(f"{error}; it has no checksums") from None


_FILE = File()


def _verify_distcp(place: Place, file: InputFile) -> int:
    contents = contents_of(file)
    if contents is None:
        raise WithoutChecksums(f"{place.path!r} has no checksums, since fastckpt did not write it")
    Body(place.staging, file, contents.index).verify()
    return contents.index.body_nbytes + len(contents.index.tail)


class Files(Kind):
    """A directory with files of tensors. It can be opened if it has a single safetensors file."""

    hint = (
        "it is a directory of safetensors files in Hugging Face's layout: load it with "
        "fastckpt.load_into(state, {path!r}), or read single tensors with fastckpt.open({path!r})"
    )

    def recognise(self, place: Place) -> bool:
        return sum(name.endswith(_SAFETENSORS) for name in place.names) == 1

    def open(self, place: Place) -> tuple[str, Source]:
        (name,) = (name for name in place.names if name.endswith(_SAFETENSORS))
        real = Place(place.storage, place.staging, os.path.realpath(place.inside(name)))
        return place.inside(name), _FILE.open(real)[1]

    def verify(self, place: Place) -> Iterator[Part]:
        if place.has(file_list.NAME, link=True):  # a list tells of all the files of a directory
            return
        names = place.files
        by_name = [name for name in names if name.endswith((*_OF_TENSORS, INDEX_SUFFIX))]
        by_head, passed_over = bounded(place.path, [*{*names} - {*by_name}])
        for name in sorted((*by_name, *by_head)):  # in a cache of the Hugging Face hub: links
            if _has_tensors(place, name):
                real = Place(place.storage, place.staging, os.path.realpath(place.inside(name)))
                yield Part(place.inside(name), partial(_FILE.verify_file, real))
        yield from passed_over

    def debris(self, place: Place) -> Iterator[Debris]:
        """Yields all files and directories with names of temporaries; for a URL also unfinished
        uploads below it that were begun more than a day ago.
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
                    what += f" that holds {os.path.basename(aside)}, which will be renamed back"
            else:
                remove = partial(atomic.remove_dead_file, storage, path)
                what = f"a temporary file{whose}"
            yield place.debris([name], path, what, is_ours, remove)
        if not is_mounted(place.path):
            return
        for each in stale_uploads(place.path, atomic.DEAD_AFTER_S):
            what = "an unfinished upload"
            yield Debris(each.path, each.nbytes, what, each.age_s, True, each.abort)


def _has_tensors(place: Place, name: str) -> bool:
    """Returns whether this is a file of tensors, by its name or else by its first bytes. An index
    of such files counts if it is not a regular file, so that its verification fails.
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


class Listed(Kind):
    """A directory with a list of its files and their checksums. Another kind opens it."""

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
    """Wraps the check of a part of a checkpoint with this commit record. If the check fails and a
    save has replaced or removed the record since this call, it raises Vanished.
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

    hint = "it is a checkpoint of torch.distributed.checkpoint: load it with that module's load()"

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
                place, distcp.METADATA, partial(_FILE.verify_file, place.below(name))
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
        remains = _left_over(place) if files and metadata else []
        for name in files:
            yield Part(place.inside(name), _leave if name in remains else checks[name])

    def debris(self, place: Place) -> Iterator[Debris]:
        """Yields the data files that no .metadata names, in a directory and its subdirectories.
        They are from a save that was killed or that runs on another host. Files that a process of
        this host may still commit are left out.
        """
        from fastckpt.directories import dcp_metadata

        storage = place.storage
        inner = [name for name in storage.names(place.path, directories=True) if name[0] != "."]
        for name in ["", *sorted(inner)]:
            path = place.inside(name)
            try:
                files = _unnamed(storage, path)
            except FileNotFoundError:
                if not name:
                    raise
                continue  # its job has removed it meanwhile
            if files:
                count = f"{len(files)} data file{'s' * (len(files) > 1)}"
                what = f"{count} of DCP that no {distcp.METADATA} names"
                remove = partial(_remove_unnamed, storage, path, files)
                names = [os.path.join(name, file) for file in files]
                is_dead = all(map(dcp_metadata.is_of_dead, files))
                yield place.debris(names, path, what, is_dead, remove)


_DCP = Dcp()


def _verify_metadata(place: Place, name: str) -> int:
    """Verifies a .metadata file, and that the .distcp files that it names exist."""
    from fastckpt.directories import dcp_metadata

    path = place.inside(name)
    content = dcp_metadata.content_of(place.storage, path)
    if not dcp_metadata.check(content, path):
        with suppress(IncompatibleCheckpoint, UnpicklingError):  # it may hold more than ours do
            dcp_metadata.described(content, path, weights_only=True)
        raise WithoutChecksums(f"{path!r} has no checksum, since fastckpt did not write it")
    for file in sorted(dcp_metadata.named_files(content)):
        if not place.has(file):
            raise CorruptCheckpoint(f"{file!r} is missing, but {path!r} lists it")
    return len(content)


def _left_over(place: Place) -> list[str]:
    """Returns the data files that no readable .metadata file names."""
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


def _remove_unnamed(storage: Storage, directory: str, files: list[str]) -> bool:
    for name in {*files}.intersection(_unnamed(storage, directory)):
        path = os.path.join(directory, name)
        with reported("remove", path), suppress(FileNotFoundError):  # somebody else removed it
            storage.remove(path)
    Lease(storage, directory).remove_left()
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
        source = hugging_face_directory(place.storage, place.staging, place.path, index)
        return place.path, source


class MegatronRun(Kind):
    """A directory of Megatron's iterations. Opens the newest complete one."""

    def recognise(self, place: Place) -> bool:
        return distcp.TRACKER in place.names

    def open(self, place: Place) -> tuple[str, Source]:
        from fastckpt.directories import iterations  # as torch.distributed.checkpoint above

        choices = iterations.candidates(place.path)
        if not choices:
            raise CorruptCheckpoint(f"{place.path!r} holds no complete iteration of Megatron")
        return _DCP.open(Place(place.storage, place.staging, choices[0][1]))


RUN = Run()
_STEP, _UNCOMMITTED, _LISTED, _FILES = Step(), UncommittedStep(), Listed(), Files()
# In the order in which a path is taken for one: its own records come before the files in it.
KINDS: tuple[Kind, ...] = (
    _FILE,
    _STEP,
    _LISTED,
    _DCP,
    HuggingFace(),
    _UNCOMMITTED,
    _FILES,
    MegatronRun(),
    DamagedStep(),
    RUN,
)
_IN_DIRECTORIES = (_LISTED, _DCP, _FILES)  # of which there may be several in one directory


def kind_of(place: Place) -> Kind:
    """Returns the kind as which a path is opened. A path of no kind is opened as a run, whose error
    describes the path's contents. Raises StorageError if a directory cannot be listed.
    """
    return next((kind for kind in KINDS if kind.recognise(place)), RUN)


def hint_for_load(path: str) -> str:
    """Returns how to load a directory that was passed as a file; "" if no kind matches."""
    current = pipeline.current()
    place = Place(current.storage, current.staging, path)
    try:
        match = next((kind for kind in KINDS if kind.recognise(place)), None)
    except StorageError:  # this hint only adds to an error that the caller raises
        return ""
    return "" if match is None else match.hint.format(path=path)


def parts_at(place: Place) -> Iterator[Part]:
    """Yields the parts at a path that can be verified. In a run, steps without a manifest come
    first, then the other steps from the oldest on, then other checkpoints and files in the
    directory.
    """
    if not place.is_directory:
        yield from _FILE.verify(place)
        return
    if alone := [*_STEP.verify(place)] or [*_UNCOMMITTED.verify(place)]:
        yield from alone
        return
    is_empty = True
    for part in chain(RUN.verify(place), _beside_steps(place)):
        is_empty = is_empty and part.check is mention
        yield part
    if is_empty:
        what = what_is_there(store_at(place.storage, place.path))
        why = f"{place.path!r} holds no committed step and no {distcp.SUFFIX} file: {what}"
        yield refused(place.path, why)


def _beside_steps(place: Place) -> Iterator[Part]:
    """Yields the parts in a directory and its subdirectories that are not steps: checkpoints of
    frameworks, exports and single files.
    """
    yield from _in_directory(place)
    if place.has(file_list.NAME, link=True):
        return
    names = place.storage.names(place.path, directories=True)
    below = [name for name in names if is_export(place, name) or not _is_passed_over(name)]
    looked_into, passed_over = bounded(place.path, below)
    for name in looked_into:
        inner = place.below(name)
        if is_step(inner.path):  # a copy that has a name of its own
            yield from _STEP.verify(inner)
        else:
            yield from _in_directory(inner)
    yield from passed_over


def _is_passed_over(name: str) -> bool:
    return name[0] == "." or NAME.match(name) is not None


def _in_directory(place: Place) -> Iterator[Part]:
    for kind in _IN_DIRECTORIES:
        yield from kind.verify(place)


def debris_at(place: Place) -> Iterator[Debris]:
    """Yields the remains of all kinds of saves in a directory, those of steps first."""
    for kind in reversed(KINDS):
        yield from kind.debris(place)
