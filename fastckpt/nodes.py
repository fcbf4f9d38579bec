"""Which ranks of one save share a machine, and how much each of them has to write.

Responsible for ranks finding that out from each other: each tells the first one, which answers once
for each machine. It must not know what is written, nor what is made of the answer.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from typing import NamedTuple

from fastckpt.agreement import Round

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Neighbour(NamedTuple):
    """A rank of this machine, this one among them.

    Attributes:
        rank, pid: of the process.
        nbytes: what it has to write.
        space: processes of the same one see each other's memory, as far as a user may.
    """

    rank: int
    nbytes: int
    pid: int
    space: str


def tell(agreement: Round, nbytes: int) -> None:
    """Tells the first rank where this one runs and how much it has to write; does not wait."""
    record = [_machine(), nbytes, os.getpid(), _space()]
    agreement.put("machine", json.dumps(record).encode())


def neighbours(agreement: Round) -> list[Neighbour]:
    """The ranks of this machine, ascending; once all ranks have told where they are.

    Raises:
        PeerFailed: one of them failed, or is missing.
    """
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
    """What tells this machine from others: the same in all of its containers."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _space() -> str:
    """Whose memory can be reached under /proc: processes of one namespace and user."""
    names = []
    for kind in ("pid", "user"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join([*names, str(os.geteuid())])
