"""The token buckets of one process, which limit the rate of writes. An owner has one bucket."""

from __future__ import annotations

import threading

from fastckpt import _engine
from fastckpt.plan.image import BLOCK_BYTES

# Writes have the size that takes _GRAIN_S at the given rate, so that others who use the device get
# their turn in between; but no less than _GRAIN_BYTES_MIN, lest the cost of calls tells.
_GRAIN_S, _GRAIN_BYTES_MIN = 0.01, 256 << 10
_UNLIMITED = 1e18  # bytes a second


class TokenBuckets:
    """The buckets by owner. Each Checkpointer, whose saves may overlap, is an owner; all other
    saves together are another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, _engine.TokenBucket] = {}
        self._whole = set[str]()
        self._lifted = set[str]()

    def bucket(self, owner: str, bytes_per_s: float, *, whole: bool = False) -> _engine.TokenBucket:
        """Returns the owner's bucket, and sets its rate.

        Args:
            bytes_per_s: the rate, above 0.
            whole: whether each block is written at once, because its backend cannot write parts.
                Once set, this stays in effect, since the owner's saves and drains overlap.
        """
        with self._lock:
            if whole:
                self._whole.add(owner)
            if owner in self._lifted:
                bytes_per_s = _UNLIMITED
            grain = BLOCK_BYTES if owner in self._whole else grain_bytes(bytes_per_s)
            if owner not in self._buckets:
                self._buckets[owner] = _engine.TokenBucket(bytes_per_s, grain)
            self._buckets[owner].set(bytes_per_s, grain)
            return self._buckets[owner]

    def lift(self, owner: str, is_lifted: bool) -> None:
        """Lifts the limit on the owner's rate, also for writes in flight, or ends this. The limit
        then applies to writes that begin later.
        """
        with self._lock:
            if is_lifted:
                self._lifted.add(owner)
                if owner in self._buckets:
                    self._buckets[owner].set(_UNLIMITED, BLOCK_BYTES)
            elif owner in self._lifted:
                self._lifted.discard(owner)
                self._buckets.pop(owner, None)  # whoever has it stays without a limit

    def forget(self, owner: str) -> None:
        """Removes an owner that does not write any more."""
        with self._lock:
            self._buckets.pop(owner, None)
            self._whole.discard(owner)
            self._lifted.discard(owner)


def grain_bytes(bytes_per_s: float) -> int:
    """Returns the size of a write: a multiple of _GRAIN_BYTES_MIN, at most a block."""
    grain = int(min(bytes_per_s * _GRAIN_S, BLOCK_BYTES))
    return max(1, grain // _GRAIN_BYTES_MIN) * _GRAIN_BYTES_MIN
