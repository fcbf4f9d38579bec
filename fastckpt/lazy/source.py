"""The interface of a format for random access: its tensors, and reads of parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from fastckpt.plan.boxes import Box

NAMES_MAX = 20  # of values that are no tensors


class Shard(NamedTuple):
    """A part of a tensor, and the path of the file that holds it."""

    path: str
    box: Box


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype, shape: the tensor's.
        shards: where its parts lie.
        repeated: the dimensions along which all its elements are one, as in an expanded tensor; of
            these only the first is read.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    repeated: frozenset[int] = frozenset()


class Wanted(NamedTuple):
    """A part of a tensor that is to be read.

    `target` is a tensor of the box's sizes and the stored dtype, with contiguous memory.
    """

    name: str
    box: Box
    target: torch.Tensor


class Rest(NamedTuple):
    """The values of a checkpoint that are no tensors.

    Attributes:
        others: how many objects, which may hold tensors, are there and were passed over, by what
            makes them.
        total: how many values there are, these objects among them; a list of plain ones is one.
        names: of the first of them.
    """

    others: Mapping[str, int] = MappingProxyType({})
    total: int = 0
    names: tuple[str, ...] = ()


class Source(Protocol):
    """An opened checkpoint of some format.

    Attributes:
        kind: the format, in words.
        facts: what else the checkpoint tells of itself, such as who wrote it, by name.
        has_paths: whether names are paths of keys joined by "/", in which keys are escaped.
        is_verified: whether every byte that is read is compared with a checksum.
        tensors: what is there, by name, in the order of the checkpoint.
        rest: what else is there.
    """

    @property
    def kind(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, int | str]: ...

    @property
    def has_paths(self) -> bool: ...

    @property
    def is_verified(self) -> bool: ...

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    @property
    def rest(self) -> Rest: ...

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Reads parts into their targets; several threads may call it.

        Raises:
            CorruptCheckpoint: something is damaged. StorageError: it cannot be read.
            DeviceError: a copy to a GPU failed.
        """

    def close(self) -> None:
        """Closes what is open, if it still is; nothing is read any more."""
