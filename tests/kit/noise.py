"""Random bytes that are the same wherever they are asked for, and cost a copy only; and damage."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

_POOL_BYTES = 64 << 20
_STRIDE = 1_000_003  # a prime, so that few seeds share an alignment


@functools.cache
def _pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.empty(_POOL_BYTES // 8, dtype=torch.int64).random_(generator=generator)
    return numbers.view(torch.uint8)


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """Bytes that differ from those of another seed nearly everywhere."""
    if nbytes > _POOL_BYTES // 2:
        first = noise(_POOL_BYTES // 2, seed)
        return torch.cat([first, noise(nbytes - len(first), seed + 1_000_000)])
    begin = seed * _STRIDE % (_POOL_BYTES - nbytes)
    return _pool()[begin : begin + nbytes].clone()


def flip(path: Path, at: float) -> None:
    """Turns a bit of the byte at a place of a file; from its end where that is below 0, and at a
    share of its size where it is a fraction.
    """
    content = bytearray(path.read_bytes())
    content[int(len(content) * at) if isinstance(at, float) else at] ^= 1
    path.write_bytes(content)
