"""Memory: the argument of Checkpointer that has steps saved to the memory of the nodes first.

The module checks its values. It must not know what there is in that memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastckpt.arguments.checks import (
    check_count,
    check_integer,
    check_path,
    check_rate,
    check_size,
    check_text,
    optional,
)


@dataclass(frozen=True)
class Memory:
    """A local tier in the node's memory, for `Checkpointer(root, local=fastckpt.Memory())`: files
    on a tmpfs, which outlive the process, but not the machine, nor a container that is replaced.

    Args:
        keep: how many of the newest steps stay there. It needs room for one more.
        budget: the most memory that steps may take on a node, as a number or a text such as
            "64GiB". None: half of the file system's size, or of the memory that the node or the
            container has left, if that is less. A save for which it is too small removes the
            oldest steps that the root has had, or need not have, and else goes past the tier.
        directory: a directory on a tmpfs of the node.
        peers: to how many neighbouring nodes each rank sends its files right after the commit, so
            that the step outlives its node: handle.wait_memory(). Each holds as many steps of so
            many others, so budget counts those, too. With one node there is nobody to send to.
        groups: the group of nodes that may fail together which this node is in, such as its rack;
            replicas go to nodes of other groups where there are any. None: no two nodes are in one.
        rate: the most bytes a second that a rank sends to a neighbour, as a number or a text such
            as "2GB/s". None: no limit.
        address: the address of this node at which its ranks listen for each other. None: the one
            from which it reaches the job's store, if that is a TCPStore, else 127.0.0.1. So give
            one if the job's nodes are several machines and its store is a FileStore, if the host
            of the store has its own name as 127.0.1.1 in /etc/hosts, or if files are to take
            another network. They travel in the clear; who does not know the job's secret, which
            ranks share by that store, is sent nothing.
        root_every: the root gets the steps that are multiples of this, and any with a deadline_s;
            the others are in memory alone: result() returns when they are committed there. After a
            crash the newest is copied to the root, whatever its number.

    Raises:
        ValueError, TypeError: one of them is out of range, or of another type.
    """

    keep: int = 2
    budget: int | str | None = None
    directory: str | os.PathLike[str] = "/dev/shm"
    root_every: int = 1
    peers: int = 1
    groups: str | None = None
    rate: float | str | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        check_count("keep", self.keep)
        check_count("root_every", self.root_every)
        if check_integer("peers", self.peers) < 0:
            raise ValueError(f"peers is {self.peers}, must be at least 0")
        optional(check_text, "groups", self.groups)
        address = optional(check_text, "address", self.address)
        if address is not None and address.strip("0.:") == "":
            raise ValueError(
                f"address is {self.address!r}, must be one address of this node that others reach"
            )
        _ = self.path, self.budget_bytes, self.rate_bytes

    @property
    def path(self) -> str:
        """The directory as an absolute path."""
        return check_path("directory", self.directory)

    @property
    def budget_bytes(self) -> int | None:
        """The budget as a number."""
        return optional(check_size, "budget", self.budget)

    @property
    def rate_bytes(self) -> float | None:
        """The rate in bytes a second."""
        return optional(check_rate, "rate", self.rate)

    def is_due(self, step: int) -> bool:
        """Returns whether the root is to get a step."""
        return step % self.root_every == 0
