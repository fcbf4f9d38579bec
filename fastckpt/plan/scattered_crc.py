"""The CRC-32 of a file of which several writers write parts, in any order and however scattered.

CRC-32 is linear: the contributions of all bytes (csrc/engine/scattered_writes.h), joined by
exclusive or with the CRC-32 of as many zeros as the file has bytes, are the file's CRC-32. The
module must not know who writes what.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache

Combine = Callable[[int, int, int], int]  # (crc of a, crc of b, len(b)) -> crc of a + b


@lru_cache(maxsize=1024)
def crc_of_zeros(nbytes: int, combine: Combine) -> int:
    """Returns the CRC-32 of so many zeros, in steps that double their number."""
    crc, power, length = 0, zlib.crc32(b"\0"), 1
    while length <= nbytes:
        if nbytes & length:
            crc = combine(crc, power, length)
        power, length = combine(power, power, length), 2 * length
    return crc
