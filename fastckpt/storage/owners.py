"""Owner: the process that created a temporary, as encoded in the temporary's name."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import socket
from typing import NamedTuple

from fastckpt.storage.machine import pid_space, started

_HOST_MAX, _DIGEST_MAX = 40, 8  # characters
_SUFFIX = re.compile(
    r"\.(?P<host>[^.+]*)\+(?P<space>[0-9a-f]+)-(?P<pid>\d+)-(?P<started>\d+)-\d+\.tmp\Z"
)
# For names that may only hold hexadecimal digits: a digest of host and pid namespace, the pid and
# start of the process, and random digits.
TOKEN = "[0-9a-f]{40}"
_TOKEN_PARTS = re.compile(r"([0-9a-f]{12})([0-9a-f]{6})([0-9a-f]{10})[0-9a-f]{12}")
_numbers = itertools.count()


class Owner(NamedTuple):
    """A process, as identified by the name of a temporary.

    Attributes:
        host: its host's name; a digest replaces the end of a long name.
        space: a digest of its pid_space().
        pid, started: its pid in that namespace, and its start time (machine.started).
    """

    host: str
    space: str
    pid: int
    started: int

    @classmethod
    def this(cls) -> Owner:
        """Returns the Owner that represents this process."""
        pid = os.getpid()
        return cls(_host(), _digest(pid_space()), pid, started(pid) or 0)

    def suffix(self) -> str:
        """Returns a new suffix for a name, which identifies this process as the file's creator."""
        return f".{self.host}+{self.space}-{self.pid}-{self.started}-{next(_numbers)}.tmp"

    @property
    def is_of_this_host(self) -> bool:
        """Whether the process runs or ran on a host with the name of this host."""
        return self.host == _host()

    @property
    def is_beside_this(self) -> bool:
        """Whether the process is in the pid namespace of this process."""
        return self.is_of_this_host and self.space == _digest(pid_space())

    @property
    def is_gone(self) -> bool:
        """Whether no process has this pid and start time. Valid only if is_beside_this."""
        return started(self.pid) != self.started


def divided(name: str) -> tuple[str, Owner | None]:
    """Splits a temporary's name; returns the name without its suffix, and the owner in the suffix.
    For any other name, returns (name, None).
    """
    match = _SUFFIX.search(name)
    if match is None:
        return name, None
    owner = Owner(match["host"], match["space"], int(match["pid"]), int(match["started"]))
    return name[: match.start()], owner


def new_token() -> str:
    """Returns a new TOKEN, which identifies this process as an object's creator."""
    pid = os.getpid()
    return f"{_home()}{pid:06x}{started(pid) or 0:010x}{secrets.token_hex(6)}"


def is_token_of_dead(token: str) -> bool | None:
    """Returns whether the process of a TOKEN has ended. None if this is unknown: the process ran on
    another host or in another pid namespace, or the text is not a TOKEN.
    """
    parts = _TOKEN_PARTS.fullmatch(token)
    if parts is None or parts[1] != _home():
        return None
    return started(int(parts[2], 16)) != int(parts[3], 16)


def _home() -> str:
    """Returns a digest of the host and pid namespace, within which a pid and start time are
    unique.
    """
    return _digest(f"{socket.gethostname()} {pid_space()}", 12)


def _host() -> str:
    name = socket.gethostname()
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    if len(plain) <= _HOST_MAX:
        return plain
    return f"{plain[: _HOST_MAX - _DIGEST_MAX - 1]}_{_digest(name)}"


def _digest(text: str, chars: int = _DIGEST_MAX) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:chars]
