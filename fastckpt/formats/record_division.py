"""The order of records in a torch zip that several ranks write together.

Responsible for dividing records into those that all ranks hold alike, and those that only the
first rank writes. It must not know the bytes of a file, nor which rank it runs on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from fastckpt.formats.torch_pickle import Capture

# Ranks share the writing of storages of this size and more; the first rank writes the rest. It puts
# small ones behind the checksum record, which a reader has in memory anyway, up to this sum; above
# it, the largest of them go to the front of the file.
SMALL_BYTES = 1 << 20
SMALL_SUM_BYTES_MAX = 64 << 20


@dataclass
class RecordDivision:
    """The order of the records in a file that several ranks write.

    Everything before the tail follows from names and sizes of the big storages alone, so each rank
    can lay it out by itself, although data.pkl and other small records differ from rank to rank.

    Attributes:
        front: storages of any size that the first rank writes.
        shared: storages that are the same on all ranks.
        tail: all other records, which the first rank writes.
        small_nbytes: size of the storages in the tail.
    """

    front: list[tuple[str, bytes | torch.UntypedStorage]]
    shared: list[tuple[str, torch.UntypedStorage]]
    tail: list[tuple[str, bytes | torch.UntypedStorage]]
    small_nbytes: int


def nbytes_of(content: bytes | torch.UntypedStorage) -> int:
    return content.nbytes() if isinstance(content, torch.UntypedStorage) else len(content)


# With these records, torch computes where storages lie, assuming that data.pkl comes first.
_COMPUTED_OFFSETS = frozenset({".format_version", ".storage_alignment"})


def arrange(captured: Capture, first_rank: Set[str]) -> RecordDivision:
    """Sorts the records of a capture for a file that several ranks write.

    Args:
        captured: the capture, whose storages have the same names, sizes and order on every rank.
        first_rank: names of the big storages that the first rank writes.
    """
    storages = [(name, c) for name, c in captured.records if name.startswith("data/")]
    small = {name: nbytes_of(c) for name, c in storages if nbytes_of(c) < SMALL_BYTES}
    largest = sorted(small, key=lambda name: (-small[name], name))
    left = sum(small.values())
    while left > SMALL_SUM_BYTES_MAX:
        left -= small.pop(largest.pop(0))
    front: list[tuple[str, bytes | torch.UntypedStorage]] = []
    shared: list[tuple[str, torch.UntypedStorage]] = []
    for name, content in storages:
        if name in small:
            continue
        if isinstance(content, bytes) or content.nbytes() < SMALL_BYTES or name in first_rank:
            front.append((name, content))
        else:
            shared.append((name, content))
    placed = {name for name, _ in [*front, *shared]} | _COMPUTED_OFFSETS
    tail = [(name, c) for name, c in captured.records if name not in placed]
    return RecordDivision(front, shared, tail, left)
