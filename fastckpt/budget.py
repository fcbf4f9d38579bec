"""How much memory staging may take: what the user set, else a share of what the machine has left;
and what a launcher says of the job.

The only module that reads environment variables. It must not know what the memory is used for.
"""

from __future__ import annotations

import os
from contextlib import suppress

from fastckpt.arguments import check_size
from fastckpt.image import BLOCK_BYTES

BUDGET_VARIABLE = "FASTCKPT_STAGING_BYTES"


def default_budget_bytes() -> int:
    """$FASTCKPT_STAGING_BYTES, else half of the memory available to this process now; where a
    launcher says in $LOCAL_WORLD_SIZE how many of its kind are on the machine, its share of that.
    """
    value = os.environ.get(BUDGET_VARIABLE)
    if value is not None:
        with suppress(ValueError):  # told below, with the least there may be
            if (budget_bytes := check_size(BUDGET_VARIABLE, value)) >= BLOCK_BYTES:
                return budget_bytes
        raise ValueError(
            f"{BUDGET_VARIABLE}={value!r} is not a number of bytes >= {BLOCK_BYTES}, nor a text "
            "such as 1GiB"
        )
    available = min(_memory_available_bytes(), _cgroup_headroom_bytes())
    siblings = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(BLOCK_BYTES, available // 2 // max(1, int(siblings) if siblings.isdigit() else 1))


def launched_rank() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, where a launcher such as torchrun says them."""
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdigit() and ranks.isdigit() else None


def _memory_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom_bytes() -> int:
    """What the memory cgroup still grants, v2 or v1; a huge number where no limit can be read."""
    unlimited = 1 << 62
    for limit_path, usage_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            with (
                open(limit_path, encoding="ascii") as limit,
                open(usage_path, encoding="ascii") as usage,
            ):
                text = limit.read().strip()
                return unlimited if text == "max" else max(0, int(text) - int(usage.read()))
        except (OSError, ValueError):
            continue  # that version of cgroups is not mounted here
    return unlimited
