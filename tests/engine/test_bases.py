"""An image with a base: the engine stages the XOR of both, leaves the image in the base's memory,
and tells the checksums of each, whatever the segments, blocks and conversions are.
"""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

import pytest
import torch

from fastckpt import _engine
from fastckpt.engine.staging import number_of
from fastckpt.plan.image import address_of
from tests.kit.engines import PAGE, Backend, backend, crcs_of, engine_of, opened, written

__all__ = ["backend"]


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("block_bytes", [PAGE, 16 * PAGE])
@pytest.mark.parametrize(
    "sizes",
    [[PAGE], [1], [PAGE - 1, 2, PAGE], [5, 3 * PAGE, 7, 40_000], [100_003], [1] * 50],
    ids=str,
)
def test_the_difference_is_staged_and_the_image_kept(
    disk: Path, backend: Backend, sizes: list[int], block_bytes: int
) -> None:
    rng = random.Random(sum(sizes))
    parts = [bytearray(rng.randbytes(nbytes)) for nbytes in sizes]
    image, base = b"".join(parts), rng.randbytes(sum(sizes))
    memory, at = bytearray(base), 0
    segments = array("Q")
    for part in parts:
        segments.extend((at, len(part), address_of(part)))
        at += len(part)
    with (
        engine_of(64, block_bytes) as engine,
        opened(disk / "file", os.O_RDWR | os.O_CREAT) as fd,
    ):
        job = engine.stage(segments, array("Q"), _engine.Allowance(32), 2, base=address_of(memory))
        job.write_to(fd, 0, backend, False)
        written(job)
        stored = (disk / "file").read_bytes()
        assert stored == xor(image, base) and memory == image
        assert job.block_crcs() == crcs_of(stored, block_bytes)
        assert job.base_crcs() == crcs_of(image, block_bytes)


def test_items_are_converted_before_the_difference(disk: Path, backend: Backend) -> None:
    numbers = torch.randn(70_001)
    cast = numbers.to(torch.bfloat16)
    image = bytes(cast.view(torch.uint8).numpy())
    base = random.Random(3).randbytes(len(image))
    memory = bytearray(base)
    segments = array("Q", (0, cast.nbytes, numbers.data_ptr()))
    conversions = array("Q", (0, number_of(torch.float32), number_of(torch.bfloat16)))
    with (
        engine_of(64) as engine,
        opened(disk / "file", os.O_RDWR | os.O_CREAT) as fd,
    ):
        job = engine.stage(
            segments,
            array("Q"),
            _engine.Allowance(32),
            2,
            conversions=conversions,
            base=address_of(memory),
        )
        job.write_to(fd, 0, backend, False)
        written(job)
        assert (disk / "file").read_bytes() == xor(image, base) and memory == image
        assert job.base_crcs() == crcs_of(image, PAGE)
