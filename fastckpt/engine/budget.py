"""The staging memory that a process may take: what the user has set, or a share of what is free."""

from __future__ import annotations

import resource

from fastckpt.arguments import environment
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage.machine import memory_left_bytes


def default_budget_bytes() -> int:
    """Returns $FASTCKPT_STAGING_BYTES, else half of the memory available to this process now,
    divided by the number of ranks on the machine if a launcher tells it; but no more than half of
    the address space that is left: threads need some, too.
    """
    nbytes = environment.staging_bytes(least=BLOCK_BYTES)
    if nbytes is None:
        nbytes = memory_left_bytes() // 2 // environment.launched_on_machine()
    return max(BLOCK_BYTES, min(nbytes, _address_space_left_bytes() // 2))


def _address_space_left_bytes() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    with open("/proc/self/statm", encoding="ascii") as file:
        return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())
