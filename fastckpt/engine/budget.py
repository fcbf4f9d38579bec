"""The staging memory that a process may take: as set by the user, else a share of the free memory.

This module must not know what the memory is used for.
"""

from __future__ import annotations

import os

from fastckpt.arguments import environment
from fastckpt.plan.image import BLOCK_BYTES


def default_budget_bytes() -> int:
    """Returns $FASTCKPT_STAGING_BYTES, else half of the memory available to this process now,
    divided by the number of ranks on the machine if a launcher tells it.
    """
    told = environment.staging_bytes(least=BLOCK_BYTES)
    if told is not None:
        return told
    available = min(_memory_available_bytes(), _cgroup_headroom_bytes())
    return max(BLOCK_BYTES, available // 2 // environment.launched_on_machine())


def _memory_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_headroom_bytes() -> int:
    """Returns how many bytes the memory cgroup (v2 or v1) still grants; 1 << 62 if not known."""
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
