"""A committed step, opened for random access.

It must not know which step is chosen, nor how its files are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import safetensors
from fastckpt.lazy.source import Shard, Stored, Wanted
from fastckpt.lazy.torch_file import torch_file
from fastckpt.reading.verified import opened_regular
from fastckpt.state.targets import Target
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

    kind, is_verified = "a step of fastckpt", True

    def __init__(
        self, storage: Storage, staging: Staging, steps: Steps, name: str, close: Callable[[], None]
    ) -> None:
        manifest, path = steps.read(name), steps.path(name)
        copies = StepCopies(storage, staging, [path])
        self._reader = StepReader(staging, path, manifest, copies)
        self._close = close
        self.facts = {
            "step": str(manifest.step),
            "saved": manifest.created,
            "ranks": str(manifest.world_size),
            "files": str(1 + len(manifest.writers)),
        }
        self.tensors: dict[str, Stored] = {}
        shards: dict[str, list[Shard]] = {}
        for file, piece in self._reader.pieces():
            shards.setdefault(piece.key, []).append(Shard(file, piece.box))
            dtype = safetensors.DTYPES[piece.dtype]
            found = self.tensors.setdefault(piece.key, Stored(dtype, piece.shape, ()))
            if found[:2] != (dtype, piece.shape):
                raise CorruptCheckpoint(f"{path!r} holds {piece.key!r} in two dtypes or shapes")
        self._in_shards = frozenset(shards)
        for key, its in shards.items():
            self.tensors[key] = self.tensors[key]._replace(shards=tuple(its))
        with ExitStack() as files:
            objects = copies.path(manifest.objects.file)
            fd = files.enter_context(opened_regular(storage, objects))
            self._objects = torch_file(storage, staging, fd, objects, files.pop_all().close)
        for name, stored in self._objects.tensors.items():
            self.tensors.setdefault(name, stored)

    def read(self, wanted: Sequence[Wanted]) -> None:
        targets = [
            Target(want.name, want.target, self.tensors[want.name].shape, want.box)
            for want in wanted
            if want.name in self._in_shards
        ]
        if targets:
            self._reader.read(targets)
        self._objects.read([want for want in wanted if want.name not in self._in_shards])

    def close(self) -> None:
        try:
            self._objects.close()
        finally:
            self._close()
