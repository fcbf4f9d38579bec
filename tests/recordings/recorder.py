"""A storage double that records what it is asked for, and the text that is made of that.

Responsible for recordings that are the same on every machine: it plays a file system of its own
choice, gives names to what is random, and orders what has no order. It must not know what a save
is.

What has no order: blocks are moved by threads of the engine, while the thread of the save does
other things. Of a block that is written it is certain only that it is written after the file was
made and before anything else is done to the file; so all that is written between two operations on
a file follows the earlier one, by offset. Reads run ahead of whoever asked for them: they stand
before the close of the file, by offset. Everything else a rank does on one thread, in the order
that is shown.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fastckpt.storage import policies
from fastckpt.storage.file_system import Refusal
from fastckpt.storage.lustre_layout import Layout, Purpose
from fastckpt.storage.policies import Policy
from tests.kit.doubles import TRANSFERS, Operation, Recorder, path_of

T = TypeVar("T")
OTHER_DEVICE = 1 << 40  # added to the number of the device that a local tier lies on
WAIT_S = 60.0
PLENTY_BYTES = 1 << 50
ANOTHER_LAYOUT = Layout(4, 1 << 20, osts=(1, 2, 3, 5))
# Their results are descriptors, or numbers that mean nothing elsewhere.
_SILENT = {"create", "open", "free_bytes"}
_TEMPORARY = re.compile(r"\.[^./]*-(?P<pid>\d+)-\d+-\d+\.tmp")


class StageStorage(Recorder):
    """A file system as it is wanted for a scene, and a log of what is done to it.

    Args:
        apart: the directory of local tiers, which lie on a device of their own.
        kind: which kind of file system is played (filesystems.POLICIES).
        by_engine: the engine's own backends move the bytes, on the route that the kind of file
            system gives; they are not logged then.
        faults: for the name of an operation, or "name part" with a part of the path, the number of
            the error that its first call meets.
        is_full: the local tier has no room.

    Attributes:
        gate: what saves and drains do in the background waits for it.
    """

    def __init__(
        self,
        apart: str,
        *,
        kind: str = "ext3",
        by_engine: bool = False,
        faults: dict[str, int] | None = None,
        is_full: bool = False,
    ) -> None:
        super().__init__(by_engine=by_engine)
        self.gate = threading.Event()
        self.gate.set()
        self._apart = apart
        self._kind = kind
        self._faults = dict(faults or {})
        self._is_full = is_full
        self.results: dict[int, str] = {}
        self.is_engines: dict[int, bool] = {}
        self._rooms: dict[str, int] = {}  # what was allocated for each file

    def _route(self, operation: Operation, real: Callable[[], T]) -> T:
        if threading.current_thread().name.startswith("fastckpt-save"):
            assert self.gate.wait(WAIT_S), f"nobody let {operation} go on"
        return super()._route(operation, real)

    def perform(self, number: int, operation: Operation, real: Callable[[], T]) -> T:
        by_engine = isinstance(threading.current_thread(), threading._DummyThread)
        self.is_engines[number] = by_engine
        try:
            code = self._faults.pop(self._fault(operation), None)
            if code is not None:
                if operation.name == "close":
                    real()
                raise OSError(code, os.strerror(code))
            result: Any = self._played(operation, real)
        except OSError as error:
            self.results[number] = f"! {errno.errorcode.get(error.errno or 0, repr(error))}"
            raise
        self.results[number] = _result_text(operation, result)
        if operation.name == "allocate":
            self._rooms[operation.path] = operation.args[0]
        return result  # type: ignore[no-any-return]

    def _fault(self, operation: Operation) -> str:
        """Which of the faults this operation meets, if it is one of them. It is the largest file
        whose sync fails: when that of a small one does, chance says what of the others is written.
        """
        largest = max(self._rooms, key=lambda path: self._rooms[path], default=operation.path)
        if operation.name == "sync" and operation.path != largest:
            return ""
        for fault in self._faults:
            name, _, part = fault.partition(" ")
            if operation.name == name and part in operation.path:
                return fault
        return ""

    def _played(self, operation: Operation, real: Callable[[], Any]) -> Any:
        """What the file system that is played makes of an operation."""
        name = operation.name
        if name in ("sync", "sync_directory", "set_direct"):
            return None  # it would take time and change nothing that is recorded
        if name == "policy":
            return self._policy()
        if name == "free_bytes":
            return 0 if self._is_full else PLENTY_BYTES
        result = real()
        if name.startswith("names"):  # in no order; and others' come and go meanwhile
            return sorted(result)
        is_apart = operation.path.startswith(self._apart)
        if isinstance(result, os.stat_result) and is_apart:
            fields = list(result[:10])
            fields[2] += OTHER_DEVICE
            return os.stat_result(fields)
        return result

    def refusal(self, fd: int, number: int) -> Refusal:
        """There is another layout, whatever else is played."""
        if number != errno.ENOSPC:
            return super().refusal(fd, number)
        operation = Operation("refusal", path_of(fd), ("ENOSPC",))
        return self._route(operation, lambda: Refusal("", ANOTHER_LAYOUT))

    def _policy(self) -> tuple[str, Policy]:
        kind = policies.recognised(None, policies.Mount(self._kind, ""))
        return self._kind, policies.POLICIES[kind]


def _result_text(operation: Operation, result: Any) -> str:
    if result is None:
        return "= None" if operation.name.startswith("status") else ""
    if operation.name in TRANSFERS or operation.name.split()[0] in _SILENT:
        return ""
    if isinstance(result, os.stat_result):
        return f"= {result.st_size}" if operation.name == "fstat" else "= there"
    if isinstance(result, bytes):
        return f"= {len(result)} bytes"
    if operation.name == "policy":
        return f"= {result[0]}"
    if isinstance(result, Refusal):
        return "= another layout"
    if isinstance(result, list):
        return f"= {[name for name in result if not _TEMPORARY.search(name)]}"
    return f"= {result}"


class Naming:
    """What random names are called in a recording: the same name always the same.

    Args:
        places: for each directory of the scene what it is called.
    """

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self._temporaries: dict[str, str] = {}

    def text(self, text: str) -> str:
        """The text with names that mean the same everywhere."""
        for path, called in self._places.items():
            text = text.replace(path, called)
        text = re.sub(r"(run-)[0-9a-f]{12}", r"\1<hash>", text)
        text = re.sub(r"(__\d+_)[0-9a-f]{28}([0-9a-f]{12}\.distcp)", r"\1<process>\2", text)
        text = re.sub(r"(step-\d{8}-)[0-9a-f]{12}", r"\1<nonce>", text)
        text = re.sub(r"/proc/\d+/fd/\d+", "/proc/<pid>/fd/<n>", text)
        return _TEMPORARY.sub(self._temporary, text)

    def _temporary(self, match: re.Match[str]) -> str:
        owner = "temporary" if int(match["pid"]) == os.getpid() else "another's"
        number = 1 + sum(owner in called for called in self._temporaries.values())
        return self._temporaries.setdefault(match.group(), f".<{owner} {number}>")


def lines_of(storage: StageStorage, naming: Naming) -> list[str]:
    """A line for each operation, in the order that the module tells of."""
    return [
        naming.text(_line(storage.log[number], storage.results.get(number, "")))
        for number in _ordered(storage)
    ]


def _ordered(storage: StageStorage) -> Iterator[int]:
    """Numbers of the operations, with what the engine moved at its place."""
    log = storage.log
    moved: dict[int, list[int]] = {}  # behind which operation
    for number, operation in enumerate(log):
        if _is_moved(storage, number):
            moved.setdefault(_anchor(storage, number, operation), []).append(number)
    for number in range(-1, len(log)):
        if number >= 0 and not _is_moved(storage, number):
            yield number
        yield from sorted(moved.get(number, []), key=lambda each: (_offset(log[each]), each))


def _is_moved(storage: StageStorage, number: int) -> bool:
    return storage.log[number].name in TRANSFERS or storage.is_engines.get(number, False)


def _anchor(storage: StageStorage, number: int, operation: Operation) -> int:
    """The operation that one of the engine's follows in the recording."""
    log = storage.log
    own = [
        other
        for other, each in enumerate(log)
        if each.path == operation.path and not _is_moved(storage, other)
    ]
    if operation.name in ("read", "read_at"):
        closes = [other for other in own if other > number and log[other].name == "close"]
        return closes[0] - 1 if closes else len(log) - 1
    return max((other for other in own if other < number), default=-1)


def _offset(operation: Operation) -> int:
    where: int = operation.args[0 if operation.name in TRANSFERS else 1]
    return where


def _line(operation: Operation, result: str) -> str:
    name, args = operation.name, operation.args
    if name in TRANSFERS:
        shown = f"{args[1]} bytes at {args[0]}"
    elif name == "write_at":
        shown = f"{memoryview(args[0]).nbytes} bytes at {args[1]}"
    elif name == "read_at":
        shown = f"{args[0]} bytes at {args[1]}"
    else:
        shown = " ".join(filter(None, map(_argument_text, args)))
    if name == "create" and args:
        shown = " ".join([oct(args[0]), *filter(None, map(_argument_text, args[1:]))])
    return "  ".join(filter(None, (f"{name:<15}", operation.path, shown, result)))


def _argument_text(value: Any) -> str:
    if isinstance(value, Purpose):
        defaults = value._field_defaults
        told = {
            name: item for name, item in value._asdict().items() if defaults.get(name, ...) != item
        }
        return "for " + ", ".join(
            f"{name}={'another' if name == 'instead' else item}" for name, item in told.items()
        )
    if isinstance(value, os.stat_result):
        return ""
    return str(value)


def left_behind(root: Path, naming: Naming) -> list[str]:
    """A line for each file below a directory: its size, and the CRC-32 of its content where that is
    the same each time.
    """
    lines = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.name == "manifest.json":  # tells when it was made, and its own digest
            content = re.sub(rb'"(created|sha256)": ?"[^"]*"', b"", content)
            content = re.sub(rb'"sequence": ?\d{13,}', b"", content)  # by the clock
        digest = "" if path.name == ".metadata" else f"  crc32 {zlib.crc32(content):08x}"
        lines.append(naming.text(f"{path}  {len(content)} bytes{digest}"))
    return sorted(lines)


def masked(text: str) -> str:
    """Without the sizes and checksums that another version of torch may change."""
    return re.sub(r"crc32 [0-9a-f]{8}|\b\d{3,}\b", "#", text)


def difference(before: str, now: str, name: str) -> str:
    """A unified diff of two recordings, "" if they are the same."""
    lines = difflib.unified_diff(
        *(text.splitlines(keepends=True) for text in (before, now)),
        f"{name} as recorded",
        f"{name} now",
        n=6,
    )
    return "".join(lines)
