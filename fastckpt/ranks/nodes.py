"""Ranks that are near each other: those on one machine, with how much each has to write in a save,
and those that see one directory.

Each rank tells the first one about itself, which answers once for each machine. It must not know
what is written, nor how the answer is used.
"""

from __future__ import annotations

import json

from fastckpt.machine import this_machine
from fastckpt.ranks.round import Round


class RanksByNode:
    """The nodes of a job; a node is the ranks that see the same directory.

    Args:
        first: for each rank, the first rank of its node.

    Attributes:
        firsts: the first rank of each node, ascending.
    """

    def __init__(self, first: list[int]) -> None:
        self._first = first
        self.firsts = sorted(set(first))

    def first(self, rank: int) -> int:
        """Returns the first rank on the node of a rank."""
        return self._first[rank]

    def beside(self, rank: int) -> list[int]:
        """Returns all ranks on the node of a rank, ascending."""
        return [other for other, first in enumerate(self._first) if first == self._first[rank]]


def neighbours(agreement: Round, nbytes: int) -> dict[int, int]:
    """Returns the bytes that each rank of this machine has to write, this rank among them. All
    ranks call it, each with its own bytes, and wait for each other. Raises PeerFailed if a rank
    failed or is missing.
    """
    agreement.put("machine", json.dumps([this_machine(), nbytes]).encode())
    if agreement.rank == 0:
        found: dict[str, list[tuple[int, int]]] = {}
        for rank, record in enumerate(agreement.gather("machine")):
            machine, its_nbytes = json.loads(record)
            found.setdefault(machine, []).append((rank, its_nbytes))
        for machine, ranks in found.items():
            agreement.put(f"machine {machine}", json.dumps(ranks).encode())
    return dict(json.loads(agreement.get(f"machine {this_machine()}")))
