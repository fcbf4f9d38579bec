"""This machine, its processes and the memory that is left for one, as proc(5) tells of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def this_machine() -> str:
    """Returns a name of this machine, from its last boot on, which is the same in all of its
    containers.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def pid_space() -> str:
    """Returns a name of this process's pid namespace, which no other one of any machine has: within
    it, a pid and a start time name one process.
    """
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return this_machine()


def started(pid: int) -> int | None:
    """Returns when a process began, in ticks since boot (proc(5), stat, field 22); None if gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *fields = file.read().rsplit(")", 1)[1].split()
        # One that was killed stays until its parent asks, which in a container may be never. (If
        # its first thread alone has ended, a process looks alike, but has others.)
        return None if state in "ZX" and int(fields[16]) <= 1 else int(fields[18])
    except (OSError, IndexError, ValueError):
        return None


def memory_left_bytes() -> int:
    """Returns how many bytes the machine, and the cgroups of this process, have left for it."""
    return min(_memory_available_bytes(), _cgroup_headroom_bytes())


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
