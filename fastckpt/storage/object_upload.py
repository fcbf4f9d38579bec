"""Upload: one object, written front to back in parts that are sent at once, several at a time.

Its writers bring blocks in any order, and each waits until its block was sent, whose memory is not
copied. The module must not know what the object is for, or who else writes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fastckpt.plan.image import BLOCK_BYTES

PARTS_MAX = 10_000  # of one object, as S3 has it
CONCURRENCY = 16  # parts of one object that are under way at a time
# Threads that bring blocks. One is always kept free, so that the block which others wait for comes.
WRITERS = 2 * CONCURRENCY + 8

Put = Callable[..., Any]  # (content, how) -> the object's ETag and version


def part_bytes(nbytes: int) -> int:
    """Returns the size of the parts of an object: whole blocks, as few as PARTS_MAX allows."""
    blocks = -(-nbytes // BLOCK_BYTES)
    return max(1, -(-blocks // (PARTS_MAX - 1))) * BLOCK_BYTES


class Upload:
    """An object on its way to a store.

    Args:
        put: sends bytes, or what an iterator of buffers yields, in parts; returns what names the
            version that was made. It raises OSError.
        nbytes: the object's size, if not more.
        waiting: of its writers, and of others on the same threads, as many as may wait.

    Attributes:
        chunk: the size of its parts.
        nbytes: how much was written so far.
        result: what `put` has returned; None before finish().
    """

    def __init__(self, put: Put, nbytes: int, waiting: threading.BoundedSemaphore) -> None:
        self.chunk = part_bytes(nbytes)
        self.nbytes = 0
        self.result: Any = None
        self.since = time.monotonic()
        self._put, self._waiting = put, waiting
        self._is_small = nbytes <= self.chunk
        self._changed = threading.Condition()
        # State below is protected by _changed.
        self._blocks: dict[int, memoryview | bytes] = {}  # by offset: those not yet taken
        self._copied_bytes = 0  # of these
        self._at = 0
        self._is_whole = self._is_given_up = False
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def parts_begun(self) -> int:
        return -(-self._at // self.chunk)

    def write(self, memory: memoryview, offset: int) -> int:
        """Takes a block; returns its size once the memory may be used again.

        A whole part is sent from where it lies. What is less waits for others, so it is copied; and
        so is what no thread is left to wait for.
        """
        nbytes = len(memory)
        is_part = nbytes == self.chunk and offset % nbytes == 0 and not self._is_small
        if not is_part or not self._waiting.acquire(blocking=False):
            self._take(bytes(memory), offset)
            return nbytes
        try:
            sent = threading.Event()
            part = memory[:]
            known = weakref.ref(part, lambda _: sent.set())
            self._take(part, offset)
            del part
            # The client lets go of it in any case. This wait has no bound, as the kernel's writes
            # have none: who wakes up while the interpreter ends would abort it.
            sent.wait()
            del known
        finally:
            self._waiting.release()
        self._check()
        return nbytes

    def _take(self, block: memoryview | bytes, offset: int) -> None:
        is_copy = isinstance(block, bytes)
        with self._changed:
            while (
                is_copy
                and self._copied_bytes > CONCURRENCY * self.chunk
                and offset != self._at
                and self._error is None
                and not self._is_small
            ):
                self._changed.wait()
            self._check()
            if self._thread is None and not self._is_small:
                self._thread = threading.Thread(
                    target=self._run, name="fastckpt-upload", daemon=True
                )
                self._thread.start()
            self._blocks[offset] = block
            self._copied_bytes += len(block) if is_copy else 0
            self.nbytes += len(block)
            self._changed.notify_all()

    def _parts(self) -> Iterator[memoryview | bytes]:
        """Yields the blocks in their order, until finish(); raises OSError if one is missing."""
        while True:
            with self._changed:
                while self._at not in self._blocks and not self._is_whole:
                    if self._is_given_up:
                        raise InterruptedError(errno.ECANCELED, "the upload was given up")
                    self._changed.wait()
                block = self._blocks.pop(self._at, None)
                if block is None:
                    if self._at != self.nbytes:  # else the client would complete a part of it
                        raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))
                    return
                self._at += len(block)
                self._copied_bytes -= len(block) if isinstance(block, bytes) else 0
                self._changed.notify_all()
            yield block
            del block

    def _run(self) -> None:
        try:
            self.result = self._put(
                self._parts(), chunk_size=self.chunk, max_concurrency=CONCURRENCY
            )
        except OSError as error:
            self._fail(error)
        except BaseException as error:  # whoever waits is to hear of it
            self._fail(OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self._error = self._error or error
            self._blocks.clear()
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def why(self) -> str:
        """Returns why it failed, in words; "" if it has not."""
        error = self._error
        return "" if error is None else str(getattr(error, "detail", "") or error.strerror or error)

    def finish(self) -> Any:
        """Completes the object, all of which was written; from then on readers find it. Idempotent.

        Returns:
            What names its version.
        """
        if self.result is not None:
            return self.result
        self._check()
        if self._thread is None:
            self._is_whole = True
            self.result = self._put(b"".join(self._parts()), use_multipart=False)
        else:
            with self._changed:
                self._is_whole = True
                self._changed.notify_all()
            self._thread.join()
            self._check()
        return self.result

    def give_up(self) -> None:
        """Leaves no object, unless finish() has begun; does not wait."""
        with self._changed:
            self._is_given_up = True
            self._error = self._error or OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._blocks.clear()
            self._changed.notify_all()
