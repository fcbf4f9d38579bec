"""The ranks of one save learn which of them share a machine, and how much each has to write.

Responsible for ranks finding that out from each other: each tells the first one, which answers once
for each machine. It must not know what is written, nor what is made of the answer.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fastckpt.ranks.round import Round

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Neighbour(NamedTuple):
    """A rank of this machine, this one among them.

    Attributes:
        rank: of the process.
        nbytes: what it has to write.
        space: processes of the same one see each other's memory.
    """

    rank: int
    nbytes: int
    space: str


def groups(neighbours: Sequence[Neighbour], count: int) -> list[list[int]]:
    """The ranks of a machine cut into those that share a file, `count` times, but for processes
    that do not see each other. The first of each group writes it.
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
    """The ranks of this machine, ascending; all ranks call it, and wait for each other.

    Args:
        agreement: the save's round.
        nbytes: what this rank has to write.

    Raises:
        PeerFailed: one of them failed, or is missing.
    """
    own = [_machine(), nbytes, _space()]
    agreement.put("machine", json.dumps(own).encode())
    if agreement.rank == 0:
        found: dict[str, list[list[object]]] = {}
        for rank, record in enumerate(agreement.gather("machine")):
            machine, *rest = json.loads(record)
            found.setdefault(machine, []).append([rank, *rest])
        for machine, ranks in found.items():
            agreement.put(f"machine {machine}", json.dumps(ranks).encode())
    answer = agreement.get(f"machine {_machine()}")
    return [Neighbour(*each) for each in json.loads(answer)]


def _machine() -> str:
    """Returns what tells this machine from others, the same in all of its containers."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _space() -> str:
    """Whose memory can be reached under /proc: processes of one namespace and user."""
    try:
        names = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")]
    except OSError:
        names = [f"process {os.getpid()}"]  # nobody else's, for all that is known
    return " ".join([*names, str(os.geteuid())])
