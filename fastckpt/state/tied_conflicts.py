"""Tensors of a state that share memory, such as tied weights, and so can take one value only.

Responsible for finding those for which a checkpoint holds different values. It must not know files,
or how stored values are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from fastckpt.plan.boxes import Box
from fastckpt.state.identity import memory_of
from fastckpt.state.kinds import PLAIN_TENSORS

_PART_BYTES = 64 << 20  # of each value that is compared at a time
_ITEM_BYTES = 16  # of the largest dtype


class _Taker(NamedTuple):
    """A name in a state, its memory, and the stored value that is to go there.

    `source` is equal for names that get the same stored value; `stored` is what a reader knows that
    value by.
    """

    name: str
    memory: torch.Tensor
    box: Box
    source: Hashable
    stored: Any


class Tied:
    """The tensors of a state that are going to be filled, by their memory."""

    def __init__(self) -> None:
        self._by_memory: dict[Hashable, list[_Taker]] = {}

    def add(self, name: str, memory: torch.Tensor, box: Box, source: Hashable, stored: Any) -> None:
        """Notes the memory that a stored value goes to.

        Args:
            name: the tensor's name in the state.
            memory: this rank's part of it.
            box: the part.
            source: equal for names that get the same stored value.
            stored: given to the reader of conflicts().
        """
        place = memory_of(memory) if type(memory) in PLAIN_TENSORS else None
        if place is not None:
            taker = _Taker(name, memory, box, source, stored)
            self._by_memory.setdefault(place, []).append(taker)

    def conflicts(self, read: Callable[[Any, Box], torch.Tensor]) -> list[str]:
        """Returns what does not fit, in words: names of one memory that different values go to.
        Values are read only if names of one memory get several of them, and are compared as the
        memory would hold them.

        Args:
            read: returns a part of a stored value; raises what reading raises.
        """
        found = []
        for first, *others in self._by_memory.values():
            seen = {first.source}
            for other in others:
                if other.source not in seen and not _are_same(first, other, read):
                    found.append(
                        f"{first.name} and {other.name} are one tensor in the state, and have "
                        "different values in the checkpoint"
                    )
                seen.add(other.source)
        return found


def _are_same(a: _Taker, b: _Taker, read: Callable[[Any, Box], torch.Tensor]) -> bool:
    if a.box != b.box:
        return False
    dtype = a.memory.dtype
    return all(
        torch.equal(_bits(read(a.stored, part), dtype), _bits(read(b.stored, part), dtype))
        for part in _parts(a.box)
    )


def _bits(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    value = value.detach().to("cpu", dtype).resolve_conj().resolve_neg()
    return value.contiguous().view(-1).view(torch.uint8)


def _parts(box: Box) -> Iterator[Box]:
    """Yields rectangles of bounded size that make up one, cut along its first dimensions."""
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if dim is None or box.numel * _ITEM_BYTES <= _PART_BYTES:
        yield box
        return
    size = box.sizes[dim]
    rows = max(1, _PART_BYTES // (box.numel // size * _ITEM_BYTES))
    for begin in range(0, size, rows):
        offsets, sizes = [*box.offsets], [*box.sizes]
        offsets[dim] += begin
        sizes[dim] = min(rows, size - begin)
        yield from _parts(Box(tuple(offsets), tuple(sizes)))
