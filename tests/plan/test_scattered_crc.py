"""The CRC-32 of a file is what the contributions of its bytes make, however they are scattered."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest

from fastckpt.engine.staging import combine_crcs
from fastckpt.plan.scattered_crc import contribution, crc_of_zeros


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 7, 4096, 100_001])
def test_the_crc_of_zeros(nbytes: int) -> None:
    assert crc_of_zeros(nbytes, combine_crcs) == zlib.crc32(bytes(nbytes))


@pytest.mark.parametrize("nbytes", [1, 2, 1000, 65_537])
@pytest.mark.parametrize("cuts", [0, 1, 9])
def test_parts_in_any_order_make_the_crc_of_the_file(nbytes: int, cuts: int) -> None:
    rng = random.Random(f"{nbytes} {cuts}")
    content = memoryview(rng.randbytes(nbytes))
    bounds = [0, *sorted(rng.choices(range(nbytes + 1), k=cuts)), nbytes]
    parts = [*itertools.pairwise(bounds)]
    rng.shuffle(parts)
    crc = crc_of_zeros(nbytes, combine_crcs)
    for begin, end in parts:
        crc ^= contribution(content[begin:end], nbytes - end, combine_crcs)
    assert crc == zlib.crc32(content)
