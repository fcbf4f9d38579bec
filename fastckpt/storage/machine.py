"""This machine and its processes, as proc(5) tells of them.

The module must not know what a process does here, nor which files it has made.
"""

from __future__ import annotations

import os
import socket

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
