"""fastckpt.open, which finds the format of a checkpoint by its contents rather than its name."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from fastckpt.arguments.urls import StorageOptions, path_of
from fastckpt.engine.staging import Staging
from fastckpt.errors import IncompatibleCheckpoint
from fastckpt.lazy.extents import Described
from fastckpt.lazy.kind import Place
from fastckpt.lazy.kinds import kind_of
from fastckpt.lazy.source import Rest, Source, Wanted
from fastckpt.lazy.tensors import LazyTensors
from fastckpt.saving import pipeline
from fastckpt.state.fit import Fit, Rename, name_taken
from fastckpt.storage.file_system import Storage, reported


class RenamedSource:
    """A Source of the tensors of another Source, under the names that `fit.rename` gives them.

    Args:
        source: the other Source, which is closed with this one.
        fit: the rules for names.
        path: the checkpoint's path, for messages.

    Attributes:
        olds: maps the new names of the tensors to their names in the checkpoint.
        left_out: see NewNames.

    Raises:
        IncompatibleCheckpoint: two tensors get the same name, or a pattern matches no name.
    """

    def __init__(self, source: Source, fit: Fit, path: str) -> None:
        self._source = source
        self.kind, self.facts = source.kind, source.facts
        self.rest = source.rest._replace(digests=partial(_renamed, source.rest, fit))
        self.has_paths, self.is_verified = source.has_paths, source.is_verified
        names, useless, self.left_out = fit.new_names([*source.tensors])
        if useless:
            raise IncompatibleCheckpoint(f"{path!r} does not fit `rename`: {useless[0]}")
        self.olds: dict[str, str] = {}
        for old, name in zip(source.tensors, names, strict=True):
            if name is None:
                continue
            if name in self.olds:
                raise name_taken(path, old, name)
            self.olds[name] = old
        self.tensors = Described(self.olds, source.tensors.__getitem__)

    def read(self, wanted: Sequence[Wanted]) -> None:
        self._source.read([want._replace(name=self.olds[want.name]) for want in wanted])

    def positions(self) -> Mapping[str, tuple[str, int]]:
        positions = self._source.positions()
        return {name: positions[old] for name, old in self.olds.items()}

    def close(self) -> None:
        self._source.close()


def _renamed(rest: Rest, fit: Fit) -> dict[str, str | None]:
    """Returns the digests of values under the names that `fit.rename` gives them."""
    digests = rest.digests()
    pairs = zip(fit.new_names([*digests]).names, digests.values(), strict=True)
    return {name: digest for name, digest in pairs if name is not None}


def open(
    path: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    storage_options: StorageOptions | None = None,
) -> LazyTensors:
    """Opens a checkpoint for random access: a mapping of names to tensors that are not read yet.

    `tensors[name][...]` reads a part of a tensor, from only those blocks of the files that contain
    it. No code from the files is run. In a nest of dicts and lists, a tensor's name consists of the
    keys that lead to it, joined by "/"; in a key, "~" and "/" become "~0" and "~1". A second tensor
    of the same name gets the suffix "#2". Tensors inside of other objects are not found; `others`
    of the result counts such objects. Tensors of Megatron have the shapes in which Megatron stored
    them.

    Args:
        path: a file of fastckpt.save, torch.save or safetensors; a step of a Checkpointer, or its
            root, for the newest step whose files all have the right sizes; a directory of
            torch.distributed.checkpoint or of Megatron (torch_dist), or Megatron's run, for the
            newest complete iteration; a directory of Hugging Face (safetensors), or one with a
            single .safetensors file; or the URL of any of these in an object store.
        rename: changes the tensors' names; see load_into().
        storage_options: see Checkpointer; for a path that is a URL.

    Returns:
        LazyTensors, which the caller must close. Its is_verified is True if reads are verified by
            checksums, which only files of fastckpt have.

    Raises:
        CorruptCheckpoint: the part of the checkpoint that was read is damaged.
        IncompatibleCheckpoint: its format is of a newer version, or a very old one; or `rename`
            gives two tensors the same name, or has a pattern that matches no name.
        CheckpointError: the path has none of these formats.
        StorageError: the path does not exist (ENOENT), or cannot be read.
        pickle.UnpicklingError: a `.metadata` file names classes that are not needed in it.
        ValueError, TypeError: the path is not a path or URL.
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
    """Opens the checkpoint at a path; returns its path, which for a root is that of the newest
    intact step, and its Source.

    Raises:
        CorruptCheckpoint: it is damaged.
        IncompatibleCheckpoint: its format is of another version.
        CheckpointError: it is not a checkpoint of a known format.
        StorageError: it does not exist or cannot be read.
        pickle.UnpicklingError: a `.metadata` file names classes that are not needed in it.
    """
    with reported("open", path):
        if storage.status(path) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        path = os.path.realpath(path)
    place = Place(storage, staging, path)
    return kind_of(place).open(place)
