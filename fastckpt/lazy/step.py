"""A committed step, opened for random access.

It must not know which step is chosen, nor how its files are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from fastckpt.engine.staging import Staging
from fastckpt.errors import CorruptCheckpoint
from fastckpt.formats import safetensors
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
        self.facts = {
            "step": str(manifest.step),
            "saved": manifest.created,
            "ranks": str(manifest.world_size),
            "files": str(1 + len(manifest.writers)),
        }
        kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        parts: dict[str, list[Shard]] = {}
        for file, piece in self._reader.pieces():
            kind = safetensors.DTYPES[piece.dtype], piece.shape
            if kinds.setdefault(piece.key, kind) != kind:
                raise CorruptCheckpoint(f"{path!r} holds {piece.key!r} in two dtypes or shapes")
            parts.setdefault(piece.key, []).append(Shard(file, piece.box))
        with ExitStack() as failing:
            failing.callback(self._files.close)
            body = self._files.enter_context(copies.body(manifest))
            objects = zip_of_ours(body, is_of_step=True)
            self._objects = objects.source(self.kind)
            self.others = objects.others
            self.tensors: dict[str, Stored] = {}
            self._keys: dict[str, str] = {}  # of the tensors in shards, by name
            for name, view in objects.tensors.items():
                if name in self._objects.tensors:
                    self.tensors[name] = self._objects.tensors[name]
                    continue
                assert isinstance(view, Placeholder)
                self._keys[name] = view.key
                kind, its = (view.dtype, view.shape), parts.get(view.key, ())
                if kinds.get(view.key, kind) != kind or not (its or 0 in view.shape):
                    raise CorruptCheckpoint(
                        f"{path!r} has no shards of {name!r} with the dtype and shape that its "
                        "objects name"
                    )
                self.tensors[name] = Stored(*kind, tuple(its))
            failing.pop_all()

    def read(self, wanted: Sequence[Wanted]) -> None:
        targets = [
            Target(self._keys[want.name], want.target, self.tensors[want.name].shape, want.box)
            for want in wanted
            if want.name in self._keys
        ]
        if targets:
            self._reader.read(targets)
        self._objects.read([want for want in wanted if want.name not in self._keys])

    def close(self) -> None:
        try:
            self._objects.close()
            self._files.close()
        finally:
            self._close()
