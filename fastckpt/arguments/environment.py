"""The environment variables that are read: the user's staging budget, a launcher's ranks, and what
an object store's client would read itself.

No other module reads any.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
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
                f"address is {self.address!r}, must be an address of this node that other nodes "
                "can reach"
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


STAGING_VARIABLE = "FASTCKPT_STAGING_BYTES"
# How torchrun, Open MPI, MPICH and Slurm tell a process its number among those of its machine.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
# The variables in which launchers say how many ranks they have started on this machine: torchrun
# and accelerate, DeepSpeed, Open MPI, MPICH and Intel MPI. What starts processes comes before what
# SLURM says of the job or job step around it.
_ON_MACHINE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_ON_NODES = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
# Of object stores: what their clients begin their variables with, and their options of HTTP.
_OF_CLIENTS = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_HTTP = {"ALLOW_HTTP", "ALLOW_INVALID_CERTIFICATES", "CONNECT_TIMEOUT", "TIMEOUT", "USER_AGENT"}
_HTTP |= {"PROXY_URL", "PROXY_CA_CERTIFICATE", "PROXY_EXCLUDES", "POOL_IDLE_TIMEOUT"}
_ENDPOINTS = ("ENDPOINT", "ENDPOINT_URL", "ENDPOINT_URL_S3", "STORAGE_ENDPOINT")
_COUNT = re.compile("[0-9]{1,9}")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")  # as "4(x2),3": two nodes of 4, one of 3


def staging_bytes(least: int) -> int | None:
    """Returns the budget in $FASTCKPT_STAGING_BYTES; None if it is not set.

    Raises:
        ValueError: it is neither bytes nor a text such as "1GiB", or is less than `least`.
    """
    value = os.environ.get(STAGING_VARIABLE)
    if value is None:
        return None
    with suppress(ValueError):  # the error below says it too, with the least size
        if (nbytes := check_size(STAGING_VARIABLE, value)) >= least:
            return nbytes
    raise ValueError(
        f"{STAGING_VARIABLE}={value!r} is not a size of at least {least} bytes: give a number of "
        "bytes or a string such as 1GiB"
    )


def client_options(scheme: str) -> dict[str, str]:
    """Returns what variables such as AWS_ALLOW_HTTP say of HTTP: an object store's client does not
    read these where it is told a part of its options of HTTP.
    """
    begin = _OF_CLIENTS[scheme]
    variables = {name.removeprefix(begin): name for name in os.environ if name.startswith(begin)}
    return {key.lower(): os.environ[variables[key]] for key in _HTTP & variables.keys()}


def is_told(scheme: str, key: str) -> bool:
    """Returns whether a variable such as AWS_DEFAULT_REGION tells such a client a "region"."""
    begin = _OF_CLIENTS[scheme]
    return any(name.startswith(begin) and key.upper() in name for name in os.environ)


def endpoints(scheme: str) -> dict[str, str]:
    """Returns the variables that tell such a client its endpoint, with their values."""
    names = (f"{_OF_CLIENTS[scheme]}{name}" for name in _ENDPOINTS)
    return {name: os.environ[name] for name in names if name in os.environ}


def launched_rank() -> tuple[int, int] | None:
    """Returns this process's rank and the number of ranks, if a launcher (torchrun) set them."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def launched_on_machine() -> int:
    """Returns how many ranks a launcher has started on this machine; 1 if none says so. A value
    that is no such number is passed over.
    """
    for name in _ON_MACHINE:
        if ranks := _count(os.environ.get(name, "")):
            return ranks
    for name in _ON_NODES:
        if ranks := _tasks_here(os.environ.get(name, "")):
            return ranks
    return 1


def _count(text: str) -> int:
    return int(text) if _COUNT.fullmatch(text) else 0


def _tasks_here(text: str) -> int:
    """Returns the tasks on this node, $SLURM_NODEID, in SLURM's text for all nodes; the most of any
    node, if the text does not tell this one's; 0, if it is no such text.
    """
    matches = [_TASKS.fullmatch(each) for each in text.split(",")]
    groups = [(int(each[1]), int(each[2] or 1)) for each in matches if each]
    if len(groups) < len(matches):
        return 0
    node = os.environ.get("SLURM_NODEID", "")
    remaining = int(node) if _COUNT.fullmatch(node) else sum(nodes for _, nodes in groups)
    for tasks, nodes in groups:
        if remaining < nodes:
            return tasks
        remaining -= nodes
    return max(tasks for tasks, _ in groups)


def is_first_on_machine() -> bool:
    """Returns whether this process is the first of those that a launcher has started on this
    machine, or was started by none.
    """
    ranks = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    return next((int(rank) == 0 for rank in ranks if rank.isdigit()), True)


def launched_job() -> tuple[str, int]:
    """Returns the name that a scheduler or launcher gives a job, and again after a restart, "" if
    none does; and how often the scheduler has begun the job again. It ends a job before it begins
    it again, so a higher number proves that all processes with a lower one were told to end.

    Only Slurm has such a number. The name alone proves nothing: two job steps of one allocation
    have the same one, and so have two jobs that were given the same --rdzv-id.
    """
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        job = os.environ.get(name, "")
        if job not in ("", "none"):  # torchrun's, if it was given no --rdzv-id
            restarts = os.environ.get("SLURM_RESTART_COUNT", "") if name == "SLURM_JOB_ID" else ""
            return f"{name}={job}", _count(restarts)
    return "", 0
