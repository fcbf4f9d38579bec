"""The log of a root's saves: one line of JSON for each, appended by the first rank.

Responsible for what a line holds, and for reading lines. It must not know how a save is done.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from fastckpt.errors import CorruptCheckpoint
from fastckpt.handle import SaveHandle
from fastckpt.storage import atomic
from fastckpt.storage.file_system import Storage, reported

log = logging.getLogger("fastckpt")

NAME = "saves.jsonl"
_LINE_BYTES_MAX = 64 << 20


def noting(path: str, step: int) -> Callable[[Any], None]:
    """Returns a callback for a SaveHandle, which appends a line about its save to the log.

    A log that cannot be written is warned of, and fails no save.
    """
    began = datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def note(handle: SaveHandle) -> None:
        failure = handle.failure()
        entry: dict[str, Any] = {"step": step, "began": began, **handle.profile()}
        entry["error"] = None if failure is None else f"{type(failure).__name__}: {failure}"
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            with reported("append", path):
                atomic.append(path, line)
        except OSError as error:
            log.warning("step %d is not in the log: %s", step, error)

    return note


def entries(storage: Storage, path: str) -> list[dict[str, Any]]:
    """Returns the entries of a log, or of the log in a directory, in order.

    A line that is cut, because a machine crashed, is left out, with a warning.

    Raises:
        CorruptCheckpoint: a line is no entry. StorageError: it cannot be read.
    """
    if storage.is_directory(path):
        path = os.path.join(path, NAME)
    with reported("read", path):
        content = storage.read_file(path, 1 << 40)
    found: list[dict[str, Any]] = []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            if len(line) > _LINE_BYTES_MAX:
                raise ValueError("it is too long")
            found.append(_entry(json.loads(line)))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                log.warning("%r: line %d is cut: it is left out", path, number)
                continue
            raise CorruptCheckpoint(f"{path!r}: line {number} is no entry: {error}") from None
    return found


def _entry(value: Any) -> dict[str, Any]:
    """Returns a line's value, of which the members that are read are as noting() makes them."""
    kinds: dict[str, Any] = {
        "step": int,
        "began": str,
        "ranks": int,
        "nbytes": int,
        "stall_s": (int, float, type(None)),
        "committed_s": (int, float, type(None)),
        "rate": (int, float, type(None)),
        "error": (str, type(None)),
        "by_rank": dict,
    }
    if type(value) is not dict:
        raise ValueError("it is no object")
    for name, kind in kinds.items():
        if not isinstance(value.get(name), kind) or isinstance(value.get(name), bool):
            raise ValueError(f"it has no {name}")
    columns = value["by_rank"]
    for name in ("captured_s", "staged_s", "opened_s", "written_s", "synced_s"):
        column = columns.get(name)
        if not isinstance(column, list) or len(column) != len(columns["captured_s"]):
            raise ValueError(f"it has no {name} of each rank")
        if not all(each is None or type(each) in (int, float) for each in column):
            raise ValueError(f"{name} has something that is no number")
    slowest = value.get("slowest")
    if slowest is not None and (
        type(slowest) is not dict
        or type(slowest.get("rank")) is not int
        or type(slowest.get("phase")) is not str
        or type(slowest.get("seconds")) not in (int, float)
    ):
        raise ValueError("its slowest rank is malformed")
    return value
