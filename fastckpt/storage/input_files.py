"""Files that are open for reading, in a file system or an object store. Readers use them only
through the interface InputFile.
"""

from __future__ import annotations

from typing import Protocol

from fastckpt.arguments.urls import is_mounted
from fastckpt.storage.atomic import close_quietly
from fastckpt.storage.file_system import Opening, Storage
from fastckpt.storage.objects import objects_of


class InputFile(Protocol):
    """A file that is open for reading. Methods raise OSError, like system calls.

    Attributes:
        path: the file's path, for messages.
        fd: the file's descriptor. For an object, a number that the engine uses instead, and that no
            descriptor has.
    """

    @property
    def path(self) -> str: ...
    @property
    def fd(self) -> int: ...
    def nbytes(self) -> int:
        """Returns the file's size."""

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Returns nbytes at an offset; fewer only at the end of the file. Meant for headers, not
        for bulk data.
        """

    def close(self) -> None:
        """Closes the file. An error here does not affect bytes that were already read."""


class PosixFile:
    """A file of a file system, given by the storage, the descriptor and the path."""

    def __init__(self, storage: Storage, fd: int, path: str) -> None:
        self.storage, self.fd, self.path = storage, fd, path

    def nbytes(self) -> int:
        return self.storage.fstat(self.fd).st_size

    def read_at(self, nbytes: int, offset: int) -> bytes:
        return self.storage.read_at(self.fd, nbytes, offset)

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        self.storage.write_at(self.fd, data, offset)

    def close(self) -> None:
        close_quietly(self.storage, self.fd)


def input_file(storage: Storage, path: str, *how: Opening) -> InputFile:
    """Opens a file for reading. For `how` and errors see Storage.open()."""
    if is_mounted(path):
        return objects_of(storage).opened(path)
    return PosixFile(storage, storage.open(path, *how), path)
