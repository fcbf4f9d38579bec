"""The parts of a tensor that are read one after the other, so that few bytes are held at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any


def parts(shape: Sequence[int], itemsize: int, nbytes_max: int) -> Iterator[tuple[Any, ...]]:
    """Yields indexes of parts that make up a tensor, in the order of its elements.

    Each part is one run of elements in a contiguous tensor, of at most `nbytes_max` bytes; or a
    single element, if that is larger.
    """
    nbytes = prod(shape) * itemsize
    dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
    if nbytes <= nbytes_max or dim is None:
        yield (...,)
        return
    front, row_nbytes = (slice(None),) * dim, nbytes // shape[dim]
    if row_nbytes > nbytes_max:
        for number in range(shape[dim]):
            for rest in parts(shape[dim + 1 :], itemsize, nbytes_max):
                yield (*front, slice(number, number + 1), *rest)
        return
    rows = nbytes_max // row_nbytes
    for begin in range(0, shape[dim], rows):
        yield (*front, slice(begin, begin + rows), ...)
