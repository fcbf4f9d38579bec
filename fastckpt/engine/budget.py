"""The staging memory that a process may take: as set by the user, else a share of the free memory.

This module must not know what the memory is used for.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

from fastckpt.arguments import environment
from fastckpt.plan.image import BLOCK_BYTES


def default_budget_bytes() -> int:
    """Returns $FASTCKPT_STAGING_BYTES, else half of the memory available to this process now,
    divided by the number of ranks on the machine if a launcher tells it; but no more than half of
    the address space that is left: threads need some, too.
    """
    nbytes = environment.staging_bytes(least=BLOCK_BYTES)
    if nbytes is None:
        available = min(_memory_available_bytes(), _cgroup_headroom_bytes())
        nbytes = available // 2 // environment.launched_on_machine()
    return max(BLOCK_BYTES, min(nbytes, _address_space_left_bytes() // 2))


def _address_space_left_bytes() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    with open("/proc/self/statm", encoding="ascii") as file:
        return max(0, limit - int(file.read().split()[0]) * resource.getpagesize())


def _memory_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Names(NamedTuple):
    """Names of a version of cgroups: where they are mounted, files of a limit and of what is used,
    and in memory.stat what of that is a cache of files, which makes room.
    """

    root: str
    limit: str
    used: str
    cached: tuple[str, str]


_CACHED = ("active_file", "inactive_file")
_CGROUPS = {  # by the controllers that /proc/self/cgroup names
    "": _Names("/sys/fs/cgroup", "memory.max", "memory.current", _CACHED),
    "memory": _Names(
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def _cgroup_headroom_bytes() -> int:
    """Returns how many bytes the process's memory cgroup (v2 or v1), and those around it, still
    grant; 1 << 62 if that is not known. See cgroups(7).
    """
    found = [1 << 62]
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        lines = []
    for _number, controllers, path in lines:
        names = _CGROUPS.get(controllers)
        if names is None:
            continue
        # Of a namespace's or a container's own view, parts of the path may not be mounted.
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            try:
                found.append(_granted("/".join([names.root, *parts[:count]]), names))
            except (OSError, ValueError):
                pass  # the limit is "max", or nothing is there
    return min(found)


def _granted(directory: str, names: _Names) -> int:
    """Returns how many bytes a cgroup still grants; raises OSError or ValueError if not known."""
    limit, used, stat = (
        Path(directory, name).read_text() for name in (names.limit, names.used, "memory.stat")
    )
    counts = dict(line.split() for line in stat.splitlines())
    cached = sum(int(counts.get(name, 0)) for name in names.cached)
    return max(0, int(limit) - int(used) + cached)
