"""Upload: one object, sent from front to back in parts, several at a time.

Blocks may arrive in any order. Blocks of the engine are sent without a copy; bytes that Python
writes are copied.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from fastckpt import _engine
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage import calls

PARTS_MAX = 10_000  # of one object, as S3 has it
CONCURRENCY = 16  # parts of one object that are under way at a time

FD_MIN = 1 << 30  # the least number by which the engine knows an object; no descriptor has it
numbers = itertools.count(FD_MIN)

Put = Callable[..., Any]  # (content, how) -> the object's ETag and version


def part_bytes(nbytes: int) -> int:
    """Returns the size of an object's parts, which is the smallest number of blocks that PARTS_MAX
    permits.
    """
    blocks = -(-nbytes // BLOCK_BYTES)
    return max(1, -(-blocks // (PARTS_MAX - 1))) * BLOCK_BYTES


class Upload:
    """An object being uploaded to a store. No reader sees it before finish().

    Args:
        put: sends bytes, or an iterator's buffers in parts; returns the ETag and version of the new
            object. It raises OSError.
        nbytes: the expected size of the object, which may become larger.
        path: the object's path; also an attribute.
        ends_with_file: whether the object is visible as soon as all bytes are written, without a
            commit; also an attribute.

    Attributes:
        fd: the number that the engine uses as the object's descriptor.
        chunk: the size of its parts.
        result: the result of `put`; None before finish().
    """

    def __init__(
        self, put: Put, nbytes: int, path: str = "", *, ends_with_file: bool = False
    ) -> None:
        self.path, self.ends_with_file, self.fd = path, ends_with_file, next(numbers)
        self.chunk = part_bytes(nbytes)
        self.result: Any = None
        self.since = time.monotonic()
        self._put = put
        self._is_small = nbytes <= self.chunk
        self._parts = _engine.Parts(self.chunk, CONCURRENCY * self.chunk)
        self._lock = threading.Lock()  # guards the following
        self._error: OSError | None = None
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes written so far."""
        return self._parts.nbytes()

    @property
    def parts_begun(self) -> int:
        return -(-self._parts.taken() // self.chunk)

    def sink(self, threads: _engine.Backend) -> _engine.Sink:
        """Returns the sink for the engine's blocks. If each block is a part, no block is copied or
        needs a thread. Otherwise the threads of the backend `threads` copy the blocks by
        write_at().
        """
        if self._is_small or self.chunk != BLOCK_BYTES:
            return _engine.callback_sink(threads, self._transfer)
        self._begin()
        return _engine.parts_sink(threads, self._parts)

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Takes a copy of data. While too many bytes wait for earlier bytes that are missing,
        blocks the caller until the missing bytes arrive, except if data are those bytes.
        """
        with calls.Call("write", self.path):
            if not self._is_small:
                self._begin()
            self._parts.add(memoryview(data).cast("B"), offset)
            self._check()

    def _transfer(self, _kind: str, _fd: int, memory: memoryview, offset: int) -> int:
        self.write_at(memory, offset)
        return len(memory)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="fastckpt-upload", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        try:
            parts = iter(self._parts.take, None)
            self.result = self._put(parts, chunk_size=self.chunk, max_concurrency=CONCURRENCY)
        except OSError as error:
            self._fail(error)
        except BaseException as error:  # the waiting thread must get the error
            self._fail(OSError(errno.EIO, f"{type(error).__name__}: {error}"))

    def _fail(self, error: OSError) -> None:
        with self._lock:
            self._error = self._error or error
        self._parts.fail(error.errno or errno.EIO)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def refusal(self) -> str:
        """Returns why the upload failed; "" if it did not fail."""
        if (error := self._error) is None:
            return ""
        why = getattr(error, "detail", "") or error.strerror or error
        parts = f"{self.parts_begun} parts of {self.chunk >> 20} MiB were started"
        return f"{parts} in {time.monotonic() - self.since:.1f} s; {why}"

    def finish(self) -> Any:
        """Completes the object after all its bytes were written; readers see it from then on.
        Idempotent. Returns the result of `put`.
        """
        with calls.Call("put", self.path):
            if self.result is not None:
                return self.result
            self._check()
            self._parts.end()
            if self._thread is None:
                content = b"".join(iter(self._parts.take, None))
                self.result = self._put(content, use_multipart=False)
            else:
                self._thread.join()
                self._check()
            return self.result

    def give_up(self) -> None:
        """Abandons the upload without waiting. No object is created, except if finish() has
        begun.
        """
        self._fail(OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))

    close = give_up
