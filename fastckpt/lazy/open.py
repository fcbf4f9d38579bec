"""fastckpt.open: what a path holds, found by what lies there rather than by its name."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack

from fastckpt.arguments.urls import StorageOptions, path_of
from fastckpt.engine.staging import Staging
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.lazy.extents import Described
from fastckpt.lazy.kind import Place
from fastckpt.lazy.kinds import kind_of
from fastckpt.lazy.source import Source, Wanted
from fastckpt.lazy.tensors import LazyTensors
from fastckpt.saving import pipeline
from fastckpt.state.fit import Fit, Rename, name_taken
from fastckpt.storage.file_system import Storage, reported


class RenamedSource:
    """A Source of the tensors of another one, under the names that `fit.rename` gives them.

    Args:
        source: the other one, which is closed with this.
        fit: has the rules.
        path: of the checkpoint, for messages.

    Attributes:
        olds: the names that the tensors have in the checkpoint, by those that they have here.

    Raises:
        IncompatibleCheckpoint: two tensors get one name, or a pattern fits none.
    """

    def __init__(self, source: Source, fit: Fit, path: str) -> None:
        self._source = source
        self.kind, self.facts, self.rest = source.kind, source.facts, source.rest
        self.has_paths, self.is_verified = source.has_paths, source.is_verified
        names, useless = fit.new_names([*source.tensors])
        if useless:
            raise IncompatibleCheckpoint(f"{path!r} does not fit: {useless[0]}")
        self.olds: dict[str, str] = {}
        for old, name in zip(source.tensors, names, strict=True):
            if name in self.olds:
                raise name_taken(path, old, name)
            if name is not None:
                self.olds[name] = old
        self.tensors = Described(self.olds, source.tensors.__getitem__)

    def read(self, wanted: Sequence[Wanted]) -> None:
        self._source.read([want._replace(name=self.olds[want.name]) for want in wanted])

    def close(self) -> None:
        self._source.close()


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
    place = Place(storage, staging, path)
    return kind_of(place).open(place)
