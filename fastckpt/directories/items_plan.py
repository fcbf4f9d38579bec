"""The plan of a directory of items: each rank writes a file with its own, and another one commits.

It must not know the bytes of the format, nor what the file that commits says.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from fastckpt.directories.items_place import ItemsPlace
from fastckpt.engine.devices import Reads
from fastckpt.formats import distcp
from fastckpt.options import WriteOptions
from fastckpt.saving.fence import Watched
from fastckpt.saving.pacing import Pace
from fastckpt.saving.save import Output, Plan, WholeFile
from fastckpt.storage.lustre_layout import Purpose

Places = list[tuple[int, int]]  # offset and size of each item


class Conclusion(Protocol):
    """A conclusion says what becomes of items that were written."""

    def record(self, name: str, places: Places) -> bytes:
        """Returns what this rank tells the first one.

        Args:
            name: of its file, in the directory; "" if it has no items.
            places: of its items in the file.
        """

    def publish(self, place: ItemsPlace, records: list[bytes]) -> None:
        """THE commit, on the first rank, with the records of all."""


class ItemsPlan(Plan):
    """One rank's plan of a directory of items; nothing of them changes until they were staged.

    Args:
        items: contiguous tensors, and bytes; without any, no file is made.
        reads: what of them lies on devices.
        watched: what must not change before it was copied.
        rank: the number in the file's name, "__RANK_TOKEN.distcp".
        place: the directory.
        options: how it is written.
        conclusion: what becomes of them.
    """

    def __init__(
        self,
        items: list[torch.Tensor | bytes],
        reads: Reads,
        watched: Sequence[Watched],
        rank: int,
        place: ItemsPlace,
        options: WriteOptions,
        conclusion: Conclusion,
    ) -> None:
        super().__init__(reads, watched)
        self._name = f"__{rank}_{secrets.token_hex(8)}.distcp"
        self._items = items
        self._sources: list[object] = []
        self._places: Places = []
        self._place = place
        self._options = options
        self._conclusion: Conclusion | None = conclusion

    def lay_out(self, pace: Pace) -> list[Output]:
        if not self._items:
            return []
        image, self._places = distcp.layout(self._items)
        self._sources, image.sources = image.sources, []
        purpose = Purpose(image.nbytes, 1, self._options.striping)
        path = os.path.join(self._place.directory, self._name)
        return [WholeFile(image, path, partial(self._place.made, self._name), purpose)]

    def record(self) -> bytes:
        assert self._conclusion is not None
        return self._conclusion.record(self._name if self._places else "", self._places)

    def publish(self, records: list[bytes]) -> None:
        assert self._conclusion is not None
        self._conclusion.publish(self._place, records)

    def forget(self) -> None:
        self._items.clear()
        self._sources.clear()

    def release(self) -> None:
        self.forget()
        self._conclusion = None
