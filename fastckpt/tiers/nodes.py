"""The nodes of a job: the ranks on each node, and the steps and parts of steps that a node holds.

The module also checks the reports that ranks send about themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastckpt.formats.manifest import Manifest
from fastckpt.steps.posix import PosixSteps

log = logging.getLogger("fastckpt")

OBJECTS_PART = -1  # the part of the objects; other parts are numbered by the ranks of their writers


class RanksByNode:
    """The nodes of a job, where a node is a group of ranks that see the same directory.

    Args:
        first: for each rank, the first rank of its node.

    Attributes:
        firsts: the first rank of each node, ascending.
    """

    def __init__(self, first: list[int]) -> None:
        self._first = first
        self.firsts = sorted(set(first))

    def first(self, rank: int) -> int:
        """Returns the first rank on the node of `rank`."""
        return self._first[rank]

    def beside(self, rank: int) -> list[int]:
        """Returns all ranks on the node of `rank`, ascending."""
        return [other for other, first in enumerate(self._first) if first == self._first[rank]]


class NodesSteps(PosixSteps):
    """The steps on the nodes that every rank can read, by their names on the first rank's node.

    Args:
        steps: the steps of this node.
        names: maps each name on the first rank's node to the name on this node.
        nonces: the steps' nonces.
    """

    def __init__(self, steps: PosixSteps, names: dict[str, str], nonces: set[str]) -> None:
        super().__init__(steps.storage, steps.root)
        self._steps, self._own, self.nonces = steps, names, nonces
        self.verdicts = steps.verdicts

    def names(self) -> list[str]:
        return [*self._own]

    def path(self, name: str, *parts: str) -> str:
        return self._steps.path(self._own.get(name, name), *parts)


def parts_of(manifest: Manifest) -> dict[int, dict[str, int]]:
    """Returns the files of each part of a step, with their sizes. An index precedes its shard."""
    parts: dict[int, dict[str, int]] = {}
    for writer in manifest.writers:
        files = {writer.index: writer.index_nbytes, writer.file: writer.nbytes}
        parts.setdefault(writer.rank, {}).update(files)
    return parts | {OBJECTS_PART: {manifest.objects.file: manifest.objects.nbytes}}


def named_parts(parts: Sequence[int]) -> str:
    """Describes parts of a step as text."""
    ranks = [str(part) for part in parts if part != OBJECTS_PART]
    texts = [f"the files of ranks {', '.join(ranks[:8])}"] if ranks else []
    return " and ".join([*texts, "its objects"] if OBJECTS_PART in parts else texts)


def check_alike(root_every: Sequence[int]) -> None:
    """Raises ValueError if ranks differ in which steps they would drain to the root."""
    for rank, value in enumerate(root_every):
        if value != root_every[0]:
            raise ValueError(
                f"Memory(root_every=) is {root_every[0]} on rank 0 and {value} on rank {rank}, "
                "must be the same on all ranks (a local directory without Memory counts as 1)"
            )


def warn_of_loopback(identities: Sequence[tuple[str, Sequence[Any] | None]]) -> None:
    """Warns if other machines cannot reach a rank, given all ranks' identities and addresses."""
    machines = {identity.partition(" ")[0] for identity, _at in identities} - {"rank"}
    if len(machines) < 2:
        return
    for rank, (_identity, at) in enumerate(identities):
        if at is not None and (at[0] == "::1" or at[0].startswith("127.")):
            log.warning(
                "rank %d listens for its neighbours at %s, which other machines cannot reach: on "
                "each node, pass Memory(address=...) with an address of the node, such as "
                "`hostname -I` shows",
                *(rank, at[0]),
            )
            return
