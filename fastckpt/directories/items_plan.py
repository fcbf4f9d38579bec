"""The plan of a directory of items: each rank writes one file with its items, and a record file
commits them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from fastckpt.arguments.options import WriteOptions
from fastckpt.engine.devices import DeviceSources
from fastckpt.formats import distcp
from fastckpt.saving.mutation_check import WatchedTensors
from fastckpt.saving.pacing import Pace
from fastckpt.saving.plan import Plan, WholeFile
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.owners import new_token

Places = list[tuple[int, int]]  # offset and size of each item
MakeItems = Callable[[str, Purpose], AbstractContextManager[tuple[int, str]]]


class ItemsConclusion(Protocol):
    """The commit of items that have been written."""

    def agree(self) -> None:
        """Agrees with the other ranks on the items that are used. It is called while items are
        copied, before a file is created.
        """

    def record(self, name: str, places: Places) -> bytes:
        """Returns this rank's record for the first rank, given the name of its file ("" if it has
        no items) and the offsets and sizes of its items there.
        """

    def publish(self, records: list[bytes]) -> None:
        """Commits on the first rank, with the records of all ranks."""


class ItemsPlan(Plan):
    """One rank's plan of a directory of items.

    Args:
        items: contiguous tensors, and bytes, that do not change until they are staged; if empty, no
            file is created.
        reads, watched: like Plan's.
        rank: the number in the file's name, "__RANK_TOKEN.distcp".
        directory: the file's directory, for messages.
        made: creates the file, given its name; yields (descriptor, path).
        options, conclusion: how the file is written, and how it is committed.
    """

    def __init__(
        self,
        items: list[torch.Tensor | bytes],
        reads: DeviceSources,
        watched: Sequence[WatchedTensors],
        rank: int,
        directory: str,
        made: MakeItems,
        options: WriteOptions,
        conclusion: ItemsConclusion,
    ) -> None:
        super().__init__(reads, watched)
        self._name = f"__{rank}_{new_token()}.distcp"
        self._items = items
        self._sources: list[object] = []
        self._places: Places = []
        self._directory, self._made = directory, made
        self._options = options
        self._conclusion: ItemsConclusion | None = conclusion

    def storages(self) -> list[torch.UntypedStorage]:
        """Returns the storages that are copied."""
        return [item.untyped_storage() for item in self._items if isinstance(item, torch.Tensor)]

    def lay_out(self, pace: Pace) -> list[WholeFile]:
        if not self._items:
            return []
        image, self._places = distcp.layout(self._items)
        self._sources, image.sources = image.sources, []
        purpose = Purpose(image.nbytes, 1, self._options.striping)
        path = os.path.join(self._directory, self._name)
        return [WholeFile(image, path, partial(self._made, self._name), purpose)]

    def agree(self, pace: Pace, nbytes: int) -> None:
        super().agree(pace, nbytes)
        self.agree_on_items()

    def agree_on_items(self) -> None:
        """Agrees with the other ranks on the items that are used."""
        assert self._conclusion is not None
        self._conclusion.agree()

    def record(self) -> bytes:
        assert self._conclusion is not None
        return self._conclusion.record(self._name if self._places else "", self._places)

    def publish(self, records: list[bytes]) -> None:
        assert self._conclusion is not None
        self._conclusion.publish(records)

    def forget(self) -> None:
        self._items.clear()
        self._sources.clear()

    def release(self) -> None:
        self.forget()
        self._conclusion = None
