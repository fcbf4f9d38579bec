"""ObjectStorage: objects by paths that stand for URLs; and PathStorage, the seam for all paths.

Of the seam it has what needs no more than a path. The rest is its own: files that are open, uploads
that are there when they are completed, and puts on the condition that there is no object, or still
the version that was read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fastckpt.arguments.urls import divided, is_mounted
from fastckpt.errors import StorageError
from fastckpt.storage import calls, object_botocore
from fastckpt.storage.file_system import Storage
from fastckpt.storage.object_upload import Upload, numbers
from fastckpt.storage.object_urls import UNTOLD, asked, client, store_of
from fastckpt.storage.owners import Owner

_STREAM_BYTES = 1 << 20  # what the client holds of one read at a time
_ABSENT = ".absent"  # the name of no object
_PAGE = 1000  # objects of a listing, as S3 has it
_KEY_BYTES_MAX = 1024  # as S3, Google and Azure have it
_ANY = 1 << 62
DROPPING = "fastckpt-drop"  # the name of a thread
_MARK = "fastckpt"  # metadata of an object: which put has made it
# If the answer to a put was lost, the client asks again, and is told that the object is there, or
# that there is no such upload. ETIMEDOUT tells by itself that the put may have been carried out.
_UNSURE = (errno.EEXIST, errno.ESTALE, errno.ENOENT, errno.EIO)
WHY = "objects: sent in parts"  # of the route of one
# The other methods of the seam have these answers.
_ANSWERS = {"sync_directory": None, "look_again": False, "free_bytes": _ANY}


class ObjectFile:
    """An object that is open for reading, in the version that it had then; an InputFile.

    Args:
        objects, path: where it is.
        found: what the store said of it.
    """

    def __init__(self, objects: ObjectStorage, path: str, found: Any) -> None:
        self.path, self.fd = path, next(numbers)
        self._objects, self._etag, self._nbytes = objects, found["e_tag"], int(found["size"])

    def nbytes(self) -> int:
        return self._nbytes

    def read_at(self, nbytes: int, offset: int) -> bytes:
        memory = bytearray(max(0, min(nbytes, self._nbytes - offset)))
        self.transfer("read", self.fd, memoryview(memory), offset)
        return bytes(memory)

    def transfer(self, _kind: str, _fd: int, memory: memoryview, offset: int) -> int:
        """Fills memory; returns how much there was. For the engine, on one of its threads."""
        nbytes = max(0, min(len(memory), self._nbytes - offset))
        if nbytes:
            asked("read", self.path, self._fill, memory[:nbytes], offset)
        return nbytes

    def _fill(self, memory: memoryview, offset: int) -> None:
        at, end = 0, offset + len(memory)
        for part in self._objects.stream(self.path, self._etag, offset, end):
            memory[at : at + len(part)] = memoryview(part)
            at += len(part)

    def close(self) -> None:
        """Does nothing: the store knows nothing of it."""


class ObjectStorage:
    """The seam, for paths that stand for URLs: as far as a path goes. Of what is open it has an
    ObjectFile or an Upload.
    """

    def __init__(self) -> None:
        self._clocks_s: dict[tuple[str, str], float] = {}  # by how much ours is ahead, by bucket

    # Objects that are written and read.

    def upload(self, path: str, nbytes: int, *, ends_with_file: bool = False) -> Upload:
        """Begins an object of so many bytes, which takes the place of whatever there was."""
        _key(path)
        put = partial(self._put, "write", path)
        return Upload(put, nbytes, path, ends_with_file=ends_with_file)

    def opened(self, path: str) -> ObjectFile:
        """Opens an object for reading. Raises FileNotFoundError, StorageError."""
        return ObjectFile(self, path, self._head(path))

    def _head(self, path: str) -> Any:
        try:
            found = asked("open", path, client().head, store_of(path), _key(path))
        except StorageError as error:
            if UNTOLD not in error.detail:
                raise
            found = self._get(path).meta
        return _of_a_store("open", path, found)

    def put(self, path: str, content: bytes) -> Any:
        """Puts a small object, whatever there was; returns what the store says of it."""
        return self._put("write", path, content)

    def put_new(self, path: str, content: bytes) -> Any:
        """Puts a small object on the condition that there is none; returns what the store says of
        it. Raises FileExistsError: there is one, by another put.
        """
        self._probe(path)
        return self._put("create", path, content, mode="create")

    def put_over(self, path: str, content: bytes, found: Any) -> Any:
        """Puts a small object in the place of the very version that `found` names; returns what the
        store says of it. Raises OSError (ESTALE, ENOENT or EEXIST): another put has changed it.
        """
        return self._put("write", path, content, mode=_version(found))

    def get(self, path: str, nbytes_max: int) -> tuple[bytes, Any]:
        """Returns a small object, b"" if it is larger, and what the store says of it. Raises
        FileNotFoundError.
        """
        found = self._get(path)
        is_small = found.meta["size"] <= nbytes_max
        return bytes(asked("read", path, found.bytes)) if is_small else b"", found.meta

    def _put(self, op: str, path: str, content: Any, **how: Any) -> Any:
        """Puts an object, and returns what the store says of it. A missing bucket is an error of
        its own, since a missing file is none.
        """
        store = store_of(path, how.get("chunk_size", 0))
        if "max_concurrency" not in how:
            how["use_multipart"] = False
        mark = {_MARK: secrets.token_hex(8)}
        # Parts are there for one try: another one would complete an object without them.
        for is_last in (False, False, True) if isinstance(content, bytes) else (True,):
            try:
                put = client().put
                return asked(op, path, put, store, _key(path), content, attributes=mark, **how)
            except OSError as error:
                if error.errno not in _UNSURE:
                    raise
                with suppress(FileNotFoundError):  # none is there
                    there = self._get(path, head=True)
                    if there.attributes.get(_MARK) == mark[_MARK]:
                        return there.meta
                    raise
                if error.errno == errno.ENOENT:
                    detail = f"there is no bucket {divided(path)[1]!r}, or the upload was aborted"
                    raise StorageError(op, path, errno.ENOENT, detail=detail) from None
                if is_last or error.errno != errno.EEXIST:  # a conflict with what was not made
                    raise
        raise AssertionError

    @staticmethod
    def _get(path: str, **options: Any) -> Any:
        got = asked("read", path, client().get, store_of(path), _key(path), options=options)
        _of_a_store("read", path, got.meta)
        return got

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        found = self._get(path)
        if found.meta["size"] <= nbytes_max:
            return bytes(asked("read", path, found.bytes))
        return self._range(path, None, 0, nbytes_max)

    def _range(self, path: str, etag: str | None, begin: int, end: int) -> bytes:
        return b"".join(map(bytes, self.stream(path, etag, begin, end)))

    def stream(self, path: str, etag: str | None, begin: int, end: int) -> Any:
        """Returns an iterator of the bytes of a range, of the version that was opened."""
        options = {"range": (begin, end), **({"if_match": etag} if etag else {})}
        return self._get(path, **options).stream(min_chunk_size=_STREAM_BYTES)

    def remove(self, path: str) -> None:
        asked("remove", path, client().delete, store_of(path), _key(path))

    def _drop(self, path: str) -> None:
        """Removes what nobody needs any more, but for exit nobody waits; what stays is debris."""

        def drop() -> None:
            with suppress(OSError):  # as said
                self.remove(path)

        try:
            threading.Thread(target=drop, name=DROPPING).start()
        except RuntimeError:  # no thread can be started
            drop()

    def remove_all(self, directory: str, names: Sequence[str]) -> None:
        keys = [_key(os.path.join(directory, name)) for name in names]
        asked("remove", directory, client().delete, store_of(directory), keys)

    # Names.

    def status(self, path: str, *, link: bool = False) -> os.stat_result | None:
        key = _key(path)
        if not key:
            return _DIRECTORY
        with suppress(FileNotFoundError):  # it may be a directory
            found = self._head(path)
            digest = hashlib.blake2b(str(found["e_tag"]).encode(), digest_size=7).digest()
            mode, number = stat.S_IFREG | 0o644, int.from_bytes(digest, "big")
            return _result(mode, number, found["size"], self.made_at(path, found))
        return _DIRECTORY if self._page(path, None)[0] else None

    def made_at(self, path: str, found: Any) -> float:
        """Returns when an object was made, by our clock if the store's is known."""
        return float(found["last_modified"].timestamp()) + self._clocks_s.get(
            divided(path)[:2], 0.0
        )

    def _listed(self, path: str) -> tuple[dict[str, Any], list[str]]:
        """Returns the objects in a directory, by name, and the names of the directories there."""
        key = _key(path)
        store = store_of(path)
        try:
            found = _listing(path, client().list_with_delimiter, store, key or None)
        except StorageError as error:
            if error.errno != errno.EILSEQ:
                raise
            found = object_botocore.listed(path, error)
        cut = len(key) + 1 if key else 0
        below = dict.fromkeys(each[cut:].rstrip("/") for each in found["common_prefixes"])
        objects = {each["path"][cut:]: each for each in found["objects"]}
        if not objects and not below:
            self._confirm_nothing(path)
        # Consoles mark a folder by an object of no bytes, whose name ends with a slash.
        objects = {name: its for name, its in objects.items() if name and name not in below}
        return objects, [*below]

    def _confirm_nothing(self, path: str) -> None:
        """Makes sure that it is a store which has listed nothing: a page of HTML reads as an empty
        listing, too. Raises StorageError.
        """
        with suppress(FileNotFoundError):  # as a store says
            self._head(os.path.join(path, _ABSENT))

    def _page(self, path: str, after: str | None) -> tuple[list[Any], str | None]:
        """Returns a page of the objects below a path, and the last key, if there may be more."""
        key = _key(path) or None
        pages = client().list(store_of(path), key, offset=after, chunk_size=_PAGE)
        try:
            page = _listing(path, next, iter(pages), [])
        except StorageError as error:
            if error.errno != errno.EILSEQ:
                raise
            return object_botocore.page(path, after, error)
        return page, page[-1]["path"] if len(page) == _PAGE else None

    def names(self, directory: str, *, directories: bool = False) -> list[str]:
        """As Storage's."""
        if directories:
            return [*self.below(directory)]
        objects, below = self._listed(directory)
        if not objects and not below:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        return [*objects, *below]

    def below(self, path: str, file: str = "") -> dict[str, dict[str, Any] | None]:
        """Returns the directories that hold objects, with what the store says of the object `file`
        in each, None if there is none. A listing by prefixes would not do: it tells nothing of what
        is in them, and SeaweedFS tells of empty ones, too.
        """
        key, found = _key(path), dict[str, dict[str, Any] | None]()
        cut = len(key) + 1 if key else 0
        after: str | None = None
        while True:
            page, last = self._page(path, after)
            if not page and last is None and after is None:
                self._confirm_nothing(path)
            for each in page:
                name, slash, rest = each["path"][cut:].partition("/")
                if slash and (found.setdefault(name) is None) and rest == file:
                    found[name] = each
            if last is None:
                return found
            name, slash, rest = last[cut:].partition("/")
            # The rest of a directory is passed over; "0" follows "/".
            after = last[:cut] + name + "0" if slash and rest >= file else last

    def _probe(self, path: str) -> None:
        if divided(path)[:2] not in self._clocks_s:
            self.probe(path)

    def probe(self, path: str) -> None:
        """Finds out that a store heeds conditions, and how late it is there, which is done once for
        each bucket before the first conditional put. Raises StorageError.
        """
        nonce = os.path.join(os.path.dirname(path), ".probe" + Owner.this().suffix())
        try:
            self._put("create", nonce, b"", mode="create")
            with suppress(FileExistsError):  # as it should be
                self._put("create", nonce, b"", mode="create")
                detail = (
                    "this store ignores conditions (If-None-Match): two writers of the same name "
                    "both succeed, so no checkpoint is safe there"
                )
                raise StorageError("probe", os.path.dirname(path), errno.EOPNOTSUPP, detail=detail)
            made = self._head(nonce)["last_modified"].timestamp()
            self._clocks_s[divided(path)[:2]] = time.time() - made
        finally:
            self._drop(nonce)

    def append(self, path: str, line: bytes) -> None:
        """Puts a line as an object of its own, whose name sorts behind those of earlier ones."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        self.put(os.path.join(path, name), line)


calls.note(ObjectStorage, ObjectStorage)


class PathStorage(Storage):
    """The seam for every path, of a file system or of an object store."""

    def __init__(self) -> None:
        self.objects = ObjectStorage()


def objects_of(storage: Storage) -> ObjectStorage:
    """Returns the storage of objects, of a seam that serves URLs, too."""
    assert isinstance(storage, PathStorage)
    return storage.objects


def _either(name: str) -> Callable[..., Any]:
    theirs = getattr(ObjectStorage, name, None)

    def call(self: PathStorage, subject: str | int, *args: Any, **options: Any) -> Any:
        if isinstance(subject, int) or not is_mounted(subject):
            return getattr(Storage, name)(self, subject, *args, **options)
        if theirs is not None:
            return theirs(self.objects, subject, *args, **options)
        if name in _ANSWERS:
            return _ANSWERS[name]
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), subject)

    return call


for _name, _method in [*vars(Storage).items()]:
    if callable(_method) and not _name.startswith("_"):
        setattr(PathStorage, _name, _either(_name))


def _key(path: str) -> str:
    """Returns the key of a path. Raises OSError (ENAMETOOLONG) if no store can have it."""
    key = divided(path)[2]
    if (nbytes := len(os.fsencode(key))) > _KEY_BYTES_MAX:
        detail = (
            f"its key has {nbytes} bytes, but stores accept at most {_KEY_BYTES_MAX}: choose a "
            "shorter URL"
        )
        raise StorageError("open", path, errno.ENAMETOOLONG, detail=detail)
    return key


def _of_a_store(op: str, path: str, found: Any) -> Any:
    """Returns what was said of an object, if it has an ETag, as every store's has.

    Raises StorageError: it is something else that answers, such as a console, or a portal.
    """
    if found.get("e_tag"):
        return found
    detail = (
        "the server is not an object store, since it returns no ETag: check the endpoint (its port "
        "may be that of a web console), and whether a proxy or a login portal answers instead"
    )
    raise StorageError(op, path, errno.EPROTO, detail=detail)


def _listing(path: str, call: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a call that lists objects. Raises StorageError, also if there is no
    bucket (ENOENT), or if a key is no path for the client (EILSEQ).
    """
    try:
        return asked("list", path, call, *args)
    except FileNotFoundError:
        detail = f"there is no bucket {divided(path)[1]!r}"
        raise StorageError("list", path, errno.ENOENT, detail=detail) from None


def _version(found: Any) -> dict[str, str]:
    return {key: found[key] for key in ("e_tag", "version") if found.get(key)}


def _result(mode: int, number: int, nbytes: int, when: float) -> os.stat_result:
    times = {"st_atime_ns": int(when * 1e9), "st_mtime_ns": int(when * 1e9), "st_mtime": when}
    return os.stat_result((mode, number, 0, 1, 0, 0, nbytes, when, when, when), times)


_DIRECTORY = _result(stat.S_IFDIR | 0o755, 0, 0, 0.0)
