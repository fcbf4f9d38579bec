"""UrlPlace: makes a file visible at a URL by completing its upload. No temporary name is used, and
no existing object has to be checked.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import IO

from fastckpt.errors import CheckpointError
from fastckpt.files.plan import FilePlace
from fastckpt.plan.image import BLOCK_BYTES
from fastckpt.storage.file_system import Storage, reported
from fastckpt.storage.lustre_layout import Purpose
from fastckpt.storage.object_upload import Upload
from fastckpt.storage.objects import objects_of


class UrlPlace(FilePlace):
    """A URL to which only the first rank writes. For the arguments see FilePlace."""

    is_shared = False

    @contextmanager
    def make(self, purpose: Purpose) -> Iterator[tuple[Upload, str]]:
        with closing(objects_of(self.storage).upload(self.path, purpose.nbytes)) as upload:
            self._upload = upload
            yield upload, self.path

    def made(self, name: str) -> None:
        """Does nothing, because no other rank opens the object."""

    def take_permissions(self, fd: int) -> None:
        """Does nothing, because objects have no permissions."""

    def publish(self) -> None:
        size = self._upload.nbytes
        if size != self._nbytes:
            raise CheckpointError(f"{self.path!r} received {size} bytes instead of {self._nbytes}")
        with reported("write", self.path):
            self._upload.finish()


def put_written(storage: Storage, path: str, write: Callable[[IO[bytes]], None]) -> int:
    """Puts an object with the content that `write` writes, at once; returns its size."""
    file = io.BytesIO()
    write(file)
    with (
        file.getbuffer() as content,
        closing(objects_of(storage).upload(path, len(content))) as upload,
        reported("write", path),
    ):
        for begin in range(0, len(content), BLOCK_BYTES):
            upload.write_at(content[begin : begin + BLOCK_BYTES], begin)
        upload.finish()
        return len(content)
