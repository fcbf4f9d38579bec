"""The slots of an image as rows, for tests that render one without the engine."""

from __future__ import annotations

from typing import NamedTuple

from fastckpt.plan.image import Image


class Slot(NamedTuple):
    """Where the CRC-32 of a segment goes, and the number of that segment."""

    offset: int
    segment: int


def slots_of(image: Image) -> list[Slot]:
    columns = iter(image.slots)
    return [Slot(*row) for row in zip(columns, columns, strict=True)]
