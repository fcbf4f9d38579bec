"""Owner: the process that made a temporary, as the temporary's name says."""

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
# In names that may hold nothing but hexadecimal digits: a digest of host and pid namespace, pid and
# start of the process, and digits that are new in each name.
TOKEN = "[0-9a-f]{40}"
_TOKEN_PARTS = re.compile(r"([0-9a-f]{12})([0-9a-f]{6})([0-9a-f]{10})[0-9a-f]{12}")
_numbers = itertools.count()


class Owner(NamedTuple):
    """A process, as the name of a temporary tells it.

    Attributes:
        host: its host's name; if that is too long, with a digest in place of the rest.
        space: a digest of its pid_space().
        pid, started: its number there, and when it began (machine.started).
    """

    host: str
    space: str
    pid: int
    started: int

    @classmethod
    def this(cls) -> Owner:
        """Returns this process."""
        pid = os.getpid()
        return cls(_host(), _digest(pid_space()), pid, started(pid) or 0)

    def suffix(self) -> str:
        """Returns a new end of a name, which says that this process has made what has the name."""
        return f".{self.host}+{self.space}-{self.pid}-{self.started}-{next(_numbers)}.tmp"

    @property
    def is_of_this_host(self) -> bool:
        """Whether it runs, or ran, on a host of this name."""
        return self.host == _host()

    @property
    def is_beside_this(self) -> bool:
        """Whether it has its pid in the pid namespace that this process is in."""
        return self.is_of_this_host and self.space == _digest(pid_space())

    @property
    def is_gone(self) -> bool:
        """Whether no process has its pid and start time, if it is beside this one."""
        return started(self.pid) != self.started


def divided(name: str) -> tuple[str, Owner | None]:
    """Returns a temporary's name without what tells its owner, and that; (name, None) for the name
    of anything else.
    """
    match = _SUFFIX.search(name)
    if match is None:
        return name, None
    owner = Owner(match["host"], match["space"], int(match["pid"]), int(match["started"]))
    return name[: match.start()], owner


def new_token() -> str:
    """Returns a new TOKEN, which says that this process has made what has it in its name."""
    pid = os.getpid()
    return f"{_home()}{pid:06x}{started(pid) or 0:010x}{secrets.token_hex(6)}"


def is_token_of_dead(token: str) -> bool | None:
    """Whether the process that a TOKEN tells is gone; None if it is not known: it ran on another
    host or in another pid namespace, or this is no TOKEN.
    """
    parts = _TOKEN_PARTS.fullmatch(token)
    if parts is None or parts[1] != _home():
        return None
    return started(int(parts[2], 16)) != int(parts[3], 16)


def _home() -> str:
    """Returns a digest of what a pid and a start time are unique in."""
    return _digest(f"{socket.gethostname()} {pid_space()}", 12)


def _host() -> str:
    name = socket.gethostname()
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    if len(plain) <= _HOST_MAX:
        return plain
    return f"{plain[: _HOST_MAX - _DIGEST_MAX - 1]}_{_digest(name)}"


def _digest(text: str, chars: int = _DIGEST_MAX) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:chars]
