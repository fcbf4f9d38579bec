"""The exit status of this process, which Python determines before it calls atexit functions.

So the engine makes libc call a function that changes the status after Python has ended, when all
files are flushed and all other exit functions have run.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from fastckpt import _engine


def fail_exit(words: str) -> None:
    """Makes the process exit with status 1 instead of 0, and with this text on stderr."""
    fd = -1
    with suppress(Exception):  # there is no stderr, or the program has closed it
        assert sys.__stderr__ is not None
        fd = sys.__stderr__.fileno()
    _engine.fail_exit(fd, words.encode(errors="replace"))
