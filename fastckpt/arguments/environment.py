"""The environment variables that are read: the user's staging budget, a launcher's ranks, and what
an object store's client would read itself.

No other module reads any. It must not know what is done with their values.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

from fastckpt.arguments.checks import check_size

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
        f"{STAGING_VARIABLE}={value!r} is not a number of bytes >= {least}, nor a text such as 1GiB"
    )


def client_options(scheme: str) -> dict[str, str]:
    """Returns what variables such as AWS_ALLOW_HTTP say of HTTP: an object store's client does not
    read these where it is told a part of its options of HTTP.
    """
    begin = _OF_CLIENTS[scheme]
    told = {name.removeprefix(begin): name for name in os.environ if name.startswith(begin)}
    return {key.lower(): os.environ[told[key]] for key in _HTTP & told.keys()}


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
    found = [_TASKS.fullmatch(each) for each in text.split(",")]
    groups = [(int(each[1]), int(each[2] or 1)) for each in found if each]
    if len(groups) < len(found):
        return 0
    node = os.environ.get("SLURM_NODEID", "")
    left = int(node) if _COUNT.fullmatch(node) else sum(nodes for _, nodes in groups)
    for tasks, nodes in groups:
        if left < nodes:
            return tasks
        left -= nodes
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
