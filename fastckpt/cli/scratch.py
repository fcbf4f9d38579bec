"""The directory that a measurement writes to: made in the directory that is measured, with a check
of the room there, and removed at the end, by SIGINT and SIGTERM, too.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fastckpt.arguments.quantities import shown_size
from fastckpt.saving import pipeline


@contextmanager
def own_directory(directory: str, prefix: str) -> Iterator[Path]:
    """Makes a directory in the given one; removes it when the body ends, by a signal, too."""

    asked = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            own = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        except OSError as error:  # its own message names the temporary directory
            number = error.errno or errno.EIO
            why = f"{os.strerror(number)} [{errno.errorcode.get(number, number)}]"
            raise OSError(f"cannot write to {directory!r}: {why}") from None
        try:
            yield own
        except Exception:
            # C code that the signal arrives in may replace the interrupt by an error of its own.
            if asked:
                raise KeyboardInterrupt from None
            raise
        finally:
            try:
                # A save whose wait was interrupted goes on, and would make files behind us.
                pipeline.current().drain()
            finally:
                shutil.rmtree(own)
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def check_room(directory: str, nbytes: int) -> None:
    """Raises OSError if the directory's file system has less free than nbytes."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise OSError(
            f"{directory} has {shown_size(free)} free, and {shown_size(nbytes)} are needed to "
            "measure"
        )
