"""The log of a root's saves: the first rank appends one line of JSON for each save.

The module defines the contents of a line, and reads and checks lines.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from typing import Any

from fastckpt.arguments.quantities import shown_size
from fastckpt.arguments.urls import is_mounted
from fastckpt.errors import CorruptCheckpoint, StorageError
from fastckpt.saving.handle import InnerHandle
from fastckpt.storage.file_system import (
    NoRegularFile,
    Storage,
    from_the_path,
    is_directory,
    reported,
)
from fastckpt.storage.input_files import input_file

log = logging.getLogger("fastckpt")

NAME = "saves.jsonl"
_LINE_BYTES_MAX, _BYTES_MAX = 64 << 20, 1 << 30
_OBJECTS_MAX = 1000  # of a log in a bucket, since each takes a request
_MEMBERS = ("step", "began", "ranks", "nbytes", "stall_s", "committed_s", "rate", "error")
_SECONDS_END, _NUMBER_END = 1e9, 1 << 63
_REPORTED_MAX = 10  # lines that are not entries


def noting(storage: Storage, root: str, step: int) -> Callable[[InnerHandle], None]:
    """Returns a function that appends a line about a finished save, given its handle, to the root's
    log.

    If the log cannot be written, the function logs a warning, and the save does not fail.
    """
    path = os.path.join(root, NAME)
    began = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def note(handle: InnerHandle) -> None:
        failure = handle.failure()
        profile = handle.profile()
        total = profile.pop("total_nbytes")
        entry: dict[str, Any] = {"step": step, "began": began, **profile}
        entry["nbytes"] = profile["nbytes"] if total is None else total  # None: it failed early
        entry["error"] = None if failure is None else f"{type(failure).__name__}: {failure}"
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            with reported("append", path):
                storage.append(path, line)
        except OSError as error:
            log.warning("step %d was not added to the log: %s", step, error)

    return note


def entries(storage: Storage, path: str) -> list[dict[str, Any]]:
    """Returns the entries of a log, or of the log in a directory, in order.

    A line that is not an entry, for example after a crash or on a full disk, is skipped with a
    warning. Only the last GiB of a log is read.

    Raises:
        CorruptCheckpoint: no line is an entry, or the log is not a regular file.
        StorageError: the log cannot be read.
    """
    is_url = is_mounted(path)
    with reported("read", path):
        is_root = is_directory(storage, path) and not (is_url and os.path.basename(path) == NAME)
    if is_root:
        path = os.path.join(path, NAME)
    try:
        with reported("read", path):
            read = _last_objects if is_url else _last_lines
            content = from_the_path(partial(read, storage, path))
    except StorageError as error:
        if isinstance(error.__cause__, NoRegularFile):
            raise CorruptCheckpoint(f"{path!r} is not a regular file") from None
        if is_root and error.errno == errno.ENOENT:
            error.reword(f"{error}; no save to this root was logged: pass log=True to Checkpointer")
        raise
    result: list[dict[str, Any]] = []
    wrong, wrong_count = list[str](), 0
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line:
            continue
        try:
            if len(line) > _LINE_BYTES_MAX:
                raise ValueError(f"it must have at most {shown_size(_LINE_BYTES_MAX)}")
            result.append(_entry(json.loads(line, parse_constant=_no_number)))
        except (ValueError, RecursionError) as error:
            wrong_count += 1
            if wrong_count <= _REPORTED_MAX:
                wrong.append(
                    f"line {number} is skipped, because it is not an entry: {str(error)[:100]}"
                )
    if wrong and not result:
        raise CorruptCheckpoint(
            f"{path!r} is not a log of saves: pass the root of a Checkpointer(log=True), or the "
            "path of its log"
        )
    if wrong_count > _REPORTED_MAX:
        wrong.append(
            f"{wrong_count - _REPORTED_MAX} more lines are skipped, because they are not entries"
        )
    for text in wrong:
        log.warning("%r: %s", path, text)
    return result


def _last_lines(storage: Storage, path: str) -> bytes:
    """Returns the complete lines among the last _BYTES_MAX bytes of a file."""
    with closing(input_file(storage, path, "regular")) as file:
        begin = max(0, file.nbytes() - _BYTES_MAX)
        content = file.read_at(_BYTES_MAX, begin)
    if begin == 0:
        return content
    text = "%r is too large: only its last %s are read, and lines are numbered from there"
    log.warning(text, path, shown_size(_BYTES_MAX))
    return content[content.find(b"\n") + 1 :]


def _last_objects(storage: Storage, path: str) -> bytes:
    """Returns the last _OBJECTS_MAX lines of a log in a bucket, where each line is an object."""
    names = sorted(storage.names(path))
    if len(names) > _OBJECTS_MAX:
        log.warning("%r: only the last %d of %d saves are read", path, _OBJECTS_MAX, len(names))
    last = names[-_OBJECTS_MAX:]
    return b"".join(storage.read_file(os.path.join(path, name), _LINE_BYTES_MAX) for name in last)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} must be a finite number")


def _is_clock(value: Any) -> bool:
    """Returns True if the value is None or a number of seconds."""
    return value is None or (type(value) in (int, float) and 0 <= value < _SECONDS_END)


def _check_writes(value: dict[str, Any], ranks: int) -> None:
    """Raises ValueError if the counts and sizes of writes differ from the form that noting()
    writes. Older logs do not have them.
    """
    columns, sizes = value["by_rank"], value.get("write_sizes", [])
    writes = columns.get("writes", [])
    for name in ("memory_waited_s", "paced_s"):
        waited = columns.get(name, [])
        is_column = type(waited) is list and len(waited) in (0, ranks)
        if not is_column or not all(map(_is_clock, waited)):
            raise ValueError(f"the {name} of each rank must be a number of seconds")
    counts = [sizes, *writes] if type(writes) is list else [None]
    for row in counts:
        if type(row) is not list or len(row) != len(sizes):
            raise ValueError("it must have one count of writes for each size")
        if any(type(n) is not int or not 0 <= n < _NUMBER_END for n in row):
            raise ValueError("each count of writes must be a number")
    if len(writes) not in (0, ranks):
        raise ValueError("it must have the writes of every rank")


def _entry(value: Any) -> dict[str, Any]:
    """Returns the value of a line, after a check of the members that are used; raises
    ValueError.
    """
    if type(value) is not dict:
        raise ValueError("it must be a JSON object")
    absent = [name for name in _MEMBERS if name not in value]
    if absent:
        raise ValueError(f"its {absent[0]} is missing")
    for name in ("step", "ranks", "nbytes"):
        if type(value.get(name)) is not int or not 0 <= value[name] < _NUMBER_END:
            raise ValueError(f"its {name} must be a number")
    stored = value.get("stored_nbytes")  # None: an earlier version wrote it, or the save failed
    if stored is not None and not (type(stored) is int and 0 <= stored < _NUMBER_END):
        raise ValueError("its stored_nbytes must be a number")
    for name in ("stall_s", "committed_s", "local_committed_s", "commit_s", "drain_s"):
        if not _is_clock(value.get(name)):
            raise ValueError(f"its {name} must be a number of seconds")
    rate = value.get("rate")
    if rate is not None and not (type(rate) in (int, float) and 0 <= rate < _NUMBER_END):
        raise ValueError("its rate must be a number")
    if type(value.get("began")) is not str or not isinstance(value.get("error"), str | None):
        raise ValueError('its "began" must be a string, and its "error" a string or null')
    columns = value.get("by_rank")
    if type(columns) is not dict or type(columns.get("captured_s")) is not list:
        raise ValueError("the times of its ranks are missing")
    for name in ("captured_s", "staged_s", "opened_s", "written_s", "synced_s"):
        column = columns.get(name)
        if type(column) is not list or len(column) != len(columns["captured_s"]):
            raise ValueError(f"it must have the {name} of every rank")
        if not all(map(_is_clock, column)):
            raise ValueError(f"the {name} of each rank must be a number of seconds")
    _check_writes(value, len(columns["captured_s"]))
    slowest = value.get("slowest")
    if slowest is not None and (
        type(slowest) is not dict
        or type(slowest.get("rank")) is not int
        or type(slowest.get("phase")) is not str
        or slowest.get("seconds") is None
        or not _is_clock(slowest["seconds"])
    ):
        raise ValueError("its slowest must be null, or name a rank, a phase and seconds")
    return value
