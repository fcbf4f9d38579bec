"""fastckpt.open: what a path holds, found by what lies there rather than by its name.

It must not know how a format is read.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack

from fastckpt.arguments.urls import StorageOptions, path_of
from fastckpt.directories import iterations
from fastckpt.engine.staging import Staging
from fastckpt.errors import CheckpointError, CorruptCheckpoint, IncompatibleCheckpoint
from fastckpt.formats.hugging_face import INDEX, INDEX_SUFFIX
from fastckpt.formats.manifest import MANIFEST, OBJECTS
from fastckpt.formats.step_names import NAME as STEP_NAME
from fastckpt.formats.step_names import OURS
from fastckpt.lazy.renamed import RenamedSource
from fastckpt.lazy.safetensors_files import hugging_face_directory, safetensors_file
from fastckpt.lazy.source import Source
from fastckpt.lazy.step import StepSource
from fastckpt.lazy.tensors import LazyTensors
from fastckpt.lazy.torch_file import torch_file
from fastckpt.reading.verified import opened_regular
from fastckpt.saving import pipeline
from fastckpt.state.fit import Fit, Rename
from fastckpt.steps.no_steps import is_step, what_is_there
from fastckpt.steps.root import Steps
from fastckpt.storage.file_system import Storage, is_directory, reported
from fastckpt.storage.vanishing import listed_anew

log = logging.getLogger("fastckpt")

_ZIP, _JSON_AT = b"PK\x03\x04", 8
_SAFETENSORS = ".safetensors"
_METADATA = ".metadata"  # of torch.distributed.checkpoint


def open(
    path: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    storage_options: StorageOptions | None = None,
) -> LazyTensors:
    """Opens a checkpoint for random access: a mapping of names to tensors that are not read yet.

    `tensors[name][...]` reads a part: only the blocks of the files that hold it. No code from the
    files is run, whatever they hold. Of a nest of dicts and lists, a tensor's name is the path of
    keys to it, joined by "/"; in a key, "~" and "/" become "~0" and "~1". A second tensor of the
    same name gets "#2" behind it. Tensors inside of other objects are not found: `others` of the
    result counts these. Of Megatron, tensors have the shapes that it stored them in.

    Args:
        path: a file of fastckpt.save, torch.save or safetensors; a step of a Checkpointer, or its
            root (then the newest step whose files all have their sizes); a directory of
            torch.distributed.checkpoint, of Megatron (torch_dist) or its run (then the newest
            complete iteration), or of Hugging Face (safetensors); or a directory with one
            .safetensors file. Or the URL of any of these in an object store.
        rename: gives the tensors other names: as load_into()'s.
        storage_options: as Checkpointer's, where the path is a URL.

    Returns:
        LazyTensors, to be closed. Its is_verified tells whether what is read is compared with
            checksums; only files of fastckpt have them.

    Raises:
        CorruptCheckpoint: the checkpoint is damaged, as far as it was read by now.
        IncompatibleCheckpoint: its format is of a newer version, or of a very old one; or `rename`
            gives two tensors one name, or does not fit.
        CheckpointError: it is none of these.
        StorageError: the path does not exist (ENOENT), or cannot be read.
        pickle.UnpicklingError: a `.metadata` file names classes that it need not have.
        ValueError, TypeError: the path is none.
    """
    checked, fit = path_of("path", path, storage_options), Fit(rename=rename)
    current = pipeline.current()
    current.wait_for(os.path.realpath(checked))
    where, source = opened(current.storage, current.staging, checked)
    with ExitStack() as failing:
        failing.callback(source.close)
        if rename is not None:
            source = RenamedSource(source, fit, where)
        failing.pop_all()
    return LazyTensors(where, source)


def opened(storage: Storage, staging: Staging, path: str) -> tuple[str, Source]:
    """Returns what a path holds, and the path of that: of a root the newest whole step.

    Raises:
        CorruptCheckpoint: it is damaged. IncompatibleCheckpoint: its format is of another version.
        CheckpointError: it is no checkpoint of a known format.
        StorageError: it does not exist, or cannot be read.
        pickle.UnpicklingError: a `.metadata` file names classes that it need not have.
    """
    with reported("open", path):
        if storage.status(path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        path = os.path.realpath(path)
        has_files = is_directory(storage, path)
    if has_files:
        return _directory(storage, staging, path)
    return path, _file(storage, staging, path)


def _file(storage: Storage, staging: Staging, path: str) -> Source:
    with ExitStack() as files:
        fd = files.enter_context(opened_regular(storage, path))
        with reported("read", path):
            head = storage.read_at(fd, min(storage.fstat(fd).st_size, _JSON_AT + 1), 0)
        if not head:
            raise CorruptCheckpoint(f"{path!r} is empty: nothing was written to it, or it was lost")
        if head.startswith(_ZIP):
            make = torch_file
        elif path.endswith(_SAFETENSORS) or head[_JSON_AT:] == b"{":
            make = safetensors_file
        else:
            raise CheckpointError(
                f"{path!r} is neither a zip file of torch.save (from before version 1.6, they are "
                "none) nor a safetensors file: pass the checkpoint's directory, if it is of one"
            )
        closing = ExitStack()
        source = make(storage, staging, fd, path, closing.close)
        closing.push(files.pop_all())
        return source


def _directory(storage: Storage, staging: Staging, path: str) -> tuple[str, Source]:
    with reported("list", path):
        names = {*storage.names(path)}
    indexes = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    # Others write files of this name, too, and beside any checkpoint. A step without its objects is
    # a damaged one, and no directory with a single safetensors file.
    is_named_step = STEP_NAME.match(os.path.basename(path)) is not None and not indexes
    if MANIFEST in names and (OBJECTS in names or is_named_step or is_step(path)):
        return path, _step(storage, staging, Steps(storage, path), "")
    if _METADATA in names:
        # Imports torch.distributed.checkpoint, which nothing else here needs.
        from fastckpt.lazy.items import ItemsSource

        return path, ItemsSource(storage, staging, path)
    if indexes:
        index = INDEX if INDEX in indexes else indexes[0]
        return path, hugging_face_directory(storage, staging, path, index)
    if MANIFEST not in names and any(map(OURS.fullmatch, names)):
        raise CheckpointError(
            f"{path!r} has files of a Checkpointer's step, but no {MANIFEST}: its save was not "
            "committed, or it is half a copy; open another step"
        )
    files = [name for name in names if name.endswith(_SAFETENSORS)]
    if len(files) == 1:
        file = os.path.join(path, files[0])
        return file, _file(storage, staging, os.path.realpath(file))
    if iterations.TRACKER in names:
        choices = iterations.candidates(path)
        if not choices:
            raise CorruptCheckpoint(f"{path!r} holds no complete iteration of Megatron's")
        return _directory(storage, staging, choices[0][1])
    if MANIFEST in names and not any(map(STEP_NAME.match, names)):
        return path, _step(storage, staging, Steps(storage, path), "")  # which says what is wrong
    return _newest(storage, staging, path)


def _step(storage: Storage, staging: Staging, steps: Steps, name: str) -> StepSource:
    with ExitStack() as holding:
        holding.enter_context(steps.hold(name))
        closing = ExitStack()
        source = StepSource(storage, staging, steps, name, closing.close)
        closing.push(holding.pop_all())
        return source


def _newest(storage: Storage, staging: Staging, root: str) -> tuple[str, Source]:
    """Opens the newest step under a root that is whole, as far as the sizes of its files tell."""
    steps = Steps(storage, root)

    problems: list[CheckpointError] = []

    def newest() -> tuple[str, Source] | None:
        found, faults = steps.survey()
        for fault in faults:  # one of these may be the newest
            if str(fault.error) not in map(str, problems):
                log.warning("skipping %s: %s", steps.path(fault.name), fault.error)
                problems.append(fault.error)
        for item in found:
            try:
                with ExitStack() as failing:
                    step = _step(storage, staging, steps, item.name)
                    failing.callback(step.close)
                    step.check_sizes()
                    failing.pop_all()
                    return steps.path(item.name), step
            except CorruptCheckpoint as error:
                log.warning("skipping %s: %s", steps.path(item.name), error)
                problems.append(error)
        return None

    found = listed_anew(newest)  # a save may remove steps meanwhile
    if found is None and problems:
        is_newer = isinstance(problems[0], IncompatibleCheckpoint)
        kind = IncompatibleCheckpoint if is_newer else CorruptCheckpoint
        raise kind(f"no step under {root!r} is whole, or can be read: {problems[0]}")
    if found is None:
        what = what_is_there(steps)
        raise CheckpointError(f"{root!r} holds no checkpoint of a known format: {what}")
    return found
