"""Frames of literals: zstd gives back what was put, whatever bytes and how many there are; they fit
where they have to, or are none; rows of alike bytes become as small as their entropy says.

Knows zstandard, as the decoder; must not know planes or blocks of images.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import zstandard

from fastckpt._engine import put_literals
from tests.storm import Storm

BLOCK_BYTES = 32 << 10  # of a frame


def frame_of(content: bytes, capacity: int | None = None) -> bytes | None:
    guard = b"\xaa" * 8
    target = bytearray(2 * len(content) + 64 if capacity is None else capacity) + guard
    nbytes = put_literals(content, memoryview(target)[: -len(guard)])
    assert target.endswith(guard) and nbytes <= len(target) - len(guard)
    return bytes(target[:nbytes]) if nbytes else None


def decoded(frame: bytes | None) -> bytes:
    assert frame is not None
    return zstandard.ZstdDecompressor().decompress(frame)


def drawn(weights: list[float], nbytes: int, seed: int) -> bytes:
    """Bytes that occur as often as these say, which are given to random ones of the 256."""
    chance = random.Random(seed)
    values = chance.sample(range(256), len(weights))
    return bytes(chance.choices(values, weights, k=nbytes))


# Codes of one bit; all equally long; a few that are longer than allowed, and very many.
WEIGHTS = {
    "two": [1.0, 1.0],
    "one is rare": [1.0, 1e-4],
    "equal": [1.0] * 64,
    "odd": [1.0] * 65,
    "halves": [0.5**n for n in range(20)],
    "slow": [0.62**n for n in range(40)],
    "many rare": [1.0] + [1e-3] * 255,
    "normal": [math.exp(-((n / 20) ** 2)) for n in range(128)],
    "half of all": [1.0] * 128,
    "all": [1.0] * 256,
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_zstd_gives_back_what_was_put(kind: str) -> None:
    sizes = [1, 2, 15, 16, 17, 255, 1000, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 3]
    for nbytes in sizes:
        for seed in range(3):
            content = drawn(WEIGHTS[kind], nbytes, seed)
            assert decoded(frame_of(content)) == content, (nbytes, seed)


def test_zstd_gives_back_whatever_was_put(storm: Storm) -> None:
    for chance in storm.rounds(100, 20_000):
        power = chance.uniform(0, 6)
        weights = [chance.random() ** power + 1e-9 for _ in range(chance.randint(1, 256))]
        content = drawn(
            weights, int(3 * BLOCK_BYTES * chance.random() ** 4) + 1, chance.getrandbits(32)
        )
        assert decoded(frame_of(content)) == content


def test_a_frame_that_does_not_fit_is_none() -> None:
    for content in (b"a", b"ab" * 5000, drawn(WEIGHTS["normal"], 50_000, 1), bytes(99_999)):
        frame = frame_of(content)
        assert frame is not None
        # What is certain to suffice may be a bit more than what is needed.
        near = range(max(0, len(frame) - 64), len(frame) + 32)
        fits = [size for size in near if frame_of(content, size)]
        assert fits == [*range(fits[0], near.stop)] and fits[0] >= len(frame)
        assert not any(frame_of(content, size) for size in (0, 1, 8, 9, len(frame) // 2))


def test_a_frame_takes_what_the_entropy_says_and_a_bit_more() -> None:
    content = drawn(WEIGHTS["normal"], 10 * BLOCK_BYTES, 1)
    shares = [n / len(content) for n in Counter(content).values()]
    least = -sum(share * math.log2(share) for share in shares) / 8 * len(content)
    frame = frame_of(content)
    assert frame is not None and least < len(frame) < 1.03 * least
    repeated = frame_of(bytes(10 * BLOCK_BYTES))
    assert repeated is not None and len(repeated) < 64
    noise = random.Random(1).randbytes(10 * BLOCK_BYTES)
    stored = frame_of(noise)
    assert stored is not None and len(stored) < len(noise) + 64  # as it is


def test_nothing_is_no_frame() -> None:
    with pytest.raises(ValueError, match="one byte"):
        put_literals(b"", bytearray(99))
