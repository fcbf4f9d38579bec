"""The clients of object stores, which the options of their URLs make, and the errors of these."""

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

# For how long one request may take: so much for each block that it carries, at 140 KB/s or faster.
_REQUEST_S = 60
# For how long a part is sent again while the server fails or is gone, and other requests are.
_PATIENCE_S, _SHORT_PATIENCE_S = 180, 15
_PAUSE_S, _PAUSE_S_MAX = 0.1, 5.0
_KNOWN_S = 300  # for how long credentials of a profile are used before they are asked for again
# Of a caller's timeout_s: a request, half as long a pause, and the last request take all of it.
_SHARE = 0.4
_KEYS = re.compile("access_key|credential|skip_signature", re.IGNORECASE)  # options about them
_CREDENTIALS = re.compile(r"//[^/@\s]+@")  # of an endpoint
_ENDPOINT_KEY = re.compile(r"(?<!fabric_)endpoint(_url)?\Z", re.IGNORECASE)
_ENDPOINT = re.compile(r"https?://[^/\s][^\s]*\Z", re.IGNORECASE)

_lock = threading.Lock()
# By mount, bucket, blocks of a part, and for how long its users wait.
_stores: dict[tuple[str, str, int, float], ObjectStore] = {}
_pid = 0  # of the process that has clients: those of its parent would hang


def store_of(path: str, part_bytes: int = 0) -> ObjectStore:
    """Returns the client for the bucket of a path. Raises StorageError in a child of fork()."""
    global _pid
    mount, bucket, _key = divided(path)
    # There are few clients, however many values callers pass: for each power of two.
    timeout_s = 2.0 ** (frexp(timeout_s_of(path))[1] - 1)
    part_blocks = part_bytes // BLOCK_BYTES
    known = mount, bucket, part_blocks, timeout_s
    if _pid not in (0, os.getpid()):
        raise StorageError("open", path, errno.ENOTSUP, detail=_FORKED)
    # Without the lock: what a profile names for its credentials may take long, or hang.
    made = _stores[known] if known in _stores else _made(mount, bucket, part_blocks, timeout_s)
    with _lock:
        _pid = os.getpid()
        return _stores.setdefault(known, made)


_FORKED = (
    "this process was forked from a process that uses an object store, and the store's client "
    'would hang here: use the store in the parent, or start this process with "spawn" or '
    '"forkserver"'
)


def _made(mount: str, bucket: str, blocks: int, timeout_s: float) -> ObjectStore:
    options, scheme = options_of(mount), mount[1:].partition(":")[0]
    _check_endpoint(options, scheme)
    most_s = timeout_s if blocks else _SHARE * timeout_s  # whoever waits for a part gives it up
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
    if scheme == "s3":  # every block has a CRC-32 of our own, and SHA-256 costs as much as the rest
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
    except Exception as error:  # an unknown option, say: its own text tells
        said = _CREDENTIALS.sub("//", str(error).split("\n\nDebug source")[0])
        raise ValueError(
            f"no client for {scheme}://{bucket} with these storage_options: {said}"
        ) from None


def _check_endpoint(options: dict[str, Any], scheme: str) -> None:
    """Raises ValueError if an endpoint is no URL: the client would panic at the first request."""
    keys = [key for key in options if _ENDPOINT_KEY.search(key)]
    told = {f"storage_options[{key!r}]": options[key] for key in keys}
    for name, value in (told or endpoints(scheme)).items():
        if isinstance(value, str) and not _ENDPOINT.match(value):
            cure = "unset it to use the store's default endpoint" if not value else "correct it"
            raise ValueError(
                f"{name} is {value!r}, must be a URL such as https://host:9000; {cure}"
            )


_SLOW = "the credentials were not available after"


def _bounded(provider: Callable[[], Any], seconds: float) -> Callable[[], Any]:
    """Returns a provider of credentials that is waited for only so long."""

    def provide() -> Any:
        try:
            return within(seconds, provider)
        except TimedOut:
            raise TimedOut(f"{_SLOW} {seconds:g} s") from None

    return update_wrapper(provide, provider)  # the client looks at what it has beside the call


def _of_profile(bucket: str, seconds: float) -> dict[str, Any]:
    """Returns the options that the user's files of profiles give (~/.aws, AWS_PROFILE), which the
    client does not read, and the environment does not: by botocore, if that is installed. Raises
    StorageError: the credentials that a profile names are not there after so many seconds.
    """
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        return {}
    session = botocore.session.get_session()
    try:
        known = session.available_profiles
        found = within(seconds, session.get_credentials) if known else None
    except botocore.exceptions.ProfileNotFound as error:
        raise ValueError(f"{error}: check AWS_PROFILE") from None
    except Exception as error:
        slow = isinstance(error, TimedOut)
        said = f"profile {session.profile!r}: {f'{_SLOW} {seconds:g} s' if slow else error}"
        number = errno.ETIMEDOUT if slow else errno.EKEYREJECTED
        raise StorageError("get credentials", bucket, number, detail=said) from None
    if found is None or found.method == "env":
        return {}

    def provide() -> dict[str, Any]:
        now = found.get_frozen_credentials()  # renewed ten minutes before they expire
        expires_at = datetime.now(timezone.utc) + timedelta(seconds=_KNOWN_S)
        keys = {"access_key_id": now.access_key, "secret_access_key": now.secret_key}
        return {**keys, "token": now.token, "expires_at": expires_at}

    profile, names = session.get_scoped_config(), {"region": "region", "endpoint_url": "endpoint"}
    told = {names[key]: profile[key] for key in names.keys() & profile if not is_told("s3", key)}
    return {**told, "credential_provider": provide}


def client() -> Any:
    import obstore.store  # which only URLs need

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

    Raises ImportError: botocore is not installed.
    """
    import botocore.config
    import botocore.session

    options, timeout_s = options_of(divided(path)[0]), _SHARE * timeout_s_of(path)
    if "credential_provider" in options:
        options |= _bounded(options["credential_provider"], min(_REQUEST_S, timeout_s))()
    known = {_NAMES[key]: value for key, value in options.items() if key in _NAMES}
    config = botocore.config.Config(
        connect_timeout=min(_SHORT_PATIENCE_S, timeout_s),
        read_timeout=min(_REQUEST_S, timeout_s),
        s3={"addressing_style": "path"},
    )
    return botocore.session.get_session().create_client("s3", config=config, **known)


def asked(op: str, path: str, call: Callable[..., T], *args: Any, **how: Any) -> T:
    """Calls the client, and turns its errors into OSErrors.

    Raises:
        FileNotFoundError: there is no such object, or bucket.
        FileExistsError: there is one already. StorageError: anything else, ESTALE if it is another
            version than was asked for; the detail has what was tried, and for how long.
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
        raise StorageError(op, path, number, detail=_told(error, path, since)) from None


def _is_the_clients(error: BaseException) -> bool:
    kinds = (OSError, ValueError, client().exceptions.BaseError)
    # A panic of Rust is no Exception, and pyo3 does not export its class.
    return isinstance(error, kinds) or type(error).__name__ == "PanicException"


_FULL = ("QuotaExceeded", "StorageFull", "status code: 507")  # which some servers tell by a 403
_BY_NAME = {
    "PermissionDeniedError": errno.EKEYREJECTED,
    "UnauthenticatedError": errno.EKEYREJECTED,
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.ESTALE,
    "InvalidPathError": errno.EILSEQ,
    "NotSupportedError": errno.EOPNOTSUPP,
}
# A refusal whose answer, to a HEAD, holds no reason.
UNTOLD = "status code: 400"
_BY_TEXT = {
    "status code: 401": errno.EKEYREJECTED,
    "status code: 403": errno.EKEYREJECTED,
    "ExpiredToken": errno.EKEYREJECTED,
    "error sending request": errno.ETIMEDOUT,
    "timed out": errno.ETIMEDOUT,
    "response body": errno.ETIMEDOUT,  # which stalls, or is cut, as often as the client tries
    r"after [1-9]\d* retries": errno.ETIMEDOUT,  # what it asked for may have been done
}


def _number(error: BaseException) -> int:
    """Returns the errno that stands for an error of the client."""
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


def _told(error: BaseException, path: str, since: float) -> str:
    rank = launched_rank()
    who = "" if rank is None else f"rank {rank[0]}: "
    said = _CREDENTIALS.sub("//", " ".join(str(error).split("\n\nDebug source")[0].split()))[:500]
    key, took_s = divided(path)[2], time.monotonic() - since
    cure = next((f"{told}; " for words, told in _CURES.items() if words in said), "")
    return f"{cure}{who}key {key!r} of {as_url(path)!r}, after {took_s:.1f} s: {said}"


_CURES = {
    "NoSuchBucket": "there is no such bucket",
    "HTTP error: builder error": "if the endpoint is http, not https, set AWS_ALLOW_HTTP=true or "
    'client_options={"allow_http": True}',
}
