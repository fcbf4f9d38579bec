"""Finds ranges of parameters in stored 1-D arrays, by arithmetic on boxes alone.

Megatron's distributed optimizer keeps the state of many parameters in 1-D buckets. This module
compares the stored pieces with the pieces of a parameter on this rank, and computes the runs of
elements to copy, for any change of tensor, pipeline and data parallel sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Piece(NamedTuple):
    """A box of a global tensor that is stored in a 1-D array.

    Attributes:
        key: name of the global tensor.
        offset, shape: the box, in elements of the global tensor.
        start: the index of the box's first element in the array.
        strides: the distance in the array between neighbouring elements along each axis.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def moved(self, by: int) -> Piece:
        """Returns the same box, moved by `by` elements in the array."""
        return self._replace(start=self.start + by)

    @classmethod
    def of(cls, record: Sequence[Any]) -> Piece:
        """Makes a piece from a stored record: (key, offset, shape, start, strides)."""
        key, offset, shape, start, strides = record
        piece = cls(str(key), tuple(offset), tuple(shape), int(start), tuple(strides))
        if not len(piece.offset) == len(piece.shape) == len(piece.strides):
            raise ValueError(
                f"a piece of {key!r} must have an offset, a size and a stride for each axis"
            )
        return piece


@dataclass(frozen=True)
class Runs:
    """Runs of elements to copy: run i copies length[i] elements from index source[i] to index
    target[i].
    """

    source: Indices
    target: Indices
    length: Indices

    @classmethod
    def one(cls, source: int, target: int, length: int) -> Runs:
        return cls(*(np.array([number], dtype=np.int64) for number in (source, target, length)))

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.length.sum())

    def spans(self) -> list[Runs]:
        """Groups runs that have small gaps between them, in order of the source. Each group is read
        at once with its gaps, which takes at most five times the memory of its elements.
        """
        if not len(self.length):
            return []
        gaps = self.source[1:] - self.source[:-1] - self.length[:-1]
        apart = gaps > 4 * np.minimum(self.length[:-1], self.length[1:])
        bounds = [0, *(np.flatnonzero(apart) + 1).tolist(), len(self.length)]
        return [
            Runs(self.source[a:b], self.target[a:b], self.length[a:b])
            for a, b in itertools.pairwise(bounds)
        ]

    def steps(self) -> tuple[int, int] | None:
        """Returns the (source, target) distances if the runs have equal lengths and distances; else
        None.
        """
        if not len(self.length) or (self.length != self.length[0]).any():
            return None
        differences = [np.unique(np.diff(starts)) for starts in (self.source, self.target)]
        if any(len(steps) > 1 for steps in differences):
            return None
        source, target = (int(steps[0]) if len(steps) else 1 for steps in differences)
        return (source, target) if target > 0 else None

    def within(self, start: int, stop: int) -> Runs:
        """Returns the runs to target elements start <= i < stop, counted from `start`."""
        first = np.maximum(self.target, start)
        last = np.minimum(self.target + self.length, stop)
        overlaps = last > first
        skipped = (first - self.target)[overlaps]
        return Runs(
            self.source[overlaps] + skipped, first[overlaps] - start, (last - first)[overlaps]
        )

    def joined(self) -> Runs:
        """Returns the same copies in order of the source; runs adjacent in both arrays are
        merged.
        """
        if not len(self.length):
            return self
        order = np.argsort(self.source, kind="stable")
        source, target, length = self.source[order], self.target[order], self.length[order]
        apart = (source[:-1] + length[:-1] != source[1:]) | (
            target[:-1] + length[:-1] != target[1:]
        )
        first = np.concatenate(([0], np.flatnonzero(apart) + 1))
        return Runs(source[first], target[first], np.add.reduceat(length, first))


def common_runs(source: Piece, target: Piece) -> Runs | None:
    """Returns the runs that copy the elements common to both boxes from the source's array to the
    target's; None if there are none.

    Each run extends as far as its elements are contiguous in both arrays.
    """
    if source.key != target.key or len(source.shape) != len(target.shape):
        return None
    low = [max(a, b) for a, b in zip(source.offset, target.offset, strict=True)]
    high = [
        min(a + m, b + n)
        for a, m, b, n in zip(source.offset, source.shape, target.offset, target.shape, strict=True)
    ]
    counts = [stop - start for start, stop in zip(low, high, strict=True)]
    if any(count <= 0 for count in counts):
        return None
    length, outer = 1, len(counts)
    while outer and (
        counts[outer - 1] == 1 or source.strides[outer - 1] == target.strides[outer - 1] == length
    ):
        outer -= 1
        length *= counts[outer]

    def starts(piece: Piece) -> Indices:
        begin = piece.start + sum(
            (at - offset) * stride
            for at, offset, stride in zip(low, piece.offset, piece.strides, strict=True)
        )
        offsets = np.array([begin], dtype=np.int64)
        for count, stride in zip(counts[:outer], piece.strides[:outer], strict=True):
            steps = np.arange(count, dtype=np.int64) * stride
            offsets = (offsets[:, None] + steps[None, :]).ravel()
        return offsets

    at = starts(source)
    return Runs(at, starts(target), np.full(len(at), length, dtype=np.int64))


class Uncovered(ValueError):
    """Elements of a parameter are stored nowhere, or more than once."""

    def __init__(self, keys: Iterable[str], found: int, wanted: int) -> None:
        names = ", ".join(sorted({repr(key) for key in keys}))
        super().__init__(f"{names}: {found} elements are stored, but {wanted} are needed")


class Catalog:
    """The pieces of all stored arrays, by their global tensor. If several arrays hold the same box,
    like replicas, the first array is used.
    """

    def __init__(self, arrays: Mapping[str, Iterable[Piece]]) -> None:
        self._held: dict[str, dict[tuple[tuple[int, ...], ...], tuple[str, Piece]]] = {}
        for name, pieces in arrays.items():
            for piece in pieces:
                boxes = self._held.setdefault(piece.key, {})
                boxes.setdefault((piece.offset, piece.shape), (name, piece))

    def runs(
        self, pieces: Sequence[Piece], start: int, stop: int, *, partial: bool = False
    ) -> dict[str, Runs]:
        """Returns, for each stored array, the runs that hold elements start <= i < stop.

        Args:
            pieces: boxes that together cover a flat parameter.
            start, stop: the range of its elements; targets are counted from `start`.
            partial: whether elements may be missing in the stored arrays.

        Raises:
            Uncovered: elements are stored nowhere, or more than once.
        """
        result: dict[str, list[Runs]] = {}
        for target in pieces:
            for name, source in self._held.get(target.key, {}).values():
                runs = common_runs(source, target)
                if runs is not None and (runs := runs.within(start, stop)).size:
                    result.setdefault(name, []).append(runs)
        size = sum(runs.size for parts in result.values() for runs in parts)
        if size > stop - start or (size < stop - start and not partial):
            raise Uncovered((piece.key for piece in pieces), size, stop - start)
        return {name: _one(parts).joined() for name, parts in result.items()}


def _one(parts: list[Runs]) -> Runs:
    return Runs(
        np.concatenate([runs.source for runs in parts]),
        np.concatenate([runs.target for runs in parts]),
        np.concatenate([runs.length for runs in parts]),
    )


def split_at(runs: Runs, starts: Indices, sizes: Indices) -> list[tuple[int, int, int, int]]:
    """Splits runs, which are in order of the source, at the ends of the array's stored fragments,
    which ascend without overlap. Returns (fragment, offset in it, target, length) for each copy.

    Raises:
        Uncovered: an element is in no fragment.
    """
    cuts: list[tuple[int, int, int, int]] = []
    ends = starts + sizes
    for source, target, length in zip(
        runs.source.tolist(), runs.target.tolist(), runs.length.tolist(), strict=True
    ):
        at, stop = source, source + length
        number = int(np.searchsorted(ends, at, side="right"))
        while at < stop:
            if number == len(ends) or at < starts[number]:
                raise Uncovered(["an array"], at - source, length)
            count = min(stop, int(ends[number])) - at
            cuts.append((number, at - int(starts[number]), target + at - source, count))
            at += count
            number += 1
    return cuts
