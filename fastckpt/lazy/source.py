"""What random access needs of a format: the tensors that are there, and parts of them read.

It must not know any format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from fastckpt.plan.boxes import Box


class Shard(NamedTuple):
    """A part of a tensor, and the path of the file that holds it."""

    path: str
    box: Box


class Stored(NamedTuple):
    """A tensor of a checkpoint: its dtype and shape, and where its parts lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


class Wanted(NamedTuple):
    """A part of a tensor that is to be read.

    `target` is a tensor of the box's sizes and the stored dtype, with contiguous memory.
    """

    name: str
    box: Box
    target: torch.Tensor


class Source(Protocol):
    """An opened checkpoint of some format.

    Attributes:
        kind: the format, in words.
        facts: what else the checkpoint tells of itself, such as who wrote it, by name.
        is_verified: whether every byte that is read is compared with a checksum.
        tensors: what is there, by name, in the order of the checkpoint.
    """

    @property
    def kind(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, str]: ...

    @property
    def is_verified(self) -> bool: ...

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Reads parts into their targets; several threads may call it.

        Raises:
            CorruptCheckpoint: something is damaged. StorageError: it cannot be read.
            DeviceError: a copy to a GPU failed.
        """

    def close(self) -> None:
        """Closes what is open; nothing is read any more."""
