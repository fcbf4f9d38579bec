"""A committed step, opened for random access."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import safetensors
from fastckpt.formats.strict_json import KINDS_MAX
from fastckpt.lazy.extents import Described
from fastckpt.lazy.source import Shard, Stored, Wanted
from fastckpt.lazy.torch_file import zip_of_ours
from fastckpt.state.targets import Target
from fastckpt.state.tree import Stored as Placeholder
from fastckpt.steps.copies import StepCopies
from fastckpt.steps.load import StepReader
from fastckpt.steps.root import Steps
from fastckpt.storage.file_system import Storage


class StepSource:
    """A Source of the tensors of a step: those of the shards, and the small ones beside them.

    Args:
        storage, staging: read the files.
        steps, name: the step's root, and its name there.
        close: lets go of what keeps the step from being removed.

    Raises:
        CorruptCheckpoint: the manifest, an index or the file of objects is damaged.
        IncompatibleCheckpoint: a newer fastckpt wrote the step. StorageError: it cannot be read.
    """

    kind, is_verified, has_paths = "a step of fastckpt", True, True

    def __init__(
        self, storage: Storage, staging: Staging, steps: Steps, name: str, close: Callable[[], None]
    ) -> None:
        manifest, path = steps.read(name), steps.path(name)
        self._files = ExitStack()
        copies = StepCopies(storage, staging, [path], kept=self._files)
        self._reader = StepReader(staging, path, manifest, copies)
        self._close = close
        self.facts: dict[str, int | str] = {
            "step": manifest.step,
            "saved": manifest.created,
            "ranks": manifest.world_size,
            "files": 1 + len(manifest.writers),
        }
        parts = _Parts(path, self._reader)
        with ExitStack() as failing:
            failing.callback(self._files.close)
            body = self._files.enter_context(copies.body(manifest))
            objects = zip_of_ours(body, is_of_step=True)
            self._objects = objects.source(self.kind)
            self.rest = objects.rest
            parts.check(objects.tensors)
            self._places = objects.tensors
            small, in_shards = self._objects.stored, parts.stored
            self.tensors: Mapping[str, Stored] = Described(
                objects.tensors,
                lambda view: in_shards(view) if isinstance(view, Placeholder) else small(view),
            )
            failing.pop_all()

    def check_sizes(self) -> None:
        """Raises CorruptCheckpoint if a shard's file is missing, or has another size than the
        manifest says; StorageError if it cannot be opened.
        """
        writers = self._reader.manifest.writers
        for file, nbytes in {writer.file: writer.nbytes for writer in writers}.items():
            with self._reader.copies.opened(file, nbytes):
                pass

    def read(self, wanted: Sequence[Wanted]) -> None:
        targets, small = list[Target](), list[Wanted]()
        for want in wanted:
            place = self._places[want.name]
            if isinstance(place, Placeholder):
                targets.append(Target(*place, want.box, want.target))
            else:
                small.append(want)
        if targets:
            self._reader.read(targets)
        self._objects.read(small)

    def close(self) -> None:
        try:
            self._objects.close()
            self._files.close()
        finally:
            self._close()


# The dtype and shape of a tensor, and its shards.
_Found: TypeAlias = tuple[tuple[torch.dtype, tuple[int, ...]], Sequence[Shard]]


class _Parts:
    """What the indexes of a step say of its tensors."""

    def __init__(self, path: str, reader: StepReader) -> None:
        self._path = path
        self._found: dict[str, _Found] = {}  # by key
        self._described: dict[int, Stored] = {}  # by the identity of what was found
        for file, pieces in reader.pieces():
            alike: dict[tuple[str, int, int], _Found] = {}  # by what pieces have in common
            for key, dtype, shape, box, _begin in pieces:
                form = dtype, id(shape), id(box)
                its = alike.get(form)
                if its is None:
                    its = alike[form] = (safetensors.DTYPES[dtype], shape), (Shard(file, box),)
                known = self._found.setdefault(key, its)
                if known is its:
                    continue
                if known[0] != its[0]:
                    raise CorruptCheckpoint(f"{path!r} holds {key!r} in two dtypes or shapes")
                if type(known[1]) is list:
                    known[1].extend(its[1])
                else:
                    self._found[key] = known[0], [*known[1], *its[1]]

    def check(self, tensors: Mapping[str, object]) -> None:
        """Raises CorruptCheckpoint unless there are shards for each placeholder."""
        for name, view in tensors.items():
            if type(view) is not Placeholder:
                continue
            key, dtype, shape = view
            known = self._found.get(key)
            if (0 not in shape) if known is None else known[0] != (dtype, shape):
                raise CorruptCheckpoint(
                    f"{self._path!r} has no shards of {name!r} with the dtype and shape that its "
                    "objects name"
                )

    def stored(self, placeholder: Placeholder) -> Stored:
        """Returns the tensor of a placeholder; many have one description in common."""
        known = self._found.get(placeholder.key)
        if known is None:  # it has no elements
            return Stored(placeholder.dtype, placeholder.shape, ())
        stored = self._described.get(id(known))
        if stored is None:
            if len(self._described) >= KINDS_MAX:
                self._described.clear()
            (dtype, shape), shards = known
            stored = self._described[id(known)] = Stored(dtype, shape, tuple(shards))
        return stored
