"""Ranks that are near each other: those on one machine, with how much each has to write in a save,
and those that see one directory.

Each rank tells the first one about itself, which answers once for each machine. It must not know
what is written, nor how the answer is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

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


class Neighbour(NamedTuple):
    """A rank of this machine, which may be this very one.

    Attributes:
        rank: its number.
        nbytes: the bytes that it has to write.
        space: a name that is equal for processes that can open each other's memory.
    """

    rank: int
    nbytes: int
    space: str


def groups(neighbours: Sequence[Neighbour], count: int) -> list[list[int]]:
    """Returns the ranks of a machine in groups that share a file, which the first of a group makes:
    `count` groups, or more where ranks cannot open each other's memory.
    """
    found: list[list[int]] = []
    spaces: dict[str, list[int]] = {}
    for each in neighbours:
        spaces.setdefault(each.space, []).append(each.rank)
    for ranks in spaces.values():
        files = min(count, len(ranks))
        cuts = [len(ranks) * number // files for number in range(files + 1)]
        found += [ranks[begin:end] for begin, end in pairwise(cuts)]
    return found


def neighbours(agreement: Round, nbytes: int) -> list[Neighbour]:
    """Returns the ranks of this machine, ascending. All ranks call it, each with the bytes that it
    has to write, and wait for each other. Raises PeerFailed if a rank failed or is missing.
    """
    own = [this_machine(), nbytes, _space()]
    agreement.put("machine", json.dumps(own).encode())
    if agreement.rank == 0:
        found: dict[str, list[list[object]]] = {}
        for rank, record in enumerate(agreement.gather("machine")):
            machine, *rest = json.loads(record)
            found.setdefault(machine, []).append([rank, *rest])
        for machine, ranks in found.items():
            agreement.put(f"machine {machine}", json.dumps(ranks).encode())
    answer = agreement.get(f"machine {this_machine()}")
    return [Neighbour(*each) for each in json.loads(answer)]


def _space() -> str:
    """Returns a name of this process's namespaces and user, whose memory /proc lets it open."""
    try:
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    except OSError:
        names = [f"process {os.getpid()}"]  # nothing is known, so it shares with nobody
    return " ".join([*names, str(os.geteuid())])
