"""`fastckpt verify`: reads every byte of files and steps and compares checksums.

The module finds out what a path holds and says what is damaged. It unpickles nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pickle import UnpicklingError
from typing import NamedTuple

import fastckpt
from fastckpt.arguments.quantities import shown_size
from fastckpt.arguments.urls import is_mounted
from fastckpt.cli.local_tiers import roots_in, tiers_of
from fastckpt.cli.shared_arguments import is_directory, is_there, shown_name, status_of
from fastckpt.directories import verify as directory_check
from fastckpt.directories.items_load import contents_of
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError, Vanished
from fastckpt.formats import file_list
from fastckpt.formats.hugging_face import INDEX_SUFFIX
from fastckpt.formats.manifest import MANIFEST, Manifest, Writer
from fastckpt.formats.step_names import NAME
from fastckpt.formats.step_names import OURS as OF_A_STEP
from fastckpt.reading.verified import Body, open_verified, opened_regular
from fastckpt.saving import pipeline
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.no_steps import is_step, what_is_there
from fastckpt.steps.root import Steps
from fastckpt.storage.file_system import persistently

_DISTCP = ".distcp"
_METADATA = ".metadata"
_BESIDE_MAX = 100  # names beside steps in a bucket that are looked into
_OF_TENSORS, _ZIP = (".pt", ".pth", ".ckpt", ".safetensors"), b"PK\x03\x04"
_DAMAGED, _UNREAD, _UNCHECKED = 1, 3, 4  # exit statuses; argparse's for wrong arguments is 2
Part = tuple[str, Callable[[], int]]  # a part's name; a function that verifies it: returns its size


class Verdict(NamedTuple):
    """The verdict on a part of a checkpoint.

    Attributes:
        kind: "ok", "no step", "left over", "removed", "unread", "unchecked", "damaged" or "FAILED".
        path: the part.
        text: how large it is, or what is wrong.
        nbytes: its size, if it is ok.
        status: the exit status that it asks for.
    """

    kind: str
    path: str
    text: str
    nbytes: int | None = None
    status: int = 0


def run(arguments: argparse.Namespace) -> int:
    if not arguments.paths and not arguments.local:
        arguments.error("the following arguments are required: PATH, or --local DIR")
    found = []
    for verdict in _all_verdicts(arguments.paths, arguments.local):
        found.append(verdict)
        if not arguments.json:
            print(f"{verdict.kind:9} {shown_name(verdict.path)}: {verdict.text}", flush=True)
    if arguments.json:
        print(json.dumps({"parts": [verdict._asdict() for verdict in found]}, indent=1))
    statuses = {verdict.status for verdict in found}
    return next((each for each in (_DAMAGED, _UNREAD, _UNCHECKED) if each in statuses), 0)


def _all_verdicts(paths: Sequence[str], local: Sequence[str]) -> Iterator[Verdict]:
    """Yields the verdicts on paths and on what local tiers have of them, or have at all."""
    for path in paths:
        real = os.path.realpath(path)
        yield from _verdicts(real, _parts(real))
        for steps in tiers_of(pipeline.current().storage, real, local):
            yield from _verdicts(steps.root, _steps_in(steps, is_local=True))
    for directory in local if not paths else ():
        real = os.path.realpath(directory)
        yield from _verdicts(real, _parts_of_tier(real))


def _verdicts(path: str, parts: Iterator[Part]) -> Iterator[Verdict]:
    """Yields the verdicts on what a path holds, as each is found."""
    try:
        for part in parts:
            yield _verdict(*part)
    except (StorageError, OSError) as error:  # a directory cannot be listed
        yield Verdict("unread", path, str(error), status=_UNREAD)


def _verdict(name: str, check: Callable[[], int]) -> Verdict:
    try:
        nbytes = persistently(check, name)
    except _NotCommitted as note:
        return Verdict("no step", name, str(note))
    except _LeftOver as note:
        return Verdict("left over", name, str(note))
    except _WithoutChecksums as note:
        return Verdict("unchecked", name, str(note), status=_UNCHECKED)
    except Vanished:
        return Verdict("removed", name, "by a save, while others were read")
    except (StorageError, OSError) as error:
        return Verdict("unread", name, str(error), status=_UNREAD)
    except CheckpointError as error:
        kind = "damaged" if isinstance(error, CorruptCheckpoint) else "FAILED"
        return Verdict(kind, name, str(error), status=_DAMAGED)
    return Verdict("ok", name, shown_size(nbytes), nbytes)


def _parts(path: str) -> Iterator[Part]:
    """Yields what a path holds. Directories without a manifest come first, then steps from the
    oldest on, then what others may have put beside them.
    """
    if not is_there(path):
        yield path, partial(_refuse, f"{path!r} does not exist")
        return
    if not is_directory(path):
        yield path, partial(_verify_file, path)
        return
    if is_there(os.path.join(path, MANIFEST), link=True):
        yield path, partial(_verify_step, _steps(path), "", False)
        return
    if NAME.match(os.path.basename(path)) and not _is_listed(path):
        why = f"{path!r} has no {MANIFEST}: this step was never committed, or is being saved"
        yield path, partial(_refuse, why)
        return
    steps, is_empty = _steps(path), True
    for part in chain(_steps_in(steps), _beside_steps(steps)):
        is_empty = is_empty and part[1] is _mention
        yield part
    if is_empty:
        why = f"{path!r} holds no committed step and no {_DISTCP} file: {what_is_there(steps)}"
        yield path, partial(_refuse, why)


def _parts_of_tier(directory: str) -> Iterator[Part]:
    """Yields what a local tier has of all roots."""
    roots = roots_in(pipeline.current().storage, directory)
    for root in roots:
        yield from _steps_in(_steps(root), is_local=True)
    if not roots:
        yield directory, partial(_refuse, f"{directory!r} holds no step of any root")


def _steps_in(steps: Steps, is_local: bool = False) -> Iterator[Part]:
    """Yields the steps under a root, those that were not committed first."""
    begun = _without_manifest(steps)
    for name in begun:
        if not _is_listed(steps.path(name)):  # an export may be named as a step is
            yield steps.path(name), _mention
    for name in sorted(steps.names()):
        if name not in begun:
            yield steps.path(name), partial(_verify_step, steps, name, is_local)


def _without_manifest(steps: Steps) -> list[str]:
    names = steps.incomplete()
    return [name for name in names if not is_there(steps.path(name, MANIFEST), link=True)]


def _beside_steps(steps: Steps) -> Iterator[Part]:
    """Yields what lies in a directory, or in one below it, and is no step: checkpoints of
    frameworks, exports, and single files.
    """
    yield from _in_directory(steps.root)
    if _is_listed(steps.root):
        return
    listed = [name for name in _without_manifest(steps) if _is_listed(steps.path(name))]
    names = steps.storage.names(steps.root, directories=True)
    below = [name for name in names if name in listed or not (name[0] == "." or NAME.match(name))]
    looked_into, passed_over = _bounded(steps.root, below)
    for name in looked_into:
        if name not in listed and is_step(steps.path(name)):  # a copy that has a name of its own
            yield steps.path(name), partial(_verify_step, _steps(steps.path(name)), "", False)
        else:
            yield from _in_directory(steps.path(name))
    yield from passed_over


def _bounded(path: str, names: Sequence[str]) -> tuple[list[str], list[Part]]:
    """Returns which of the names in a directory are looked into: of a bucket not all, since each
    takes requests. And the part that says so.
    """
    names = sorted(names)
    if not is_mounted(path) or len(names) <= _BESIDE_MAX:
        return names, []
    return names[:_BESIDE_MAX], [(path, partial(_pass_over, len(names) - _BESIDE_MAX))]


def _pass_over(count: int) -> int:
    raise _WithoutChecksums(
        f"{count} more names beside steps were not looked into, since each takes requests: verify "
        "those that are checkpoints by their own URLs"
    )


def _is_listed(path: str) -> bool:
    return is_there(os.path.join(path, file_list.NAME), link=True)


def _in_directory(path: str) -> Iterator[Part]:
    """Yields what a directory itself holds: a checkpoint of a framework, and files beside it."""
    if _is_listed(path):
        yield path, _unless_replaced(os.path.join(path, file_list.NAME), _verify_listed, path)
    storage = pipeline.current().storage
    names = sorted(storage.names(path))
    if is_mounted(path):  # where a look at each would take requests
        names = sorted({*names} - {*storage.names(path, directories=True)})
    files = [name for name in names if name.endswith(_DISTCP)]
    record = os.path.join(path, _METADATA)
    checks = {
        name: _unless_replaced(record, _verify_file, os.path.join(path, name)) for name in files
    }
    metadata = [name for name in names if name.endswith(_METADATA)]  # one, or one for each rank
    if files and not metadata:
        why = f"{path!r} has no {_METADATA}: no checkpoint was committed there"
        yield path, partial(_refuse, why)
    for name in metadata:
        file = os.path.join(path, name)
        yield file, _unless_replaced(file, _verify_metadata, file)
    left = _left_over(path) if files and metadata else []
    for name in files:
        yield os.path.join(path, name), _leave if name in left else checks[name]
    if _is_listed(path):  # a list tells of all the files that belong to a directory
        return
    by_name = [name for name in names if name.endswith((*_OF_TENSORS, INDEX_SUFFIX))]
    by_head, passed_over = _bounded(path, [*{*names} - {*by_name}])
    for name in sorted((*by_name, *by_head)):  # in a cache of the Hugging Face hub they are links
        file = os.path.join(path, name)
        if _has_tensors(path, name):
            yield file, partial(_verify_file, os.path.realpath(file))
    yield from passed_over


def _left_over(path: str) -> list[str]:
    """Returns the data files of DCP that no .metadata names, as far as these can be read."""
    # Imports torch.distributed.checkpoint, which nothing else here needs.
    from fastckpt.directories import dcp_metadata

    try:
        return dcp_metadata.unnamed(pipeline.current().storage, path)
    except CheckpointError:  # whose own verdict says so
        return []


def _unless_replaced(record: str, verify: Callable[[str], int], path: str) -> Callable[[], int]:
    """Returns the check of a part of what a commit record stands for. It raises Vanished if it
    fails, and a save has replaced or removed the record since this call.
    """
    before = _version(record)

    def check() -> int:
        try:
            return verify(path)
        except (CorruptCheckpoint, StorageError):
            if _version(record) != before:
                raise Vanished(record) from None
            raise

    return check


def _version(path: str) -> tuple[int, int, int] | None:
    status = status_of(path)
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)


def _has_tensors(directory: str, name: str) -> bool:
    """Returns whether this is a file of tensors, by its name, or else by how it begins; or stands
    for the index of such files, and is no file.
    """
    path = os.path.join(directory, name)
    if name.endswith(INDEX_SUFFIX):  # it has no checksum: it is told only if it is no file
        status = status_of(path)
        return status is None or not stat.S_ISREG(status.st_mode)
    is_other = name[0] == "." or name.endswith(_DISTCP)
    if is_other or (not is_mounted(path) and is_directory(path)):
        return False
    if name.endswith(_OF_TENSORS):
        return True
    try:
        storage = pipeline.current().storage
        return storage.read_file(path, len(_ZIP)) == _ZIP
    except OSError:  # a file of another name is none of tensors, as far as anybody can tell
        return False


class _NotCommitted(CheckpointError):
    """A directory that a save began to fill: neither a step nor damage."""


def _mention() -> int:
    raise _NotCommitted(f"it has no {MANIFEST}: it was never committed, or is being saved")


class _LeftOver(CheckpointError):
    """A file that belongs to no checkpoint: what a save wrote that did not commit."""


def _leave() -> int:
    raise _LeftOver(
        f"no {_METADATA} names it: its save was killed, or has not committed yet; see `fastckpt "
        "repair`"
    )


class _WithoutChecksums(CheckpointError):
    """A file that may be whole, and that holds nothing to tell it by."""


def _refuse(why: str) -> int:
    raise CheckpointError(why)


def _steps(root: str) -> Steps:
    return Steps(pipeline.current().storage, root)


def _copies(directory: str) -> StepCopies:
    current = pipeline.current()
    return StepCopies(current.storage, current.staging, [directory])


def _verify_file(path: str) -> int:
    """Verifies one file: a torch zip, a .distcp file, or a file of a step."""
    directory, file = os.path.split(path)
    if OF_A_STEP.fullmatch(file) and (
        NAME.match(os.path.basename(directory)) or is_step(directory)
    ):
        return _verify_file_of_step(directory, file)
    current = pipeline.current()
    with opened_regular(current.storage, path) as fd:
        if path.endswith(_DISTCP):
            return _verify_distcp(fd, path)
        opened = open_verified(current.storage, current.staging, fd, path, True)
        if opened is not None:
            with opened:
                opened.verify_all()
                return opened.nbytes
    if file == directory_check.COMMON:
        nbytes = directory_check.verified_common(path, current.storage)
        if nbytes is not None:
            return nbytes
    _look_at_stock(path)
    raise _WithoutChecksums(f"{path!r} was not written by fastckpt: it has no checksums")


def _look_at_stock(path: str) -> None:
    """Raises CorruptCheckpoint for a file without checksums that is evidently cut or damaged, and
    _WithoutChecksums for one in a format that is not known.
    """
    try:
        fastckpt.open(path).close()
    except (CorruptCheckpoint, StorageError):
        raise
    except (CheckpointError, UnpicklingError, NotImplementedError) as error:
        raise _WithoutChecksums(f"{error}; it has no checksums") from None


def _verify_file_of_step(directory: str, file: str) -> int:
    """Verifies one file of a step, with the manifest and index that tell its checksums."""
    if not is_there(os.path.join(directory, MANIFEST)):
        raise CheckpointError(
            f"{file!r} is of a step that was never committed: {directory!r} has no {MANIFEST}, "
            "which would name the files that belong to it"
        )
    steps = _steps(directory)
    with steps.hold(""):
        manifest = steps.read("")
        if file == manifest.objects[0]:
            return _verify_objects(_copies(directory), manifest)
        for writer in manifest.writers:
            if file in (writer.file, writer.index):
                return _verify_writer(_copies(directory), manifest, writer)
        if file == MANIFEST:
            return len(manifest.to_bytes())
        raise CheckpointError(
            f"{file!r} is none of the files that the manifest of {directory!r} names"
        )


def _verify_listed(path: str) -> int:
    """Verifies a directory that holds a list of its files with their checksums."""
    storage = pipeline.current().storage
    directory_check.check(path, storage)
    listed = directory_check.list_of(path, storage)
    return sum(file.nbytes for file in listed.values())


def _verify_metadata(path: str) -> int:
    """Verifies a .metadata file, and that the .distcp files which it commits exist."""
    # Imports torch.distributed.checkpoint, which nothing else here needs.
    from fastckpt.directories import dcp_metadata

    content = dcp_metadata.content_of(pipeline.current().storage, path)
    if not dcp_metadata.check(content, path):
        raise _WithoutChecksums(f"{path!r} was not written by fastckpt: it has no checksum")
    directory = os.path.dirname(path)
    for name in sorted(dcp_metadata.named_files(content)):
        if not is_there(os.path.join(directory, name)):
            raise CorruptCheckpoint(f"{name!r}, which {path!r} names, is missing")
    return len(content)


def _verify_distcp(fd: int, path: str) -> int:
    current = pipeline.current()
    contents = contents_of(current.storage, fd, path)
    if contents is None:
        raise _WithoutChecksums(f"{path!r} was not written by fastckpt: it has no checksums")
    Body(current.staging, fd, path, contents.index).verify()
    return contents.index.body_nbytes + len(contents.index.tail)


def _verify_step(steps: Steps, name: str, is_local: bool) -> int:
    """Verifies every file that the manifest names, while nobody may remove the step.

    With is_local, only the files of writers that have one here: those are this node's writers.
    """
    with steps.hold(name):
        manifest = steps.read(name)
        copies, there = _copies(steps.path(name)), {*steps.storage.names(steps.path(name))}
        checks = []
        if not is_local or manifest.objects[0] in there:
            checks.append(partial(_verify_objects, copies, manifest))
        for writer in manifest.writers:
            if not is_local or {writer.index, writer.file} & there:
                checks.append(partial(_verify_writer, copies, manifest, writer))
        nbytes, damage = 0, []
        unread: StorageError | None = None
        for check in checks:
            try:
                nbytes += check()
            except CorruptCheckpoint as error:
                damage.append(str(error))
            except StorageError as error:
                unread = error
        if damage or unread is not None:  # without locks, as in a bucket, a save may remove it
            steps.read(name)
        if damage:
            raise CorruptCheckpoint("; ".join(damage))
        if unread is not None:
            raise unread
        return nbytes


def _verify_objects(copies: StepCopies, manifest: Manifest) -> int:
    with copies.objects(manifest) as file:
        file.verify_all()
        return file.nbytes


def _verify_writer(copies: StepCopies, manifest: Manifest, writer: Writer) -> int:
    """Verifies the index of one writer, and its shard by the checksums in that."""
    index, _content = copies.index(writer, manifest.nonce)
    unpadded: list[int] = []
    with copies.shard(index, unpadded=unpadded) as body:
        body.verify()
        if unpadded:
            first, path = min(unpadded), body.path
            end = sum(index.frames[: first + 1])
            raise CorruptCheckpoint(
                f"{path!r} is damaged: the padding of block {first}, before byte {end}, is not "
                "what was written; every tensor in it is whole, but `zstd -d` may refuse the file"
            )
    return writer.index_nbytes + writer.nbytes
