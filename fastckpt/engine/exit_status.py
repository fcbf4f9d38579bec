"""The exit status of this process, which Python has settled before the functions of atexit run.

So the engine has libc call it after Python has ended, when all is flushed and all others have run.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from fastckpt import _engine


def fail_exit(words: str) -> None:
    """Has the process end with status 1 in the place of 0, and with these words on stderr."""
    fd = -1
    with suppress(Exception):  # there is no stderr, or the program has closed it
        assert sys.__stderr__ is not None
        fd = sys.__stderr__.fileno()
    _engine.fail_exit(fd, words.encode(errors="replace"))
