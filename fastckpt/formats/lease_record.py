"""The record of which job saves to a root: the content of `lease.json` (docs/format.md).

Responsible for its bytes.
"""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import NamedTuple

from fastckpt.formats.strict_json import NUMBER_END, decode

LEASE_FILE = "lease.json"
VERSION = 1
NBYTES = 1024  # of every record, so that one is replaced by one write
_CHARS_MAX = {"nonce": 32, "host": 64, "space": 128, "job": 128, "began": 64, "renewed": 64}


class LeaseRecord(NamedTuple):
    """The process of a job that saves to a root.

    Attributes:
        nonce: tells this process from every other one.
        host: its host's name.
        space, pid, started: as machine.pid_space() and machine.started() have them.
        job, restarts: the launcher's name for the job, "" if it has none; and how often the
            scheduler has begun the job again.
        began, renewed: when the lease was taken and last renewed, in ISO 8601.
        lasts_s: for how long after that other hosts take it for held.
        is_over: whether the job has given it up.
    """

    nonce: str
    host: str
    space: str
    pid: int
    started: int
    job: str
    restarts: int
    began: str
    renewed: str
    lasts_s: int
    is_over: bool = False

    def to_bytes(self) -> bytes:
        members = {name: str(getattr(self, name))[:most] for name, most in _CHARS_MAX.items()}
        content = {"fastckpt-lease": VERSION, **self._asdict(), **members}
        return json.dumps(content, indent=1).encode().ljust(NBYTES - 1) + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes) -> LeaseRecord | None:
        """Returns a record that was stored, by this version or a newer one; None if it is none."""
        try:
            value = decode(content)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not {"fastckpt-lease", *cls._fields} <= value.keys():
            return None
        value = {name: value[name] for name in cls._fields}
        numbers = [value[name] for name in ("pid", "started", "restarts", "lasts_s")]
        if any(type(number) is not int or not 0 <= number < NUMBER_END for number in numbers):
            return None
        if any(type(value[name]) is not str for name in _CHARS_MAX):
            return None
        return cls(**value) if type(value["is_over"]) is bool else None


def now_text() -> str:
    """Returns the time as a record tells it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
