"""UrlPlace: a file becomes visible at a URL when its upload is completed. Nothing there has a
temporary name, and nobody has to be asked what lies there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from fastckpt.errors import CheckpointError
from fastckpt.files.plan import FilePlace
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.objects import new_object, objects_of


class UrlPlace(FilePlace):
    """A URL, which the first rank alone writes to. Arguments are FilePlace's."""

    is_shared = False

    @contextmanager
    def make(self, purpose: Purpose) -> Iterator[tuple[int, str]]:
        with new_object(self.storage, self.path, purpose.nbytes) as fd:
            yield fd, self.path

    def made(self, name: str) -> None:
        """Does nothing: no other rank opens it."""

    def take_permissions(self, fd: int) -> None:
        """Does nothing: objects have none."""

    def publish(self) -> None:
        with reported("write", self.path):
            size = self.storage.fstat(self._fd).st_size
            if size != self._nbytes:
                raise CheckpointError(f"{self.path!r} got {size} bytes instead of {self._nbytes}")
            objects_of(self.storage).complete(self._fd)


def put_written(storage: Storage, path: str, write: Callable[[IO[bytes]], None]) -> int:
    """Puts what a function writes to a file, at once; returns the size."""
    file = io.BytesIO()
    write(file)
    with file.getbuffer() as content, new_object(storage, path, len(content)) as fd:
        with reported("write", path):
            for begin in range(0, len(content), BLOCK_BYTES):
                storage.write_at(fd, content[begin : begin + BLOCK_BYTES], begin)
            objects_of(storage).complete(fd)
        return len(content)
