"""Tensors that are made of rectangles of others: cut from them, or put together.

Responsible for which rectangle comes from where. It must not know names, dtypes, or where elements
lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

from fastckpt.plan.boxes import Box, intersect, row_major, whole

T = TypeVar("T")


class Slice(NamedTuple):
    """A rectangle of a tensor which is one of a source, too: the same elements in the same order.

    Attributes:
        source: whatever tells sources apart.
        box: the rectangle in the source.
        at: where it begins in the tensor.
        dims: of each dimension of the tensor, the source's. None: the source has not got it, and
            the rectangle has one element along it, as along those that the tensor has not got.
    """

    source: Any
    box: Box
    at: tuple[int, ...]
    dims: tuple[int | None, ...]

    def placed(self, box: Box) -> Box:
        """Returns where a part of the rectangle, given by its place in the source, is here."""
        offsets, sizes = [*self.at], [1] * len(self.at)
        for dim, number in enumerate(self.dims):
            if number is not None:
                offsets[dim] += box.offsets[number] - self.box.offsets[number]
                sizes[dim] = box.sizes[number]
        return Box(tuple(offsets), tuple(sizes))

    def within(self, wanted: Box) -> tuple[Box, Box] | None:
        """Returns what a box of the tensor has of this: as it lies there, and in the source."""
        common = intersect(self.placed(self.box), wanted)
        if common is None:
            return None
        offsets, sizes = [*self.box.offsets], [1] * len(self.box.offsets)
        for dim, number in enumerate(self.dims):
            if number is not None:
                offsets[number] += common.offsets[dim] - self.at[dim]
                sizes[number] = common.sizes[dim]
        return common, Box(tuple(offsets), tuple(sizes))

    def runs(self, held: Box) -> Iterator[tuple[Box, int]]:
        """Yields what a box of the source has of this, in pieces that are contiguous in the box's
        row-major memory: where each is in the tensor, and the element at which it begins.
        """
        common = intersect(self.box, held)
        if common is None:
            return
        rest = len(held.sizes)  # the first of the last dimensions that are there as a whole
        while rest and common.sizes[rest - 1] == held.sizes[rest - 1]:
            rest -= 1
        outer, strides = max(0, rest - 1), row_major(held.sizes)
        for index in product(*map(range, common.sizes[:outer])):
            steps = (*index, *(0,) * (len(strides) - outer))
            offsets = tuple(map(int.__add__, common.offsets, steps))
            begin = sum(
                (at - first) * stride
                for at, first, stride in zip(offsets, held.offsets, strides, strict=True)
            )
            yield self.placed(Box(offsets, (1,) * outer + common.sizes[outer:])), begin


class Form(NamedTuple):
    """A tensor as its slices make it up, of which those without elements may be left out;
    `is_source`: it is all of one source, as it is.
    """

    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    is_source: bool = False

    def cut(self, dim: int, begin: int, size: int) -> Form:
        """Returns the part [begin, begin + size) along a dimension."""
        everything = whole(self.shape)
        part = Box(_with(everything.offsets, dim, begin), _with(everything.sizes, dim, size))
        slices = list[Slice]()
        for each in self.slices:
            if (found := each.within(part)) is not None:
                common, box = found
                at = _with(common.offsets, dim, common.offsets[dim] - begin)
                slices.append(each._replace(box=box, at=at))
        return Form(part.sizes, tuple(slices))

    def without(self, dim: int) -> Form:
        """Returns the same elements without a dimension, along which there is one."""
        slices = (
            each._replace(at=_with(each.at, dim), dims=_with(each.dims, dim))
            for each in self.slices
        )
        return Form(_with(self.shape, dim), tuple(slices))

    def within_new(self, dim: int) -> Form:
        """Returns the same elements with one more dimension, along which there is one."""
        slices = (
            each._replace(
                at=(*each.at[:dim], 0, *each.at[dim:]),
                dims=(*each.dims[:dim], None, *each.dims[dim:]),
            )
            for each in self.slices
        )
        return Form((*self.shape[:dim], 1, *self.shape[dim:]), tuple(slices))


def source(name: Any, shape: Sequence[int]) -> Form:
    """Returns a source as it is."""
    its, numbers = whole(shape), tuple(range(len(shape)))
    return Form(its.sizes, (Slice(name, its, its.offsets, numbers),), is_source=True)


def joined(forms: Sequence[Form], dim: int) -> Form:
    """Returns tensors, which differ along this dimension at most, one behind the other along it."""
    slices, size = list[Slice](), 0
    for form in forms:
        slices += [
            each._replace(at=_with(each.at, dim, each.at[dim] + size)) for each in form.slices
        ]
        size += form.shape[dim]
    return Form(_with(forms[0].shape, dim, size), tuple(slices))


def _with(numbers: tuple[T, ...], dim: int, *new: T) -> tuple[T, ...]:
    """Returns numbers, one of which is replaced, or left out."""
    return (*numbers[:dim], *new, *numbers[dim + 1 :])
