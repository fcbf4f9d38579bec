"""Storage doubles: the real file system with one thing wrong with it, behind the seam
`fastckpt.storage.file_system.Storage`, and a model of what a disk still holds after a power cut.

Responsible for counting operations, for injecting faults at one of them and for the images of a
directory that a crash may leave. It must not know in which order a save uses the file system, nor
what a checkpoint contains: those are what the tests are about.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

import fastckpt
from fastckpt import _engine
from fastckpt.engine import staging as staging_module
from fastckpt.engine.staging import QUEUE_DEPTH, Route, Scatterer, Staging
from fastckpt.reading.verified import open_verified
from fastckpt.saving import lease as lease_module
from fastckpt.saving import pipeline as pipeline_module
from fastckpt.saving.handle import InnerHandle
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.file_system import Storage
from fastckpt.storage.input_files import input_file
from tests.kit import storm as storms
from tests.kit.options import gathered
from tests.kit.storm import SUITE_SEED

SECTOR_BYTES = 4096
TRANSFERS = ("write", "read")
# Every method of the seam, so that one added later is recorded and made to fail as well; but for
# the one that only explains a failure, and cannot fail.
METHODS = tuple(
    name
    for name, value in vars(Storage).items()
    if callable(value) and name[0] != "_" and name != "refusal"
)
# What tells the kinds of a method apart: its Operations are called "open write", "names
# directories", "lock shared", and "open fd" for what is open already.
_KINDS = (
    "regular",
    "write",
    "lock",
    "directory",
    "directories",
    "shared",
    "parents",
    "content",
    "link",
)

# A tree, by paths in it: the bytes of a file, None of a directory, and where a symbolic link leads.
Image = dict[str, bytes | Path | None]
T = TypeVar("T")
_swapping = threading.RLock()


def save_through(
    pipeline: Pipeline,
    obj: Any,
    path: str | os.PathLike[str],
    **options: Any,
) -> InnerHandle:
    """fastckpt.save to a path, through this pipeline instead of the process's own."""
    with _swapping:
        kept, pipeline_module._current = pipeline_module._current, pipeline
        try:
            return fastckpt.save(obj, path, **gathered(**options))
        finally:
            pipeline_module._current = kept


def load_through(pipeline: Pipeline, path: str | os.PathLike[str]) -> Any:
    """fastckpt.load of a file that fastckpt wrote, through this pipeline."""
    with closing(input_file(pipeline.storage, os.fspath(path))) as opened:
        file = open_verified(pipeline.staging, opened, True)
        assert file is not None, "fastckpt did not write this file"
        with file:
            return file.read_by(torch.load)


@dataclass(frozen=True)
class Operation:
    """One call at the seam.

    Attributes:
        name: the method of Storage, with the word that tells its kind, as "open write"; "write" and
            "read" for a transfer.
        path: what it was done to; of a descriptor the name its file has at that moment.
        args: the other arguments: (target,) of a rename, (offset, nbytes) of a transfer.
    """

    name: str
    path: str
    args: tuple[Any, ...] = ()


class DoubledStaging(Staging):
    """Staging of which a double of Storage moves the bytes, if it has a `transfer`: a function
    (kind, fd, memory, offset) -> bytes moved, with the kind "read" or "write".
    """

    _WHY = "the storage double transfers the bytes"

    def _transfer(self) -> Callable[[str, int, memoryview, int], int] | None:
        return getattr(self.storage, "transfer", None)

    def route(
        self, fd: int, path: str, requested: str, *, writing: bool, offset: int | None = 0
    ) -> Route:
        transfer = self._transfer()
        if transfer is None:
            return super().route(fd, path, requested, writing=writing, offset=offset)
        double = self._backend("double", 0, lambda: _engine.callback_backend(transfer))
        return Route(double, False, self._WHY, staging_module.PATIENCE_S)

    def scatter_route(self, fd: int, path: str, scatterer: Scatterer, closing: ExitStack) -> Route:
        transfer = self._transfer()
        if transfer is None:
            return super().scatter_route(fd, path, scatterer, closing)
        threads = self._threads("scattered writes", fd, QUEUE_DEPTH)
        sink = _engine.ScatterSink(threads, scatterer.of_engine, None, transfer)
        return Route(sink, False, self._WHY, staging_module.PATIENCE_S)


pipeline_module.Staging = DoubledStaging  # type: ignore[misc]  # that pipelines make


class Recorder(Storage):
    """Does everything as the real file system does, and logs it before it is done.

    Args:
        by_engine: leave the transfers to the engine's real backends, as without a double; they are
            not logged then.
    """

    def __init__(self, *, by_engine: bool = False) -> None:
        self.log: list[Operation] = []
        self._log_lock = threading.Lock()
        self.transfer = None if by_engine else self._transfer

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        """Where a double differs: `real` is what the file system would do as operation `number`."""
        return real()

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        """One transfer by a system call; returns the bytes moved."""
        move = os.pwritev if kind == "write" else os.preadv
        return move(fd, [memory], offset)

    def names_logged(self) -> list[str]:
        return [operation.name for operation in self.log]

    def numbers_of(self, name: str) -> list[int]:
        """At which places of the log an operation stands."""
        return [number for number, operation in enumerate(self.log) if operation.name == name]

    def _transfer(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        operation = Operation(kind, path_of(fd), (offset, len(memory)))
        return self._route(operation, lambda: self.attempt(kind, fd, memory, offset))

    def _route(self, operation: Operation, real: Callable[[], T]) -> T:
        with self._log_lock:
            number = len(self.log)
            self.log.append(operation)
        return self.perform(number, operation, real)


def _subject(name: str, args: tuple[Any, ...]) -> str:
    """The path that a call is about."""
    subject = args[0] if args else ""  # what has no name is made of nothing
    return path_of(subject) if isinstance(subject, int) else subject


def _routed(name: str) -> Callable[..., Any]:
    method = getattr(Storage, name)

    def routed(self: Recorder, *args: Any, **options: Any) -> Any:
        told = (*args[1:], *(option for option, value in options.items() if value is True))
        kinds = [word for word in told if isinstance(word, str) and word in _KINDS]
        if name == "open" and isinstance(args[0], int):
            kinds.insert(0, "fd")
        rest = tuple(arg for arg in args[1:] if not (isinstance(arg, str) and arg in kinds))
        operation = Operation(" ".join([name, *kinds]), _subject(name, args), rest)
        return self._route(operation, lambda: method(self, *args, **options))

    return routed


for _name in METHODS:
    setattr(Recorder, _name, _routed(_name))


class FailAt(Recorder):
    """Operation number `number` (from 0) fails with `code`; with `lasting`, so do all that follow.

    A close that fails has closed the descriptor, as on Linux. A lock never fails: Storage takes a
    refusal for a file system without locks, and so does this.
    """

    def __init__(
        self, number: int, code: int, *, lasting: bool = False, by_engine: bool = False
    ) -> None:
        super().__init__(by_engine=by_engine)
        self._number = number
        self._code = code
        self._lasting = lasting

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if number != self._number and not (self._lasting and number > self._number):
            return real()
        if operation.name in ("close", "lock"):
            result = real()
            if operation.name == "lock":
                return result
        raise OSError(self._code, os.strerror(self._code))


class FailOnce(Recorder):
    """The first operation that is like a given one fails with `code`: of the same name, and with
    the same offset and size, whatever its place among the others.
    """

    def __init__(self, operation: Operation, code: int) -> None:
        super().__init__()
        self._like, self._code, self._is_left = operation, code, True

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == self._like.name and operation.args[-2:] == self._like.args[-2:]:
            with self._log_lock:
                is_first, self._is_left = self._is_left, False
            if is_first:
                raise OSError(self._code, os.strerror(self._code))
        return real()


class FailAlways(Recorder):
    """Every operation of one name fails with `code`; a close closes all the same."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__()
        self._name = name
        self._code = code

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name != self._name:
            return real()
        if operation.name == "close":
            real()
        raise OSError(self._code, os.strerror(self._code))


class Shorten(Recorder):
    """Transfers move fewer bytes than they were asked to.

    Args:
        portion: (bytes asked for, number of the attempt from 0) -> bytes to move.
    """

    def __init__(self, portion: Callable[[int, int], int]) -> None:
        super().__init__()
        self._portion = portion
        self.attempts = 0

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        nbytes = self._portion(len(memory), self.attempts)
        self.attempts += 1
        return super().attempt(kind, fd, memory[:nbytes], offset) if nbytes else 0


class Storm(Shorten):
    """Transfers are interrupted: before each one that goes through, `count` fail with `code`.

    Args:
        count: None for a storm without end.
        portion: as of Shorten; everything by default.
    """

    def __init__(
        self,
        code: int,
        count: int | None,
        portion: Callable[[int, int], int] = lambda nbytes, _attempt: nbytes,
    ) -> None:
        super().__init__(portion)
        self._code = code
        self._count = count
        self._left = count

    def attempt(self, kind: str, fd: int, memory: memoryview, offset: int) -> int:
        if self._left is None or self._left > 0:
            self._left = None if self._left is None else self._left - 1
            raise OSError(self._code, os.strerror(self._code))
        self._left = self._count
        return super().attempt(kind, fd, memory, offset)


class Delay(Recorder):
    """Operations of one name wait for an event, one of theirs each, before they are done.

    Args:
        name: of the operations.
        gates: what the first, second, ... of them waits for; those beyond do not wait.
    """

    WAIT_S = 60.0

    def __init__(self, name: str, *gates: threading.Event) -> None:
        super().__init__()
        self._name = name
        self._gates = list(gates)
        self.reached = threading.Event()

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if operation.name == self._name and self._gates:
            gate = self._gates.pop(0)
            self.reached.set()
            assert gate.wait(self.WAIT_S), f"nobody let {operation} go on"
        return real()


@contextmanager
def process_on(storage: Storage | None, budget_bytes: int | None = None) -> Iterator[Pipeline]:
    """The process's pipeline is one on this storage meanwhile, and ends with the block."""
    before, pipeline_module._current = pipeline_module._current, Pipeline(storage, budget_bytes)
    mine, others = pipeline_module._current, set(threading.enumerate())
    try:
        yield mine
    finally:
        pipeline_module._current = before
        mine.close()
        _wait_for(others, lambda thread: thread.name != lease_module.BEATING)
        end_leases(mine.storage)
        if isinstance(storage, Crash):
            _wait_for(others, lambda thread: True)


def end_leases(storage: Storage) -> None:
    """Ends what this process has of leases on a storage that saves to directories took, as its exit
    does; the process of a machine that is gone neither renews nor releases any.
    """
    registered = lease_module._of_directories
    for lease in [each for each in registered.values() if each.records.storage is storage]:
        del registered[os.path.dirname(lease.path)]
        if not isinstance(storage, Crash):
            lease.records.storage = Storage()
            lease.release()
    for lease in [*lease_module._leases]:
        if lease.records.storage is storage and isinstance(storage, Crash):
            lease._let_go()


def _wait_for(others: set[threading.Thread], which: Callable[[threading.Thread], bool]) -> None:
    """Joins the threads that are not among others."""
    while left := [*filter(which, set(threading.enumerate()) - others)]:
        for thread in left:
            if thread.is_alive():  # else it is being started just now
                thread.join(60.0)
                assert not thread.is_alive(), thread.name


@contextmanager
def file_size_limit(nbytes: int | None) -> Iterator[None]:
    """No file of this process may have more bytes meanwhile: the disk is full, as it were. None:
    any size, but a limit that the body sets ends with it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Deadly(Recorder):
    """The process is killed before the first operation that is due.

    The engine's transfers are not counted.
    """

    def __init__(self, is_due: Callable[[int, Operation], bool] = lambda *_: False) -> None:
        super().__init__(by_engine=True)
        self.is_due = is_due

    @classmethod
    def at(cls, name: str, part: str = "") -> Deadly:
        """Operations of this name are due, on a path that has this part."""
        return cls(lambda _, operation: operation.name == name and part in operation.path)

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        if self.is_due(number, operation):
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        return real()


class PowerCut(BaseException):
    """Raised by every operation after the crash. No `except Exception` can make it go on."""


class Crash(Recorder):
    """The first `count` operations happen, then the machine is gone.

    What comes later raises PowerCut and changes nothing; only descriptors are closed, as the death
    of a process does. images() then tells what the disk may hold.

    Args:
        directory: the one whose tree is modelled; what is in it now is durable.
        count: how many operations happen.
    """

    def __init__(self, directory: Path, count: int, *, by_engine: bool = False) -> None:
        super().__init__(by_engine=by_engine)
        self._count = count
        self._disk = Disk(directory)
        self._order = threading.RLock()  # an operation may be made of others

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        with self._order:
            if number < self._count:
                result = real()
                self._disk.note(operation)
                return result
            self._disk.end()
        if operation.name == "close":
            return real()
        if operation.name in TRANSFERS:  # the engine knows no exception but an error number
            raise OSError(errno.EIO, "the machine is gone")
        raise PowerCut

    def images(self, seed: int, mixtures: int = 2) -> Iterator[tuple[str, Image]]:
        """Label and content of each tree that the disk may hold now; so many are left to chance."""
        yield from self._disk.images(random.Random(seed), mixtures)


class LostStore:
    """A rank's client of a c10d store, which is lost after `count` operations: whatever it is asked
    next raises what a client of torch raises whose server is gone, and so does all that follows.

    Args:
        store: does the operations.
        count: how many; looks for keys are not counted, since their number is left to chance.
        is_heard: whether the last of them is answered. If not, it is done, and raises.
    """

    def __init__(self, store: Any, count: int, is_heard: bool = True) -> None:
        self._store, self._count, self._is_heard = store, count, is_heard
        self.log: list[tuple[str, Any]] = []

    @property
    def is_lost(self) -> bool:
        """Whether no further operation will be done."""
        return len(self.log) >= self._count

    def clone(self) -> LostStore:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._store, name)

        def called(*args: Any) -> Any:
            if self.is_lost:
                raise dist.DistNetworkError("failed to recv, got 0 bytes")
            if name == "check":
                return operation(*args)
            result = operation(*args)
            self.log.append((name, args[0]))
            if self.is_lost and not self._is_heard:
                raise dist.DistNetworkError("Connection reset by peer")
            return result

        return called


class _File:
    """An inode of a file, whatever names it has: its content as of its last sync."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable


class _Folder:
    """An inode of a directory: its entries now, and as of its last sync."""

    def __init__(self) -> None:
        self.now: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}


# A symbolic link is where it leads to, which it never changes.
_Node = _File | _Folder | Path


class Disk:
    """Which contents and names of a tree are durable.

    A file's content is durable as of its last sync, the names in a directory as of that directory's
    last sync; what is not durable may have reached the disk or not, each name and sector by itself.
    After each operation the real tree is looked at, so changes that go past the seam count, too.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, _Node] = {}  # by the number of the inode
        self._left: dict[_File, bytes] | None = None  # what files held when it ended
        self._look()
        for node, path in self._walk(self._top, directory):
            if isinstance(node, _File):
                node.durable = path.read_bytes()
            elif isinstance(node, _Folder):
                node.durable = dict(node.now)

    def _look(self) -> None:
        """Notes which names there are now."""
        found: dict[int, _Node] = {}
        self._top = self._folder(self._directory, self._directory.stat().st_ino, found)
        for inode, node in self._known.items():
            if isinstance(node, _Folder) and inode not in found:
                node.now = {}
        self._known = found

    def _folder(self, path: str | Path, inode: int, found: dict[int, _Node]) -> _Folder:
        node = self._known.get(inode)
        found[inode] = node = node if isinstance(node, _Folder) else _Folder()
        with os.scandir(path) as entries:
            node.now = {entry.name: self._entry(entry, found) for entry in entries}
        return node

    def _entry(self, entry: os.DirEntry[str], found: dict[int, _Node]) -> _Node:
        inode = entry.inode()
        if entry.is_dir(follow_symlinks=False):
            return self._folder(entry.path, inode, found)
        node = found.get(inode) or self._known.get(inode)
        if entry.is_symlink():
            node = node if isinstance(node, Path) else Path(os.readlink(entry.path))
        elif not isinstance(node, _File):
            node = _File()
        found[inode] = node
        return node

    def _walk(self, node: _Node, path: Path) -> Iterator[tuple[_Node, Path]]:
        yield node, path
        if isinstance(node, _Folder):
            for name, inner in node.now.items():
                yield from self._walk(inner, path / name)

    def note(self, operation: Operation) -> None:
        """Follows one operation that was done."""
        self._look()
        path = Path(operation.path)
        if operation.name not in ("sync", "sync_directory") or not path.exists():
            return
        if not path.is_relative_to(self._directory):
            return
        node = self._known[path.stat().st_ino]
        if isinstance(node, _File):
            node.durable = path.read_bytes()
        elif isinstance(node, _Folder):
            node.durable = dict(node.now)

    def end(self) -> None:
        """The machine is gone: what is changed from now on counts for nothing."""
        if self._left is None:
            self._look()
            files = self._walk(self._top, self._directory)
            self._left = {node: path.read_bytes() for node, path in files if type(node) is _File}

    def images(self, rng: random.Random, mixtures: int) -> Iterator[tuple[str, Image]]:
        """Label and content of each tree that there may be after the crash."""
        self.end()
        left = self._left or {}

        def now(folder: _Folder) -> dict[str, _Node]:
            return folder.now

        def durable(folder: _Folder) -> dict[str, _Node]:
            return folder.durable

        def mixed(folder: _Folder) -> dict[str, _Node]:
            entries = {}
            for name in sorted(folder.durable.keys() | folder.now.keys()):
                source = folder.now if rng.getrandbits(1) else folder.durable
                if name in source:
                    entries[name] = source[name]
            return entries

        def synced(file: _File) -> bytes:
            return file.durable

        def live(file: _File) -> bytes:
            return left.get(file, file.durable)  # nobody can tell of one that has lost its name

        yield "nothing unsynced", self._image(durable, synced)
        yield "names, data cut off", self._image(now, synced)
        zero = self._image(now, lambda file: _padded(file.durable, len(live(file))))
        yield "names and sizes, data zero", zero
        yield "everything", self._image(now, live)
        yield "data, no names", self._image(durable, live)
        for number in range(mixtures):
            image = self._image(mixed, lambda file: _mixed(file.durable, live(file), rng))
            yield f"mixture {number}", image

    def _image(
        self,
        names: Callable[[_Folder], dict[str, _Node]],
        content: Callable[[_File], bytes],
    ) -> Image:
        image: Image = {}

        def walk(folder: _Folder, inside: str) -> None:
            for name, node in sorted(names(folder).items()):
                if isinstance(node, _Folder):
                    image[inside + name] = None
                    walk(node, f"{inside}{name}/")
                else:
                    image[inside + name] = content(node) if isinstance(node, _File) else node

        walk(self._top, "")
        return image


def _padded(content: bytes, nbytes: int) -> bytes:
    return content[:nbytes].ljust(nbytes, b"\0")


def _mixed(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """`new`, about half of whose sectors still hold what was there before."""
    if old == new:
        return new
    old = _padded(old, len(new))
    sectors = []
    for begin in range(0, len(new), SECTOR_BYTES):
        source = new if rng.getrandbits(1) else old
        sectors.append(source[begin : begin + SECTOR_BYTES])
    return b"".join(sectors)


def path_of(fd: int) -> str:
    """The name that an open file has now."""
    return os.readlink(f"/proc/self/fd/{fd}")


def dead_pid() -> int:
    """The number of a process that has just ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
        return process.pid


def visible(image: Image) -> Image:
    """The part of a tree that readers of checkpoints look at: what has no hidden name."""
    return {name: each for name, each in image.items() if f"/{name}".find("/.") < 0}


def plant(image: Image, directory: Path, owner: int) -> None:
    """Writes an image into a directory; temporaries of this process become those of `owner`.

    For the process that wrote them did not survive the crash, while the one that tests does.
    """
    for name, content in image.items():
        path = directory / name.replace(f"-{os.getpid()}-", f"-{owner}-")
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


class Cut(NamedTuple):
    """What the disk may hold after a cut of the power.

    Attributes:
        found: what was found there.
        told: whether somebody was told before that the save has committed.
        count: how many operations had happened.
        text: the same in words, for messages.
    """

    found: Any
    told: bool
    count: int
    text: str


CUTS = 10  # of the power in `make test`, beside those next to a new name


def power_cuts(
    before: Path,
    save: Callable[[Crash, Path], bool],
    find: Callable[[Path], Any],
    mixtures: int = 8,
    storm: storms.Storm | None = None,
) -> Iterator[Cut]:
    """Yields what may be found when the power is cut at each operation of a save in turn.

    Args:
        before: the directory as it was before; copies of it are made beside it.
        save: saves to a copy on a storage, and returns whether it was told of a commit. It may
            raise PowerCut.
        find: returns what is in a directory that readers see, which has to be whole.
        mixtures: as Crash.images()'s.
        storm: chooses operations for `make test`; None: it takes all.
    """
    live, after = before.with_name("live"), before.with_name("after")
    seen: dict[int, Any] = {}
    print(f"seed {SUITE_SEED}")
    counts: Iterable[int] = itertools.count()
    if storm is not None:
        shutil.copytree(before, live, symlinks=True)
        storage = Crash(live, sys.maxsize)
        save(storage, live)
        shutil.rmtree(live)
        counts = storm.moments([operation.name for operation in storage.log], CUTS)
    for count in counts:
        shutil.copytree(before, live, symlinks=True)
        storage, told = Crash(live, count), False
        try:
            told = save(storage, live)
        except PowerCut:
            pass  # what it is for
        for label, image in storage.images(SUITE_SEED + count, mixtures):
            text = f"{count} operations, the last {storage.log[:count][-1:]}; survived: {label}"
            key = hash(tuple(visible(image).items()))
            if key not in seen:
                plant(visible(image), after, os.getpid())
                try:
                    seen[key] = find(after)
                except Exception as error:
                    raise AssertionError(text) from error
                shutil.rmtree(after, ignore_errors=True)
            yield Cut(seen[key], told, count, text)
        shutil.rmtree(live)
        if storm is None and count > len(storage.log):
            return


def assert_old_or_new(cuts: Iterator[Cut], old: Any, new: Any, operations_min: int) -> None:
    """Every cut leaves the one or the other, both occur, and what was told of a commit stays."""
    seen, count = [], 0
    for cut in cuts:
        assert cut.found == new or (cut.found == old and not cut.told), cut.text
        seen += [] if cut.found in seen else [cut.found]
        count = cut.count
    assert old in seen and new in seen and count > operations_min


BUDGET_BYTES = 64 << 20


def through(storage: Storage, budget_bytes: int = BUDGET_BYTES) -> AbstractContextManager[Pipeline]:
    return process_on(storage, budget_bytes)
