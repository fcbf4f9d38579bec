"""Tensors whose elements lie in files at known places: read by rows, verified where blocks are.

Responsible for turning parts of tensors into rows of files. It must not know how the places were
found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import torch

from fastckpt.engine.staging import Staging
from fastckpt.lazy.selection import whole
from fastckpt.lazy.source import Shard, Stored, Wanted
from fastckpt.plan.boxes import row_major
from fastckpt.plan.runs import CopyRow, blocks_of, strided_copies
from fastckpt.reading.verified import Body, takes_bytes


class Extent(NamedTuple):
    """A tensor's place in a file.

    Attributes:
        file: the number of the file.
        begin: the offset of the first element, in bytes; or a function that returns it.
        strides: from an element to the next one along each dimension, in elements.
    """

    file: int
    begin: int | Callable[[], int]
    strides: tuple[int, ...]


class ExtentsSource:
    """A Source of whole tensors in files that stay open.

    Args:
        kind: the format, in words.
        staging: reads the files.
        bodies: the files.
        tensors: dtype, shape and place of each tensor, by name.
        close: closes the files.
    """

    def __init__(
        self,
        kind: str,
        staging: Staging,
        bodies: Sequence[Body],
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], Extent]],
        close: Callable[[], None],
    ) -> None:
        self.kind = kind
        self.facts: dict[str, str] = {"files": str(len(bodies))}
        self.is_verified = all(body.index.block_crcs for body in bodies if body.index.body_nbytes)
        self.tensors = {
            name: Stored(dtype, shape, (Shard(bodies[at.file].path, whole(shape)),))
            for name, (dtype, shape, at) in tensors.items()
        }
        self._extents = {name: at for name, (_dtype, _shape, at) in tensors.items()}
        self._staging, self._bodies, self._close = staging, bodies, close

    def read(self, wanted: Sequence[Wanted]) -> None:
        rows: dict[int, list[CopyRow]] = {}
        targets: list[torch.Tensor] = []
        later: list[tuple[Wanted, torch.Tensor, tuple[int, ...]]] = []
        for want in wanted:
            if not want.box.numel:
                continue
            memory, strides = self._memory(want)
            if memory is not want.target:
                later.append((want, memory, strides))
            targets.append(memory)
            rows.setdefault(self._extents[want.name].file, []).extend(self._rows(want, memory))
        for file, its in rows.items():
            self._move(self._bodies[file], sorted(its), targets)
        with torch.no_grad():
            for want, memory, strides in later:
                want.target.copy_(memory.as_strided(want.box.sizes, strides))

    def _memory(self, want: Wanted) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Returns the tensor whose memory receives the bytes, and the strides of the part in it."""
        sizes, strides = want.box.sizes, self._extents[want.name].strides
        dtype = want.target.dtype
        if not _is_ascending(sizes, strides):
            # Transposed, expanded or overlapping: everything from the first element to the last is
            # read, and the elements are picked from that.
            span = 1 + sum(step * (size - 1) for step, size in zip(strides, sizes, strict=True))
            return torch.empty(span, dtype=dtype, device="cpu"), strides
        if takes_bytes(want.target, self._staging.devices.readable()):
            return want.target, row_major(sizes)
        return torch.empty(sizes, dtype=dtype, device="cpu"), row_major(sizes)

    def _rows(self, want: Wanted, memory: torch.Tensor) -> list[CopyRow]:
        extent, itemsize = self._extents[want.name], memory.element_size()
        begin = extent.begin if isinstance(extent.begin, int) else extent.begin()
        begin += itemsize * sum(map(int.__mul__, want.box.offsets, extent.strides))
        sizes = tuple(memory.shape)
        strides = extent.strides if sizes == want.box.sizes else (1,)
        address = memory.data_ptr()
        return strided_copies(sizes, begin, strides, address, row_major(sizes), itemsize)

    def _move(self, body: Body, rows: Sequence[CopyRow], targets: Sequence[torch.Tensor]) -> None:
        devices = self._staging.devices.reads(
            target.untyped_storage() for target in targets if target.device.type != "cpu"
        )
        with closing(body.stream(blocks_of(rows, body.index.block_bytes))) as stream:
            body.move(stream, rows, devices.ranges)
            body.check(stream, stream.arrive())

    def close(self) -> None:
        self._close()


def _is_ascending(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether elements in row-major order lie one behind the other, perhaps with gaps."""
    inner = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size > 1:
            if stride < inner:
                return False
            inner = size * stride
    return True
