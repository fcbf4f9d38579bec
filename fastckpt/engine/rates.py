"""The token buckets of one process: what limits the rate of writing.

Responsible for all saves of an owner sharing one, and for how much is written at a time. It must
not know what is written, nor how a rate was come by.
"""

from __future__ import annotations

import threading

from fastckpt import _engine
from fastckpt.plan.image import BLOCK_BYTES

# What is written at a time is what this takes of time, so that others who use a device get their
# turn in between; but no less than that, or calls and metadata would count.
_GRAIN_S, _GRAIN_BYTES_MIN = 0.01, 256 << 10


class Rates:
    """Buckets by owner: one Checkpointer's saves, say, which go on beside each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, _engine.TokenBucket] = {}

    def bucket(self, owner: str, bytes_per_s: float, *, whole: bool = False) -> _engine.TokenBucket:
        """The owner's, at this rate from now on.

        Args:
            owner: whose.
            bytes_per_s: above 0.
            whole: blocks are not divided, because what writes them cannot take parts.
        """
        grain = BLOCK_BYTES if whole else grain_bytes(bytes_per_s)
        with self._lock:
            if owner not in self._buckets:
                self._buckets[owner] = _engine.TokenBucket(bytes_per_s, grain)
            self._buckets[owner].set(bytes_per_s, grain)
            return self._buckets[owner]


def grain_bytes(bytes_per_s: float) -> int:
    """Returns how much is written at a time: a multiple of _GRAIN_BYTES_MIN, a block at most."""
    grain = int(min(bytes_per_s * _GRAIN_S, BLOCK_BYTES))
    return max(1, grain // _GRAIN_BYTES_MIN) * _GRAIN_BYTES_MIN
