"""One image on its way from memory into a file.

Responsible for waiting on the engine and for turning its failures into errors. It must not know
what the image is of, nor how the file is named or committed.
"""

from __future__ import annotations

from fastckpt.errors import StorageError
from fastckpt.image import BLOCK_BYTES, Image
from fastckpt.staging import Route, Staging

_WAIT_S = 3600.0  # one wait on the engine, repeated: a slow disk is not an error


class Transfer:
    """An image that is being staged, and written once write_to() has said where to.

    Leaving the context waits until nothing of it is in flight any more; what was not written by
    then never is.

    Args:
        staging: whose engine and budget are used.
        image: its body is moved; may be empty.
        path: of the file, for messages.
        blocks_limit: the most blocks of the budget it may hold, at least 1.
        stagers: the most threads that copy.

    Raises:
        StorageError: from any wait, when a write failed; the first failure.
    """

    def __init__(
        self, staging: Staging, image: Image, path: str, blocks_limit: int, stagers: int
    ) -> None:
        self._path = path
        self._image: Image | None = image  # keeps the sources until they were copied
        self._nbytes = image.body_nbytes
        self._job = None
        if image.body_nbytes:
            self._job = staging.engine().stage(
                image.segments, image.slots, max(1, blocks_limit), max(1, stagers)
            )

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            self._job.cancel()
            while not self._job.wait_written(_WAIT_S):
                pass
        self._image = None

    def write_to(self, fd: int, offset: int, route: Route) -> None:
        """Says where the image goes; fd stays open until the context is left."""
        if self._job is not None:
            self._job.write_to(fd, offset, route.backend, route.direct)

    def staged(self, timeout_s: float) -> bool:
        """Whether everything was copied, after waiting so long for it."""
        if self._job is not None and not self._job.wait_staged(timeout_s):
            return False
        self._check()
        self._image = None
        return True

    def wait_staged(self) -> None:
        """Waits until everything was copied."""
        while not self.staged(_WAIT_S):
            pass

    def wait_written(self) -> None:
        """Waits until everything was written, and checks that it was everything."""
        if self._job is None:
            return
        while not self._job.wait_written(_WAIT_S):
            pass
        self._check()
        assert self._job.nbytes_written() == self._nbytes, "bytes written differ from the plan"

    def _check(self) -> None:
        failure = None if self._job is None else self._job.failure()
        if failure is not None:
            op, offset, number = failure
            raise StorageError(op, self._path, number, offset)

    def block_crcs(self) -> list[int]:
        """CRC-32 of each block of the image; after wait_staged()."""
        return [] if self._job is None else self._job.block_crcs()

    def slot_crcs(self) -> list[int]:
        """CRC-32 of each slot's segment; after wait_staged()."""
        return [] if self._job is None else self._job.slot_crcs()

    def staged_bytes_max(self) -> int:
        """An upper bound of the staging memory held at a time."""
        return 0 if self._job is None else self._job.blocks_held_max() * BLOCK_BYTES
