"""`fastckpt verify`: reads every byte of files and steps and compares checksums.

The module finds out what a path holds and says what is damaged. It unpickles nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from fastckpt.arguments.quantities import shown_size
from fastckpt.cli.shared_arguments import add_json, path_argument
from fastckpt.directories import verify as directory_check
from fastckpt.directories.items_load import contents_of
from fastckpt.errors import CheckpointError, CorruptCheckpoint, StorageError
from fastckpt.formats import file_list
from fastckpt.formats.manifest import MANIFEST, Manifest, Writer
from fastckpt.formats.step_names import NAME
from fastckpt.formats.step_names import OURS as OF_A_STEP
from fastckpt.reading.verified import Body, opened_regular
from fastckpt.reading.verified_file import open_verified
from fastckpt.saving import pipeline
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.no_steps import is_export, what_is_there
from fastckpt.steps.root import Steps
from fastckpt.storage.file_system import persistently, reported
from fastckpt.storage.vanishing import Vanished

_DISTCP = ".distcp"
_METADATA = ".metadata"
_DAMAGED, _UNREAD = 1, 3  # exit statuses; argparse's for wrong arguments is 2


def add_arguments(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="read checkpoints and compare all checksums",
        description="Reads every byte under each PATH and compares checksums. The exit status is 0 "
        "if all is as it was written; 1 if something is damaged, missing, or has no checksums; 3 "
        "if none of that was found, but something could not be read in several attempts.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        type=path_argument,
        metavar="PATH",
        help="a file of fastckpt.save, a step, a Checkpointer's root, a .distcp file, a checkpoint "
        "of DCP, Transformers or Accelerate, an export, or a directory of such",
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="each PATH is of a Checkpointer's local tier, where files that only other nodes have "
        "may be missing",
    )
    add_json(parser)
    parser.set_defaults(run=run)


class Verdict(NamedTuple):
    """The verdict on a part of a checkpoint.

    Attributes:
        kind: "ok", "no step", "removed", "unread", "damaged" or "FAILED".
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
    found = []
    for path in arguments.paths:
        for verdict in _verdicts(os.path.realpath(path), arguments.local):
            found.append(verdict)
            if not arguments.json:
                print(f"{verdict.kind:8} {verdict.path}: {verdict.text}", flush=True)
    if arguments.json:
        print(json.dumps({"parts": [verdict._asdict() for verdict in found]}, indent=1))
    statuses = {verdict.status for verdict in found}
    return _DAMAGED if _DAMAGED in statuses else max(statuses, default=0)


def _verdicts(path: str, is_local: bool) -> Iterator[Verdict]:
    """Yields the verdicts on what a path holds, as each is found."""
    try:
        for name, check in _parts(path, is_local):
            yield _verdict(name, check)
    except (StorageError, OSError) as error:  # a directory cannot be listed
        yield Verdict("unread", path, str(error), status=_UNREAD)


def _verdict(name: str, check: Callable[[], int]) -> Verdict:
    try:
        nbytes = persistently(check, name)
    except _NotCommitted as note:
        return Verdict("no step", name, str(note))
    except Vanished:
        return Verdict("removed", name, "by a save, while others were read")
    except (StorageError, OSError) as error:
        return Verdict("unread", name, str(error), status=_UNREAD)
    except CheckpointError as error:
        kind = "damaged" if isinstance(error, CorruptCheckpoint) else "FAILED"
        return Verdict(kind, name, str(error), status=_DAMAGED)
    return Verdict("ok", name, shown_size(nbytes), nbytes)


def _parts(path: str, is_local: bool) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yields what a path holds: for each part its name, and a function that verifies it and returns
    its size. Directories without a manifest come first, then steps from the oldest on.
    """
    if not os.path.exists(path):
        yield path, partial(_refuse, f"{path!r} does not exist")
        return
    if not os.path.isdir(path):
        yield path, partial(_verify_file, path)
        return
    parent, name = os.path.split(path)
    if os.path.lexists(os.path.join(path, MANIFEST)):
        yield path, partial(_verify_step, _steps(parent), name, is_local)
        return
    if NAME.match(name) and not _is_listed(path):
        why = f"{path!r} has no {MANIFEST}: this step was never committed, or is being saved"
        yield path, partial(_refuse, why)
        return
    steps = _steps(path)
    incomplete = [
        name for name in steps.incomplete() if not os.path.lexists(steps.path(name, MANIFEST))
    ]
    # Exports are named as steps are.
    exports = [os.path.join(path, name) for name in incomplete if is_export(steps, name)]
    for name in incomplete:
        if os.path.join(path, name) not in exports:
            yield os.path.join(path, name), _mention
    found = [name for name in sorted(steps.names()) if name not in incomplete]
    for name in found:
        yield os.path.join(path, name), partial(_verify_step, steps, name, is_local)
    inner = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name[0] != "."]
    inner = [each for each in inner if os.path.isdir(each)]
    runs = [] if found or not is_local else [each for each in inner if _steps(each).names()]
    for each in runs:  # a local tier has a directory for each root
        yield from _parts(each, is_local)
    if runs:
        return
    of_frameworks = [*_of_frameworks(path)]
    below = exports if found or of_frameworks else inner  # they may lie one level further down
    of_frameworks += [part for each in below for part in _of_frameworks(each)]
    yield from of_frameworks
    if not found and not of_frameworks:
        why = f"{path!r} holds nothing that fastckpt wrote, and so no checksums"
        if not any(name.endswith(".safetensors") for name in os.listdir(path)):
            why = f"{path!r} holds no committed step and no {_DISTCP} file: {what_is_there(steps)}"
        yield path, partial(_refuse, why)


def _is_listed(path: str) -> bool:
    return os.path.lexists(os.path.join(path, file_list.NAME))


def _of_frameworks(path: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yields what a directory holds as one checkpoint of a framework, as _parts() does."""
    if _is_listed(path):
        yield path, partial(_verify_listed, path)
    names = sorted(os.listdir(path))
    files = [name for name in names if name.endswith(_DISTCP)]
    metadata = [name for name in names if name.endswith(_METADATA)]  # one, or one for each rank
    if files and not metadata:
        why = f"{path!r} has no {_METADATA}: no checkpoint was committed there"
        yield path, partial(_refuse, why)
    for name in metadata:
        yield os.path.join(path, name), partial(_verify_metadata, os.path.join(path, name))
    for name in files:
        yield os.path.join(path, name), partial(_verify_file, os.path.join(path, name))


class _NotCommitted(CheckpointError):
    """A directory that a save began to fill: neither a step nor damage."""


def _mention() -> int:
    raise _NotCommitted(f"it has no {MANIFEST}: it was never committed, or is being saved")


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
    if OF_A_STEP.fullmatch(file) and NAME.match(os.path.basename(directory)):
        return _verify_file_of_step(_steps(os.path.dirname(directory)), directory, file)
    current = pipeline.current()
    with opened_regular(current.storage, path) as fd:
        if path.endswith(_DISTCP):
            return _verify_distcp(fd, path)
        opened = open_verified(current.storage, current.staging, fd, path, True)
        if opened is None:
            raise CheckpointError(f"{path!r} was not written by fastckpt: it has no checksums")
        with opened:
            opened.verify_all()
            return opened.nbytes


def _verify_file_of_step(steps: Steps, directory: str, file: str) -> int:
    """Verifies one file of a step, with the manifest and index that tell its checksums."""
    name = os.path.basename(directory)
    if not os.path.exists(os.path.join(directory, MANIFEST)):
        raise CheckpointError(
            f"{file!r} is of a step that was never committed: {directory!r} has no {MANIFEST}, "
            "which would name the files that belong to it"
        )
    with steps.hold(name):
        manifest = steps.read(name)
        if file == manifest.objects[0]:
            return _verify_objects(_copies(directory), manifest)
        for writer in manifest.writers:
            if file in (writer.file, writer.index):
                return _verify_writer(_copies(directory), manifest, writer)
        if file == MANIFEST:
            return os.path.getsize(os.path.join(directory, file))
        raise CheckpointError(f"{file!r} is none of the files that the manifest of {name!r} names")


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

    storage = pipeline.current().storage
    with opened_regular(storage, path) as fd, reported("read", path):
        content = storage.read_at(fd, storage.size(fd), 0)
    if not dcp_metadata.check(content, path):
        raise CheckpointError(f"{path!r} was not written by fastckpt: it has no checksum")
    directory = os.path.dirname(path)
    for name in dcp_metadata.our_files(content):
        if not os.path.exists(os.path.join(directory, name)):
            raise CorruptCheckpoint(f"{name!r}, which {path!r} names, is missing")
    return len(content)


def _verify_distcp(fd: int, path: str) -> int:
    current = pipeline.current()
    contents = contents_of(current.storage, fd, path)
    if contents is None:
        raise CheckpointError(f"{path!r} was not written by fastckpt: it has no checksums")
    Body(current.staging, fd, path, contents.index).verify()
    return contents.index.body_nbytes + len(contents.index.tail)


def _verify_step(steps: Steps, name: str, is_local: bool) -> int:
    """Verifies every file that the manifest names, while nobody may remove the step.

    With is_local, only the files of writers that have one here: those are this node's writers.
    """
    with steps.hold(name):
        manifest = steps.read(name)
        copies, there = _copies(steps.path(name)), {*os.listdir(steps.path(name))}
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
