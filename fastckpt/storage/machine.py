"""Information from proc(5) about this machine, its processes and the memory available to a
process.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def this_machine() -> str:
    """Returns an identifier of this machine since its last boot, which is the same in all its
    containers.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def pid_space() -> str:
    """Returns an identifier of this process's pid namespace that is unique among all machines.
    Within the namespace, a pid and a start time identify a process.
    """
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return this_machine()


def started(pid: int) -> int | None:
    """Returns the start time of a process, in ticks since boot (proc(5), stat, field 22); None if
    it has ended.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rsplit(")", 1)[1].split()
        # A killed process stays until its parent collects it; in a container that may be never. (A
        # process whose first thread has ended looks the same, but has other threads.)
        return None if state in "ZX" and int(fields[16]) <= 1 else int(fields[18])
    except (OSError, IndexError, ValueError):
        return None


def memory_left_bytes() -> int:
    """Returns how many more bytes the machine and this process's cgroups let it use."""
    return min(_memory_available_bytes(), _cgroup_headroom_bytes())


def _memory_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Names(NamedTuple):
    """File names in one version of cgroups: the mount point, the files of the limit and of the
    usage, and the lines of memory.stat for the page cache, which can be reclaimed.
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
    """Returns how many more bytes this process's memory cgroup (v2 or v1) and its parents permit; 1
    << 62 if unknown. See cgroups(7).
    """
    headrooms = [1 << 62]
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        lines = []
    for _number, controllers, path in lines:
        names = _CGROUPS.get(controllers)
        if names is None:
            continue
        # In a namespace or a container, parts of the path may not be mounted.
        parts = [part for part in path.split("/") if part]
        for count in range(len(parts) + 1):
            try:
                headrooms.append(_granted("/".join([names.root, *parts[:count]]), names))
            except (OSError, ValueError):
                pass  # the limit is "max", or the files are missing
    return min(headrooms)


def _granted(directory: str, names: _Names) -> int:
    """Returns how many more bytes a cgroup permits; raises OSError or ValueError if unknown."""
    limit, used, stat = (
        Path(directory, name).read_text() for name in (names.limit, names.used, "memory.stat")
    )
    counts = dict(line.split() for line in stat.splitlines())
    cached = sum(int(counts.get(name, 0)) for name in names.cached)
    return max(0, int(limit) - int(used) + cached)
