"""URLs of object stores as arguments: their options, and the absolute paths that represent them.

A URL such as s3://bucket/run becomes "/s3:/bucket/run", a path that no file system has, so that
code that joins and divides paths works unchanged; errors.as_url() converts it back to the URL. The
first component is the mount. Each set of options has its own mount: "/s3:0f3a21/bucket/run"
contains a digest of the endpoint, and "/s3:0f3a21-1/..." is, for example, the same endpoint with
other keys.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from fastckpt.arguments.checks import check_path

StorageOptions = Mapping[str, Any]

# pathlib makes one slash of two: Path("s3://bucket/a") is "s3:/bucket/a".
_URL = re.compile(
    r"(?P<scheme>s3|gs|az):/{1,2}(?P<bucket>[^/]+)(?:/(?P<key>.*))?\Z", re.IGNORECASE | re.DOTALL
)
_PREFIXES = ("/s3:", "/gs:", "/az:")

_lock = threading.Lock()
_mounts: dict[str, dict[str, Any]] = {mount: {} for mount in _PREFIXES}  # their options
_timeouts_s: dict[str, float] = {}  # by path: those that are shorter than a client's patience
_PATIENCE_S = 512.0


def path_of(
    name: str,
    value: object,
    storage_options: StorageOptions | None = None,
    timeout_s: float | None = None,
) -> str:
    """Returns the absolute path that stands for a path or URL.

    Args:
        name: the argument's name, for messages.
        value: a path, a URL, or a path that this function returned for a URL.
        storage_options: the options of a URL's client; None: the client's own conventions.
        timeout_s: see timeout_s_of(); None: the earlier value remains.

    Raises:
        TypeError, ValueError: see check_path(); or there are options, but the value is not a URL.
        ImportError: it is a URL, but no client is installed.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if isinstance(text, str) and is_mounted(text):
        mount, bucket, key = divided(text)
        if mount not in _mounts or not bucket or ".." in key.split("/"):
            raise ValueError(
                f"{name} is {text!r}, must be a path, or a URL such as s3://bucket/run"
            )
        return text
    match = _URL.match(text) if isinstance(text, str) else None
    if match is None:
        if storage_options is not None:
            raise ValueError(f"storage_options apply to URLs only, but {name} is {text!r}")
        return check_path(name, value, "a path, or a URL such as s3://bucket/run, gs:// or az://")
    if importlib.util.find_spec("obstore") is None:
        raise ImportError(
            f"{name} is {text!r}, a URL: URLs need Python 3.11 or later and the package obstore "
            "(pip install obstore)"
        )
    options: object = storage_options
    names = options.keys() if isinstance(options, Mapping) else [None] * (options is not None)
    if not all(isinstance(each, str) for each in names):
        raise TypeError(f"storage_options is {options!r}, must be a dict whose keys are strings")
    if "@" in match["bucket"]:
        raise ValueError(f"{name} is a URL with credentials: pass them in storage_options instead")
    parts = [part for part in (match["key"] or "").split("/") if part not in ("", ".")]
    # Some stores take a backslash for a slash, and no client sends control characters.
    if ".." in parts or "\\" in text or any(map(_is_control, text)):
        raise ValueError(f"{name} is {text!r}, must be a URL of an object or of a prefix")
    scheme = match["scheme"].lower()
    mount = f"/{scheme}:" if storage_options is None else _mount(scheme, dict(storage_options))
    path = "/".join((mount, match["bucket"], *parts))
    if timeout_s is not None:
        _timeouts_s.pop(path, None)
        if timeout_s < _PATIENCE_S:
            _timeouts_s[path] = timeout_s
    return path


def _is_control(character: str) -> bool:
    return character < " " or character == "\x7f"


def timeout_s_of(path: str) -> float:
    """Returns how long to wait for an answer about a path: the latest timeout_s for the path or a
    parent of it, or a long default.
    """
    while path and path not in _timeouts_s:
        path = path.rpartition("/")[0]
    return _timeouts_s.get(path, _PATIENCE_S)


def is_mounted(path: str) -> bool:
    """Returns whether a path stands for a URL."""
    return path.startswith(_PREFIXES)


_REFUSED = {
    "staging": ("gds", "is GPUDirect Storage, which writes to files"),
    "backend": ("io_uring", "is for files"),
}


def refuse_for_url(path: object, **asked: object) -> None:
    """Raises ValueError if the path stands for a URL, but an argument's value is for files only."""
    is_url = isinstance(path, str) and is_mounted(path)
    for name, value in asked.items() if is_url else ():
        refused, why = _REFUSED[name]
        if value == refused:
            raise ValueError(
                f"{name}={value!r} {why}, so it cannot be used with a URL of an object store"
            )


def divided(path: str) -> tuple[str, str, str]:
    """Returns the mount, the bucket and the key of a path; "" for a missing part."""
    _none, mount, bucket, key = (path.rstrip("/") + "///").split("/", 3)
    return f"/{mount}", bucket, key.rstrip("/")


def options_of(mount: str) -> dict[str, Any]:
    """Returns a copy of the options of a mount."""
    return dict(_mounts[mount])


def _mount(scheme: str, options: dict[str, Any]) -> str:
    """Returns the mount with these options; creates it if there is none."""
    where = next((str(options[key]) for key in options if "endpoint" in key.lower()), "")
    mount = f"/{scheme}:" + (hashlib.sha256(where.encode()).hexdigest()[:6] if where else "")
    with _lock:
        for number in range(len(_mounts) + 1):
            named = f"{mount}-{number}" if number else mount
            if _mounts.setdefault(named, options) == options:
                return named
    raise AssertionError("one of the numbered names must be free")
