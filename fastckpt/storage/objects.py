"""ObjectStorage: objects, addressed by paths that stand for URLs; and PathStorage, the storage for
all paths.

ObjectStorage has those methods of Storage that only need a path. Its other methods open objects for
reading, begin uploads that become visible on completion, and put objects conditionally. The
condition is either that there is no object, or that it still has the version that was read.
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
from fastckpt.storage.object_urls import UNTOLD, client, request, store_of
from fastckpt.storage.owners import Owner

_STREAM_BYTES = 1 << 20  # the client's buffer for one read
_ABSENT = ".absent"  # the name of no object
_PAGE = 1000  # objects of a listing, as S3 has it
_KEY_BYTES_MAX = 1024  # as S3, Google and Azure have it
_ANY = 1 << 62
DROPPING = "fastckpt-drop"  # the name of a thread
_MARK = "fastckpt"  # metadata of an object: identifies the put that made it
# If the answer to a put is lost, the client repeats the request, and the answer is that the object
# exists or that there is no such upload. ETIMEDOUT itself says that the put may have succeeded.
_UNSURE = (errno.EEXIST, errno.ESTALE, errno.ENOENT, errno.EIO)
WHY = "objects: sent in parts"  # the reason for the route of an object
# The results of other methods of the seam.
_ANSWERS = {"sync_directory": None, "look_again": False, "free_bytes": _ANY}


class ObjectFile:
    """An InputFile for an object, in its version at the time of opening.

    Args:
        objects, path: the storage and the path.
        meta: the store's metadata of the object.
    """

    def __init__(self, objects: ObjectStorage, path: str, meta: Any) -> None:
        self.path, self.fd = path, next(numbers)
        self._objects, self._etag, self._nbytes = objects, meta["e_tag"], int(meta["size"])

    def nbytes(self) -> int:
        return self._nbytes

    def read_at(self, nbytes: int, offset: int) -> bytes:
        memory = bytearray(max(0, min(nbytes, self._nbytes - offset)))
        self.transfer("read", self.fd, memoryview(memory), offset)
        return bytes(memory)

    def transfer(self, _kind: str, _fd: int, memory: memoryview, offset: int) -> int:
        """Fills memory; returns the number of bytes read. The engine calls this on its threads."""
        nbytes = max(0, min(len(memory), self._nbytes - offset))
        if nbytes:
            request("read", self.path, self._fill, memory[:nbytes], offset)
        return nbytes

    def _fill(self, memory: memoryview, offset: int) -> None:
        at, end = 0, offset + len(memory)
        for part in self._objects.stream(self.path, self._etag, offset, end):
            memory[at : at + len(part)] = memoryview(part)
            at += len(part)

    def close(self) -> None:
        """Does nothing, because the store keeps no open files."""


class ObjectStorage:
    """The methods of Storage that only need a path, for paths that stand for URLs. Open objects are
    ObjectFiles and Uploads.
    """

    def __init__(self) -> None:
        self._clocks_s: dict[tuple[str, str], float] = {}  # how far our clock is ahead, by bucket

    # Objects that are written and read.

    def upload(self, path: str, nbytes: int, *, ends_with_file: bool = False) -> Upload:
        """Begins the upload of an object of nbytes bytes, which replaces any object at the path."""
        _key(path)
        put = partial(self._put, "write", path)
        return Upload(put, nbytes, path, ends_with_file=ends_with_file)

    def opened(self, path: str) -> ObjectFile:
        """Opens an object for reading. Raises FileNotFoundError, StorageError."""
        return ObjectFile(self, path, self._head(path))

    def _head(self, path: str) -> Any:
        try:
            meta = request("open", path, client().head, store_of(path), _key(path))
        except StorageError as error:
            if UNTOLD not in error.detail:
                raise
            meta = self._get(path).meta
        return _of_a_store("open", path, meta)

    def put(self, path: str, content: bytes) -> Any:
        """Puts a small object, which replaces any existing one; returns its metadata."""
        return self._put("write", path, content)

    def put_new(self, path: str, content: bytes) -> Any:
        """Puts a small object if there is none; returns its metadata. Raises FileExistsError if
        another put has created one.
        """
        self._probe(path)
        return self._put("create", path, content, mode="create")

    def put_over(self, path: str, content: bytes, meta: Any) -> Any:
        """Puts a small object if the existing one still has exactly this metadata's version;
        returns the new metadata. Raises OSError (ESTALE, ENOENT or EEXIST) if another put has
        changed it.
        """
        return self._put("write", path, content, mode=_version(meta))

    def get(self, path: str, nbytes_max: int) -> tuple[bytes, Any]:
        """Returns the content and the metadata of a small object. The content is b"" if the object
        is larger. Raises FileNotFoundError.
        """
        result = self._get(path)
        is_small = result.meta["size"] <= nbytes_max
        return bytes(request("read", path, result.bytes)) if is_small else b"", result.meta

    def _put(self, op: str, path: str, content: Any, **how: Any) -> Any:
        """Puts an object, and returns its metadata. For a missing bucket, raises StorageError, not
        FileNotFoundError.
        """
        store = store_of(path, how.get("chunk_size", 0))
        if "max_concurrency" not in how:
            how["use_multipart"] = False
        mark = {_MARK: secrets.token_hex(8)}
        # Parts can be sent once only: a second attempt would complete an object without them.
        for is_last in (False, False, True) if isinstance(content, bytes) else (True,):
            try:
                put = client().put
                return request(op, path, put, store, _key(path), content, attributes=mark, **how)
            except OSError as error:
                if error.errno not in _UNSURE:
                    raise
                with suppress(FileNotFoundError):  # there is no object
                    there = self._get(path, head=True)
                    if there.attributes.get(_MARK) == mark[_MARK]:
                        return there.meta
                    raise
                if error.errno == errno.ENOENT:
                    detail = f"there is no bucket {divided(path)[1]!r}, or the upload was aborted"
                    raise StorageError(op, path, errno.ENOENT, detail=detail) from None
                if is_last or error.errno != errno.EEXIST:  # a conflict, but there is no object
                    raise
        raise AssertionError

    @staticmethod
    def _get(path: str, **options: Any) -> Any:
        got = request("read", path, client().get, store_of(path), _key(path), options=options)
        _of_a_store("read", path, got.meta)
        return got

    def read_file(self, path: str, nbytes_max: int) -> bytes:
        result = self._get(path)
        if result.meta["size"] <= nbytes_max:
            return bytes(request("read", path, result.bytes))
        return self._range(path, None, 0, nbytes_max)

    def _range(self, path: str, etag: str | None, begin: int, end: int) -> bytes:
        return b"".join(map(bytes, self.stream(path, etag, begin, end)))

    def stream(self, path: str, etag: str | None, begin: int, end: int) -> Any:
        """Returns an iterator over a range of bytes of the object, which must have the version of
        `etag`.
        """
        options = {"range": (begin, end), **({"if_match": etag} if etag else {})}
        return self._get(path, **options).stream(min_chunk_size=_STREAM_BYTES)

    def remove(self, path: str) -> None:
        request("remove", path, client().delete, store_of(path), _key(path))

    def _drop(self, path: str) -> None:
        """Removes an object that is no longer needed. Only the interpreter's exit waits for the
        removal; if it fails, the object stays as debris.
        """

        def drop() -> None:
            with suppress(OSError):  # it stays as debris
                self.remove(path)

        try:
            threading.Thread(target=drop, name=DROPPING).start()
        except RuntimeError:  # no thread can be started
            drop()

    def remove_all(self, directory: str, names: Sequence[str]) -> None:
        keys = [_key(os.path.join(directory, name)) for name in names]
        request("remove", directory, client().delete, store_of(directory), keys)

    # Names.

    def status(self, path: str, *, link: bool = False) -> os.stat_result | None:
        key = _key(path)
        if not key:
            return _DIRECTORY
        with suppress(FileNotFoundError):  # it may be a directory
            meta = self._head(path)
            digest = hashlib.blake2b(str(meta["e_tag"]).encode(), digest_size=7).digest()
            mode, number = stat.S_IFREG | 0o644, int.from_bytes(digest, "big")
            return _result(mode, number, meta["size"], self.made_at(path, meta))
        return _DIRECTORY if self._page(path, None)[0] else None

    def made_at(self, path: str, meta: Any) -> float:
        """Returns when an object was created, by our clock if its offset to the store's clock is
        known.
        """
        return float(meta["last_modified"].timestamp()) + self._clocks_s.get(divided(path)[:2], 0.0)

    def _listed(self, path: str) -> tuple[dict[str, Any], list[str]]:
        """Returns the objects in a directory, by name, and the names of its subdirectories."""
        key = _key(path)
        store = store_of(path)
        try:
            listing = _listing(path, client().list_with_delimiter, store, key or None)
        except StorageError as error:
            if error.errno != errno.EILSEQ:
                raise
            listing = object_botocore.listed(path, error)
        cut = len(key) + 1 if key else 0
        below = dict.fromkeys(each[cut:].rstrip("/") for each in listing["common_prefixes"])
        objects = {each["path"][cut:]: each for each in listing["objects"]}
        if not objects and not below:
            self._confirm_nothing(path)
        # Consoles mark a folder with an empty object whose name ends with a slash.
        objects = {name: meta for name, meta in objects.items() if name and name not in below}
        return objects, [*below]

    def _confirm_nothing(self, path: str) -> None:
        """Checks that an empty listing comes from an object store, because an HTML page is also
        parsed as an empty listing. Raises StorageError.
        """
        with suppress(FileNotFoundError):  # the answer of an object store
            self._head(os.path.join(path, _ABSENT))

    def _page(self, path: str, after: str | None) -> tuple[list[Any], str | None]:
        """Returns one page of the objects below a path, and the page's last key if there may be
        more.
        """
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
        """See Storage.names."""
        if directories:
            return [*self.below(directory)]
        objects, below = self._listed(directory)
        if not objects and not below:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        return [*objects, *below]

    def below(self, path: str, file: str = "") -> dict[str, dict[str, Any] | None]:
        """Returns the directories that hold objects, each with the metadata of the object `file` in
        it, or None if there is no such object. A listing of prefixes is not enough: it does not
        list their objects, and on SeaweedFS it includes empty directories.
        """
        key, directories = _key(path), dict[str, dict[str, Any] | None]()
        cut = len(key) + 1 if key else 0
        after: str | None = None
        while True:
            page, last = self._page(path, after)
            if not page and last is None and after is None:
                self._confirm_nothing(path)
            for each in page:
                name, slash, rest = each["path"][cut:].partition("/")
                if slash and (directories.setdefault(name) is None) and rest == file:
                    directories[name] = each
            if last is None:
                return directories
            name, slash, rest = last[cut:].partition("/")
            # Skip the rest of a directory; "0" follows "/".
            after = last[:cut] + name + "0" if slash and rest >= file else last

    def _probe(self, path: str) -> None:
        if divided(path)[:2] not in self._clocks_s:
            self.probe(path)

    def probe(self, path: str) -> None:
        """Checks that a store supports conditions, and compares its clock with ours. This is done
        once for each bucket, before the first conditional put. Raises StorageError.
        """
        nonce = os.path.join(os.path.dirname(path), ".probe" + Owner.this().suffix())
        try:
            self._put("create", nonce, b"", mode="create")
            with suppress(FileExistsError):  # the correct answer
                self._put("create", nonce, b"", mode="create")
                detail = (
                    "this store ignores conditions (If-None-Match): two writers of the same name "
                    "both succeed, so no checkpoint is safe there"
                )
                raise StorageError("probe", os.path.dirname(path), errno.EOPNOTSUPP, detail=detail)
            store_time_s = self._head(nonce)["last_modified"].timestamp()
            self._clocks_s[divided(path)[:2]] = time.time() - store_time_s
        finally:
            self._drop(nonce)

    def append(self, path: str, line: bytes) -> None:
        """Puts a line as a separate object, whose name sorts after those of earlier lines."""
        name = f"{time.time_ns():020d}-{secrets.token_hex(4)}.json"
        self.put(os.path.join(path, name), line)


calls.note(ObjectStorage, ObjectStorage)


class PathStorage(Storage):
    """The storage for every path, in a file system or an object store."""

    def __init__(self) -> None:
        self.objects = ObjectStorage()


def objects_of(storage: Storage) -> ObjectStorage:
    """Returns the object storage of a Storage that also serves URLs."""
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
    """Returns the key of a path. Raises OSError (ENAMETOOLONG) if the key is too long for any
    store.
    """
    key = divided(path)[2]
    if (nbytes := len(os.fsencode(key))) > _KEY_BYTES_MAX:
        detail = (
            f"its key has {nbytes} bytes, but stores accept at most {_KEY_BYTES_MAX}: choose a "
            "shorter URL"
        )
        raise StorageError("open", path, errno.ENAMETOOLONG, detail=detail)
    return key


def _of_a_store(op: str, path: str, meta: Any) -> Any:
    """Returns the metadata of an object, after checking that it has an ETag, like in every object
    store.

    Raises StorageError if another server answered, such as a web console or a login portal.
    """
    if meta.get("e_tag"):
        return meta
    detail = (
        "the server is not an object store, since it returns no ETag: check the endpoint (its port "
        "may be that of a web console), and whether a proxy or a login portal answers instead"
    )
    raise StorageError(op, path, errno.EPROTO, detail=detail)


def _listing(path: str, call: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a call that lists objects. Raises StorageError, also if there is no
    bucket (ENOENT), or if the client rejects a key as a path (EILSEQ).
    """
    try:
        return request("list", path, call, *args)
    except FileNotFoundError:
        detail = f"there is no bucket {divided(path)[1]!r}"
        raise StorageError("list", path, errno.ENOENT, detail=detail) from None


def _version(meta: Any) -> dict[str, str]:
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key)}


def _result(mode: int, number: int, nbytes: int, when: float) -> os.stat_result:
    times = {"st_atime_ns": int(when * 1e9), "st_mtime_ns": int(when * 1e9), "st_mtime": when}
    return os.stat_result((mode, number, 0, 1, 0, 0, nbytes, when, when, when), times)


_DIRECTORY = _result(stat.S_IFDIR | 0o755, 0, 0, 0.0)
