"""The environment variables that fastckpt reads: the user's staging budget, a launcher's ranks, and
the variables of an object store's client.

No other module reads environment variables.
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
    """A local tier in the node's memory, for `Checkpointer(root, local=fastckpt.Memory())`. Its
    files are on a tmpfs: they outlive the process, but neither a restart of the machine nor the
    replacement of a container.

    Args:
        keep: how many of the newest steps are kept in memory. The tier needs room for one more.
        budget: the most memory that steps may take on a node, as a number or a text such as
            "64GiB". None: half of the tmpfs's size or half of the free memory of the node or
            container, whichever is less. If a save needs more, it removes the oldest steps that
            were already committed in the root or are not meant for the root; if this is not enough,
            it bypasses the tier.
        directory: a directory on a tmpfs of the node.
        peers: the number of neighbouring nodes to which each rank sends its files right after the
            commit, so that the step survives the loss of its node; handle.wait_memory() waits for
            this. Each node also holds the same number of steps of `peers` other nodes, which count
            towards its budget. A job of one node has no replicas.
        groups: the name of this node's failure domain, such as its rack. Replicas go to nodes with
            other names, if there are any. None: each node is a separate domain.
        rate: the most bytes a second that a rank sends to a neighbour, as a number or a text such
            as "2GB/s". None: no limit.
        address: the address of this node at which its ranks listen for each other. None: the
            address from which this node reaches the job's store, if that is a TCPStore, else
            127.0.0.1. So pass an address if the job has several machines and a FileStore, if the
            store's host has its own name as 127.0.1.1 in /etc/hosts, or if files should use another
            network. Files are sent unencrypted, but only to processes that prove that they have the
            job's secret, which ranks share over the store.
        root_every: only steps that are multiples of this number, and steps with a deadline_s, are
            copied to the root. For the other steps, which are only in memory, result() returns when
            they are committed there. After a crash the newest step is copied to the root in any
            case.

    Raises:
        ValueError, TypeError: an argument is out of range or of the wrong type.
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
        """Returns whether a step is to be copied to the root."""
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
        ValueError: it is not a number of bytes or a text such as "1GiB", or is below `least`.
    """
    value = os.environ.get(STAGING_VARIABLE)
    if value is None:
        return None
    with suppress(ValueError):  # the error below says it too, with the least size
        if (nbytes := check_size(STAGING_VARIABLE, value)) >= least:
            return nbytes
    raise ValueError(
        f"{STAGING_VARIABLE}={value!r} must be a size of at least {least} bytes: a number of bytes "
        "or a string such as 1GiB"
    )


def client_options(scheme: str) -> dict[str, str]:
    """Returns the HTTP options in variables such as AWS_ALLOW_HTTP. An object store's client
    ignores these variables if any HTTP option is passed to it.
    """
    begin = _OF_CLIENTS[scheme]
    variables = {name.removeprefix(begin): name for name in os.environ if name.startswith(begin)}
    return {key.lower(): os.environ[variables[key]] for key in _HTTP & variables.keys()}


def is_told(scheme: str, key: str) -> bool:
    """Returns whether a variable, such as AWS_DEFAULT_REGION, sets this option of a client."""
    begin = _OF_CLIENTS[scheme]
    return any(name.startswith(begin) and key.upper() in name for name in os.environ)


def endpoints(scheme: str) -> dict[str, str]:
    """Returns the variables that set a client's endpoint, with their values."""
    names = (f"{_OF_CLIENTS[scheme]}{name}" for name in _ENDPOINTS)
    return {name: os.environ[name] for name in names if name in os.environ}


def launched_rank() -> tuple[int, int] | None:
    """Returns this process's rank and the number of ranks, if a launcher (torchrun) set them."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def launched_on_machine() -> int:
    """Returns how many ranks a launcher has started on this machine; 1 if this is unknown."""
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
    """Returns the number of tasks on this node ($SLURM_NODEID) from Slurm's text for all nodes; the
    largest number of any node if this node's is not in the text; 0 if the text is malformed.
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
    """Returns whether this process is the first of a launcher's processes on this machine, or was
    started without a launcher.
    """
    ranks = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    return next((int(rank) == 0 for rank in ranks if rank.isdigit()), True)


def launched_job() -> tuple[str, int]:
    """Returns the job's name, which the scheduler or launcher keeps across restarts ("" if there is
    none), and the number of restarts by the scheduler. The scheduler ends a job before it restarts
    the job, so a higher number proves that all processes with a lower number were asked to exit.

    Only Slurm counts restarts. An equal name proves nothing, because two job steps of one
    allocation, or two jobs with the same --rdzv-id, have the same name.
    """
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        job = os.environ.get(name, "")
        if job not in ("", "none"):  # torchrun's, if it was given no --rdzv-id
            restarts = os.environ.get("SLURM_RESTART_COUNT", "") if name == "SLURM_JOB_ID" else ""
            return f"{name}={job}", _count(restarts)
    return "", 0
