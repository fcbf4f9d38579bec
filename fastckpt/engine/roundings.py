"""The parts of bf16 tensors that are roundings of fp32 tensors of the same file, found by hashes of
their blocks while the file is written.

The module must not know how blocks are stored, or what the tensors are.
"""

from __future__ import annotations

import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastckpt._engine import PolyvalKey, polyval, round_to_bf16
from fastckpt.errors import ensure
from fastckpt.plan.image import ItemRange

# Grains are compared as wholes, from each tensor's beginning on; each lies in one block. The last
# grain of a tensor has what is left, too, so that it is no smaller, unless the tensor is.
GRAIN_ITEMS = 64 << 10
ITEMS_MIN = 16 << 10  # of a tensor: smaller ones are not worth a hash
_FP32_BYTES, _BF16_BYTES = 4, 2
_KEY_BYTES = 16


class Rounding(NamedTuple):
    """A part of a block, as many bytes from `begin` on, that is the rounding of the fp32 items from
    the image's byte `source` on.
    """

    begin: int
    nbytes: int
    source: int

    @property
    def ends(self) -> tuple[int, int]:
        """The part's end in the block, and the end of its fp32 items in the image."""
        return self.begin + self.nbytes, self.source + self.nbytes // _BF16_BYTES * _FP32_BYTES


class Roundings:
    """The hashes of what the fp32 tensors of an image are rounded to, of all blocks that were seen.

    A hash of 128 bits under a random key takes two grains that differ for the same with a chance of
    less than 2^-110; and then the checksum of the block shows that when it is read.

    Args:
        masters: the fp32 tensors that bf16 tensors may be roundings of, ascending.
        halves: these bf16 tensors, ascending, all behind the masters.

    Attributes:
        masters, halves: the arguments.
        derived_nbytes: the bytes that encoders derived, and did not store.
    """

    def __init__(self, masters: Sequence[ItemRange] = (), halves: Sequence[ItemRange] = ()) -> None:
        if masters and halves:
            end = masters[-1].begin + _FP32_BYTES * masters[-1].items
            ensure(end <= halves[0].begin, "what is derived lies behind its masters")
        self.masters = masters
        self.halves = halves
        self._key = PolyvalKey(secrets.token_bytes(_KEY_BYTES))
        self._lock = threading.Lock()
        # State below is protected by _lock.
        self._sources: dict[tuple[int, bytes], int] = {}  # by the number of items, and their hash
        self.derived_nbytes = 0

    def see(self, block: memoryview, offset: int, scratch: memoryview) -> bool:
        """Notes what the fp32 items of a block are rounded to.

        Args:
            block: the block at this offset of the image.
            scratch: memory of half a block or more, which is overwritten.

        Returns:
            Whether the block has bf16 items: of() then needs all blocks before it to be seen.
        """
        end = offset + len(block)
        for at, count in _grains(self.masters, _FP32_BYTES, offset, end):
            rounded = scratch[: _BF16_BYTES * count]
            round_to_bf16(block[at - offset : at - offset + _FP32_BYTES * count], rounded)
            name = count, polyval(rounded, self._key)
            with self._lock:  # of equal ones the first, whoever comes first
                self._sources[name] = min(at, self._sources.get(name, at))
        return next(_grains(self.halves, _BF16_BYTES, offset, end), None) is not None

    def of(self, block: memoryview, offset: int) -> list[Rounding]:
        """Returns the parts of a block that are roundings of blocks that were seen, ascending."""
        found: list[Rounding] = []
        for at, count in _grains(self.halves, _BF16_BYTES, offset, offset + len(block)):
            begin, nbytes = at - offset, _BF16_BYTES * count
            name = count, polyval(block[begin : begin + nbytes], self._key)
            with self._lock:
                source = self._sources.get(name)
            if source is None:
                continue
            if found and found[-1].ends == (begin, source):
                found[-1] = found[-1]._replace(nbytes=found[-1].nbytes + nbytes)
            else:
                found.append(Rounding(begin, nbytes, source))
        return found

    def count(self, nbytes: int) -> None:
        """Adds bytes that were derived."""
        with self._lock:
            self.derived_nbytes += nbytes


def _grains(
    tensors: Sequence[ItemRange], width: int, begin: int, end: int
) -> Iterator[tuple[int, int]]:
    """Yields offset and number of items of each grain that lies in [begin, end) of an image."""
    first = bisect_right(tensors, begin, key=lambda tensor: tensor.begin) - 1
    size = width * GRAIN_ITEMS
    for number in range(max(0, first), len(tensors)):
        tensor = tensors[number]
        if tensor.begin >= end:
            break
        last = max(1, tensor.items // GRAIN_ITEMS) - 1
        for grain in range(max(0, -((tensor.begin - begin) // size)), last + 1):
            at = tensor.begin + grain * size
            count = GRAIN_ITEMS if grain < last else tensor.items - last * GRAIN_ITEMS
            if at + count * width > end:
                break
            yield at, count
