"""The way of staged elements into a file that several ranks write together: the engine converts
them to their dtype there, and writes them where they belong. The module must not know names of
tensors, who else writes to the file, or where it becomes visible.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from fastckpt import _engine
from fastckpt.plan.runs import CopyRow

# csrc/cast/cast.h has the numbers; those before these are of items that are not converted.
_FLOATS = {
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 6,
    torch.float16: 7,
    torch.bfloat16: 8,
    torch.float32: 9,
    torch.float64: 10,
}
_E4M3_FINITE = 5


class Elements(NamedTuple):
    """Elements that a rank writes, which follow each other in its image.

    Attributes:
        nbytes: of the image, which they are.
        held, stored: their dtypes in memory and in the file.
        offset: where in the file their tensor begins.
        rows: as boxes.copies() gives them, in elements of the tensor and of these; all of them of
            as many runs, as long, and as far apart.
    """

    nbytes: int
    held: torch.dtype
    stored: torch.dtype
    offset: int
    rows: Sequence[CopyRow]


class Scatterer:
    """Writes the blocks of one image, one rank's part of a file, to where they belong there.

    Args:
        nbytes: the size of the file.
        elements: what the image is made of, in its order. None of them lies across two blocks.

    Attributes:
        of_engine: the engine's part, which gets each block.
    """

    def __init__(self, nbytes: int, elements: Sequence[Elements]) -> None:
        table, starts, begin = array("Q"), array("Q"), 0
        for each in elements:
            _element, _first, size, count, stride, _step = each.rows[0]
            numbers = number_of(each.held), number_of(each.stored)
            end = begin + each.nbytes
            table.extend((begin, end, *numbers, len(starts), size, count, stride))
            itemsize = each.stored.itemsize
            starts.extend(each.offset + row[0] * itemsize for row in each.rows)
            begin = end
        self.of_engine = _engine.Scatterer(nbytes, table, starts)

    def written(self) -> tuple[int, int]:
        """Returns how many bytes were written, and their contribution to the file's CRC-32."""
        return self.of_engine.written()

    def lossy(self) -> set[int]:
        """Returns the numbers of the elements that hold what has not stayed finite as converted."""
        return self.of_engine.lossy()

    def whole_page(self) -> int | None:
        """Returns the offset in the file of a page that only this rank writes to, if it is worth
        writing without the page cache.
        """
        return self.of_engine.whole_page()


def number_of(dtype: torch.dtype) -> int:
    """Returns the engine's number of a dtype."""
    if dtype == torch.float8_e4m3fn and _is_finite():
        return _E4M3_FINITE
    return _FLOATS.get(dtype, dtype.itemsize.bit_length() - 1)


@cache
def _is_finite() -> bool:
    """Whether torch makes the largest number, and not NaN, of what is too large for E4M3."""
    large = torch.tensor([1e9], dtype=torch.float32, device="cpu")
    return not bool(large.to(torch.float8_e4m3fn).to(torch.float32).isnan())
