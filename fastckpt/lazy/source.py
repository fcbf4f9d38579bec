"""The interface of a checkpoint for random access: its tensors, and reads of parts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch

from fastckpt.plan.boxes import Box

NAMES_MAX = 20  # of values that are no tensors
_PACKED: object = getattr(torch, "float4_e2m1fn_x2", object())


class Shard(NamedTuple):
    """A part of a tensor, and the path of the file that holds it."""

    path: str
    box: Box


class Unreadable(NamedTuple):
    """A description of a tensor whose dtype torch does not have: the dtype, and the size."""

    dtype: str
    nbytes: int


class Stored(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype, shape: the tensor's.
        shards: its parts and their files.
        repeated: the dimensions along which all elements are the same memory, like in an expanded
            tensor; only the first element along them is read.
        unreadable: set for a tensor that cannot be read; `dtype` has no meaning then.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    repeated: frozenset[int] = frozenset()
    unreadable: Unreadable | None = None

    @property
    def shown(self) -> tuple[str, int]:
        """The name of the dtype, and the size in bytes."""
        name = str(self.dtype).removeprefix("torch.")
        return self.unreadable or (name, prod(self.shape) * self.dtype.itemsize)

    def refusal(self, name: str, dtype: torch.dtype | None = None) -> str:
        """Returns why a tensor of this name cannot be read, or not as `dtype`; "" if it can."""
        if self.unreadable is None:
            if dtype in (None, self.dtype) or _PACKED not in (dtype, self.dtype):
                return ""
            return (
                f"{name!r} is of {self.dtype}, and torch does not cast packed numbers to {dtype}: "
                f"leave this tensor out, or load it into a tensor of {self.dtype}"
            )
        return (
            f"{name!r} is of dtype {self.unreadable.dtype}, which torch {torch.__version__} does "
            "not have: leave this tensor out, or read it with a version of torch that has this "
            "dtype or with the program that wrote it"
        )


class Wanted(NamedTuple):
    """A request to read a part of a tensor.

    `target` is a tensor of the box's sizes and the stored dtype, with contiguous memory.
    """

    name: str
    box: Box
    target: torch.Tensor


class Rest(NamedTuple):
    """The values of a checkpoint that are not tensors.

    Attributes:
        others: maps each class or function to the number of skipped objects that it makes. These
            objects may contain tensors.
        total: the number of values, including these objects; a list of plain values counts as one.
        names: the names of the first values.
        digests: reads the values' digests, by name; see LazyTensors.digests().
    """

    others: Mapping[str, int] = MappingProxyType({})
    total: int = 0
    names: tuple[str, ...] = ()
    digests: Callable[[], Mapping[str, str | None]] = dict


class Source(Protocol):
    """An opened checkpoint of some format.

    Attributes:
        kind: the name of the format for users.
        facts: other facts about the checkpoint, such as its writer, by name.
        has_paths: whether names are paths of keys joined by "/", in which keys are escaped.
        is_verified: whether every byte that is read is compared with a checksum.
        tensors: the tensors by name, in the order of the checkpoint.
        rest: the other values.
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
            CorruptCheckpoint: a part is damaged.
            StorageError: a part cannot be read.
            DeviceError: a copy to a GPU failed.
        """

    def positions(self) -> Mapping[str, tuple[str, int]]:
        """Returns where the first part of each tensor begins: a file, and an offset in it."""

    def close(self) -> None:
        """Closes the open files, after the last read. Idempotent."""
