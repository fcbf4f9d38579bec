"""The nodes of a job: the ranks that share each, and the steps and parts of steps that it holds.

The module must not know how that was found out.
"""

from __future__ import annotations

from fastckpt.formats.manifest import Manifest
from fastckpt.steps.known import Known
from fastckpt.steps.root import Steps

OBJECTS_PART = -1  # the objects' place among parts, which else are ranks of writers


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


class NodesSteps(Steps):
    """The steps of the nodes that each rank can read, by the names that the first rank's node has.

    Args:
        steps: those of this node.
        names: this node's name for each of those.
        nonces: the steps' nonces.
    """

    def __init__(self, steps: Steps, names: dict[str, str], nonces: set[str]) -> None:
        super().__init__(steps.storage, steps.root)
        self._steps, self._own, self.nonces = steps, names, nonces

    def names(self) -> list[str]:
        return [*self._own]

    def known(self, name: str) -> Known:
        return self._steps.known(self._own.get(name, name))

    def path(self, name: str, *parts: str) -> str:
        return self._steps.path(self._own.get(name, name), *parts)


def parts_of(manifest: Manifest) -> dict[int, dict[str, int]]:
    """Returns the files of each part of a step, with their sizes; an index before its shard."""
    shards = {
        writer.rank: {writer.index: writer.index_nbytes, writer.file: writer.nbytes}
        for writer in manifest.writers
    }
    return shards | {OBJECTS_PART: {manifest.objects.file: manifest.objects.nbytes}}


def sizes_of(manifest: Manifest) -> dict[str, int]:
    """Returns the size of each file of a step but the manifest's."""
    return {file: size for files in parts_of(manifest).values() for file, size in files.items()}
