"""The order of records in a torch zip that several ranks write together.

Responsible for telling what all ranks hold from what only the first one's copy counts of. It must
not know the bytes of a file, nor which rank it runs on.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from fastckpt.formats.torch_pickle import Capture

# What ranks that save one file together hold in common are storages of this size and more; the rest
# is the first rank's. What is small in sum goes behind the checksum record, which is in memory when
# a file is read; above that sum, the largest of it goes to the front.
SMALL_BYTES = 1 << 20
SMALL_SUM_BYTES_MAX = 64 << 20


@dataclass
class Arrangement:
    """In which order records go into a file that several ranks write.

    Everything up to the tail follows from names and sizes of the big storages alone, so each rank
    can lay it out by itself while data.pkl and what else is small differ from rank to rank. The
    first rank writes `front` and the tail.

    Attributes:
        front: storages that only the first rank's copy counts of, of any size.
        shared: storages that are the same on all ranks.
        tail: all other records.
        small_nbytes: size of the storages in the tail.
    """

    front: list[tuple[str, bytes | torch.UntypedStorage]]
    shared: list[tuple[str, torch.UntypedStorage]]
    tail: list[tuple[str, bytes | torch.UntypedStorage]]
    small_nbytes: int


def nbytes_of(content: bytes | torch.UntypedStorage) -> int:
    """Size of a record's content."""
    return content.nbytes() if isinstance(content, torch.UntypedStorage) else len(content)


# Records that let torch compute where storages lie, assuming that data.pkl comes first.
_COMPUTED_OFFSETS = frozenset({".format_version", ".storage_alignment"})


def arrange(captured: Capture, first_rank: Set[str]) -> Arrangement:
    """Sorts the records of a capture for a file that several ranks write.

    Args:
        captured: on every rank with storages of the same names and sizes, in the same order.
        first_rank: names of big storages to be taken from the first rank.
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
    return Arrangement(front, shared, tail, left)
