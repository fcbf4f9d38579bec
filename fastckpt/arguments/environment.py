"""The environment tells the staging budget that the user has set, and a launcher's words about
the job.

The only module that reads environment variables. It must not know what is done with their values.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fastckpt.arguments.checks import check_size

STAGING_VARIABLE = "FASTCKPT_STAGING_BYTES"


def staging_bytes(least: int) -> int | None:
    """The budget in $FASTCKPT_STAGING_BYTES; None where it is not set.

    Raises:
        ValueError: it is no number of bytes, nor a text such as "1GiB", or less than `least`.
    """
    value = os.environ.get(STAGING_VARIABLE)
    if value is None:
        return None
    with suppress(ValueError):  # told below, with the least there may be
        if (nbytes := check_size(STAGING_VARIABLE, value)) >= least:
            return nbytes
    raise ValueError(
        f"{STAGING_VARIABLE}={value!r} is not a number of bytes >= {least}, nor a text such as 1GiB"
    )


def launched_rank() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, where a launcher such as torchrun says them."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def launched_on_machine() -> int:
    """Returns how many ranks a launcher has started on this machine; 1 where none says so."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks)) if ranks.isdigit() else 1
