"""The clients of object stores, created from the options of URLs, and the conversion of their
errors.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import update_wrapper
from math import frexp
from typing import TYPE_CHECKING, Any, TypeVar

from fastckpt.arguments.environment import client_options, endpoints, is_told, launched_rank
from fastckpt.arguments.urls import divided, options_of, timeout_s_of
from fastckpt.errors import StorageError, as_url
from fastckpt.latch import TimedOut, within
from fastckpt.plan.image import BLOCK_BYTES

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

# The longest duration of a request, for each block in it: enough at 140 KB/s.
_REQUEST_S = 60
# For how long a part, or another request, is repeated while the server fails or does not respond.
_PATIENCE_S, _SHORT_PATIENCE_S = 180, 15
_PAUSE_S, _PAUSE_S_MAX = 0.1, 5.0
_KNOWN_S = 300  # for how long credentials of a profile are used before they are read again
# A request's share of timeout_s: one request, a pause of half its time and a last request take all.
_SHARE = 0.4
_KEYS = re.compile("access_key|credential|skip_signature", re.IGNORECASE)  # credential options
_CREDENTIALS = re.compile(r"//[^/@\s]+@")  # in an endpoint
_ENDPOINT_KEY = re.compile(r"(?<!fabric_)endpoint(_url)?\Z", re.IGNORECASE)
_ENDPOINT = re.compile(r"https?://[^/\s][^\s]*\Z", re.IGNORECASE)

_lock = threading.Lock()
# By mount, bucket, blocks of a part, and the timeout of its users.
_stores: dict[tuple[str, str, int, float], ObjectStore] = {}
_pid = 0  # of the process that made the clients: after a fork they would hang


def store_of(path: str, part_bytes: int = 0) -> ObjectStore:
    """Returns the client for a path's bucket. Raises StorageError in a child of fork()."""
    global _pid
    mount, bucket, _key = divided(path)
    # One client for each power of two keeps their number small.
    timeout_s = 2.0 ** (frexp(timeout_s_of(path))[1] - 1)
    part_blocks = part_bytes // BLOCK_BYTES
    key = mount, bucket, part_blocks, timeout_s
    if _pid not in (0, os.getpid()):
        raise StorageError("open", path, errno.ENOTSUP, detail=_FORKED)
    # Without the lock, since the program that a profile names for its credentials may hang.
    store = _stores[key] if key in _stores else _new_client(mount, bucket, part_blocks, timeout_s)
    with _lock:
        _pid = os.getpid()
        return _stores.setdefault(key, store)


_FORKED = (
    "this process was forked from a process that uses an object store, and the store's client "
    'would hang here: use the store in the parent, or start this process with "spawn" or '
    '"forkserver"'
)


def _new_client(mount: str, bucket: str, blocks: int, timeout_s: float) -> ObjectStore:
    options, scheme = options_of(mount), mount[1:].partition(":")[0]
    _check_endpoint(options, scheme)
    most_s = timeout_s if blocks else _SHARE * timeout_s  # a thread waits for a part so long
    patience_s = min(_PATIENCE_S if blocks else _SHORT_PATIENCE_S, most_s)
    retries = {
        "max_retries": 1000,
        "retry_timeout": timedelta(seconds=patience_s),
        "backoff": {
            "init_backoff": timedelta(seconds=min(_PAUSE_S, most_s / 2)),
            "max_backoff": timedelta(seconds=min(_PAUSE_S_MAX, most_s / 2)),
            "base": 2,
        },
    }
    options.setdefault("retry_config", retries)
    request_s = min(_REQUEST_S * max(1, blocks), most_s)
    timing = {"timeout": f"{max(1, int(1000 * request_s))}ms", **client_options(scheme)}
    timing |= options.pop("client_options", {})
    if scheme == "s3":  # every block has our CRC-32, and SHA-256 costs as much as the rest
        options.setdefault("unsigned_payload", True)
    credentials_s = min(_REQUEST_S, most_s)
    if scheme == "s3" and not _KEYS.search(" ".join(options)):
        options = {**_of_profile(f"{scheme}://{bucket}", credentials_s), **options}
    if "credential_provider" in options:
        options["credential_provider"] = _bounded(options["credential_provider"], credentials_s)
    try:
        store: ObjectStore = client().store.from_url(
            f"{scheme}://{bucket}", client_options=timing, **options
        )
        return store
    except Exception as error:  # such as an unknown option: the text of the error says which
        text = _CREDENTIALS.sub("//", str(error).split("\n\nDebug source")[0])
        raise ValueError(
            f"no client for {scheme}://{bucket} with these storage_options: {text}"
        ) from None


def _check_endpoint(options: dict[str, Any], scheme: str) -> None:
    """Raises ValueError if an endpoint is not a URL, because the client would panic on it."""
    keys = [key for key in options if _ENDPOINT_KEY.search(key)]
    options_of_endpoints = {f"storage_options[{key!r}]": options[key] for key in keys}
    for name, value in (options_of_endpoints or endpoints(scheme)).items():
        if isinstance(value, str) and not _ENDPOINT.match(value):
            cure = "unset it to use the store's default endpoint" if not value else "correct it"
            raise ValueError(
                f"{name} is {value!r}, must be a URL such as https://host:9000; {cure}"
            )


_SLOW = "the credentials were not available after"


def _bounded(provider: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    """Wraps a provider of credentials to raise TimedOut after `seconds`."""

    def provide() -> Any:
        try:
            return within(seconds, provider)
        except TimedOut:
            raise TimedOut(f"{_SLOW} {seconds:g} s") from None

    return update_wrapper(provide, provider)  # the client also reads attributes of the provider


def _of_profile(bucket: str, seconds: float) -> dict[str, Any]:
    """Returns the options from the user's profile (~/.aws, AWS_PROFILE) that the environment does
    not set. The client does not read the profile, so botocore reads it if installed. Raises
    StorageError if the profile's credentials are not available after `seconds`.
    """
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        return {}
    session = botocore.session.get_session()
    try:
        profiles = session.available_profiles
        credentials = within(seconds, session.get_credentials) if profiles else None
    except botocore.exceptions.ProfileNotFound as error:
        raise ValueError(f"{error}: check AWS_PROFILE") from None
    except Exception as error:
        slow = isinstance(error, TimedOut)
        detail = f"profile {session.profile!r}: {f'{_SLOW} {seconds:g} s' if slow else error}"
        number = errno.ETIMEDOUT if slow else errno.EKEYREJECTED
        raise StorageError("get credentials", bucket, number, detail=detail) from None
    if credentials is None or credentials.method == "env":
        return {}

    def provide() -> dict[str, Any]:
        now = credentials.get_frozen_credentials()  # renewed ten minutes before they expire
        expires_at = datetime.now(timezone.utc) + timedelta(seconds=_KNOWN_S)
        keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key}
        return {**keys, "token": now.token, "expires_at": expires_at}

    profile, names = session.get_scoped_config(), {"region": "region", "endpoint_url": "endpoint"}
    settings = {
        names[key]: profile[key] for key in names.keys() & profile if not is_told("s3", key)
    }
    return {**settings, "credential_provider": provide}


def client() -> Any:
    import obstore.store  # only URLs need it

    return obstore


_NAMES = {
    "endpoint": "endpoint_url",
    "region": "region_name",
    "access_key_id": "aws_access_key_id",
    "secret_access_key": "aws_secret_access_key",
    "session_token": "aws_session_token",
    "token": "aws_session_token",
}


def botocore_client(path: str) -> Any:
    """Returns botocore's client for S3, with the options of the path's URL.

    Raises ImportError if botocore is not installed.
    """
    import botocore.config
    import botocore.session

    options, timeout_s = options_of(divided(path)[0]), _SHARE * timeout_s_of(path)
    if "credential_provider" in options:
        options |= _bounded(options["credential_provider"], min(_REQUEST_S, timeout_s))()
    arguments = {_NAMES[key]: value for key, value in options.items() if key in _NAMES}
    config = botocore.config.Config(
        connect_timeout=min(_SHORT_PATIENCE_S, timeout_s),
        read_timeout=min(_REQUEST_S, timeout_s),
        s3={"addressing_style": "path"},
    )
    return botocore.session.get_session().create_client("s3", config=config, **arguments)


def request(op: str, path: str, call: Callable[..., T], *args: Any, **how: Any) -> T:
    """Calls the client, and converts its errors to OSErrors.

    Raises:
        FileNotFoundError: there is no such object or bucket.
        FileExistsError: the object already exists.
        StorageError: any other error; ESTALE if the version does not match. The detail contains the
            request and its duration.
    """
    since = time.monotonic()
    try:
        return call(*args, **how)
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
    except StorageError:
        raise
    except BaseException as error:
        if not _is_the_clients(error):
            raise
        number = _number(error)
        if number == errno.EEXIST:
            raise FileExistsError(number, os.strerror(number), path) from None
        raise StorageError(op, path, number, detail=_detail(error, path, since)) from None


def _is_the_clients(error: BaseException) -> bool:
    kinds = (OSError, ValueError, client().exceptions.BaseError)
    # A panic of Rust is not an Exception, and pyo3 does not export its class.
    return isinstance(error, kinds) or type(error).__name__ == "PanicException"


_FULL = ("QuotaExceeded", "StorageFull", "status code: 507")  # some servers answer 403 for these
_BY_NAME = {
    "PermissionDeniedError": errno.EKEYREJECTED,
    "UnauthenticatedError": errno.EKEYREJECTED,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.ESTALE,
    "InvalidPathError": errno.EILSEQ,
    "NotSupportedError": errno.EOPNOTSUPP,
}
# A refusal of a HEAD request: its answer does not hold the reason.
UNTOLD = "status code: 400"
_BY_TEXT = {
    "status code: 401": errno.EKEYREJECTED,
    "status code: 403": errno.EKEYREJECTED,
    "ExpiredToken": errno.EKEYREJECTED,
    "error sending request": errno.ETIMEDOUT,
    "timed out": errno.ETIMEDOUT,
    "response body": errno.ETIMEDOUT,  # it stalls or is cut short at each attempt
    r"after [1-9]\d* retries": errno.ETIMEDOUT,  # the request may have been carried out
}


def _number(error: BaseException) -> int:
    """Returns the errno for an error of the client."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    if any(words in text for words in _FULL):
        return errno.EDQUOT
    if _SLOW in text:
        return errno.ETIMEDOUT
    if type(error).__name__ in _BY_NAME:
        return _BY_NAME[type(error).__name__]
    return next((number for words, number in _BY_TEXT.items() if re.search(words, text)), errno.EIO)


def _detail(error: BaseException, path: str, since: float) -> str:
    rank = launched_rank()
    who = "" if rank is None else f"rank {rank[0]}: "
    text = _CREDENTIALS.sub("//", " ".join(str(error).split("\n\nDebug source")[0].split()))[:500]
    key, took_s = divided(path)[2], time.monotonic() - since
    cure = next((f"{advice}; " for words, advice in _CURES.items() if words in text), "")
    return f"{cure}{who}key {key!r} of {as_url(path)!r}, after {took_s:.1f} s: {text}"


_CURES = {
    "NoSuchBucket": "there is no such bucket",
    "HTTP error: builder error": "if the endpoint is http, not https, set AWS_ALLOW_HTTP=true or "
    'client_options={"allow_http": True}',
}
