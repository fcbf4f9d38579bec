"""Records of a Round about several things of a kind, and the comparison of a digest."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Protocol

from fastckpt.ranks.round import Round


class Records(Protocol):
    """The part of a Round that leaves records and waits for them."""

    rank: int
    world_size: int
    label: str

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, rank: int = 0) -> bytes: ...
    def gather(self, key: str) -> list[bytes]: ...


class Apart:
    """The records of a round about one of several things, with keys of their own.

    Args:
        agreement: the round.
        name: of the thing, the same on all ranks.
    """

    def __init__(self, agreement: Records, name: str) -> None:
        self.rank, self.world_size = agreement.rank, agreement.world_size
        self.label = agreement.label
        self._agreement, self._name = agreement, name

    def put(self, key: str, value: bytes) -> None:
        self._agreement.put(f"{key} of {self._name}", value)

    def get(self, key: str, rank: int = 0) -> bytes:
        return self._agreement.get(f"{key} of {self._name}", rank)

    def gather(self, key: str) -> list[bytes]:
        return self._agreement.gather(f"{key} of {self._name}")


def same(
    agreement: Round, key: str, digest: bytes, detail: Callable[[], bytes]
) -> list[tuple[list[int], bytes]] | None:
    """Compares a digest on all ranks, each of which calls this with the same key; all are as long.

    Returns None if all are equal. Otherwise, the same on every rank: for each digest, the ranks
    that have it, and what detail() returned, which only the lowest of them calls.
    """
    return compared(agreement, key, digest, detail)[0]


def compared(
    agreement: Round, key: str, digest: bytes, detail: Callable[[], bytes], beside: bytes = b""
) -> tuple[list[tuple[list[int], bytes]] | None, int | None]:
    """Returns what same() does, and a rank that has other bytes `beside` its digest than rank 0, if
    there is one: of several, another one in another round.
    """
    agreement.put(f"{key}.digest", digest + beside)
    if agreement.rank == 0:
        ranks_of: dict[bytes, list[int]] = {}
        others = list[int]()
        for rank, record in enumerate(agreement.gather(f"{key}.digest")):
            ranks_of.setdefault(record[: len(digest)], []).append(rank)
            others += [rank] if record[len(digest) :] != beside else []
        unequal = [*ranks_of.values()] if len(ranks_of) > 1 else []
        chosen = zlib.crc32(agreement.label.encode()) % max(1, len(others))
        found = [unequal, others[chosen] if others else None]
        agreement.put(f"{key}.unequal", json.dumps(found).encode())
    groups: list[list[int]]
    groups, other = json.loads(agreement.get(f"{key}.unequal"))
    if agreement.rank in [ranks[0] for ranks in groups]:
        agreement.put(f"{key}.detail", detail())
    if agreement.rank == 0:  # copies the details, which their ranks may delete when they close
        for ranks in groups:
            detailed = agreement.get(f"{key}.detail", ranks[0])
            agreement.put(f"{key}.detail of {ranks[0]}", detailed)
    told = [(ranks, agreement.get(f"{key}.detail of {ranks[0]}")) for ranks in groups]
    return told or None, other
