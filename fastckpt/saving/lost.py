"""The end of a process that has lost a checkpoint: what it says, and that it is no success.

It must not know why a save failed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from fastckpt.engine import exit_status
from fastckpt.errors import fate
from fastckpt.saving.handle import InnerHandle


def tell_lost(failed: Sequence[InnerHandle]) -> None:
    """Reports failures that nobody has asked for, and has a status of 0 become 1, which is said
    last on stderr.
    """
    for handle in failed:
        with suppress(Exception):  # nobody reads it: the status says that something was lost
            sys.stderr.write(
                f"fastckpt: the save to {handle.path!r} FAILED and {fate(handle.failure())}: "
                f"{handle.failure()}\n"
            )
    if failed:
        fail_exit(failed[-1].path, len(failed) - 1)


def fail_exit(path: str, others: int = 0) -> None:
    """Has the process end with a status other than 0, because of a save to this path."""
    more = f", and {others} before it," if others else ""
    exit_status.fail_exit(
        f"fastckpt: this process has lost a checkpoint: the save to {path!r}{more} failed"
    )


def tell_lost_in_child(failed: Sequence[InnerHandle]) -> None:
    """Does what tell_lost() does in a process of multiprocessing, before Python joins its threads:
    where it was forked, it runs no function of atexit, and ends past libc.

    Raises SystemExit for the exit status, unless other threads are to be joined.
    """
    children = sys.modules.get("multiprocessing.process")
    if not failed or children is None or children.parent_process() is None:
        return
    tell_lost(failed)
    for handle in failed:
        handle.note_reported()
    others = [its for its in threading.enumerate() if its is not threading.current_thread()]
    if all(thread.daemon or thread.name.startswith("fastckpt-") for thread in others):
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # as Python itself does, which the error prevents
                stream.flush()
        raise SystemExit(1)
