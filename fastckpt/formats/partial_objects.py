"""The objects of a torch zip of which torch.load(weights_only=True) refuses some: the others.

Responsible for asking torch which classes and functions it refuses, and for having it load a pickle
without them: torch's own reader loads everything, by its own rules. The module must not know what
the objects are for, nor which of them somebody asks for.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

from fastckpt.formats import torch_pickle
from fastckpt.formats.pickle_cuts import cut, left_out
from fastckpt.formats.value_names import below

_GLOBALS_MAX = 1000  # torch is asked about each
_ENCRYPTED = 1
# Raised by Python's reader of zip files, and by cut(), for bytes that nobody else takes.
_DAMAGE = (ValueError, LookupError, NotImplementedError, EOFError, zipfile.BadZipFile, struct.error)


def loaded(source: Any, weights_only: bool, what: str) -> Any:
    """Returns what torch_pickle.unpickled() does; but with weights_only, a note is in the place of
    each object that torch refuses: see left_out().

    Args:
        source: a seekable file with a torch zip.
        weights_only, what: as unpickled()'s.

    Raises:
        As unpickled(); pickle.UnpicklingError only for a pickle that no pickler of torch's wrote.
    """
    try:
        return torch_pickle.unpickled(source, weights_only, what)
    except pickle.UnpicklingError:
        rest = _without_refused(source) if weights_only else None
        if rest is None:
            raise
    return torch_pickle.unpickled(rest, weights_only, what)


def notes_in(value: Any, name: str | None) -> Iterator[tuple[str, str]]:
    """Yields the names of what was left out of a value, each with its maker. What stands there
    many times is told once.
    """
    ahead, seen = [(name, value)], set[int]()
    while ahead:
        name, value = ahead.pop()
        if type(value) not in (dict, list, tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        maker = left_out(value)
        if maker is not None:
            yield name or "", maker
            continue
        items = value.items() if type(value) is dict else enumerate(value)
        inner = [(key, item) for key, item in items if type(item) in (dict, list, tuple)]
        ahead += [(below(name, str(key)), item) for key, item in reversed(inner)]


def _without_refused(source: Any) -> io.RawIOBase | None:
    """Returns a torch zip without the objects that torch refuses; None if no pickler of torch's
    wrote the pickle in it.
    """
    asked: dict[bytes, bool] = {}

    def is_refused(operation: bytes) -> bool:
        if operation not in asked:
            if len(asked) == _GLOBALS_MAX:
                raise ValueError("it names too many classes and functions")
            asked[operation] = _is_refused(operation)
        return asked[operation]

    changed = _ChangedEnd(source)
    try:
        with zipfile.ZipFile(changed, "a") as archive, torch_pickle.collection_paused():
            top = archive.infolist()[0].filename.partition("/")[0]
            info = archive.getinfo(f"{top}/data.pkl")
            is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED
            if not is_plain or info.file_size > changed.nbytes:
                return None
            content = cut(archive.read(info), is_refused)
            archive.filelist.remove(info)
            del archive.NameToInfo[info.filename]
            archive.writestr(info.filename, content)
    except _DAMAGE:
        return None
    changed.seek(0)
    return changed


def _is_refused(operation: bytes) -> bool:
    """Returns whether torch refuses the class or function that an operation of a pickle names."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + operation + b".")
        archive.writestr("archive/version", b"3\n")
    buffer.seek(0)
    try:
        torch_pickle.torch_load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        return True
    return False


class _ChangedEnd(io.RawIOBase):
    """A file that is only read, whose bytes from the first write on are those that were written.

    Attributes:
        nbytes: its size.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._base, self._end = base, bytearray()
        self.nbytes: int = base.seek(0, os.SEEK_END)
        self._split, self._position = self.nbytes, 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        nbytes = max(0, min(len(view), self.nbytes - self._position))
        before = max(0, min(nbytes, self._split - self._position))
        if before:
            self._base.seek(self._position)
            self._base.readinto(view[:before])
        if nbytes > before:
            begin = self._position + before - self._split
            view[before:nbytes] = self._end[begin : begin + nbytes - before]
        self._position += nbytes
        return nbytes

    def write(self, content: Any) -> int:
        if not self._end:
            self._split = min(self._split, self._position)
        begin = self._position - self._split
        self._end[begin : begin + len(content)] = content
        self._position += len(content)
        self.nbytes = self._split + len(self._end)
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        del self._end[self._position - self._split if size is None else size - self._split :]
        self.nbytes = self._split + len(self._end)
        return self.nbytes
