"""Processes on a host of another name, and in a pid namespace of their own, as containers are.

Responsible for the namespaces; needs root.
"""

from __future__ import annotations

import ctypes
import os
import socket

import pytest

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID = 0x00020000, 0x04000000, 0x20000000
MS_REC, MS_PRIVATE = 16384, 1 << 18

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")


def become(host: str, *, own_pids: bool = False) -> None:
    """From here on this process is on a host of this name. With `own_pids` it is a child of the
    caller, in a new pid namespace; the caller itself waits for it, and ends as it ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    checked(libc.unshare(CLONE_NEWUTS | (CLONE_NEWPID | CLONE_NEWNS if own_pids else 0)))
    socket.sethostname(host)
    if not own_pids:
        return
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    checked(libc.mount(b"proc", b"/proc", b"proc", 0, None))


def checked(result: int) -> None:
    """Raises what a call of libc has failed with."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
