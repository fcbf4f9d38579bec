"""The environment variables that are read: the user's staging budget, and a launcher's ranks.

No other module reads any. It must not know what is done with their values.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fastckpt.arguments.checks import check_size

STAGING_VARIABLE = "FASTCKPT_STAGING_BYTES"
# How torchrun, Open MPI, MPICH and Slurm tell a process its number among those of its machine.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


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


def launched_rank() -> tuple[int, int] | None:
    """Returns this process's rank and the number of ranks, if a launcher (torchrun) set them."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def launched_on_machine() -> int:
    """Returns how many ranks a launcher has started on this machine; 1 if it does not say."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdigit() else 1


def is_first_on_machine() -> bool:
    """Returns whether this process is the first of those that a launcher has started on this
    machine, or was started by none.
    """
    ranks = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    return next((int(rank) == 0 for rank in ranks if rank.isdigit()), True)
